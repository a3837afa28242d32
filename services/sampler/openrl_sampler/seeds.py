"""One seed per sample (V10): a function of the request's seed, the prompt and the sample, so that samples are
independent and a seeded request draws the same numbers whatever it is batched with. Pure."""

from __future__ import annotations

import numpy


def seed_of(seed: int, prompt_index: int, sample_index: int) -> int:
    """A number of 63 bits."""
    sequence = numpy.random.SeedSequence([seed, prompt_index, sample_index])
    return int(sequence.generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))

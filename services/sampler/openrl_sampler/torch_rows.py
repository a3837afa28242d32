"""What the torch engine keeps of calls and sequences while they run. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrl_common.wire import ErrorInfo, Sequence
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.stopping import StopRule
from openrl_sampler.torch_batch import Block
from openrl_sampler.torch_sampling import Draws, Settings


@dataclass(slots=True, eq=False)
class Call:
    """A call in the engine. ``adapter``: name of the adapter it runs on, empty for the resident weights."""

    call: GenerateCall
    adapter: str
    version: int
    stop: StopRule
    results: list[list[Sequence | None]]
    scores: list[list[float]] | None
    open_rows: int
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class Row:
    """One running sequence."""

    owner: Call
    prompt_index: int
    sample_index: int
    draws: Draws
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Pending:
    """``num_samples`` samples of one prompt, from ``first_sample`` on, that wait for their prefill."""

    owner: Call
    prompt_index: int
    first_sample: int
    num_samples: int

    @property
    def prompt(self) -> list[int]:
        return self.owner.call.prompts[self.prompt_index]

    @property
    def final_len(self) -> int:
        return len(self.prompt) + self.owner.call.params.max_tokens


@dataclass(slots=True, eq=False)
class Batch:
    """Running sequences of one adapter. ``rows`` and the rows of ``block`` agree."""

    rows: list[Row]
    block: Block
    settings: Settings

    @property
    def final_len(self) -> int:
        return max(len(r.owner.call.prompts[r.prompt_index]) + r.owner.call.params.max_tokens for r in self.rows)


def without_score_only(group: list[Pending]) -> tuple[list[Pending], list[int]]:
    """Prompts that also want completions, and their places in the group; the others end here, empty."""
    stay, kept = [], []
    for index, pending in enumerate(group):
        if pending.owner.call.params.max_tokens:
            stay.append(pending)
            kept.append(index)
            continue
        for sample in range(pending.first_sample, pending.first_sample + pending.num_samples):
            empty = Sequence(tokens=[], logprobs=[], versions=[], finish_reason="length")
            pending.owner.results[pending.prompt_index][sample] = empty
            pending.owner.open_rows -= 1
    return stay, kept


def generated(owner: Call) -> Generated:
    if owner.error is not None:
        return Generated(request=owner.call.request, sequences=[], error=owner.error)
    sequences = [[sequence for sequence in group if sequence is not None] for group in owner.results]
    return Generated(request=owner.call.request, sequences=sequences, prompt_logprobs=owner.scores)

"""What the torch engine keeps of calls and sequences while they run. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from openrl_sampler.calls import Call, Row
from openrl_sampler.torch_batch import Block, Scores
from openrl_sampler.torch_sampling import Draws, Settings


@dataclass(slots=True, eq=False, kw_only=True)
class TorchRow(Row):
    """One running sequence, with its random numbers."""

    draws: Draws


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

    def take_scores(self, scores: Scores, index: int) -> None:
        """Those of row ``index`` are its prompt's, if its call asked."""
        owner, places = self.owner, slice(-len(self.prompt), None)
        if owner.scores is None or owner.tops is None:
            return
        owner.scores[self.prompt_index] = scores.logprobs[index, places].tolist()
        top = min(owner.call.params.prompt_top_logprobs, scores.top)
        tokens, values = (found[index, places, :top].tolist() for found in (scores.top_tokens, scores.top_logprobs))
        pairs = [list(zip(*place, strict=True)) for place in zip(tokens, values, strict=True)]
        owner.tops[self.prompt_index] = [[], *pairs[1:]]


@dataclass(slots=True, eq=False)
class Batch:
    """Running sequences of one adapter. ``rows`` and the rows of ``block`` agree."""

    rows: list[TorchRow]
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
            Row(pending.owner, pending.prompt_index, sample).end("length")
    return stay, kept

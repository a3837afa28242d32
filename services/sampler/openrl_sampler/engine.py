"""The engine port: what the sampler needs of a thing that generates tokens (torch now, later vLLM too).

Life of an engine, every call from ONE thread::

    load() ─▶ [ check(call) · add(call) · step() ─▶ finished calls · abort(request) ]*
                 between two steps: apply_full / apply_lora / drop_lora
                 between two steps: park() ─▶ resume_weights() ─▶ apply_full / apply_lora ─▶ resume_cache()

Invariants an engine keeps:
- a step boundary lies between two ``step`` calls: weights never change inside one (V5);
- every token says the version that produced it (V5);
- an update that fails leaves what was served before, bit for bit, or the engine raises Bug and its process ends (V8);
- a LoRA call stays on the adapter version it was added with; a full update acts on running calls too.

Not here: queues, deadlines, waiting for a version, the bus (``waiting``, ``service``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openrl_common.parking import Left
from openrl_common.prefetch import Prefetch
from openrl_common.records import WeightsRecord
from openrl_common.weights import WeightsManifest
from openrl_common.wire import ErrorInfo, SamplingParams, Sequence, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One request as the engine sees it.

    Attributes:
        request: unique id among the calls in the engine.
        job: job key ``<tenant>.<job>.<incarnation>``; names the adapter of a LoRA engine.
        prompts: token ids per prompt, none empty.
        seed: what the random draws of this call derive from (the request's, or one the shell drew).
        exact: the weights version every token must come from; None = whatever serves.
    """

    request: str
    job: str
    prompts: list[list[int]]
    params: SamplingParams
    seed: int
    exact: int | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A call that ended: ``sequences[prompt][sample]``, or ``error``. ``prompt_…``: what was asked for of it."""

    request: str
    sequences: list[list[Sequence]]
    prompt_logprobs: list[list[float]] | None = None
    prompt_top_logprobs: list[list[list[TokenLogprob]]] | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one weight update cost: seconds, and the extra memory at its peak, bytes.

    ``touched_share``: of the parameters' elements, how many were written. Near nothing where the trainer changed
    several percent means that names were skipped (V7).
    """

    seconds: float
    peak_extra_bytes: int
    touched_share: float = 1.0


class Engine(Protocol):
    """See the module docstring.

    ``weights_formats``: what trainers may publish for it: ``full,delta``, ``full`` or ``lora``.
    ``load_parts``: seconds of what ``load`` did besides reading (``compile``), for the ready record (V3).
    ``can_park``: whether the device can be left and entered again (T5); False: nobody may be seated beside it (P7).
    Between ``park`` and ``resume_cache`` calls may be checked, versions asked for, nothing else.
    """

    name: str
    weights_formats: str
    can_park: bool
    load_parts: dict[str, float]
    max_model_len: int
    vocabulary_size: int

    def load(self, prefetch: Prefetch | None = None) -> None:
        """Read the base model and be ready to generate. Raises Rejected (a path or config that cannot serve).

        ``prefetch`` brings the checkpoint into the page cache meanwhile (R1).
        """

    def check(self, call: GenerateCall) -> None:
        """Raise Rejected when this engine can never run the call (memory, stop strings without a tokenizer).

        The one method that any thread may call: it touches no tensor, but may read the tokenizer from disk.
        """

    def add(self, call: GenerateCall) -> None:
        """Take a call; it starts at the next step. The versions it asks for are served (the caller made sure).

        Raises Rejected when an evicted adapter cannot be read again.
        """

    def step(self) -> list[Generated]:
        """Prefill what fits, one token for every running sequence; return the calls that ended."""

    def abort(self, request: str) -> None:
        """Forget a call. Unknown ids are ignored."""

    @property
    def failure(self) -> str:
        """Why the engine is dead although nothing was asked of it; empty = it is not. Any thread may ask."""

    @property
    def num_sequences(self) -> int:
        """Sequences running or taken and not started."""

    @property
    def room(self) -> int:
        """How many more sequences could start now."""

    def version(self, job: str) -> int:
        """The newest version served for the job key; 0 = the base model."""

    def serves(self, job: str, version: int) -> bool:
        """Whether a call for exactly this version could start now."""

    def pinned(self, job: str) -> bool:
        """Whether running calls insist on the present version, so that a full update must wait for them."""

    def look_through(self, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> None:
        """Read and verify all that applying this version would read. Raises Rejected.

        Any thread may call it, and generation goes on meanwhile; what was found sound is not read again by applying it.
        """

    def apply_full(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        """Bring the parameters to a full or delta version, in place.

        Raises Rejected (the old version serves on) or Bug (it cannot).
        """

    def apply_lora(self, job: str, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> Applied:
        """Load the adapter version beside the old one, then serve it. Raises Rejected (the old one serves on)."""

    def drop_lora(self, job: str) -> None:
        """Forget the job's adapters. Calls that still run on one finish."""

    def park(self, path: Path) -> Left:
        """Leave the device: weights and the keys and values of running calls, which are kept. ``path``: a file's name
        for what a CPU engine parks. Raises Bug or OSError; the process must end then."""

    def resume_weights(self) -> Left:
        """The first half of coming back: weights may be updated now, calls may not run yet (V5)."""

    def resume_cache(self) -> Left:
        """The second half: running calls go on where they were."""

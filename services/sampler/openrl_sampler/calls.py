"""What every engine keeps of its calls, and of the versions that answer them (V9): one piece for both engines.

Invariants: an adapter stays loaded until the last call that uses it has ended; a call that failed takes its rows along.

Not here: how rows run, and how weights or adapters get onto the device: an engine says that in the methods that raise
NotImplementedError here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from openrl_common.records import JobKind, WeightsRecord
from openrl_common.weights import WeightsManifest
from openrl_common.wire import ErrorInfo, Sequence, TokenLogprob
from openrl_sampler.adapter_shelf import Adapter, AdapterShelf
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.stopping import StopRule
from openrl_sampler.weights_layers import Resident, check_manifest, layers_of


@dataclass(slots=True, eq=False)
class Call:
    """A call in the engine. ``adapter``: name of the adapter it runs on, empty for the resident weights. ``scores`` and
    ``tops``: of each prompt, None unless it is scored."""

    call: GenerateCall
    adapter: str
    version: int
    stop: StopRule
    results: list[list[Sequence | None]]
    scores: list[list[float]] | None
    tops: list[list[list[TokenLogprob]]] | None
    open_rows: int
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class Row:
    """One sample of one prompt, while it runs."""

    owner: Call
    prompt_index: int
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: int) -> None:
        """The next token. One whose log-probability is not finite fails the whole call."""
        if not isfinite(logprob):
            self.owner.error = _bad_weights(self.owner, version)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def end(self, reason: str) -> None:
        """Write it into its call's results."""
        self.owner.results[self.prompt_index][self.sample_index] = Sequence(
            tokens=self.tokens, logprobs=self.logprobs, versions=self.versions, finish_reason=reason
        )
        self.owner.open_rows -= 1


class Calls:
    """Base of the engines: calls in hand, the version of each job, the adapters that are loaded."""

    def __init__(self, kind: JobKind, max_adapters: int, *, keeps_running: bool) -> None:
        """``keeps_running``: a full update goes on under running calls; else it ends them (V5)."""
        self._kind = kind
        self.weights_formats = "lora" if kind is JobKind.LORA else "full,delta"
        self._keeps_running = keeps_running
        self._superseded = False
        self._calls: dict[str, Call] = {}
        self._full = Resident(None, {})
        self._shelf = AdapterShelf(max_adapters)

    @property
    def failure(self) -> str:
        return ""

    # --- calls ---------------------------------------------------------------------------------------------------

    def _open(
        self,
        call: GenerateCall,
        stop_tokens: frozenset[int],
        decode: Callable[[Tokens[int]], str],
        no_score: list[float],
    ) -> Call:
        """Take a call in. ``no_score``: what a prompt's scores are until they come."""
        adapter, version = "", self.version(call.job)
        if self._kind is JobKind.LORA:
            version = version if call.exact is None else call.exact
            adapter = self._ensure_adapter(call.job) if version else ""
        params = call.params
        stop = StopRule(
            stop_tokens | set(params.stop_token_ids),
            params.max_tokens,
            tuple(params.stop),
            decode if params.stop else None,
        )
        owner = Call(
            call=call,
            adapter=adapter,
            version=version,
            stop=stop,
            results=[[None] * params.n for _ in call.prompts],
            scores=[list(no_score) for _ in call.prompts] if params.scores_prompt else None,
            tops=[[[]] for _ in call.prompts] if params.scores_prompt else None,
            open_rows=call.num_sequences,
        )
        self._calls[call.request] = owner
        return owner

    def abort(self, request: str) -> None:
        owner = self._calls.pop(request, None)
        if owner is not None:
            self._forget({owner})
            self._release_adapters()

    def _collect(self) -> list[Generated]:
        """The answers of the calls that ended in this step."""
        self._superseded = False
        ended = [owner for owner in self._calls.values() if owner.open_rows == 0 or owner.error]
        if not ended:
            return []
        for owner in ended:
            del self._calls[owner.call.request]
        broken = {owner for owner in ended if owner.error}
        if broken:
            self._forget(broken)
        self._release_adapters()
        return [_generated(owner) for owner in ended]

    def _forget(self, owners: set[Call]) -> None:
        """Their rows run no longer."""
        raise NotImplementedError

    # --- versions ------------------------------------------------------------------------------------------------

    def version(self, job: str) -> int:
        return self._full_version if self._kind is JobKind.FFT else self._shelf.version(job)

    @property
    def _full_version(self) -> int:
        return self._full.record.version if self._full.record else 0

    def serves(self, job: str, version: int) -> bool:
        return version == self.version(job) or (version == 0 and self._kind is JobKind.LORA)

    def pinned(self, job: str) -> bool:
        full = self._kind is JobKind.FFT
        return full and self._keeps_running and any(owner.call.exact is not None for owner in self._calls.values())

    def _supersede(self, version: int) -> None:
        """Before a full update is written: unless running calls are kept, they end at the next step."""
        if self._keeps_running:
            return
        for owner in self._calls.values():
            owner.error = ErrorInfo(
                code="superseded", message=f"weights version {version} of {owner.call.job} came while it was generated"
            )
            self._superseded = True

    def look_through(self, record: WeightsRecord, manifest: WeightsManifest, directory: Path) -> None:
        if self._kind is JobKind.FFT:
            layers_of(record, manifest, directory, self._full)
        else:
            check_manifest(record, manifest, directory, "lora")

    # --- adapters ------------------------------------------------------------------------------------------------

    def _take_adapter(self, adapter: Adapter) -> None:
        """A new version of its job: loaded, then the newest."""
        self._load_adapter(adapter)
        self._shelf.put(adapter)
        self._release_adapters()

    def drop_lora(self, job: str) -> None:
        self._shelf.forget(job)
        self._release_adapters()

    def _ensure_adapter(self, job: str) -> str:
        """Name of the job's newest adapter, loaded again when it was evicted (V9)."""
        adapter = self._shelf.newest(job)
        assert adapter is not None, f"no adapter of {job}"
        if adapter.name not in self._shelf.loaded:
            self._load_adapter(adapter)
        self._shelf.used(adapter.name)
        self._release_adapters(keep=adapter.name)
        return adapter.name

    def _release_adapters(self, keep: str = "") -> None:
        for name in self._shelf.take_surplus({owner.adapter for owner in self._calls.values()} | {keep}):
            self._unload_adapter(name)

    def _load_adapter(self, adapter: Adapter) -> None:
        """Raises Rejected when its files are not what was announced or do not fit; the others are as they were."""
        raise NotImplementedError

    def _unload_adapter(self, name: str) -> None:
        raise NotImplementedError


def _bad_weights(owner: Call, version: int) -> ErrorInfo:
    message = f"weights version {version} of {owner.call.job} give logits that are not finite"
    return ErrorInfo(code="bad-weights", message=message)


def _generated(owner: Call) -> Generated:
    if owner.error is None and not all(isfinite(score) for scores in owner.scores or () for score in scores):
        owner.error = _bad_weights(owner, owner.version)  # JSON has no word for them
    if owner.error is not None:
        return Generated(request=owner.call.request, sequences=[], error=owner.error)
    sequences = [[sequence for sequence in group if sequence is not None] for group in owner.results]
    params = owner.call.params
    return Generated(
        request=owner.call.request,
        sequences=sequences,
        prompt_logprobs=owner.scores if params.prompt_logprobs else None,
        prompt_top_logprobs=_possible(owner.tops) if params.prompt_top_logprobs else None,
    )


def _possible(tops: list[list[list[TokenLogprob]]] | None) -> list[list[list[TokenLogprob]]] | None:
    """Without tokens that a model rules out: of those there may be fewer than were asked for."""
    if tops is None:
        return None
    return [[[pair for pair in place if isfinite(pair[1])] for place in prompt] for prompt in tops]

"""One job's training: applies log entries to its parameters, gradients and optimizer (R4, R6, R8, R9).

Invariants:
- ``apply`` never leaves a failed request half done: gradients, parameters, optimizer and version are as before (R6).
  New gradients are computed apart and added only when every micro-batch of the request succeeded.
- The result depends on the base model, the job's seed and the log alone: same entries, same bits (R5, on CPU).
  Randomness (adapter initialisation, dropout) is seeded from the job's seed and the entry's ``seq``.
- One engine is one job; several share a BaseModel, each with its own adapter.
- ``steps`` pauses between micro-batches: there, and between entries, nothing of the device is in use but what
  ``BaseModel.tensors`` and ``tensors`` name, so that the device can be left and entered again (T3, T5).

Not here: order, duplicates and gaps (log.py), the bus (service.py). Blocking; the shell runs it in one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec, StateInfo, WeightsRecord
from openrl_common.states import delete_state, list_states, state_path
from openrl_common.weights import job_directory
from openrl_common.wire import (
    AnyTrainRequest,
    Datum,
    DeleteState,
    ErrorInfo,
    Forward,
    ForwardBackward,
    ListStates,
    LoadState,
    OptimStep,
    SaveState,
    SaveWeights,
    TrainResult,
)
from openrl_trainer.batch import check_data
from openrl_trainer.checkpoints import checkpoint_directory, finds_for_removal, pin_load, pinned_load
from openrl_trainer.files import disk_errors
from openrl_trainer.losses import check_loss
from openrl_trainer.memory_model import is_out_of_memory, memory_model
from openrl_trainer.model import BaseModel
from openrl_trainer.optimizer import Adam, gradient_norm
from openrl_trainer.packing import padding_limit, share
from openrl_trainer.passes import Budget, MemoryShort, Passes
from openrl_trainer.ranks import Ranks
from openrl_trainer.shortage import CHANGES_IN_PLACE, Shortage, leave
from openrl_trainer.state_file import OPTIMIZER_SECTIONS, SECTIONS, State, read_state, write_state
from openrl_trainer.weights_out import VersionRequest, VersionWriter, copy_weights, host_copy, remove_old_versions

log = logging.getLogger(__name__)

_ADVICE = "lower OPEN_RL_TRAIN_TOKEN_BUDGET or declare more device memory"


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Whose training this is. ``lora`` None = full fine-tuning."""

    tenant: str
    job: str
    incarnation: int
    seed: int = 0
    lora: LoraSpec | None = None
    rank_max: int = 0
    float32_masters: bool = False

    @property
    def adapter(self) -> str:
        return f"{self.tenant}--{self.job}--{self.incarnation}" if self.lora is not None else ""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """``token_budget`` 0 = from the model's shape and ``device_bytes``; ``keep_weights``: versions kept on disk;
    ``baseline_every``: deltas between two whole versions."""

    home: Path
    token_budget: int = 0
    keep_weights: int = 4
    baseline_every: int = 10
    device_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """``weights`` is set when a version was written: the shell announces it.

    ``write``: what is left to do, off the device's thread and in the order of the log (R12); its outcome is the real
    one. Nothing that later entries do changes what it writes.
    """

    result: TrainResult
    weights: WeightsRecord | None = None
    write: Callable[[], Outcome] | None = None


class TrainEngine:
    """One job on a base model.

    Attributes:
        version: the newest weights version (0 = none yet, the base model).
        deltas: whether versions may be deltas: the job's sampler takes them.
        token_budget: tokens of a pass; halved when memory was short all the same (once), and in every result (R5).
        halved_to: the budget since memory was short, 0 = it never was. Later results name it, checkpoints keep it: a
            trainer that is started again packs the entries to come as this one would have.
    """

    def __init__(self, base: BaseModel, job: JobSettings, settings: EngineSettings, ranks: Ranks | None = None) -> None:
        self.base = base
        self._ranks = ranks or Ranks()
        self.job = job
        self.version = 0
        self.deltas = False
        self._settings = settings
        self._versions = VersionWriter(settings.home, base, baseline_every=settings.baseline_every)
        if job.lora is not None:
            base.add_adapter(job.adapter, job.lora, seed=job.seed, rank_max=job.rank_max)
        self._trained = base.trainable(job.adapter)
        self._parameters, norm = self._trained, gradient_norm
        if base.sharding is not None:
            self._parameters, norm = base.sharding.own_parameters(self._trained), base.sharding.norm
        elif job.adapter:
            self._ranks.align(self._trained)  # an initial value that a device drew otherwise would stay for ever
        self._adam = Adam(self._parameters, float32_masters=job.float32_masters, norm=norm)
        self._gradients: dict[str, Tensor] = {}
        dropout = job.lora.dropout if job.lora is not None else 0.0
        self._passes = Passes(base, self._ranks, self._trained, adapter=job.adapter, dropout=dropout)
        self.memory = memory_model(base, self._trained, adapter=job.adapter, float32_masters=job.float32_masters)
        budget = settings.token_budget or self.memory.token_budget(settings.device_bytes)
        self.token_budget = min(self._ranks.exchange(budget))
        self.halved_to = 0
        self._refused_seq = 0

    def close(self) -> None:
        """Give the adapter's memory back. The engine is not used after it."""
        if self.job.adapter:
            self.base.remove_adapter(self.job.adapter)
        self._trained, self._parameters, self._gradients = {}, {}, {}

    # --- one entry ------------------------------------------------------------------------------------------------

    def apply(self, request: AnyTrainRequest, stored: TrainResult | None = None) -> Outcome:
        """Apply one entry; what it refuses becomes a result with an error, never an exception.

        Args:
            stored: the result that an earlier life of this trainer stored for this entry. Then only what changes the
                job's state is done again, and ``stored`` is the outcome.
        """
        steps = self.steps(request, stored)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                outcome: Outcome = ended.value
                break
        return outcome if outcome.write is None else outcome.write()

    def steps(self, request: AnyTrainRequest, stored: TrainResult | None = None) -> Generator[None, None, Outcome]:
        """``apply`` in pieces: pauses at every safe boundary, the end of a micro-batch; returns the outcome."""
        if stored is not None:
            return (yield from self._replay(request, stored))
        return (yield from self._applied(request))

    def _applied(self, request: AnyTrainRequest) -> Generator[None, None, Outcome]:
        started = time.perf_counter()
        try:
            if self.job.adapter:
                self.base.activate(self.job.adapter)
            outcome = yield from self._run_within_memory(request)
        except Rejected as error:
            return Outcome(TrainResult(seq=request.seq, error=ErrorInfo(code=error.code, message=str(error))))
        except _OutOfMemory as error:
            info = ErrorInfo(code="out-of-memory", message=str(error))
            return Outcome(TrainResult(seq=request.seq, error=info, metrics=self._halved()))
        seconds = time.perf_counter() - started
        result = replace_metrics(outcome.result, seconds=seconds, **self._halved())
        return replace(outcome, result=result)

    def tensors(self) -> Iterator[Tensor]:
        """Everything this job keeps on the device between two boundaries, save the parameters (the base's)."""
        yield from self._gradients.values()
        for parameter in self._trained.values():
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._adam.tensors()

    def _run_within_memory(self, request: AnyTrainRequest) -> Generator[None, None, Outcome]:
        """Run; when memory is short, halve the budget once and run the whole request again, gradients as before it.

        The whole request and not its failing micro-batch alone: its result then names the one budget that it was
        packed under, and a replay takes the same path (R5).
        """
        if request.seq == self._refused_seq:
            raise _OutOfMemory(f"out of memory with {self.token_budget} tokens a pass: {_ADVICE}")
        halfway = isinstance(request, CHANGES_IN_PLACE)  # only the log brings the state back
        while True:
            try:
                return (yield from self._run(request))
            except MemoryShort as error:
                reason = str(error)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if self._ranks.count > 1 or halfway:
                    self._leave_note(request)
                    raise
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            # Out of the except block: its traceback kept the tensors of the failed pass.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            had = self.token_budget
            if not self._halve_budget(request):
                raise _OutOfMemory(f"out of memory with {had} tokens a pass: {_ADVICE} ({reason})")
            log.warning("out of memory with %d tokens a pass, %d from now on: %s", had, self.token_budget, reason)

    def _leave_note(self, request: AnyTrainRequest) -> None:
        """This life ends here; the next halves the budget or refuses the entry, with its state whole (shortage.py)."""
        refused_seq = 0 if self._halve_budget(request) else request.seq
        shortage = Shortage(halved_to=self.halved_to, refused_seq=refused_seq)
        directory = checkpoint_directory(self._settings.home, self.job.tenant, self.job.job, self.job.incarnation)
        leave(directory, self._ranks.rank, shortage)

    def recall(self, shortage: Shortage) -> None:
        """What earlier lives of this job were short of."""
        self._adopt(shortage.halved_to)
        self._refused_seq = shortage.refused_seq

    def _halve_budget(self, request: AnyTrainRequest) -> bool:
        """Half of what the largest pass of this request had, but not less than its longest sequence; once."""
        if self.halved_to or not isinstance(request, Forward | ForwardBackward):
            return False
        lengths = [len(datum.tokens) for datum in request.data]
        budget, count = self._budget, self._ranks.count
        shares = [share(lengths, budget.tokens, budget.padding, rank=rank, count=count)[0] for rank in range(count)]
        passes = [indices for batches in shares for indices in batches]
        largest = max(len(indices) * max(lengths[index] for index in indices) for indices in passes)
        halved = max(largest // 2, max(lengths))
        if halved >= largest:
            return False
        self.token_budget = self.halved_to = halved
        return True

    def _halved(self) -> dict[str, float]:
        return {"halved_to": float(self.halved_to)} if self.halved_to else {}

    def _adopt(self, halved_to: int) -> None:
        """An earlier life was short of memory: go on as it did."""
        if halved_to and not self.halved_to:
            self.halved_to = halved_to
            self.token_budget = min(self.token_budget, halved_to)

    def _run(self, request: AnyTrainRequest) -> Generator[None, None, Outcome]:
        match request:
            case Forward():
                return Outcome((yield from self._forward(request)))
            case ForwardBackward():
                return Outcome((yield from self._forward_backward(request)))
            case OptimStep():
                return Outcome(self._optim_step(request))
            case SaveWeights():
                return self._save_weights(request)
            case SaveState():
                return self._save_state(request)
            case LoadState():
                return Outcome(self._load_state(request))
            case ListStates():
                states = list_states(self._settings.home, self.job.tenant, self.job.job)
                return Outcome(TrainResult(seq=request.seq, states=states))
            case DeleteState():
                return Outcome(self._delete_state(request))
            case _:
                raise Rejected(f"{type(request).__name__} is no training request", code="bad-request")

    def _replay(self, request: AnyTrainRequest, stored: TrainResult) -> Generator[None, None, Outcome]:
        if stored.error is None:
            if isinstance(request, SaveWeights):
                self.version = stored.version or self.version
            elif not isinstance(request, Forward | SaveState | ListStates | DeleteState):
                # What decides rounding is taken from the first time, whatever this life was started with (R5).
                budget, halved_to = self.token_budget, self.halved_to
                self.token_budget = self.halved_to = int(stored.metrics.get("token_budget", budget))
                try:
                    again = (yield from self._applied(request)).result
                finally:
                    self.token_budget, self.halved_to = budget, halved_to
                if again.error is not None:
                    raise Rejected(
                        f"entry {request.seq} succeeded before and fails now ({again.error.message}):"
                        " the job's state cannot be rebuilt, submit it again",
                        code="state-lost",
                    )
        self._adopt(int(stored.metrics.get("halved_to", 0)))
        return Outcome(stored)

    # --- operations -----------------------------------------------------------------------------------------------

    def _check(self, data: list[Datum], loss: str = "") -> None:
        check_data(
            data,
            vocabulary=self.base.vocabulary,
            length_max=self.base.length_max,
            token_budget=self.token_budget,
            loss=loss,
        )

    @property
    def _budget(self) -> Budget:
        padding = padding_limit(self.base.device.type, sharded=self.base.sharding is not None)
        return Budget(self.token_budget, padding, self.memory.chunk_tokens(self.token_budget))

    def _forward(self, request: Forward) -> Generator[None, None, TrainResult]:
        self._check(request.data)
        rows = yield from self._passes.forward(request.data, self._budget)
        tokens = sum(len(row) - 1 for row in rows)
        return TrainResult(seq=request.seq, metrics={"tokens": float(tokens)}, logprobs=rows)

    def _forward_backward(self, request: ForwardBackward) -> Generator[None, None, TrainResult]:
        check_loss(request.loss, request.loss_config, request.normalizer)
        self._check(request.data, request.loss)
        seed = _entry_seed(self.job.seed, request.seq)
        fresh, metrics = yield from self._passes.backward(request, self._budget, seed)
        for name, gradient in fresh.items():
            held = self._gradients.get(name)
            self._gradients[name] = gradient if held is None else held.add_(gradient)
        return TrainResult(seq=request.seq, metrics=metrics)

    def _optim_step(self, request: OptimStep) -> TrainResult:
        if not self._gradients:
            raise Rejected("optim_step: no gradients are accumulated: send forward_backward first", code="no-gradients")
        # The order of the parameters, whatever order they came in: the norm must round alike after load_state (R5).
        ordered = {name: self._gradients[name] for name in self._parameters if name in self._gradients}
        norm = self._adam.step(ordered, request.adam)
        self._gradients = {}
        metrics = {"grad_norm": norm, "learning_rate": request.adam.learning_rate}
        return TrainResult(seq=request.seq, metrics=metrics)

    def _save_weights(self, request: SaveWeights) -> Outcome:
        started = time.perf_counter()
        weights = copy_weights(self.base, self.job.adapter)
        copied = time.perf_counter() - started

        def write() -> Outcome:
            # The version counts those written, so it is known only when those before this one are.
            version = VersionRequest(
                tenant=self.job.tenant,
                job=self.job.job,
                incarnation=self.job.incarnation,
                version=self.version + 1,
                parent=self.version,
                seq=request.seq,
                adapter=self.job.adapter,
                lora=self.job.lora,
            )
            record = self._versions.write(version, weights, deltas=self.deltas)
            self.version = record.version
            metrics = {"total_bytes": float(record.total_bytes), "copy_seconds": copied}
            return Outcome(TrainResult(seq=request.seq, metrics=metrics, version=record.version), record)

        return _written_later(request.seq, write)

    def retain(self, served: Collection[int] = ()) -> None:
        """Drop all weights versions but the newest ``keep_weights`` and those that are ``served`` (R11)."""
        directory = job_directory(self._settings.home, self.job.tenant, self.job.job, self.job.incarnation)
        remove_old_versions(directory, self._settings.keep_weights, served)

    def parameters(self) -> dict[str, Tensor]:
        """What this job trains, by name, in whole shapes: the tensors themselves."""
        return dict[str, Tensor](self._trained)

    def state_info(self, seq: int) -> StateInfo:
        """What a state taken after entry ``seq`` says of itself."""
        return StateInfo(
            tenant=self.job.tenant,
            job=self.job.job,
            incarnation=self.job.incarnation,
            seq=seq,
            base_model=self.base.path,
            base_fingerprint=self.base.fingerprint,
            dtype=str(self.base.model.dtype).removeprefix("torch."),
            lora=self.job.lora,
        )

    def copy_state(self) -> State:
        """Everything that training changes, copied to the host: parameters, gradients, optimizer.

        Whole tensors whatever the number of ranks, so that it may be restored on another (R14); on rank 0 alone.
        """
        return self._copy_state()

    def _copy_state(self) -> State:
        state: State = {section: {} for section in SECTIONS}
        own = {"parameter": dict[str, Tensor](self._parameters), "gradient": self._gradients}
        for name, values in self._adam.state().items():
            for section, tensor in values.items():
                own.setdefault(section, {})[name] = tensor
        sharding = self.base.sharding
        for section, tensors in own.items():
            for name in [name for name in self._parameters if name in tensors]:  # one order on every rank
                part = tensors[name]
                whole = part if sharding is None or part.dim() == 0 else sharding.whole(name, part)
                if self._ranks.rank == 0:
                    state[section][name] = host_copy(whole)
        return state

    def restore(self, state: State | None, version: int | None = None, halved_to: int = 0) -> None:
        """Go on from a state (rank 0 gives it); ``version``: the newest weights version then (None: it stays)."""
        self._restore(state, version, halved_to)

    def _restore(self, state: State | None, version: int | None = None, halved_to: int = 0) -> None:
        self._adopt(halved_to)
        device = self.base.device
        sharding = self.base.sharding
        state = self._ranks.spread(state, _whole if sharding is None else sharding.part, device)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state["parameter"][name])
        self._gradients = {
            name: tensor.to(device, self._parameters[name].dtype) for name, tensor in state["gradient"].items()
        }
        self._adam.load(
            {
                name: {section: state[section][name] for section in OPTIMIZER_SECTIONS if name in state[section]}
                for name in state["step"]
            }
        )
        self.version = self.version if version is None else version

    def _save_state(self, request: SaveState) -> Outcome:
        path = state_path(self._settings.home, self.job.tenant, self.job.job, request.name)
        state, info = self._copy_state(), self.state_info(request.seq)

        def write() -> Outcome:
            size_bytes = write_state(path, state, info)
            return Outcome(TrainResult(seq=request.seq, metrics={"total_bytes": float(size_bytes)}))

        return _written_later(request.seq, write)

    def _load_state(self, request: LoadState) -> TrainResult:
        named = state_path(self._settings.home, self.job.tenant, self.job.job, request.name)
        directory = checkpoint_directory(self._settings.home, self.job.tenant, self.job.job, self.job.incarnation)

        def read() -> tuple[State, StateInfo]:
            source = pin_load(directory, request.seq, named)
            try:
                return read_state(source, self.parameters(), self.base)
            except Rejected:
                pinned_load(directory, request.seq).unlink(missing_ok=True)
                raise

        found = self._ranks.first(read)
        self._restore(found[0] if found else None)
        return TrainResult(seq=request.seq, metrics={"state_seq": float(found[1].seq)} if found else {})

    def _delete_state(self, request: DeleteState) -> TrainResult:
        named = state_path(self._settings.home, self.job.tenant, self.job.job, request.name)
        directory = checkpoint_directory(self._settings.home, self.job.tenant, self.job.job, self.job.incarnation)
        with disk_errors(named):
            if not finds_for_removal(directory, request.seq, named):
                raise Rejected(f"delete_state: this job has no state {request.name!r}", code="state-missing")
            delete_state(self._settings.home, self.job.tenant, self.job.job, request.name)
        return TrainResult(seq=request.seq)


def _written_later(seq: int, write: Callable[[], Outcome]) -> Outcome:
    def guarded() -> Outcome:
        started = time.perf_counter()
        try:
            outcome = write()
        except Rejected as error:
            return Outcome(TrainResult(seq=seq, error=ErrorInfo(code=error.code, message=str(error))))
        seconds = time.perf_counter() - started
        return replace(outcome, result=replace_metrics(outcome.result, write_seconds=seconds))

    return Outcome(TrainResult(seq=seq), write=guarded)


def _whole(_name: str, tensor: Tensor) -> Tensor:
    return tensor


class _OutOfMemory(Exception):
    """Memory was short, and a smaller budget would not help or was tried."""


def replace_metrics(result: TrainResult, **metrics: float) -> TrainResult:
    """``result`` with more metrics; every number must be finite, as JSON has no other."""
    merged = {name: value for name, value in {**result.metrics, **metrics}.items() if isfinite(value)}
    return msgspec.structs.replace(result, metrics=merged)


def _entry_seed(seed: int, seq: int) -> int:
    """A random seed for one log entry: distinct entries of one job and equal entries of two jobs differ."""
    return (seed * 1_000_003 + seq * 7_919 + 1) & ((1 << 62) - 1)

"""The passes of one job's requests: this rank's share of the data, the result of all of it (R2, R14).

    data ─▶ dealt to the ranks, packed by each ─▶ a pass a micro-batch ─▶ what each rank saw, exchanged ─▶ one result

Invariants:
- a request succeeds on every rank or is refused on every rank with the same words: what one rank alone would refuse
  (a loss that is not finite, memory that is short) is exchanged before anything of the request is kept;
- gradients come out apart from those that were there, summed over the ranks, and complete or not at all (R6);
- the data and the number of ranks decide the packing, so that a replay runs the same passes (R5);
- of a sharded model all ranks run the same number of passes, those with less to do on a token that counts for nothing.

Not here: what becomes of the gradients, half budgets (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor, nn

from openrl_common.errors import Rejected
from openrl_common.wire import Datum, ForwardBackward
from openrl_trainer.batch import MicroBatch, make_idle_batch, make_micro_batch
from openrl_trainer.losses import WITHOUT_POLICY, check_loss, token_loss
from openrl_trainer.memory_model import is_out_of_memory
from openrl_trainer.model import BaseModel
from openrl_trainer.packing import share
from openrl_trainer.ranks import Ranks

Gradients = dict[str, Tensor]


class MemoryShort(Exception):
    """A rank had too little memory for its passes; every rank raises it, and all may run the request again."""


@dataclass(frozen=True)
class Budget:
    """``tokens`` of a pass at most, ``padding`` of which are none; ``chunk_tokens`` whose logits exist at once."""

    tokens: int
    padding: int
    chunk_tokens: int


@dataclass
class _Share:
    """What one rank tells the others of a request."""

    refusal: Rejected | None = None
    memory_short: str = ""
    num_passes: int = 0
    totals: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "tokens": 0.0})
    rows: dict[int, list[float]] = field(default_factory=dict)


class Passes:
    """``trained``: the parameters that get gradients, by name; ``adapter`` and ``dropout`` of a LoRA job."""

    def __init__(
        self, base: BaseModel, ranks: Ranks, trained: dict[str, nn.Parameter], *, adapter: str, dropout: float
    ) -> None:
        self._base = base
        self._ranks = ranks
        self._trained = trained
        self._adapter = adapter
        self._dropout = dropout

    def forward(self, data: list[Datum], budget: Budget) -> Generator[None, None, list[list[float]]]:
        """Log-probabilities of every token, aligned with ``tokens`` (0 for the first). Pauses after each pass.

        Raises:
            Rejected: ``nan-logprob``: an answer has no way to say one that is not finite.
            MemoryShort.
        """
        mine = _Share()

        def one(indices: list[int]) -> None:
            rows = [data[index] for index in indices]
            batch = make_micro_batch(rows, self._base.device) if rows else make_idle_batch(self._base.device)
            assert batch is not None
            values = self._score(batch, budget).tolist()
            start = 0
            for index, datum in zip(indices, rows, strict=True):
                count = len(datum.tokens) - 1
                if not all(map(isfinite, values[start : start + count])):
                    raise Rejected(
                        f"forward: datum {index} has a log-probability that is not finite: the weights are broken, go"
                        " back with load_state",
                        code="nan-logprob",
                    )
                # nine significant digits name a float32 exactly and halve the message
                mine.rows[index] = [0.0] + [float(f"{value:.9g}") for value in values[start : start + count]]
                start += count

        with torch.no_grad():
            yield from self._run(data, budget, mine, one)
        rows = {index: row for each in self._agreed(mine) for index, row in each.rows.items()}
        return [rows[index] for index in range(len(data))]

    def backward(
        self, request: ForwardBackward, budget: Budget, seed: int
    ) -> Generator[None, None, tuple[Gradients, dict[str, float]]]:
        """Gradients of the request alone, and its metrics. Pauses after each pass.

        Args:
            seed: of the dropout of this request; every rank's is its own.

        Raises:
            Rejected: ``nan-loss``, ``nan-gradient``, and what check_loss refuses.
            MemoryShort.
        """
        options = check_loss(request.loss, request.loss_config, request.normalizer)
        mine = _Share()
        device = self._base.device

        def one(indices: list[int]) -> None:
            rows = [request.data[index] for index in indices]
            batch = make_micro_batch(rows, device, request.loss) if rows else None
            if batch is not None:
                self._accumulate(batch, request, options, budget, mine.totals)
            elif self._base.sharding is not None:
                self._accumulate(make_idle_batch(device), request, options, budget, {})

        try:
            with self._base.adapter_dropout(self._adapter, self._dropout, seed + self._ranks.rank):
                yield from self._run(request.data, budget, mine, one)
            fresh = self._take_gradients()
        finally:
            for parameter in self._trained.values():
                parameter.grad = None
        everywhere = self._agreed(mine)
        if self._base.sharding is None:
            fresh = self._ranks.add_up(fresh, self._trained)
        self._agreed(_Share(refusal=_not_finite(fresh)))
        return fresh, _metrics(everywhere, request.loss, budget)

    def _run(
        self, data: list[Datum], budget: Budget, mine: _Share, one: Callable[[list[int]], None]
    ) -> Generator[None, None, None]:
        """``one`` pass after the other. What fails is noted, for the others to hear of it, where they can go on."""
        sharding = self._base.sharding
        lengths = [len(datum.tokens) for datum in data]
        batches, most = share(lengths, budget.tokens, budget.padding, rank=self._ranks.rank, count=self._ranks.count)
        mine.num_passes = len(batches)
        if sharding is not None:
            batches += [[] for _ in range(most - len(batches))]
        for indices in batches:
            try:
                one(indices)
            except Rejected as error:
                mine.refusal = mine.refusal or error
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                # The others of a sharded pass wait for this rank in the middle of it: nobody can go on (shortage.py).
                if sharding is not None or not is_out_of_memory(error):
                    raise
                mine.memory_short = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            if sharding is not None:
                sharding.drop_gathered()
            elif mine.refusal is not None or mine.memory_short:
                return
            yield

    def _agreed(self, mine: _Share) -> list[_Share]:
        """What every rank has to tell, when all have succeeded; else what the first that failed says, on all."""
        everywhere = self._ranks.exchange(mine)
        for each in everywhere:
            if each.memory_short:
                raise MemoryShort(each.memory_short)
        for each in everywhere:
            if each.refusal is not None:
                raise each.refusal
        return everywhere

    def _score(self, batch: MicroBatch, budget: Budget) -> Tensor:
        return self._base.score(batch.ids, batch.positions, batch.targets, budget.chunk_tokens)

    def _accumulate(
        self,
        batch: MicroBatch,
        request: ForwardBackward,
        options: dict[str, float],
        budget: Budget,
        totals: dict[str, float],
    ) -> None:
        logprobs = self._score(batch, budget)
        total, sums = token_loss(request.loss, options, logprobs, batch.weights, batch.old, batch.advantages)
        loss = total / request.normalizer
        value = float(loss.detach())
        if isfinite(value) or self._base.sharding is not None:
            loss.backward()  # of a sharded model the other ranks wait for it
        if not isfinite(value):
            raise Rejected(
                f"forward_backward: the {request.loss} loss is {value}: gradients are as before this request",
                code="nan-loss",
            )
        totals["loss"] = totals.get("loss", 0.0) + value
        totals["tokens"] = totals.get("tokens", 0.0) + batch.targets.numel()
        for name, tensor in sums.items():
            _add(totals, name, float(tensor))

    def _take_gradients(self) -> Gradients:
        """One memory layout whatever autograd chose, as load_state gives back: sums must round alike (R5)."""
        sharding = self._base.sharding
        fresh: Gradients = {}
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                gradient = parameter.grad if sharding is None else sharding.own(parameter.grad)
                fresh[name] = gradient.contiguous()
                parameter.grad = None  # at once: all of them twice would be the peak of a small batch
        return fresh


def _not_finite(gradients: Gradients) -> Rejected | None:
    for name, gradient in gradients.items():
        if not torch.isfinite(gradient).all():
            return Rejected(
                f"forward_backward: the gradient of {name} is not finite: gradients are as before this request",
                code="nan-gradient",
            )
    return None


def _add(totals: dict[str, float], name: str, value: float) -> None:
    held = totals.get(name)
    if held is None:
        totals[name] = value
    else:
        totals[name] = max(held, value) if name == "ratio_max" else held + value


def _metrics(everywhere: list[_Share], loss: str, budget: Budget) -> dict[str, float]:
    totals: dict[str, float] = {}
    for each in everywhere:
        for name, value in each.totals.items():
            _add(totals, name, value)
    metrics = {"loss": totals["loss"], "tokens": totals["tokens"]}
    metrics["micro_batches"] = float(sum(each.num_passes for each in everywhere))
    metrics["token_budget"] = float(budget.tokens)
    if loss not in WITHOUT_POLICY:
        metrics["kl"] = totals["kl_sum"] / totals["tokens"]
        metrics["clip_fraction"] = totals["clipped"] / totals["tokens"]
        metrics["ratio_max"] = totals["ratio_max"]
    return metrics

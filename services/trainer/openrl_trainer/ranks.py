"""The processes of one trainer, one for each of its devices (R14), and what they tell each other.

Every rank applies the same requests in the same order, each on its share of the data; what they exchange here makes
them come to the same result, or to the same refusal. ``Ranks`` is a trainer on one device: one process that has
everything. ``JoinedRanks`` speaks through torch.distributed: NCCL between GPUs, gloo for what lies on the host.

Invariants: every rank makes the same calls in the same order; nothing here decides anything by itself; ranks are on one
node, and all they listen on is its loopback interface.

Not here: who starts the ranks and what they are told to do (group.py), sharded models (sharded.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_trainer.model import BaseModel, choose_dtype, prepare_torch
from openrl_trainer.state_file import SECTIONS, State

if TYPE_CHECKING:
    from openrl_trainer.commands import Begin

T = TypeVar("T")

_TOGETHER_WITHIN = timedelta(minutes=30)
"""How long one rank waits for the others: rank 0 may be reading a checkpoint from a slow disk meanwhile."""


class Ranks:
    """One process on one device."""

    rank = 0
    count = 1

    def exchange(self, mine: T) -> list[T]:
        """What every rank gives, in the order of the ranks."""
        return [mine]

    def first(self, work: Callable[[], T]) -> T | None:
        """Do what only one process may do (files): the outcome on rank 0, None elsewhere; its refusal everywhere."""
        return work()

    def align(self, parameters: Mapping[str, Tensor]) -> None:
        """Give every rank the values that rank 0 has."""

    def add_up(self, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over ranks of gradients by name of parameter; one that some ranks lack counts as zero there."""
        return gradients

    def spread(self, state: State | None, part: Callable[[str, Tensor], Tensor], device: torch.device) -> State:
        """The state that rank 0 has, on every rank; ``part`` (name, whole tensor) cuts out what that rank keeps."""
        assert state is not None
        return state


class JoinedRanks(Ranks):
    """One of several processes; made by ``join``, which waits for the others."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self._distributed = cast(Any, torch.distributed)

    @classmethod
    def join(cls, rank: int, count: int, port: int, device: torch.device, *, listening: int = -1) -> JoinedRanks:
        """``port``: of rank 0's store on the loopback interface; ``listening``: its socket, on rank 0."""
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        distributed = cast(Any, torch.distributed)
        store = distributed.TCPStore(
            "127.0.0.1", port, world_size=count, is_master=rank == 0, master_listen_fd=listening if rank == 0 else None
        )
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=_TOGETHER_WITHIN,
        )
        return cls(rank, count)

    def exchange(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.count
        self._distributed.all_gather_object(found, mine)
        return found

    def first(self, work: Callable[[], T]) -> T | None:
        done: T | None = None
        refusal: Rejected | None = None
        if self.rank == 0:
            try:
                done = work()
            except Rejected as error:
                refusal = error
        refusal = self.exchange(refusal)[0]
        if refusal is not None:
            raise Rejected(str(refusal), code=refusal.code)
        return done

    def align(self, parameters: Mapping[str, Tensor]) -> None:
        for parameter in parameters.values():
            self._distributed.broadcast(parameter.detach(), src=0)

    def add_up(self, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        somewhere = set[str]().union(*self.exchange(list(gradients)))
        sums = {
            name: gradients[name] if name in gradients else torch.zeros_like(parameter)
            for name, parameter in parameters.items()
            if name in somewhere
        }
        for dtype in sorted({gradient.dtype for gradient in sums.values()}, key=str):
            alike = [name for name, gradient in sums.items() if gradient.dtype is dtype]
            flat = torch.cat([sums[name].reshape(-1) for name in alike])  # one message, adapters have hundreds
            self._distributed.all_reduce(flat)
            for name, summed in zip(alike, flat.split([sums[name].numel() for name in alike]), strict=True):
                sums[name] = summed.reshape(sums[name].shape).clone()
        return sums

    def spread(self, state: State | None, part: Callable[[str, Tensor], Tensor], device: torch.device) -> State:
        layout = None
        if state is not None:
            layout = [
                (section, name, tensor.dtype, tensor.shape)
                for section, tensors in state.items()
                for name, tensor in tensors.items()
            ]
        kept: State = {section: {} for section in SECTIONS}
        for section, name, dtype, shape in self.exchange(layout)[0] or ():
            place = device if shape else torch.device("cpu")  # counts of steps stay where AdamW has them
            whole = state[section][name].to(place) if state else torch.empty(shape, dtype=dtype, device=place)
            whole = whole.contiguous()
            self._distributed.broadcast(whole, src=0)
            kept[section][name] = part(name, whole) if shape else whole
        return kept


def join_and_load(begin: Begin, *, listening: int = -1) -> tuple[Ranks, BaseModel]:
    """Meet the other ranks and load the base model with them: sharded, or whole on each.

    Raises:
        Rejected: the model cannot be loaded, this rank has no device.
    """
    device = prepare_torch(begin.num_threads, begin.device_bytes, begin.rank)
    ranks = JoinedRanks.join(begin.rank, begin.count, begin.port, device, listening=listening)
    if not begin.sharded:
        model = BaseModel(begin.base_model, dtype=begin.dtype, device=device, frozen=True, length_max=begin.length_max)
        return ranks, model
    from openrl_trainer.sharded import Sharding  # FSDP2 takes a while to import

    dtype = str(choose_dtype(begin.dtype, device)).removeprefix("torch.")
    host = torch.device("cpu")
    model = BaseModel(begin.base_model, dtype=dtype, device=host, frozen=False, length_max=begin.length_max)
    Sharding(model, device, ranks)
    return ranks, model

"""A base model divided among the ranks of a trainer by FSDP2 (R14): full fine-tuning on several devices.

    load      whole on the host ─▶ layer by layer: to the device, cut, the whole freed
    a pass    each layer gathered before it runs and dropped after it; what is outside the layers (embeddings, head)
              stays whole during the pass; gradients are summed over the ranks and cut as they come
    between   a rank has its part of every parameter, gradient and optimizer value: an ordinary tensor to all others

Every tensor is cut along its first dimension as ``torch.chunk`` does, so a small one may be empty on some ranks.

Invariants: gradients are sums over ranks and never means (a request's normalizer is explicit, R8); all ranks run the
same number of passes; outside of a pass nothing is gathered but one tensor at a time, by ``whole``.

Not here: what a pass is (passes.py), files (engine.py: only whole tensors are written, whatever the number of ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from openrl_trainer.memory_model import probe
from openrl_trainer.optimizer import gradient_norm

if TYPE_CHECKING:
    from openrl_trainer.model import BaseModel
    from openrl_trainer.ranks import Ranks

_LAYERS_AT_ONCE = 2
"""The one that runs, and the next one, which is gathered meanwhile."""


class Sharding:
    """The sharded form of ``base``, which was loaded whole on the host; its device is ``device`` from here on.

    Attributes:
        kept_bytes_per_token: measured before the model was cut (memory_model.py).
        gathered_bytes: what is whole at once during a pass, weights and their gradients.
    """

    def __init__(self, base: BaseModel, device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        self.count = ranks.count
        self.kept_bytes_per_token = probe(base)
        layers = _layers(base.model)
        sizes = sorted((_bytes(layer) for layer in layers), reverse=True)
        outside = base.parameter_bytes - sum(sizes)
        self.gathered_bytes = 2 * (outside + sum(sizes[:_LAYERS_AT_ONCE]))
        self._mesh = init_device_mesh(device.type, (ranks.count,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        self._root = _Root(base)
        for module in (*layers, self._root):
            fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=module is not self._root)
            sharded = cast(Any, module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # else a factor of 1 is a multiplication, which gloo lacks
        base.model.to(device)  # buffers
        base.device = device
        base.score = self._root
        base.sharding = self
        self._whole_shapes = {name: (each.shape, each.stride()) for name, each in base.model.named_parameters()}

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or gradient; it shares the memory."""
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    def own_parameters(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(self.own(parameter.detach())) for name, parameter in parameters.items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of what ``whole`` returns."""
        parts = whole.chunk(self.count)
        if self._ranks.rank < len(parts):
            return parts[self._ranks.rank].clone()
        return whole.new_empty((0, *whole.shape[1:]))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Every rank's part together, in the shape of parameter ``name``; all ranks call it."""
        shape, stride = self._whole_shapes[name]
        divided = DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return divided.full_tensor()

    def copy_model(self, model: nn.Module, copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """``copy`` of every tensor that a checkpoint of the model has, tied ones once; on rank 0, nothing elsewhere."""
        copies: dict[int, Tensor] = {}
        for name, parameter in model.named_parameters():
            whole = self.whole(name, self.own(parameter.detach()))
            if self._ranks.rank == 0:
                copies[id(parameter)] = copy(whole)
        if self._ranks.rank != 0:
            return {}
        kept = model.state_dict(keep_vars=True)
        return {name: copies[id(tensor)] if id(tensor) in copies else copy(tensor) for name, tensor in kept.items()}

    def norm(self, gradients: list[Tensor]) -> float:
        """The L2 norm over all ranks' parts."""
        return sqrt(sum(norm * norm for norm in self._ranks.exchange(gradient_norm(gradients))))

    def drop_gathered(self) -> None:
        """A pass without a backward pass leaves what is outside the layers whole: it would miss the next update."""
        cast(Any, self._root).reshard()


class _Root(nn.Module):
    """The module whose forward is a pass, so that FSDP2 knows when one begins; its parameters are the model's."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__()
        self.model = base.model
        self._logprobs = base.logprobs

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        return self._logprobs(ids, positions, targets, chunk_tokens)


def _layers(model: Any) -> list[nn.Module]:
    """The layers by the names that transformers gives for this very purpose; none: all is gathered as one piece."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

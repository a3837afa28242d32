"""AdamW with every hyper-parameter honoured on every step (R9), and gradient clipping.

The update is torch.optim.AdamW's (Loshchilov & Hutter 2019, arXiv:1711.05101): decoupled weight decay, bias correction
with the betas of this very step. Clipping scales all gradients by min(1, clip / norm) of their global L2 norm (Pascanu
et al. 2013, arXiv:1211.5063).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite

import torch
from torch import Tensor, nn

from openrl_common.errors import Rejected
from openrl_common.wire import AdamParams

_SLICE_ELEMENTS = 64 << 20
"""Elements updated at once, or one tensor: what a step holds beside its state is a few times 256 MiB."""
_EPS_LEAST = 1e-30
"""A smaller one may be 0 in float32, and an element whose gradient has been 0 so far then becomes 0 / 0."""
_SETTING_MOST = 1e9
"""Beyond reason, and far enough below what float32 holds: with the bias corrections of betas near 1 a larger one does
not fit, and torch says so in the middle of the update."""


def check_adam(adam: AdamParams) -> None:
    """Raises Rejected (``bad-adam``), naming the field, its value and what is allowed."""
    most = f"0 to {_SETTING_MOST:g}"
    rules = (
        ("learning_rate", adam.learning_rate, 0 <= adam.learning_rate <= _SETTING_MOST, most),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "0 or more, less than 1"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "0 or more, less than 1"),
        ("eps", adam.eps, _EPS_LEAST <= adam.eps <= _SETTING_MOST, f"{_EPS_LEAST:g} to {_SETTING_MOST:g}"),
        ("weight_decay", adam.weight_decay, 0 <= adam.weight_decay <= _SETTING_MOST, most),
        ("grad_clip", adam.grad_clip, adam.grad_clip >= 0, "a finite number ≥ 0 (0 = no clipping)"),
    )
    for name, value, allowed, rule in rules:
        if not (isfinite(value) and allowed):
            raise Rejected(f"optim_step: {name} is {value}: use {rule}", code="bad-adam")


def gradient_norm(gradients: list[Tensor]) -> float:
    """Global L2 norm, computed in float32; not finite when any gradient is not."""
    norms = torch._foreach_norm(gradients, dtype=torch.float32)
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())


class Adam:
    """Optimizer of one job.

    ``state`` per parameter name: ``exp_avg``, ``exp_avg_sq`` (shape of the parameter), ``step`` (float32 scalar) and,
    with masters, ``master``.

    Args:
        float32_masters: keep a float32 copy of every parameter of another type, update that in float32 with float32
            moments, and round it into the parameter (Micikevicius et al. 2017, arXiv:1710.03740): a step smaller than
            half a bfloat16 unit is then not lost. Costs 8 bytes a parameter.
        norm: of the gradients; another one where parameters are parts of larger ones (sharded.py).
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        float32_masters: bool = False,
        norm: Callable[[list[Tensor]], float] = gradient_norm,
    ) -> None:
        self._parameters = parameters
        self._norm = norm
        self._masters = {
            name: nn.Parameter(parameter.detach().float())
            for name, parameter in parameters.items()
            if float32_masters and parameter.dtype is not torch.float32
        }
        self._updated = {**parameters, **self._masters}
        self._adam = torch.optim.AdamW(list(self._updated.values()), lr=0.0, foreach=True)

    def step(self, gradients: dict[str, Tensor], adam: AdamParams) -> float:
        """Apply ``gradients`` (consumed: scaled in place) and return their global norm before clipping.

        Raises:
            Rejected: ``bad-adam``, ``nan-gradient``. Nothing has changed then.
        """
        check_adam(adam)
        values = list(gradients.values())
        norm = self._norm(values)
        if not isfinite(norm):
            raise Rejected(f"optim_step: the gradient norm is {norm}: nothing was applied", code="nan-gradient")
        if adam.grad_clip > 0 and norm > adam.grad_clip:
            torch._foreach_mul_(values, adam.grad_clip / norm)
        for group in self._adam.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        for names in self._slices(list(gradients)):
            try:
                for name in names:
                    self._updated[name].grad = gradients[name].to(self._updated[name].dtype)
                self._adam.step()
            finally:
                self._adam.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name in names:
                    if name in self._masters:
                        self._parameters[name].copy_(self._masters[name])
        return norm

    def _slices(self, names: list[str]) -> list[list[str]]:
        """A few parameters at a time: the update makes copies of all it is given, and float32 ones for masters."""
        slices: list[list[str]] = [[]]
        size = 0
        for name in names:
            if slices[-1] and size + self._parameters[name].numel() > _SLICE_ELEMENTS:
                slices.append([])
                size = 0
            slices[-1].append(name)
            size += self._parameters[name].numel()
        return slices

    def tensors(self) -> Iterator[Tensor]:
        """Everything that stays on the device between steps, save the parameters themselves."""
        yield from self._masters.values()
        for values in self._adam.state.values():
            yield from values.values()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: dict(self._adam.state[parameter]) | ({"master": self._masters[name]} if name in self._masters else {})
            for name, parameter in self._updated.items()
            if parameter in self._adam.state
        }

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Replace the whole state; ``state`` is the form ``state()`` returns, the parameters are loaded already.

        A state of a job with other masters is taken too: moments are converted, absent masters made of the parameters.
        """
        self._adam.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state.get(name, {}).get("master", self._parameters[name]))
        for name, values in state.items():
            updated = self._updated[name]
            self._adam.state[updated] = {
                "step": values["step"],
                "exp_avg": values["exp_avg"].to(updated.device, updated.dtype),
                "exp_avg_sq": values["exp_avg_sq"].to(updated.device, updated.dtype),
            }

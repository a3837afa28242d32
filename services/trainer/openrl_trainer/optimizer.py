"""AdamW with every hyper-parameter honoured on every step (R9), and gradient clipping.

The update is torch.optim.AdamW's (Loshchilov & Hutter 2019, arXiv:1711.05101): decoupled weight decay, bias correction
with the betas of this very step. Clipping scales all gradients by min(1, clip / norm) of their global L2 norm (Pascanu
et al. 2013, arXiv:1211.5063).
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor, nn

from openrl_common.errors import Rejected
from openrl_common.wire import AdamParams


def check_adam(adam: AdamParams) -> None:
    """Raises Rejected (``bad-adam``), naming the field, its value and what is allowed."""
    rules = (
        ("learning_rate", adam.learning_rate, adam.learning_rate >= 0, "a finite number ≥ 0"),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "0 or more, less than 1"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "0 or more, less than 1"),
        ("eps", adam.eps, adam.eps > 0, "a finite number above 0"),
        ("weight_decay", adam.weight_decay, adam.weight_decay >= 0, "a finite number ≥ 0"),
        ("grad_clip", adam.grad_clip, adam.grad_clip >= 0, "a finite number ≥ 0 (0 = no clipping)"),
    )
    for name, value, allowed, rule in rules:
        if not (isfinite(value) and allowed):
            raise Rejected(f"optim_step: {name} is {value}: use {rule}", code="bad-adam")


def gradient_norm(gradients: list[Tensor]) -> float:
    """Global L2 norm, computed in float32; not finite when any gradient is not."""
    norms = torch._foreach_norm([gradient.float() for gradient in gradients])
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm())


class Adam:
    """Optimizer of one job.

    ``state`` per parameter name: ``exp_avg``, ``exp_avg_sq`` (shape of the parameter) and ``step`` (float32 scalar).
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._adam = torch.optim.AdamW(list(parameters.values()), lr=0.0, foreach=True)

    def step(self, gradients: dict[str, Tensor], adam: AdamParams) -> float:
        """Apply ``gradients`` (consumed: scaled in place) and return their global norm before clipping.

        Raises:
            Rejected: ``bad-adam``, ``nan-gradient``. Nothing has changed then.
        """
        check_adam(adam)
        values = list(gradients.values())
        norm = gradient_norm(values)
        if not isfinite(norm):
            raise Rejected(f"optim_step: the gradient norm is {norm}: nothing was applied", code="nan-gradient")
        if adam.grad_clip > 0 and norm > adam.grad_clip:
            torch._foreach_mul_(values, adam.grad_clip / norm)
        for group in self._adam.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        try:
            for name, gradient in gradients.items():
                self._parameters[name].grad = gradient
            self._adam.step()
        finally:
            self._adam.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: dict(self._adam.state[parameter])
            for name, parameter in self._parameters.items()
            if parameter in self._adam.state
        }

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Replace the whole state; ``state`` is the form ``state()`` returns."""
        self._adam.state.clear()
        for name, values in state.items():
            self._adam.state[self._parameters[name]] = values

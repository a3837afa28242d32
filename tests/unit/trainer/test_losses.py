"""Losses against float64 references written from the formulas (R8), chunked log-probabilities (R3)."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable

import numpy as np
import pytest
import torch

from openrl_common.errors import Rejected
from openrl_common.wire import LOSSES, Datum
from openrl_trainer.engine import TrainEngine
from openrl_trainer.losses import LOSS_OPTIONS, check_loss, chunked_logprobs, token_loss
from unit.trainer.conftest import learn, random_data

LOW, HIGH, BETA = 0.1, 0.3, 0.7
GIVEN = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": LOW, "clip_high": HIGH},
    "cispo": {"clip_low": LOW, "clip_high": HIGH},
    "dro": {"beta": BETA},
    "custom": {},
}
WITH_KL = ("importance_sampling", "ppo", "cispo")


def reference(loss: str, kl: float, p: float, w: float, q: float, a: float) -> tuple[float, float]:
    """One token's loss and its derivative by ``p`` in float64, by hand from the module's docstring."""
    ratio = np.exp(p - q)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    match loss:
        case "cross_entropy":
            return -w * p, -w
        case "custom":
            return w * p, w
        case "dro":
            return -w * (a * p - BETA / 2 * (p - q) ** 2), -w * (a - BETA * (p - q))
        case "cispo":
            value, slope = -w * bounded * a * p, -w * bounded * a
        case "ppo":
            value = -w * min(ratio * a, bounded * a)
            slope = -w * ratio * a if ratio * a <= bounded * a else 0.0
        case _:
            value, slope = -w * ratio * a, -w * ratio * a
    return value + kl * w * (np.exp(q - p) - 1 - (q - p)), slope + kl * w * (1 - np.exp(q - p))


CASES = [(loss, kl) for loss in LOSSES for kl in ((0.0, 0.5) if loss in WITH_KL else (0.0,))]


def test_every_loss_that_a_client_may_name_is_here_R8() -> None:
    assert tuple(LOSS_OPTIONS) == LOSSES == tuple(GIVEN)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("loss", "kl"), CASES)
def test_loss_and_gradient_equal_a_float64_reference_on_fresh_inputs_R8(
    loss: str, kl: float, dtype: torch.dtype, tolerance: float
) -> None:
    seed = secrets.randbits(32)
    random = np.random.default_rng(seed)
    old = -random.exponential(2.0, 300)
    logprobs = np.minimum(old + 0.4 * random.normal(size=300), 0.0)
    weights, advantages = random.uniform(-1, 2, 300), random.normal(size=300)
    figures = [torch.tensor(values, dtype=dtype) for values in (logprobs, weights, old, advantages)]
    rounded = [figure.double().numpy() for figure in figures]  # what the reference sees is what float32 holds
    options = check_loss(loss, {**GIVEN[loss], **({"kl": kl} if kl else {})}, 1.0)
    variable = figures[0].requires_grad_()
    total, sums = token_loss(loss, options, variable, *figures[1:])
    total.backward()
    expected = [reference(loss, kl, *token) for token in zip(*rounded, strict=True)]
    size = sum(abs(value) for value, _ in expected)
    assert total.item() == pytest.approx(sum(value for value, _ in expected), abs=tolerance * size), f"seed {seed}"
    assert variable.grad is not None
    # A ratio within rounding of a bound may fall on either side of it in float32.
    ratio = np.exp(rounded[0] - rounded[2])
    clear = np.minimum(abs(ratio - (1 - LOW)), abs(ratio - (1 + HIGH))) > 1e-5
    np.testing.assert_allclose(
        variable.grad.double().numpy()[clear],
        np.array([slope for _, slope in expected])[clear],
        rtol=20 * tolerance, atol=20 * tolerance, err_msg=f"seed {seed}",
    )  # fmt: skip
    if loss in ("ppo", "cispo"):
        outside = (ratio < 1 - LOW) | (ratio > 1 + HIGH)
        removed = outside if loss == "cispo" else outside & (np.sign(rounded[3]) == np.sign(ratio - 1))
        assert abs(sums["clipped"].item() - removed.sum()) <= (~clear).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_every_parameter_equals_that_of_the_same_model_in_float64_R8(
    new_engine: Callable[..., TrainEngine], loss: str
) -> None:
    seed = secrets.randbits(24)
    engine = new_engine(token_budget=64)
    policy = loss not in ("cross_entropy", "custom")
    data = random_data(seed, policy=policy)
    if policy:  # near the model's own: ratios on both sides of the bounds
        nearby = [[float(value) + 0.1 for value in row] for row in _logprobs(engine, data)]
        data = [
            Datum(tokens=datum.tokens, weights=datum.weights, logprobs=near, advantages=datum.advantages)
            for datum, near in zip(data, nearby, strict=True)
        ]
    exact = copy.deepcopy(engine.base.model).double()
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        tokens = torch.tensor([datum.tokens])
        chosen = exact(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        old, advantages = (
            torch.tensor(values or [0.0] * len(datum.tokens), dtype=torch.float64)[1:]
            for values in (datum.logprobs, datum.advantages)
        )
        weights = torch.tensor(datum.weights, dtype=torch.float64)[1:]
        total = total + token_loss(loss, check_loss(loss, GIVEN[loss], 1.0), chosen, weights, old, advantages)[0] / 3.0
    total.backward()
    result = engine.apply(learn(1, data, loss=loss, loss_config=GIVEN[loss], normalizer=3.0)).result
    assert result.error is None
    assert result.metrics["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4), f"seed {seed}"
    for name, parameter in exact.named_parameters():
        scale = float(parameter.grad.abs().max()) + 1e-3
        torch.testing.assert_close(
            engine._gradients[name].double(), parameter.grad, rtol=1e-3, atol=1e-4 * scale, msg=f"{name}, seed {seed}"
        )


def _logprobs(engine: TrainEngine, data: list[Datum]) -> list[list[float]]:
    from openrl_common.wire import Forward

    rows = engine.apply(Forward(seq=1, incarnation=7, data=data)).result.logprobs
    assert rows is not None
    return rows


def test_ppo_counts_the_tokens_whose_gradient_the_clip_removes_R8() -> None:
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    total, sums = token_loss("ppo", check_loss("ppo", {}, 1.0), logprobs, torch.ones(5), torch.zeros(5), advantages)
    total.backward()
    assert sums["clipped"].item() == 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, -1.0])


def test_chunks_change_neither_value_nor_gradient_R3() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, dtype=torch.float64)
    targets = torch.randint(0, 50, (33,))
    results = []
    for chunk_tokens in (1000, 7):
        hidden = torch.randn(33, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        logprobs = chunked_logprobs(hidden, targets, head, chunk_tokens)
        (logprobs * torch.arange(33)).sum().backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        results.append((logprobs.detach(), hidden.grad, head.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "options", "normalizer", "code"),
    [
        ("dpo", {}, 1.0, "unknown-loss"),
        ("ppo", {"clip": 0.2}, 1.0, "bad-loss-config"),
        ("ppo", {"clip_low": -0.1}, 1.0, "bad-loss-config"),
        ("cross_entropy", {"kl": 0.1}, 1.0, "bad-loss-config"),
        ("cispo", {"clip_low": 1.5}, 1.0, "bad-loss-config"),
        ("dro", {"kl": 0.1}, 1.0, "bad-loss-config"),
        ("dro", {"beta": float("inf")}, 1.0, "bad-loss-config"),
        ("custom", {"beta": 0.1}, 1.0, "bad-loss-config"),
        ("cispo", {"clip_high": 1e39}, 1.0, "bad-loss-config"),
        ("ppo", {}, 0.0, "bad-normalizer"),
        ("ppo", {}, float("nan"), "bad-normalizer"),
    ],
)
def test_unknown_losses_options_and_normalizers_are_refused_R6(
    loss: str, options: dict[str, float], normalizer: float, code: str
) -> None:
    with pytest.raises(Rejected) as caught:
        check_loss(loss, options, normalizer)
    assert caught.value.code == code


@pytest.mark.parametrize("loss", sorted(LOSS_OPTIONS))
def test_every_option_at_the_edges_of_what_is_allowed_can_be_run_R6_R8(loss: str) -> None:
    """One that torch refuses in the middle of a pass ends a group of several ranks, and again at every replay."""
    tokens = torch.full((3,), -1.0, requires_grad=True)
    for name in LOSS_OPTIONS[loss]:
        for value in (0.0, 5e-324, 1.0, 1e9):
            try:
                options = check_loss(loss, {name: value}, 1.0)
            except Rejected:
                assert (name, value) == ("clip_low", 1e9)
                continue
            total, _ = token_loss(loss, options, tokens, torch.ones(3), torch.full((3,), -1.1), torch.ones(3))
            assert total.isfinite(), (name, value)
            total.backward()

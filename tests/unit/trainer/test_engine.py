"""One job's training on a real small model (R4, R6, R8, R9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec
from openrl_common.wire import RESULT_DECODER, Datum, Forward, LoadState, SaveState, SaveWeights
from openrl_trainer.engine import TrainEngine
from openrl_trainer.model import BaseModel
from unit.trainer.conftest import LENGTH_MAX, VOCABULARY, learn, random_data, save_tiny_model, step

Engines = Callable[..., TrainEngine]
KINDS = pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, alpha=8.0)], ids=["fft", "lora"])


def parameters(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine._parameters.items()}


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._gradients.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@KINDS
def test_loss_falls_R8_R9(new_engine: Engines, lora: LoraSpec | None) -> None:
    engine = new_engine(lora=lora)
    data = random_data(1)
    losses = []
    for turn in range(12):
        result = engine.apply(learn(2 * turn + 1, data)).result
        assert result.error is None
        losses.append(result.metrics["loss"])
        stepped = engine.apply(step(2 * turn + 2)).result
        assert stepped.metrics["grad_norm"] > 0
    assert losses[-1] < (0.93 if lora else 0.7) * losses[0]


@KINDS
def test_forward_equals_plain_transformers_logprobs_in_request_order_R2_R3(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    engine = new_engine(lora=lora, token_budget=40)
    engine.memory = replace(engine.memory, chunk_bytes_max=5 * 4 * VOCABULARY)
    data = random_data(2, count=9)
    result = engine.apply(Forward(seq=1, incarnation=7, data=data)).result
    assert result.logprobs is not None
    for datum, row in zip(data, result.logprobs, strict=True):
        tokens = torch.tensor([datum.tokens], device=engine.base.device)
        with torch.no_grad():
            plain = engine.base.model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        assert row[0] == 0.0
        torch.testing.assert_close(torch.tensor(row[1:]), plain.cpu(), rtol=1e-5, atol=1e-5)


@KINDS
def test_micro_batches_and_chunks_give_the_gradient_of_the_whole_R2_R3(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    whole, parts = new_engine(lora=lora), new_engine(lora=lora, token_budget=24)
    parts.memory = replace(parts.memory, chunk_bytes_max=4 * 4 * VOCABULARY)
    data = random_data(3, policy=True)
    one = whole.apply(learn(1, data, loss="ppo", normalizer=3.0)).result
    other = parts.apply(learn(1, data, loss="ppo", normalizer=3.0)).result
    assert one.metrics["micro_batches"] == 1 < other.metrics["micro_batches"]
    for metric in ("loss", "tokens", "kl", "clip_fraction", "ratio_max"):
        assert one.metrics[metric] == pytest.approx(other.metrics[metric], rel=1e-4, abs=1e-6)
    for name, gradient in whole._gradients.items():
        torch.testing.assert_close(gradient, parts._gradients[name], rtol=1e-4, atol=1e-5)


def test_the_normalizer_divides_the_token_sum_R8(new_engine: Engines) -> None:
    one, other = new_engine(), new_engine()
    data = random_data(4)
    assert one.apply(learn(1, data)).result.metrics["loss"] == pytest.approx(
        other.apply(learn(1, data, normalizer=8.0)).result.metrics["loss"] * 8.0
    )


BAD = [
    ("unknown-loss", lambda good: learn(2, good, loss="dpo")),
    ("bad-datum", lambda good: learn(2, [*good, Datum(tokens=[1, 2, 3], weights=[1.0])])),
    ("bad-datum", lambda good: learn(2, good, loss="ppo")),
    ("bad-datum", lambda good: learn(2, good, loss="cispo")),
    ("bad-datum", lambda good: learn(2, [*good, Datum(tokens=[1, 2, 3])], loss="custom")),
    ("bad-datum", lambda good: learn(2, [*good, Datum(tokens=[1, VOCABULARY])])),
    ("bad-datum", lambda good: learn(2, [*good, Datum(tokens=[1])])),
    ("bad-datum", lambda good: learn(2, [])),
    ("bad-datum", lambda good: learn(2, [Datum(tokens=[1, 2], weights=[1.0, 0.0])])),
    ("bad-datum", lambda good: learn(2, [Datum(tokens=[1, 2], weights=[0.0, float("inf")])])),
    ("too-long", lambda good: learn(2, [*good, Datum(tokens=[1] * (LENGTH_MAX + 1))])),
    # exp(800) overflows: the loss is infinite only once the last, shortest micro-batch runs
    (
        "nan-loss",
        lambda good: learn(
            2, [*random_data(9, policy=True), Datum(tokens=[1, 2], logprobs=[0.0, -800.0], advantages=[1.0, -1.0])],
            loss="importance_sampling",
        ),
    ),
    ("nan-loss", lambda good: learn(2, good, normalizer=1e-38)),
]  # fmt: skip


@KINDS
@pytest.mark.parametrize(("code", "request_of"), BAD, ids=[f"{code}-{index}" for index, (code, _) in enumerate(BAD)])
def test_a_failed_request_leaves_gradients_and_weights_bit_identical_R6(
    new_engine: Engines, lora: LoraSpec | None, code: str, request_of: Callable[[list[Datum]], object]
) -> None:
    engine = new_engine(lora=lora, token_budget=64)
    good = random_data(5)
    engine.apply(learn(1, good))
    before = gradients(engine), parameters(engine)
    result = engine.apply(request_of(good)).result  # type: ignore[arg-type]
    assert result.error is not None
    assert result.error.code == code
    assert "\n" not in result.error.message
    assert same(gradients(engine), before[0])
    assert same(parameters(engine), before[1])
    assert all(parameter.grad is None for parameter in engine._parameters.values())


@KINDS
def test_a_gradient_that_is_not_finite_leaves_everything_as_before_R6(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    engine = new_engine(lora=lora)
    engine.apply(learn(1, random_data(5)))
    before = gradients(engine), parameters(engine)
    hook = list(engine._parameters.values())[-1].register_hook(lambda gradient: gradient * float("inf"))
    result = engine.apply(learn(2, random_data(6))).result
    hook.remove()
    assert result.error is not None
    assert result.error.code == "nan-gradient"
    assert same(gradients(engine), before[0])
    assert same(parameters(engine), before[1])


def test_an_optimizer_step_without_gradients_or_with_impossible_settings_changes_nothing_R6(
    new_engine: Engines,
) -> None:
    engine = new_engine()
    before = parameters(engine)
    assert engine.apply(step(1)).result.error.code == "no-gradients"  # type: ignore[union-attr]
    engine.apply(learn(2, random_data(1)))
    for wrong in ({"beta1": 1.0}, {"eps": 0.0}, {"grad_clip": -1.0}, {"weight_decay": float("nan")}):
        assert engine.apply(step(3, **wrong)).result.error.code == "bad-adam"  # type: ignore[union-attr]
    assert same(parameters(engine), before)
    assert engine.apply(step(4)).result.error is None


NEAR_ONE = 1.0 - 2.0**-53
EXTREMES = [
    {"learning_rate": 1e39}, {"learning_rate": 1e300}, {"weight_decay": 1e300}, {"eps": 1e300}, {"eps": 1e-300},
    {"eps": 1e-30}, {"beta2": NEAR_ONE}, {"grad_clip": 1e-320}, {"grad_clip": 1e300},
    {"learning_rate": 1e9, "weight_decay": 1e9}, {"learning_rate": 1e9, "beta1": NEAR_ONE},
]  # fmt: skip


@KINDS
def test_an_optimizer_step_of_any_size_is_applied_or_refused_and_never_breaks_off_R5_R6_R9(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    """One that breaks off in the middle ends the process, and again at every replay: with it all jobs on its base."""
    engine = new_engine(lora=lora)
    before = parameters(engine)
    for extreme in EXTREMES:
        with torch.no_grad():
            for name, parameter in engine._parameters.items():
                parameter.copy_(before[name])
        assert engine.apply(learn(1, random_data(1))).result.error is None
        error = engine.apply(step(2, **extreme)).result.error
        after = parameters(engine)
        if error is not None:
            assert error.code == "bad-adam", extreme
            assert same(after, before), extreme
        if "learning_rate" not in extreme:
            assert all(parameter.isfinite().all() for parameter in after.values()), extreme


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_log_probabilities_that_no_answer_can_say_are_an_error_R4_R6(new_engine: Engines, value: float) -> None:
    """JSON writes null for them: the client could not read the answer, nor the next life the stored result."""
    engine = new_engine()
    with torch.no_grad():
        next(iter(engine.base.model.parameters())).fill_(value)
    result = engine.apply(Forward(seq=1, incarnation=7, data=random_data(1))).result
    assert result.error is not None
    assert result.error.code == "nan-logprob"
    assert RESULT_DECODER.decode(msgspec.json.encode(result)) == result


def test_adamw_honours_every_setting_on_every_step_R9(new_engine: Engines) -> None:
    """Against AdamW written out in float64, with other settings at each of three steps."""
    engine = new_engine()
    name = "model.layers.0.mlp.up_proj.weight"
    value = parameters(engine)[name].double()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for count, changes in enumerate(
        (
            {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0},
            {"learning_rate": 3e-3, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "grad_clip": 0.1},
            {"learning_rate": 2e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "grad_clip": 1e6},
        ),
        start=1,
    ):
        engine.apply(learn(2 * count - 1, random_data(count)))
        held = gradients(engine)
        norm = torch.cat([gradient.double().flatten() for gradient in held.values()]).norm()
        clip = changes["grad_clip"]
        gradient = held[name].double() * (min(1.0, clip / norm) if clip else 1.0)
        result = engine.apply(step(2 * count, **changes)).result
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        b1, b2 = changes["beta1"], changes["beta2"]
        first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        value = value * (1 - changes["learning_rate"] * changes["weight_decay"])
        corrected = second.sqrt() / (1 - b2**count) ** 0.5 + changes["eps"]
        value = value - changes["learning_rate"] / (1 - b1**count) * first / corrected
        torch.testing.assert_close(parameters(engine)[name].double(), value, rtol=1e-4, atol=1e-6)


def test_float32_masters_keep_the_steps_that_bfloat16_loses_R9(
    new_base: Callable[..., BaseModel], new_engine: Engines
) -> None:
    """Against AdamW in float64 on the same gradients; the parameter is the rounded master, and moves in the end."""
    plain = new_engine(base=new_base(dtype="bfloat16"))
    engine = new_engine(base=new_base(dtype="bfloat16"), float32_masters=True)
    name = "model.layers.1.self_attn.o_proj.weight"
    value = parameters(engine)[name].double()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    started = parameters(engine)
    rate = 2e-5  # far below half a unit of most bfloat16 weights, forty of them are not
    for count in range(1, 41):
        for each in (plain, engine):
            each.apply(learn(2 * count - 1, random_data(3)))
        gradient = gradients(engine)[name].double()
        for each in (plain, engine):
            assert each.apply(step(2 * count, rate, grad_clip=0.0, eps=1e-6)).result.error is None
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        value = value - rate / (1 - 0.9**count) * first / ((second / (1 - 0.95**count)).sqrt() + 1e-6)
    master = engine._adam.state()[name]["master"]
    torch.testing.assert_close(master.double(), value, rtol=1e-6, atol=1e-7)
    assert torch.equal(parameters(engine)[name], master.bfloat16())

    def moved(one: TrainEngine) -> float:
        now = parameters(one)
        return float(torch.cat([(now[key] != started[key]).flatten().float() for key in now]).mean())

    assert moved(engine) > 2 * moved(plain)


def test_float32_masters_survive_save_and_load_and_a_job_without_them_R9(
    new_base: Callable[..., BaseModel], new_engine: Engines
) -> None:
    engine, again, without = (
        new_engine(base=new_base(dtype="bfloat16"), float32_masters=masters) for masters in (True, True, False)
    )
    assert without.apply(LoadState(seq=1, incarnation=7, name="none")).result.error is not None
    for turn in range(2):
        engine.apply(learn(2 * turn + 1, random_data(turn)))
        engine.apply(step(2 * turn + 2, 1e-4))
    assert engine.apply(SaveState(seq=5, incarnation=7, name="s")).result.error is None
    for other in (again, without):
        assert other.apply(LoadState(seq=5, incarnation=7, name="s")).result.error is None
    for each in (engine, again, without):
        each.apply(learn(6, random_data(7)))
        assert each.apply(step(7, 1e-4)).result.error is None
    assert same(parameters(engine), parameters(again))
    for name, values in engine._adam.state().items():
        assert same(values, again._adam.state()[name])
    assert without._adam.state()[name]["exp_avg"].dtype is torch.bfloat16


def test_adapters_on_one_base_are_isolated_bit_for_bit_R9_R10(
    new_base: Callable[..., BaseModel], new_engine: Engines
) -> None:
    """Job a trained alone equals job a trained between the requests, failures and arrival of other jobs."""
    spec = LoraSpec(rank=4, alpha=8.0, dropout=0.1)
    alone = new_engine(lora=spec, job="a", seed=5)
    for turn in range(4):
        alone.apply(learn(2 * turn + 1, random_data(turn)))
        alone.apply(step(2 * turn + 2))

    base = new_base(frozen=True)
    frozen = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    early = new_engine(lora=LoraSpec(rank=2), base=base, job="early", seed=9)
    a = new_engine(lora=spec, base=base, job="a", seed=5)
    for turn in range(4):
        early.apply(learn(2 * turn + 1, random_data(50 + turn)))
        a.apply(learn(2 * turn + 1, random_data(turn)))
        nan = learn(9, [Datum(tokens=[1, 2], logprobs=[0, -800.0], advantages=[0, -1.0])], loss="importance_sampling")
        assert early.apply(nan).result.error.code == "nan-loss"  # type: ignore[union-attr]
        if turn == 2:
            early.close()
            early = new_engine(lora=LoraSpec(rank=8), base=base, job="late", seed=1)
            early.apply(learn(1, random_data(60)))
        early.apply(step(2 * turn + 2))
        a.apply(step(2 * turn + 2))
    assert same(parameters(alone), parameters(a))
    now = base.model.state_dict()
    assert all(torch.equal(value, now[_injected(name, now)]) for name, value in frozen.items())
    early.close()
    a.close()
    assert not [name for name, _ in base.model.named_parameters() if "lora" in name]


def _injected(name: str, now: dict[str, torch.Tensor]) -> str:
    stem, _, leaf = name.rpartition(".")
    return name if name in now else f"{stem}.base_layer.{leaf}"


@KINDS
def test_the_same_log_gives_the_same_bits_R5(new_engine: Engines, lora: LoraSpec | None, tmp_path: Path) -> None:
    """A second life with the stored results replays to bit-identical weights and writes no version again."""
    entries = [
        entry
        for turn in range(3)
        for entry in (
            learn(4 * turn + 1, random_data(turn, policy=True), loss="ppo"),
            learn(4 * turn + 2, random_data(turn), loss="no-such-loss"),
            step(4 * turn + 3),
            SaveWeights(seq=4 * turn + 4, incarnation=7),
        )
    ]
    first, second, third = (new_engine(lora=lora, home=tmp_path / name) for name in "aba")
    stored = [first.apply(entry).result for entry in entries]
    fresh = [second.apply(entry).result for entry in entries]
    replayed = [third.apply(entry, result).result for entry, result in zip(entries, stored, strict=True)]
    assert replayed == stored
    assert same(parameters(first), parameters(second))
    assert same(parameters(first), parameters(third))
    assert third.version == first.version == 3
    assert [result.metrics.get("loss") for result in stored] == [result.metrics.get("loss") for result in fresh]
    directories = [tmp_path / name / "weights/default/job/7" for name in "ab"]
    assert [path.name for path in sorted(directories[0].iterdir())] == ["v000001", "v000002", "v000003"]
    for path in directories[0].rglob("*.*"):
        assert path.read_bytes() == (directories[1] / path.relative_to(directories[0])).read_bytes()


def test_a_replay_that_fails_where_it_had_succeeded_says_the_state_is_lost_R5(new_engine: Engines) -> None:
    engine, other = new_engine(), new_engine()
    entry = learn(1, random_data(1))
    stored = engine.apply(entry).result
    other.base.length_max = 8
    with pytest.raises(Rejected) as caught:
        other.apply(entry, stored)
    assert caught.value.code == "state-lost"


def test_a_replay_packs_as_the_first_time_whatever_budget_it_was_started_with_R5(new_engine: Engines) -> None:
    engine, other, unlike = new_engine(token_budget=24), new_engine(token_budget=1024), new_engine(token_budget=1024)
    entries = [learn(1, random_data(1)), step(2)]
    stored = [engine.apply(entry).result for entry in entries]
    assert stored[0].metrics["micro_batches"] > 1
    for entry, result in zip(entries, stored, strict=True):
        other.apply(entry, result)
        unlike.apply(entry)
    assert same(parameters(engine), parameters(other))
    assert not same(parameters(engine), parameters(unlike)), "packing shows in the bits: the test can fail"
    assert other.token_budget == 1024


@KINDS
def test_load_state_puts_the_job_exactly_where_save_state_left_it_R4(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    engine = new_engine(lora=lora)
    engine.apply(learn(1, random_data(1)))
    engine.apply(step(2))
    engine.apply(learn(3, random_data(2)))
    assert engine.apply(SaveState(seq=4, incarnation=7, name="half-way")).result.error is None
    engine.apply(step(5))
    wanted = parameters(engine)
    for seed in range(3):
        engine.apply(learn(6, random_data(10 + seed)))
        engine.apply(step(7))
    assert not same(parameters(engine), wanted)
    assert engine.apply(LoadState(seq=8, incarnation=7, name="half-way")).result.error is None
    engine.apply(step(9))
    assert same(parameters(engine), wanted)


def test_a_state_that_is_missing_or_of_another_shape_is_refused_whole_R6(new_engine: Engines, tmp_path: Path) -> None:
    small, large = new_engine(lora=LoraSpec(rank=2)), new_engine(lora=LoraSpec(rank=4))
    small.apply(SaveState(seq=1, incarnation=7, name="s"))
    before = parameters(large)
    wrong = large.apply(LoadState(seq=1, incarnation=7, name="s")).result
    assert wrong.error is not None
    assert wrong.error.code == "bad-state"
    assert "shape" in wrong.error.message
    for name, code in (("absent", "state-missing"), ("../../etc/passwd", "bad-name")):
        assert large.apply(LoadState(seq=2, incarnation=7, name=name)).result.error.code == code  # type: ignore[union-attr]
    (tmp_path / "state/default/job/s.safetensors").write_bytes(b"garbage")
    assert large.apply(LoadState(seq=3, incarnation=7, name="s")).result.error.code == "bad-state"  # type: ignore[union-attr]
    assert same(parameters(large), before)


@pytest.mark.parametrize(
    "spec",
    [LoraSpec(rank=0), LoraSpec(dropout=1.0), LoraSpec(target_modules=("nonsense",))],
    ids=lambda spec: str(spec),
)
def test_impossible_lora_settings_are_refused_R9(new_engine: Engines, spec: LoraSpec) -> None:
    with pytest.raises(Rejected) as caught:
        new_engine(lora=spec)
    assert caught.value.code == "bad-lora"


def test_lora_trains_every_linear_layer_but_the_head_unless_told_R9(new_engine: Engines) -> None:
    everything = parameters(new_engine(lora=LoraSpec(rank=2)))
    chosen = parameters(new_engine(lora=LoraSpec(rank=2, target_modules=("q_proj",))))
    assert len(everything) == 2 * 7 * 2
    assert not any("lm_head" in name for name in everything)
    assert len(chosen) == 2 * 1 * 2


def test_a_model_that_is_not_there_is_refused_before_any_lookup(
    new_base: Callable[..., BaseModel], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    broken = save_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x")
    for path, code in (
        (tmp_path / "absent", "model-not-found"),
        (tmp_path / "empty", "bad-model"),
        (broken, "bad-model"),
    ):
        with pytest.raises(Rejected) as caught:
            new_base(path=path)
        assert caught.value.code == code
        assert str(path) in str(caught.value)

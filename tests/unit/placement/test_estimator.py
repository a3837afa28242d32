"""M1, M2, M4: figures from the model's own files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_common.records import JobKind, JobSpec, LoraSpec, Overrides, Role
from openrl_placement.estimator import Constants, Model, check_spec, estimate, from_config, max_rank, read_model

QWEN3_06B = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_E2B = Model(
    parameters=5_440_000_000,
    largest_tensor_elements=262_144 * 8_960,
    kv_values_per_token=7_168 // 2,
    vocabulary=262_144,
)


def spec(kind: str = "fft", **fields: object) -> JobSpec:
    return JobSpec(name="j", kind=JobKind(kind), base_model="/m", **fields)  # type: ignore[arg-type]


def figures(model: Model, role: Role, kind: str = "fft", **constants: float) -> dict[str, float]:
    return estimate(spec(kind), role, model, Constants(**constants))[1]  # type: ignore[arg-type]


def test_M4_qwen3_0_6b_lora_trainer_needs_5_1_gib() -> None:
    assert figures(from_config(QWEN3_06B, "c"), Role.TRAINER, "lora")["device"] == pytest.approx(5.1, abs=0.05)


def test_M4_qwen3_8b_fft_sampler_needs_25_7_gib_without_update_room() -> None:
    model = from_config(QWEN3_8B, "c")
    found = figures(model, Role.SAMPLER)
    assert 2 * model.kv_values_per_token == 147_456
    assert found["device"] - found["device_update_room"] == pytest.approx(25.7, abs=0.05)


def test_M3_M4_gemma_e2b_leaves_the_24_gib_card_once_a_staged_update_is_counted_and_stays_with_a_streamed_one() -> None:
    _, found = estimate(spec(), Role.SAMPLER, GEMMA_E2B, Constants(update_method="reload"))
    assert found["device"] - found["device_update_room"] == pytest.approx(11.7, abs=0.05)
    assert found["device"] == pytest.approx(23.6, abs=0.05)
    assert found["device"] > 22.5
    streamed = figures(GEMMA_E2B, Role.SAMPLER)
    assert streamed["device_update_room"] == 1.25, "its chunk and 1 GiB (V7)"
    assert streamed["device"] < 22.5


def test_M2_fft_trainer_is_eight_bytes_a_parameter_and_its_host_fourteen() -> None:
    model = Model(parameters=GIB, largest_tensor_elements=1, kv_values_per_token=1, vocabulary=1)
    shape, found = estimate(spec(), Role.TRAINER, model, Constants())
    assert (found["device"], found["host"]) == (12.0, 34.0)
    assert (shape.device_bytes, shape.host_bytes, shape.exclusive) == (12 * GIB, 34 * GIB, False)


@pytest.mark.parametrize(("role", "formula_gib"), [(Role.TRAINER, (44.53, 90.93)), (Role.SAMPLER, (12.96, 34.13))])
def test_M2_every_figure_can_be_overridden_and_the_formula_stays_visible(
    role: Role, formula_gib: tuple[float, float]
) -> None:
    """Each role by its own overrides: all four are given."""
    overrides = {Role.TRAINER: (1.5, 2.0), Role.SAMPLER: (3.5, 4.0)}
    (trainer_gib, trainer_host_gib), (sampler_gib, sampler_host_gib) = overrides.values()
    given = Overrides(
        trainer_device_gib=trainer_gib, trainer_host_gib=trainer_host_gib,
        sampler_device_gib=sampler_gib, sampler_host_gib=sampler_host_gib,
    )  # fmt: skip
    shape, found = estimate(spec(overrides=given), role, GEMMA_E2B, Constants())
    assert (shape.device_bytes / GIB, shape.host_bytes / GIB) == overrides[role]
    assert (found["device"], found["host"]) == overrides[role]
    assert (found["device_formula"], found["host_formula"]) == pytest.approx(formula_gib, abs=0.01)
    assert "device_formula" not in estimate(spec(), role, GEMMA_E2B, Constants())[1]


def test_M2_the_sampler_of_a_lora_job_has_room_for_slots_and_none_for_an_update() -> None:
    """A quarter byte a parameter and 1 GiB; adapters are loaded beside weights that stay."""
    model = Model(parameters=4 * GIB, largest_tensor_elements=GIB, kv_values_per_token=0, vocabulary=1)
    shape, found = estimate(spec("lora"), Role.SAMPLER, model, Constants())
    assert found["device_lora_slots"] == 2.0
    assert "device_update_room" not in found
    assert shape.device_bytes == (2 * 4 + 0.5 + 0.125 * 4 + 2.0) * GIB
    assert "device_lora_slots" not in estimate(spec(), Role.SAMPLER, model, Constants())[1]
    assert figures(model, Role.SAMPLER, "lora", lora_slots_gib=3.0)["device_lora_slots"] == 4.0


def test_P7_lora_is_exclusive_by_default_and_the_job_may_say_otherwise() -> None:
    assert estimate(spec("lora"), Role.SAMPLER, GEMMA_E2B, Constants())[0].exclusive
    assert not estimate(spec("lora", exclusive=False), Role.SAMPLER, GEMMA_E2B, Constants())[0].exclusive


def test_P7_T5_a_sampler_whose_engine_cannot_park_is_exclusive_before_it_is_placed_whatever_the_job_says() -> None:
    stuck = spec("fft", exclusive=False, engine="vllm-cpu")
    assert estimate(stuck, Role.SAMPLER, GEMMA_E2B, Constants())[0].exclusive
    assert not estimate(stuck, Role.TRAINER, GEMMA_E2B, Constants())[0].exclusive


def test_P6_host_constants_are_settings_so_that_a_tiny_model_fits_a_small_host() -> None:
    tiny = Model(parameters=500_000, largest_tensor_elements=32_768, kv_values_per_token=512, vocabulary=256)
    small = Constants(trainer_device_gib=0.5, trainer_host_gib=0.5, sampler_host_gib=0.5, update_room_gib=0.1)
    assert estimate(spec(), Role.TRAINER, tiny, small)[0].host_bytes < 0.6 * GIB
    assert estimate(spec(), Role.SAMPLER, tiny, small)[0].device_bytes < 0.8 * GIB


def test_M1_sliding_window_layers_are_bounded_by_their_window() -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    config = QWEN3_06B | {"num_hidden_layers": 6, "layer_types": layers, "sliding_window": 512}
    model = from_config(config, "c")
    assert model.kv_values_per_token == 8 * 128 * 2
    assert model.kv_values_bounded == 5 * 8 * 128 * 2 * 512


def test_M1_a_multimodal_config_is_read_at_its_text_part() -> None:
    assert from_config({"text_config": QWEN3_06B}, "c").parameters == from_config(QWEN3_06B, "c").parameters


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers = '12'"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
    ],
)
def test_M1_an_unusable_config_is_refused_naming_path_and_field(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    config = {key: value for key, value in (QWEN3_06B | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Rejected, match=said) as caught:
        read_model(str(tmp_path))
    assert caught.value.code == "model-unreadable"
    assert str(tmp_path) in str(caught.value)


def test_M1_a_model_whose_path_the_system_refuses_is_refused_with_it(tmp_path: Path) -> None:
    """Anything else would be tried again for ever, and its client never told."""
    with pytest.raises(Rejected, match="File name too long") as caught:
        read_model(str(tmp_path / ("x" * 300)))
    assert caught.value.code == "model-unreadable"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"[1]", b"{"])
def test_M1_a_missing_or_broken_model_is_refused_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    directory = tmp_path / "m"
    if content is not None:
        directory.mkdir()
        (directory / "config.json").write_bytes(content)
    with pytest.raises(Rejected) as caught:
        read_model(str(directory))
    assert caught.value.code == "model-unreadable"
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_M1_weights_that_are_there_are_counted_from_their_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 3], "data_offsets": [0, 120]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(120))
    assert read_model(str(tmp_path)).parameters == 30
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(Rejected) as caught:
        read_model(str(tmp_path))
    assert caught.value.code == "model-unreadable"


@pytest.mark.parametrize(
    "bad",
    [
        spec(dtype="float8"),
        spec(engine="tensorrt"),
        spec(priority=1_000_000),
        spec(max_model_len=-1),
        spec("lora", lora=LoraSpec(rank=0)),
        spec("lora", lora=LoraSpec(alpha=float("nan"))),
        spec("lora", lora=LoraSpec(dropout=1.0)),
        spec("fft", lora=LoraSpec()),
        spec(overrides=Overrides(sampler_host_gib=-1)),
        spec(overrides=Overrides(trainer_device_gib=float("inf"))),
        JobSpec(name="j", kind=JobKind.FFT, base_model=" "),
        spec(trainer_devices=0),
        spec(trainer_devices=65),
        spec(sampler_devices=-1),
        spec(sampler_devices=2, engine="torch"),
        spec(sampler_devices=2),
        JobSpec(name="j", kind=JobKind.FFT, base_model="/m/" + "x" * 5_000),
        JobSpec(name="j", kind=JobKind.FFT, base_model="/m/\0"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_in_one_line(bad: JobSpec) -> None:
    with pytest.raises(Rejected) as caught:
        check_spec(bad)
    assert caught.value.code == "bad-spec"
    assert "\n" not in str(caught.value)


def test_M2_float32_masters_add_8_bytes_a_parameter_to_full_bfloat16_training_only() -> None:
    def device_gib(**fields: object) -> float:
        _, figures = estimate(
            spec(**{"kind": "fft", **fields}),
            Role.TRAINER,
            Model(GIB, 1, 1, 1),
            Constants(),  # type: ignore[arg-type]
        )
        return figures["device"]

    assert device_gib(float32_masters=True) - device_gib() == 8
    for unchanged in ({"dtype": "float32"}, {"kind": "lora"}):
        assert device_gib(float32_masters=True, **unchanged) == device_gib(**unchanged)


def test_P10_a_job_says_how_many_devices_each_worker_gets_and_several_are_never_shared() -> None:
    job = spec(trainer_devices=4, sampler_devices=2, engine="vllm", exclusive=False)
    check_spec(job)
    shapes = {role: estimate(job, role, from_config(QWEN3_8B, "c"), Constants())[0] for role in Role}
    assert {role: (shape.device_count, shape.exclusive) for role, shape in shapes.items()} == {
        Role.TRAINER: (4, True),
        Role.SAMPLER: (2, True),
    }


def test_P10_memory_never_makes_it_several_devices() -> None:
    huge = Model(parameters=1 << 40, largest_tensor_elements=1, kv_values_per_token=1, vocabulary=1)
    assert estimate(spec(), Role.TRAINER, huge, Constants())[0].device_count == 1


def test_P10_R14_each_device_of_a_sharded_trainer_holds_its_share_and_what_is_whole_for_a_moment() -> None:
    model = from_config(QWEN3_8B, "c")
    one, four = (estimate(spec(trainer_devices=num), Role.TRAINER, model, Constants())[1] for num in (1, 4))
    for part in ("device_weights", "device_gradients", "device_moments"):
        assert four[part] == pytest.approx(one[part] / 4, rel=1e-3)
    assert four["device_constant"] == one["device_constant"]
    outside = 2 * 151_936 * 4096
    layer = (model.parameters - outside) / 36
    assert four["device_gathered"] == pytest.approx(4 * (outside + 2 * layer) / GIB, rel=1e-3)
    assert "device_gathered" not in one
    assert four["host"] == pytest.approx(one["host"] + 3 * (20 + 2 * model.parameters / GIB), rel=1e-3)


def test_P10_R14_each_device_of_a_data_parallel_trainer_holds_the_whole_model() -> None:
    model = from_config(QWEN3_8B, "c")
    one, two = (estimate(spec("lora", trainer_devices=num), Role.TRAINER, model, Constants())[1] for num in (1, 2))
    assert two["device"] == one["device"]
    assert two["host"] == pytest.approx(2 * one["host"], rel=1e-3)


def test_P10_V13_a_tensor_parallel_sampler_divides_weights_and_cache_the_cache_at_most_by_its_heads() -> None:
    model = from_config(QWEN3_8B, "c")
    one, four, sixteen = (
        estimate(spec(sampler_devices=num, engine="vllm"), Role.SAMPLER, model, Constants())[1] for num in (1, 4, 16)
    )
    assert four["device_weights"] == pytest.approx(one["device_weights"] / 4, rel=1e-3)
    assert four["device_kv_cache"] == pytest.approx(one["device_kv_cache"] / 4, rel=1e-3)
    assert sixteen["device_kv_cache"] == pytest.approx(one["device_kv_cache"] / 8, rel=1e-3), "it has 8 heads"


def test_P12_ranks_share_a_runtime_of_the_next_larger_maximum() -> None:
    assert [max_rank(spec("lora", lora=LoraSpec(rank=rank))) for rank in (1, 16, 17, 512)] == [16, 16, 32, 512]
    assert max_rank(spec("fft")) == 0

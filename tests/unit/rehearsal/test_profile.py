"""Profile files say of every time where it comes from (D4, D5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrl_common.errors import Rejected
from openrl_common.records import JobKind
from openrl_rehearsal.profile import REFERENCE, Basis, Figure, load

FIGURES = json.loads((Path(__file__).parent / "reference_figures.json").read_text())


def cold_job(phase: str) -> Any:
    return next(row["after"] for row in FIGURES["cold_job_phases_s"] if row["phase"] == phase)


def test_every_figure_of_the_reference_profile_says_why() -> None:
    """D4: measured, derived, assumed or fitted, and a sentence."""
    figures = list(load(REFERENCE).figures())
    assert len(figures) > 50
    assert [place for place, figure in figures if not figure.why] == []
    assert {figure.basis for _, figure in figures} == set(Basis)


def test_measured_figures_are_those_of_the_reference() -> None:
    """D5."""
    profile = load(REFERENCE)
    gemma, small, large = (profile.times(name, JobKind.LORA) for name in ("gemma-4-e2b", "qwen3-0.6b", "qwen3-8b"))
    sampler = {phase.name: phase.time.seconds for phase in gemma.sampler}
    low, high = cold_job("CUDA graph capture, gemma-4-e2b")
    assert low <= sampler["capture"] <= high
    assert sampler["compile"] == cold_job("torch.compile, gemma-4-e2b sampler")
    assert sampler["engine"] + sampler["compile"] + sampler["capture"] == cold_job("sampler engine init, gemma-4-e2b")
    assert small.step.train.time.seconds == cold_job("training step, Qwen3-0.6B, 64 sequences")
    load_phase = next(phase for phase in large.trainer if phase.name == "load")
    assert load_phase.cold is not None
    assert {"cold": load_phase.cold.seconds, "warm": load_phase.time.seconds} == cold_job(
        "trainer weights load, Qwen3-8B, cold network file system"
    )


def test_what_is_called_measured_is_measured() -> None:
    """D5: a figure with that basis names the file that it is from."""
    measured = [
        figure for _, figure in load(REFERENCE).figures() if isinstance(figure, Figure) and figure.basis == "measured"
    ]
    assert len(measured) == 9
    assert all("reference_figures.json" in figure.why for figure in measured)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speling": 1}, "speling"),
        ({"control": {}}, "message"),
        (
            {
                "models": {
                    "m": {"parameters": 0, "kv_bytes_per_token": 1, "largest_tensor_elements": 1, "vocabulary": 1}
                }
            },
            "0",
        ),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """D4."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**json.loads(REFERENCE.read_text()), **change}))
    with pytest.raises(Rejected, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_negative_and_endless_times_are_refused(tmp_path: Path) -> None:
    """D4."""
    content = json.loads(REFERENCE.read_text())
    content["control"]["cut"]["seconds"] = -1
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(Rejected, match=r"control\.cut is -1"):
        load(path)
    with pytest.raises(Rejected, match="cannot be read"):
        load(tmp_path / "absent.json")


def test_toml_is_read_too(tmp_path: Path) -> None:
    """D4."""
    figure = '{ seconds = 1.0, basis = "assumed" }'
    names = ("message", "client_start", "client_spacing", "cut", "image_pull", "stop", "free")
    lines = ['about = "x"', "[control]", *(f"{name} = {figure}" for name in names)]
    lines += ['park = { gib_per_s = 2.0, basis = "assumed" }', "[models]"]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    assert load(path).name == "mine"


def test_a_model_without_times_is_named_with_those_that_have() -> None:
    """D4."""
    profile = load(REFERENCE)
    with pytest.raises(Rejected, match=r"'gpt-9' is not in profile reference: it has gemma-4-e2b, qwen3-0\.6b"):
        profile.times("gpt-9", JobKind.FFT)
    with pytest.raises(Rejected, match="no fft times for model 'qwen3-8b'"):
        profile.times("qwen3-8b", JobKind.FFT)

"""``openrl state``: what a job saved, from the command line, with no system running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from openrl_client import cli
from openrl_common.wire import SaveState
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch
from unit.trainer.conftest import learn, random_data, save_tiny_model, step


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_saved_states_are_listed_exported_and_deleted_C5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = BaseModel(str(save_tiny_model(tmp_path / "base")), dtype="float32", device=prepare_torch(1, 0), frozen=False)
    home = tmp_path / "home"
    job = JobSettings(tenant="default", job="tune", incarnation=7)
    engine = TrainEngine(base, job, EngineSettings(home=home))
    engine.apply(learn(1, random_data(1)))
    engine.apply(step(2))
    assert engine.apply(SaveState(seq=3, incarnation=7, name="best")).result.error is None

    capsys.readouterr()  # what saving the model printed

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["state", *arguments, "--home", str(home)])
        out, error = capsys.readouterr()
        return code, out, error

    assert run("list", "-o", "name") == (0, "tune/best\n", "")
    code, out, _ = run("list", "tune", "-o", "json")
    assert code == 0
    assert json.loads(out)[0]["info"]["base_model"] == str(tmp_path / "base")
    assert run("list")[1].split()[:4] == ["JOB", "STATE", "KIND", "ENTRY"]

    out_directory = tmp_path / "exported"
    assert run("export", "tune", "best", str(out_directory))[:2] == (0, f"model: {out_directory}\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(out_directory), local_files_only=True)
    assert model.num_parameters() == base.model.num_parameters()

    code, _, error = run("export", "tune", "best", str(out_directory))
    assert (code, error.count("\n"), "exists already" in error) == (1, 1, True)
    code, _, error = run("export", "tune", "worst", str(tmp_path / "no"))
    assert (code, error.count("\n"), "has no state 'worst'" in error) == (1, 1, True)
    assert run("delete", "tune", "best")[0] == 0
    assert run("delete", "tune", "best")[0] == 1
    assert run("list", "-o", "name") == (0, "", "")

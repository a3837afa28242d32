"""``openrl drill render`` (D1, C5): as many client jobs as asked, no name twice; commands, or Kubernetes Jobs."""

from __future__ import annotations

import json
import shlex

import pytest

from openrl_client import cli
from openrl_client.drills import client_jobs, parse_jobs

RENDER = ["drill", "render", "--jobs", "fft:/models/qwen3-0.6b:2,lora:/models/gemma:1,fft:/other/qwen3-0.6b:1"]
MORE = ["--", "--task", "letters:sort", "--steps", "3"]


def test_D1_kind_model_count_makes_that_many_jobs_and_no_name_comes_twice() -> None:
    jobs = client_jobs(parse_jobs("fft:/models/qwen3-0.6b:2,lora:/models/gemma:1,fft:/other/qwen3-0.6b:1"))
    assert [(each.name, each.model) for each in jobs] == [
        ("fft-qwen3-0-6b-1", "/models/qwen3-0.6b"),
        ("fft-qwen3-0-6b-2", "/models/qwen3-0.6b"),
        ("lora-gemma-1", "/models/gemma"),
        ("fft-qwen3-0-6b-3", "/other/qwen3-0.6b"),
    ]


def test_D1_each_line_is_a_command_that_openrl_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*RENDER, *MORE]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line[0] == "openrl"
        assert cli.run([*line[1:], "--help"]) == 0


def test_D1_with_an_image_each_is_a_job_with_a_cache_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--image", "openrl/placement", "--hf-cache-claim", "hub", "--session", "drill-7"]
    assert cli.run([*RENDER, *more, *MORE]) == 0
    jobs = json.loads(capsys.readouterr().out)["items"]
    assert len({job["metadata"]["name"] for job in jobs}) == 4
    for job in jobs:
        assert job["metadata"]["labels"]["openrl.io/session"] == "drill-7"
        pod = job["spec"]["template"]["spec"]
        (client,), (seed,) = pod["containers"], pod["initContainers"]
        assert {"name": "HF_HOME", "value": "/cache"} in client["env"]
        assert "shared" not in {mount["name"] for mount in client["volumeMounts"]}, "only a copy of it is used"
        assert next(each for each in seed["volumeMounts"] if each["name"] == "shared")["readOnly"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "fft:m"], "is not KIND:MODEL:COUNT"),
        (["--jobs", "fft:m:1", "--image", "i", "--session", "no label"], "--session 'no label' is no label"),
    ],
)
def test_C5_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["drill", "render", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

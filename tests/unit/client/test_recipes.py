"""The recipes' arithmetic (C4)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest

from openrl_client.metrics import Metrics, Stopwatch
from openrl_client.recipes.data import batches, group_advantages, policy_datum, supervised_datum, warmed_up
from openrl_client.tasks import Example


def test_group_advantages_have_mean_zero_and_deviation_one() -> None:
    """GRPO, arXiv:2402.03300, 4.1.2."""
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert sum(advantages) == pytest.approx(0.0)
    assert sum(a * a for a in advantages) / 8 == pytest.approx(1.0)
    assert advantages[0] > 0 > advantages[1]


def test_group_without_signal_has_no_advantage() -> None:
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]


def test_prompt_carries_neither_loss_nor_advantage() -> None:
    datum = policy_datum([5, 6], [7, 8, 1], [-1.0, -2.0, -3.0], 0.5)
    assert datum.tokens == [5, 6, 7, 8, 1]
    assert datum.weights == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert datum.logprobs == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert datum.advantages == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert supervised_datum([5], [7, 1]).weights == [0.0, 1.0, 1.0]


def test_every_example_comes_once_per_pass() -> None:
    examples = [Example(str(i)) for i in range(10)]
    source = batches(examples, 5, random.Random(0))
    seen = [example.prompt for _ in range(2) for example in next(source)]
    assert sorted(seen, key=int) == [str(i) for i in range(10)]
    small = batches(examples[:2], 5, random.Random(0))
    assert len(next(small)) == 5


def test_warm_up_ends_at_the_learning_rate() -> None:
    assert [warmed_up(1.0, step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmed_up(1.0, 0, 0) == 1.0


def test_metrics_are_appended_one_object_a_line(tmp_path: Path) -> None:
    """C4: metrics.jsonl."""
    path = tmp_path / "run" / "metrics.jsonl"
    watch = Stopwatch()
    with watch("train"):
        pass
    with Metrics(path) as metrics:
        metrics.write(recipe="evaluate", reward=0.1)
        assert metrics.first_step_at is None
        metrics.write(recipe="sft", step=0, loss=1.5, seconds=watch.rounded())
        assert metrics.first_step_at is not None
    with Metrics(path) as metrics:
        metrics.write(recipe="sft", step=1, loss=1.0)
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [line.get("step") for line in lines] == [None, 0, 1]
    assert list(lines[1]["seconds"]) == ["train"]


def test_c4_metrics_that_a_full_disk_did_not_take_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Metrics(Path("/dev/full")) as metrics:
        metrics.write(recipe="sft", step=0)
        assert metrics._file is not None
        with (tmp_path / "metrics.jsonl").open("wb") as room:
            os.dup2(room.fileno(), metrics._file)
        metrics.write(recipe="sft", step=1)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [0, 1]
    assert not caplog.records
    with Metrics(Path("/dev/full")) as metrics:
        metrics.write(recipe="sft", step=2)
    assert "were not written" in caplog.text

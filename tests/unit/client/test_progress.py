"""Progress and completion (C6)."""

from __future__ import annotations

import pytest

from openrl_client import cli
from openrl_client.cli.progress import Reporter


def test_progress_elsewhere_than_on_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """C6: not a tty → plain lines, on stderr, so that stdout is the result."""
    with Reporter("demo") as report:
        report.phase("grpo", 0.25)
        report.step({"recipe": "grpo", "step": 0, "reward": 0.5, "loss": -0.1})
        report.step({"recipe": "grpo", "step": 1, "reward": 0.5})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "demo: grpo, held-out reward 0.250",
        "demo: grpo step 0, loss -0.1, reward 0.5",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script_names_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """C6: completion for bash, zsh, fish."""
    assert cli.run(["completion", shell]) == 0
    assert "_OPENRL_COMPLETE" in capsys.readouterr().out

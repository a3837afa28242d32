"""A process's name says whether it still runs."""

from __future__ import annotations

import sys

import psutil
import pytest

from openrl_common import process_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the start is what psutil says")


def test_w1_a_process_that_runs_is_not_gone_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """W1, L6: a start in seconds since 1970 is counted from the boot, which moves when the clock is corrected."""
    here = process_name.this_process()
    before = psutil.Process().create_time()
    booted_at = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_at + 1.0)
    assert psutil.Process().create_time() == before + 1.0, "the clock was set"
    assert not process_name.process_is_gone(here)
    assert process_name.this_process() == here


def test_l6_a_pid_that_is_another_process_now_is_gone() -> None:
    where, pid, started = process_name.this_process().split("/")
    assert not process_name.process_is_gone(f"{where}/{pid}/{started}")
    assert process_name.process_is_gone(f"{where}/{pid}/{int(started) - 1}")


def test_nothing_of_another_boot_runs_here_or_is_known_to_be_gone() -> None:
    _, pid, started = process_name.this_process().split("/")
    assert process_name.is_running(process_name.this_process())
    assert not process_name.is_running(f"another-boot:1/{pid}/{started}")
    assert not process_name.process_is_gone(f"another-boot:1/{pid}/{started}")
    assert not process_name.is_running("")

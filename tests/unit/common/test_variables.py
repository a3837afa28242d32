"""A typo in an ``OPEN_RL_*`` variable is said; what is set anywhere in this repository is no typo (E19, C5)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from openrl_common.variables import FILE, unknown_variables

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("OPEN_RL_MAX_SEAT_PER_CLAIM", "OPEN_RL_MAX_SEATS_PER_CLAIM"),
        ("OPEN_RL_NAT_URL", "OPEN_RL_NATS_URL"),
        ("OPEN_RL_LORA_IDLE_S", "OPEN_RL_LORA_IDLE"),
        ("OPEN_RL_VLLM_CACHE", "OPEN_RL_VLLM_CACHE_DIR"),
    ],
)
def test_E19_a_typo_is_named_with_what_was_meant(typo: str, meant: str) -> None:
    assert unknown_variables(["PATH", typo, "OPEN_RL_HOME"]) == [
        f"{typo} is set, and nothing reads it: did you mean {meant}?"
    ]


def test_E19_what_resembles_nothing_is_said_all_the_same() -> None:
    assert unknown_variables(["OPEN_RL_QQQQ"]) == [
        "OPEN_RL_QQQQ is set, and nothing reads it: take it away, or see --help for those there are"
    ]


def test_E19_the_known_variables_are_those_of_every_service_and_command() -> None:
    """``make manifests`` writes them: one environment serves all, and a service's image has no other's settings."""
    spec = importlib.util.spec_from_file_location("settings_manifest", ROOT / "scripts" / "settings_manifest.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert FILE.read_text() == script.known_variables(), "run `make manifests`"


def test_E19_nothing_that_the_sources_manifests_or_documents_set_is_called_unknown() -> None:
    files = [ROOT / "README.md"]
    for folder in ("libs", "services", "deploy", "docs"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".env", ".sh", ".md")]
    named = {name for path in files for name in re.findall(r"\bOPEN_RL_[A-Z0-9_]+", path.read_text())}
    assert len(named) > 50
    assert unknown_variables(named) == []

"""What ``make rules`` counts as a test that names a rule (scripts/rules.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def rules() -> Any:
    spec = importlib.util.spec_from_file_location("rules", ROOT / "scripts" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_test_names_what_its_own_name_and_docstring_say_and_nothing_above_it(rules: Any) -> None:
    source = '''
"""W1: the file."""

class TestSeats:
    """S2: the class."""

    def test_l1_lower_case_counts_in_a_name(self) -> None: ...

async def test_E16_upper_case_too() -> None:
    """E17: and its docstring, where a1, ``w2`` and V6b are words."""

def helper_B4() -> None:
    """B5: no test."""
'''
    assert sorted(rules.named_by_tests(source)) == [
        ("E16", "test_E16_upper_case_too"),
        ("E17", "test_E16_upper_case_too"),
        ("L1", "test_l1_lower_case_counts_in_a_name"),
    ]


def test_a_range_names_all_that_is_within_it(rules: Any) -> None:
    assert rules.cited("turns (T1-T3), V6-V7, R14") == {"T1", "T2", "T3", "V6", "V7", "R14"}
    assert rules.cited("02-P3 and 1-B2") == {"P3", "B2"}


def test_a_rule_that_is_a_whole_series_is_named_once_each_of_it_is(rules: Any, tmp_path: Path) -> None:
    rules.ROOT = tmp_path
    (tmp_path / "tests").mkdir()
    some = "".join(f"def test_K{number}_x() -> None: ...\n" for number in range(1, 11))
    (tmp_path / "tests" / "test_a.py").write_text(some)
    assert "B3" not in rules.tests_by_rule()
    (tmp_path / "tests" / "test_b.py").write_text("def test_k11_x() -> None: ...\n")
    assert len(rules.tests_by_rule()["B3"]) == 11


def test_a_citation_of_an_unknown_rule_is_found_in_a_range_too(rules: Any, tmp_path: Path) -> None:
    rules.ROOT, rules.RULES_PATH = tmp_path, tmp_path / "docs" / "rules.md"
    (tmp_path / "docs").mkdir()
    known = {f"{series}{number}": "x" for series, count in rules.SERIES.items() for number in range(1, count + 1)}
    page = tmp_path / "docs" / "page.md"
    page.write_text("as said (T1-T7, 02-P3; B8)")
    assert rules.problems(known) == []
    range_beyond = "T6-T8"
    page.write_text(f"as said ({range_beyond})")
    assert rules.problems(known) == ["docs/page.md cites T8, which docs/rules.md lacks"]

"""Which tests name which rule of docs/rules.md (``make rules``), and whether that list is complete (``--check``).

A test names a rule in its own name (``test_S2_...``, ``test_s2_...``) or its own docstring, where T1-T7 is all seven.
What a class or module says of itself names nothing: not each of its tests holds it. ``--check`` fails when the list has
a gap, a duplicate or an empty line, or when any file of the repository cites a rule of one of its series that the list
lacks. Without it: fails when no test names a rule of a series that is finished.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES_PATH = ROOT / "docs" / "rules.md"
# How many rules each series has. A new rule is added to docs/rules.md and here.
SERIES = {
    "E": 19,
    "P": 13,
    "S": 7,
    "L": 7,
    "W": 6,
    "F": 6,
    "M": 4,
    "B": 8,
    "T": 7,
    "R": 14,
    "V": 13,
    "K": 11,
    "C": 6,
    "D": 5,
    "O": 4,
}
FINISHED = "EPSLWFMBT"
"""Series of which every rule must be named by a test."""
MADE_OF = {"B3": "K"}
"""Rules that are a whole series: held by its tests, once each of its rules has one."""
_ROW = re.compile(r"^\| (?P<rule>[A-Z]\d{1,2}) \| (?P<line>.*?) \|$", re.MULTILINE)
_CITED = re.compile(r"(?<![A-Za-z0-9.])([EPSLWFMBTRVKCDO]\d{1,2})(?![A-Za-z0-9])")
_RANGE = re.compile(r"(?<![A-Za-z0-9.])([EPSLWFMBTRVKCDO])(\d{1,2})-\1(\d{1,2})(?![A-Za-z0-9])")
_IN_BRACKETS = re.compile(r"\(((?:\d\d-)?[EPSLWFMBTRVKCDO]\d{1,2}(?:(?:[,;] |-)(?:\d\d-)?[EPSLWFMBTRVKCDO]\d{1,2})*)\)")


def listed_rules(text: str) -> dict[str, str]:
    """Rule id to its line. Raises ValueError on a rule that is listed twice."""
    rules: dict[str, str] = {}
    for match in _ROW.finditer(text):
        if match["rule"] in rules:
            raise ValueError(f"docs/rules.md lists {match['rule']} twice")
        rules[match["rule"]] = match["line"]
    return rules


def named_by_tests(source: str) -> Iterator[tuple[str, str]]:
    """Pairs (rule, test name) of one test file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            for rule in cited(ast.get_docstring(node)) | cited(node.name.replace("_", " ").upper()):
                yield rule, node.name


def cited(text: str | None) -> set[str]:
    """The rules that a text names, those within its ranges too."""
    ranges = _RANGE.findall(text or "")
    within = {f"{series}{number}" for series, low, high in ranges for number in range(int(low), int(high) + 1)}
    return set(_CITED.findall(text or "")) | within


def tests_by_rule() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for rule, test in named_by_tests(path.read_text()):
            found[rule].append(f"{path.relative_to(ROOT)}::{test}")
    for rule, series in MADE_OF.items():
        parts = [found[f"{series}{number}"] for number in range(1, SERIES[series] + 1)]
        if all(parts):
            found[rule] += sorted({test for part in parts for test in part} - set(found[rule]))
    return found


def problems(rules: dict[str, str]) -> list[str]:
    expected = [f"{letter}{number}" for letter, count in SERIES.items() for number in range(1, count + 1)]
    found = [f"docs/rules.md lacks {rule}" for rule in expected if rule not in rules]
    found += [f"docs/rules.md lists {rule}, which no series has" for rule in rules if rule not in expected]
    found += [f"docs/rules.md says nothing about {rule}" for rule, line in rules.items() if not line.strip()]
    for folder in ("libs", "services", "tests", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".py", ".md") or path == RULES_PATH:
                continue
            for bracket in _IN_BRACKETS.findall(path.read_text()):
                found += [
                    f"{path.relative_to(ROOT)} cites {rule}, which docs/rules.md lacks"
                    for rule in sorted(cited(re.sub(r"\b\d\d-", "", bracket)))
                    if rule not in rules
                ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only check that docs/rules.md is complete")
    parser.add_argument("--missing", action="store_true", help="list only the rules that no test names")
    arguments = parser.parse_args()
    try:
        rules = listed_rules(RULES_PATH.read_text())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.check:
        found = problems(rules)
        for problem in found:
            print(f"error: {problem}", file=sys.stderr)
        print(f"docs/rules.md: {len(rules)} rules, {len(found)} problems")
        return 1 if found else 0
    tests = tests_by_rule()
    for rule, line in rules.items():
        if tests.get(rule) and arguments.missing:
            continue
        print(f"{rule:4} {line}")
        for test in tests.get(rule, ()):
            print(f"       {test}")
    without = [rule for rule in rules if not tests.get(rule)]
    print(
        f"\n{len(rules)} rules, {len(rules) - len(without)} named by tests, {len(without)} by none: {' '.join(without)}"
    )
    unproven = [rule for rule in without if rule[0] in FINISHED]
    if unproven:
        print(f"error: no test names {' '.join(unproven)}", file=sys.stderr)
    return 1 if unproven else 0


if __name__ == "__main__":
    sys.exit(main())

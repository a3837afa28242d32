"""``OPEN_RL_*`` variables that nothing reads: a typo is said at the start instead of being ignored (E19, C5).

What is known is in ``variables.txt``: the variables of every setting of every service and command, because one
environment serves them all and a service's image has no other's settings. ``make manifests`` writes it from the click
options, a test holds it to them. It refuses nothing: a newer part's variable may be there before an older one is gone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

PREFIX = "OPEN_RL_"
FILE = Path(__file__).with_name("variables.txt")


def unknown_variables(names: Iterable[str]) -> list[str]:
    """A line for each of ``names`` (an environment's) that begins with OPEN_RL_ and that nothing reads."""
    known = FILE.read_text().split()
    words = [name.removeprefix(PREFIX) for name in known]
    lines = []
    for name in sorted(name for name in names if name.startswith(PREFIX) and name not in known):
        nearest = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1)
        remedy = f"did you mean {PREFIX}{nearest[0]}?" if nearest else "take it away, or see --help for those there are"
        lines.append(f"{name} is set, and nothing reads it: {remedy}")
    return lines

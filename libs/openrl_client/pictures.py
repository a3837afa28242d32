"""Pictures by matplotlib, which is an extra: whether it is there, and writing one to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrl_common.errors import Rejected


def new_figure(**options: Any) -> Any:
    """A matplotlib ``Figure``. Raises Rejected when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Rejected("--chart needs matplotlib: pip install matplotlib, or leave it out", code="usage") from None
    return Figure(layout="constrained", **options)


def save(figure: Any, path: Path) -> None:
    """Write a picture (PNG, SVG, PDF by the suffix). Raises Rejected when the file cannot be written."""
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise Rejected(f"--chart {path} cannot be written: {error}", code="usage") from error

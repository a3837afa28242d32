"""Errors a client sees, and the documented exit code of each (C5).

    0 ok · 1 failed · 2 usage · 3 impossible · 4 timed out · 5 unreachable

The classes come from ``openrl_common.errors``; this module adds the two that only a client can raise.
"""

from __future__ import annotations

from openrl_common.errors import Bug, Conflict, OpenRLError, Poison, Rejected, Transient, Unreachable

__all__ = [
    "Bug",
    "Conflict",
    "JobEndedError",
    "OpenRLError",
    "Poison",
    "Rejected",
    "TimedOut",
    "Transient",
    "Unreachable",
    "exit_code",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_IMPOSSIBLE = 3
EXIT_TIMED_OUT = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130

_CODES = {
    "impossible": EXIT_IMPOSSIBLE,
    "placement-timeout": EXIT_TIMED_OUT,
    "usage": EXIT_USAGE,
    "bad-name": EXIT_USAGE,
    "bad-spec": EXIT_USAGE,
}
"""What is wrong as it was written is usage, whether click sees it or the name's rule, a job file or placement does."""


class TimedOut(Transient):
    """The caller's own deadline passed. What was asked may still happen."""


class JobEndedError(Rejected):
    """The job failed, finished or was cancelled; ``code`` is placement's (``worker-failed``, ``cancelled`` …)."""


def exit_code(error: BaseException) -> int:
    """Return the documented exit code of ``error`` (C5)."""
    if isinstance(error, TimedOut | TimeoutError):
        return EXIT_TIMED_OUT
    if isinstance(error, Unreachable):
        return EXIT_UNREACHABLE
    if isinstance(error, Rejected):
        return _CODES.get(error.code, EXIT_FAILED)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_FAILED

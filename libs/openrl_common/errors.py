"""The error tree of OpenRL. The class says who must react; the consume loop maps it to ack, nak or term.

OpenRLError
 ├─ Transient     try again later: the message is nak'ed with a delay (network, timeout, a busy peer)
 │   ├─ Conflict      a compare-and-swap lost: read again, decide again
 │   │   └─ UnknownOutcome  it lost, but an earlier try of this very write may have landed in between
 │   └─ Unreachable   no server answered before the deadline
 ├─ Rejected      the answer is no: the message is acknowledged, the requester is told (never retried)
 ├─ Poison        the message can never be handled: it is terminated and copied to the dead letters
 └─ Bug           an invariant broke: the process must stop, a restart re-derives its state
"""

from __future__ import annotations


class OpenRLError(Exception):
    """Base of every error that OpenRL raises on purpose. The message is one line: what, which value, what to do.

    ``remedy`` is what to do, where it was given apart; ``what`` is the rest.
    """

    def __init__(self, what: str = "", *, remedy: str = "") -> None:
        super().__init__(f"{what}: {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class Transient(OpenRLError):
    """Retry later; nothing is known to be wrong with the input."""


class Conflict(Transient):
    """A compare-and-swap lost against another writer."""


class UnknownOutcome(Conflict):
    """Another value stands there now, and an earlier try that timed out may have landed before it (E7, E8).

    What the write meant to add may be part of the present value: read again and look.
    """


class Unreachable(Transient):
    """No server answered before the deadline. The outcome of a write that raised this is unknown."""


class Rejected(OpenRLError):
    """A definite no, with a machine-readable code beside the sentence.

    Args:
        what: one line for a person: what, which value, what to do (unless ``remedy`` says that).
        code: one of the documented codes (for example ``unknown-loss``), stable across releases.
    """

    def __init__(self, what: str, *, code: str = "rejected", remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.code = code


class Poison(OpenRLError):
    """The message itself is unusable (not decodable, impossible fields)."""


class Bug(OpenRLError):
    """An invariant of the program does not hold. Never caught below ``main``."""

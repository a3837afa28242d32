"""What rank 0 tells the others (R14); the ranks themselves: tests/bus/trainer/test_ranks.py."""

from __future__ import annotations

import pytest

from openrl_common.errors import Rejected
from openrl_common.wire import Datum, Forward
from openrl_trainer.commands import Apply
from openrl_trainer.group import Group


def test_a_request_that_cannot_be_told_to_the_other_ranks_is_refused_R6_R14() -> None:
    """The log takes any number; one beyond 64 bits ended the process, and again at every replay."""
    request = Forward(seq=1, incarnation=7, data=[Datum(tokens=[1, 10**30])])
    with pytest.raises(Rejected) as refused:
        Group(1).send(Apply(key="default.job.7", request=request))
    assert refused.value.code == "bad-request"

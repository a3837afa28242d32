"""Identifiers and subjects (E1)."""

from __future__ import annotations

import re

import msgspec
import pytest

from openrl_common.errors import Rejected
from openrl_common.events import AnyEvent, Event
from openrl_common.names import FLEET, SHARED, check_job, check_tenant, query_subject, sample_subject, train_subject

TOKEN = re.compile(r"[a-z0-9-]+")


def example(kind: type[Event]) -> Event:
    """An event of this kind with a plain value in every field that must be given."""
    plain = {str: "a-1", int: 1, float: 1.0, bool: True}
    fields = {
        field.name: plain.get(field.type)
        for field in msgspec.structs.fields(kind)
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    }
    return kind(**fields)


@pytest.mark.parametrize("kind", AnyEvent.__args__, ids=lambda kind: kind.__name__)
def test_E1_every_events_subject_is_source_tenant_entity_id_fact(kind: type[Event]) -> None:
    subject = example(kind).subject
    tokens = subject.split(".")
    assert tokens[:2] == ["openrl", "ev"]
    assert len(tokens) == 7
    assert tokens[3] == FLEET or TOKEN.fullmatch(tokens[3])
    assert all(TOKEN.fullmatch(token) for token in (*tokens[:3], *tokens[4:])), subject


def test_E1_subjects_of_requests_and_queries() -> None:
    assert train_subject("acme", "sort") == "openrl.train.acme.sort"
    assert sample_subject(SHARED, "lora-tiny-0", "team") == "openrl.sample._shared.lora-tiny-0.team"
    assert query_subject("placement", "jobs") == "openrl.q.placement.jobs"


@pytest.mark.parametrize("name", [FLEET, SHARED, "fleet", "shared", "A", "a.b", "a b", "a--b", "-a", "", "*", ">", "ö"])
def test_E1_a_tenant_is_one_token_and_never_a_reserved_one(name: str) -> None:
    with pytest.raises(Rejected, match="tenant"):
        check_tenant(name)


@pytest.mark.parametrize("name", ["A", "a.b", "a\nb", "a--b", "a" * 41, "", "*", ">"])
def test_E1_a_job_name_is_one_token(name: str) -> None:
    with pytest.raises(Rejected, match="job name"):
        check_job(name)

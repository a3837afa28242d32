"""What another release wrote is read: more fields than are known here, and fewer (E2)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from openrl_common.events import EVENT_DECODER, AnyEvent, Event, JobSubmitted
from openrl_common.records import JobSpec, LoraSpec, Overrides

KINDS = pytest.mark.parametrize("kind", AnyEvent.__args__, ids=lambda kind: kind.__name__)
USER_INPUT = (JobSpec, LoraSpec, Overrides)
PLAIN: dict[type, Any] = {
    inspect.StrType: "a-1", inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True, inspect.NoneType: None,
}  # fmt: skip


def written(kind: inspect.Type, *, optional: bool, newer: bool) -> Any:
    """A value as it stands in JSON. ``optional``: fields with a default too; ``newer``: each record has one more."""

    def of(part: inspect.Type) -> Any:
        within_itself = isinstance(part, inspect.StructType) and issubclass(part.cls, Event)
        return written(part, optional=optional and not within_itself, newer=newer)

    match kind:
        case inspect.StructType():
            fields = {f.encode_name: of(f.type) for f in kind.fields if optional or f.required}
            unknown = {"added_later": {"more": [1]}} if newer and kind.cls not in USER_INPUT else {}
            return {kind.tag_field: kind.tag, **fields, **unknown} if kind.tag_field else {**fields, **unknown}
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.UnionType():
            return of(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.VarTupleType() | inspect.ListType():
            return [of(kind.item_type)]
        case inspect.TupleType():
            return [of(each) for each in kind.item_types]
        case inspect.DictType():
            return {of(kind.key_type): of(kind.value_type)}
    return PLAIN[type(kind)]


@KINDS
def test_E2_fields_that_a_newer_writer_added_are_ignored(kind: type[Event]) -> None:
    """E2: of the event and of every record in it."""
    form = inspect.type_info(kind)
    known = written(form, optional=True, newer=False)
    event = EVENT_DECODER.decode(json.dumps(written(form, optional=True, newer=True)))
    assert type(event) is kind
    assert event == EVENT_DECODER.decode(json.dumps(known))
    assert msgspec.to_builtins(event).keys() <= known.keys()


@KINDS
def test_E2_fields_that_an_older_writer_did_not_know_have_their_defaults(kind: type[Event]) -> None:
    form = inspect.type_info(kind)
    event = EVENT_DECODER.decode(json.dumps(written(form, optional=False, newer=False)))
    assert type(event) is kind
    assert event.subject
    assert event.message_id.startswith(kind.__struct_config__.tag)


def test_E2_what_a_user_wrote_may_have_none_that_is_unknown() -> None:
    submitted = written(inspect.type_info(JobSubmitted), optional=True, newer=False)
    submitted["spec"]["learning_rat"] = 1
    with pytest.raises(msgspec.ValidationError, match="learning_rat"):
        EVENT_DECODER.decode(json.dumps(submitted))

"""Requests as they travel: one that no worker could read is refused at the call, before it takes a number (C2, C5).

JSON knows neither NaN nor infinity, msgspec writes ``null`` for them: such a value is named here, where the caller can
still see which one it was. What the values mean is for the worker to check.
"""

from __future__ import annotations

import re

import msgspec

from openrl_client.errors import Rejected

_NULL = re.compile(r"Expected `[^`]*`, got `null` - at `\$\.?(.*)`")


def encode(request: msgspec.Struct) -> bytes:
    """The JSON body. Raises Rejected (``bad-request``), naming the first value that cannot travel."""
    try:
        body = msgspec.json.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Rejected(
            f"the request cannot be sent ({error}): use plain numbers and lists, for an array its .tolist()",
            code="bad-request",
        ) from None
    if b"null" in body:
        try:
            msgspec.json.decode(body, type=type(request))
        except msgspec.ValidationError as error:
            found = _NULL.fullmatch(str(error))
            what = f"{found[1]} is None, NaN or infinite: give a finite value" if found else str(error)
            raise Rejected(f"the request is not usable: {what}", code="bad-request") from None
    return body

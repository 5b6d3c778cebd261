"""Messages as JSON, as ``--json`` of the commands prints them."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """A message by the names of its proto; what is empty, zero or false is left out."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def as_json(message: Message) -> str:
    """The same as text."""
    return dumps(as_dict(message))


def dumps(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))

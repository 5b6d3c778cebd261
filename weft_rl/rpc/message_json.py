"""Messages as JSON, alike wherever they are shown."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """Convert a message by the names of its proto; what is empty, zero or false is left out."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found

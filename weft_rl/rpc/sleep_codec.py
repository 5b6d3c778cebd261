"""Codec of orders to sleep."""

from __future__ import annotations

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.v1 import registry_pb2


def level_from_proto(value: int) -> int:
    """Return vLLM's level at which a replica is to sleep.

    Raises:
        InvalidRequestError: There is no such level.
    """
    if value not in (0, 1, 2):
        raise InvalidRequestError(f"level is {value}, and must be 1 or 2")
    return value or 1


def when_running_to_proto(aborts: bool) -> registry_pb2.WhenRunning.ValueType:
    """Encode what becomes of running requests: they are aborted, or finish."""
    return registry_pb2.WHEN_RUNNING_ABORT if aborts else registry_pb2.WHEN_RUNNING_FINISH


def aborts_from_proto(value: registry_pb2.WhenRunning.ValueType) -> bool:
    """Return whether running requests are aborted, rather than finished.

    Raises:
        InvalidRequestError: The value is unset or unknown.
    """
    if value not in (registry_pb2.WHEN_RUNNING_ABORT, registry_pb2.WHEN_RUNNING_FINISH):
        raise InvalidRequestError("when_running must say what becomes of running requests")
    return value == registry_pb2.WHEN_RUNNING_ABORT

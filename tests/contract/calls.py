"""Calls that must fail."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from weft_rl.contract.errors import WeftError
from weft_rl.rpc.status import error_from_rpc


async def refused(call: Any) -> tuple[str, WeftError]:
    """Await a call, or the first answer of a stream, that must fail: its status and reason
    as ``"STATUS/REASON"``, and the error."""
    with pytest.raises(grpc.RpcError) as failed:
        await (call.read() if hasattr(call, "read") else call)
    error = error_from_rpc(failed.value)
    return f"{failed.value.code().name}/{error.reason}", error


async def refusal(call: Any) -> str:
    """How a call fails that must, as ``"STATUS/REASON"``."""
    return (await refused(call))[0]


async def error_of(call: Any) -> WeftError:
    """The error of a call that must fail."""
    return (await refused(call))[1]


async def fails(call: Any, code: str, reason: str) -> WeftError:
    """The error of a call that must fail with this status and reason."""
    how, error = await refused(call)
    assert how == f"{code}/{reason}"
    return error

"""What a failed call is told as, where no Weft server has answered or nobody hears it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from weft_rl.contract.errors import PeerUnavailableError, WeftError
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.status import abort_with_error, error_from_rpc
from weft_rl.v1 import inspect_pb2, inspect_pb2_grpc


def test_a_refused_connection_is_named_without_grpcs_layers() -> None:
    channel = open_channel("127.0.0.1:1")
    try:
        with pytest.raises(grpc.RpcError) as failed:
            inspect_pb2_grpc.InspectServiceStub(channel).GetPool(inspect_pb2.GetPoolRequest())
    finally:
        channel.close()
    error = error_from_rpc(failed.value)
    assert isinstance(error, PeerUnavailableError)
    assert error.reason == "COORDINATOR_AWAY"
    assert error.message == "no answer: 127.0.0.1:1: Connection refused"


async def test_a_call_that_is_over_is_cancelled_not_a_failure_of_the_server() -> None:
    """gRPC's core takes no status for it, and gRPC logs what a method raises then."""

    class Over:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("Internal error from Core")

    with pytest.raises(asyncio.CancelledError):
        await abort_with_error(Over(), WeftError("x"))  # type: ignore[arg-type]

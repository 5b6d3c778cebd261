"""What a failed call is told as, where no Weft server has answered."""

from __future__ import annotations

import grpc
import pytest

from weft.contract.errors import PeerUnavailableError
from weft.rpc.channel import open_channel
from weft.rpc.status import error_from_rpc
from weft.v1 import inspect_pb2, inspect_pb2_grpc


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

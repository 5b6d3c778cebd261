"""A command's connection to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.status import error_from_rpc

#: For a call that waits for nobody.
CALL_SECONDS = 10.0


@contextmanager
def connect(coordinator: str) -> Iterator[grpc.Channel]:
    """Open a channel for one command; what fails in its calls is raised as a typed error."""
    with open_channel(coordinator) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

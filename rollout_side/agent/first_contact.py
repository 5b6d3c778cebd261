"""First contact with the coordinator, before a model is loaded for minutes."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc

from rollout_side.config import AgentConfig
from weft_rl.contract.errors import (
    InvalidNameError,
    PeerUnavailableError,
    RequestConflictError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import check_target, open_aio_channel
from weft_rl.rpc.handshake import why_refused
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import registry_pb2 as pb
from weft_rl.v1.registry_pb2_grpc import RegistryServiceStub

_log = logging.getLogger(__name__)

_CALL_SECONDS = 5.0
_RETRY_SECONDS = 0.5
#: Beyond the time that a former process of this name needs to be taken for gone.
_MORE_SECONDS = 1.0


async def check_contact(config: AgentConfig) -> None:
    """Check whether the coordinator will take this replica in, and log what is in the way.

    A coordinator may be away, or refuse this replica by rules that others mend. It is waited for
    later, when the replica registers: the model is loaded meanwhile.

    Raises:
        InvalidRequestError: The coordinator's address is malformed.
        RequestConflictError: Another process of this name lives on; nothing is served here yet
            that would be lost.
    """
    check_target(config.coordinator)
    request = pb.CheckReplicaRequest(
        replica_id=config.replica_id,
        incarnation=config.incarnation,
        protocol_revision=PROTOCOL_REVISION,
    )
    taken_since: float | None = None
    async with open_aio_channel(config.coordinator) as channel:
        stub = RegistryServiceStub(channel)
        while True:
            try:
                await stub.CheckReplica(request, timeout=_CALL_SECONDS)
                return
            except grpc.RpcError as rpc_error:
                if rpc_error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return  # an older coordinator says it when the replica registers
                error = error_from_rpc(rpc_error)
            if isinstance(error, InvalidNameError):
                raise error
            if not isinstance(error, RequestConflictError):
                await _say(config, error)
                return
            now = time.monotonic()
            if taken_since is None:
                taken_since = now
                _log.warning("waiting for a former process to be forgotten: %s", error.message)
            elif now - taken_since > _patience(config, error):
                raise error
            await asyncio.sleep(_RETRY_SECONDS)


def _patience(config: AgentConfig, error: RequestConflictError) -> float:
    try:
        needed = float(error.metadata["silent_seconds"]) + _MORE_SECONDS
    except (KeyError, ValueError):
        return config.conflict_patience_seconds
    return min(needed, config.conflict_patience_seconds)


async def _say(config: AgentConfig, error: WeftError) -> None:
    """Log why there is no contact yet."""
    if not isinstance(error, PeerUnavailableError | TransferTimeoutError):
        what = f"the coordinator at {config.coordinator} refuses this replica: {error}"
    else:
        credentials = Credentials.from_environment()
        why = await asyncio.to_thread(why_refused, config.coordinator, credentials)
        what = f"no contact with the coordinator at {config.coordinator}: {why or error.message}"
    _log.warning("%s; the model is loaded meanwhile, and then it is asked again", what)

"""What is said of sleep, as messages of ``weft.v1``."""

from __future__ import annotations

from weft_rl.coordinator.decisions.effects import CallSleep, CallWake
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.sleep_codec import when_running_to_proto
from weft_rl.v1 import replica_pb2


def sleep_request(
    call: CallSleep | CallWake, generation: int
) -> replica_pb2.SleepRequest | replica_pb2.WakeUpRequest:
    """A call to a replica, as its service takes it."""
    if isinstance(call, CallWake):
        return replica_pb2.WakeUpRequest(
            coordinator_generation=generation, incarnation=call.incarnation
        )
    return replica_pb2.SleepRequest(
        coordinator_generation=generation,
        incarnation=call.incarnation,
        trainer_id=call.trainer_id,
        when_running=when_running_to_proto(call.aborts),
        timeout=duration_to_proto(call.seconds),
        level=call.level,
    )

"""What is said of sleep, as messages of ``weft.v1``."""

from __future__ import annotations

from weft_rl.coordinator.decisions.effects import CallSleep, CallWake
from weft_rl.coordinator.decisions.state.sleep import Asleep
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.sleep_codec import when_running_to_proto
from weft_rl.v1 import registry_pb2, replica_pb2

_SaysSleep = (
    registry_pb2.RegisterRequest | registry_pb2.HeartbeatRequest | replica_pb2.SleepResponse
)


def asleep_from_proto(message: _SaysSleep) -> Asleep | None:
    """What a replica says of its sleep; None of one that is awake."""
    if not message.HasField("sleep"):
        return None
    said = message.sleep
    return Asleep(said.trainer_id, said.weights_awake, said.level or 1)


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

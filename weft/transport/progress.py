"""What a rank's working threads say of their work, on its stream to the coordinator.

The thread that works speaks, never the stream's own: so one that hangs is silent, and is
found out. A long step is therefore cut so that the thread can speak in between.
"""

from __future__ import annotations

import time

from weft.transport.attendance import Attendance
from weft.transport.speaking import SPEAK_SECONDS
from weft.v1 import rendezvous_pb2 as pb


class Progress:
    """Says what a rank does; any of its threads may call it.

    Nothing is sent where the rank has sent something else less than ``SPEAK_SECONDS``
    ago: a push that is fast is told by its buckets alone.

    Args:
        attendance: The rank's stream.
    """

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance

    def say(
        self,
        activity: pb.Activity.ValueType,
        transfer_id: str = "",
        bucket: int = 0,
        done: int = 0,
        total: int = 0,
    ) -> None:
        """Say it, if it is time to; returns at once. See ``weft.v1.Progress``."""
        if time.monotonic() - self._attendance.sent_at < SPEAK_SECONDS:
            return
        progress = pb.Progress(
            transfer_id=transfer_id, activity=activity, bucket=bucket, done=done, total=total
        )
        self._attendance.send(pb.AttendRequest(progress=progress))

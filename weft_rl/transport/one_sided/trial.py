"""Trials of whether processes can read each other's memory, by doing it.

A replica answers under a name that it registers with; a trainer hands a memory file over there,
and is told what lies in it. Another host, a container of its own or another user fail in one of
the steps that a group would fail in.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence

import torch

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import CapacityError
from weft_rl.ipc.connection import PeerError
from weft_rl.ipc.listener import Listener
from weft_rl.transport.one_sided.directory import connect, listen, unlink
from weft_rl.transport.one_sided.memory import (
    allocate,
    export_of,
    map_export,
    record_event,
    synchronize,
)
from weft_rl.transport.one_sided.messages import (
    SECRET_BYTES,
    Export,
    ExportDevice,
    MemberConnection,
    OneSidedError,
    Tried,
    Try,
    TryDevice,
)

_log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_ASK_SECONDS = 2.0
# Of a memory file that is mapped for a trial: anybody on this host may ask for one.
_MAX_TRIED_BYTES = 64 * 1024
# Replicas that a trainer remembers: more than a pool of one host has.
_MAX_PASSED = 1024
# Connections of this user's processes that have asked nothing (yet).
_MAX_SILENT = 64


class TrialAnswerer:
    """Thread that answers trials until it is closed.

    Args:
        device: Device that it would receive on.

    Raises:
        OneSidedError: There is no directory for it, or no descriptor or thread.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        listening, self.name = listen()
        try:
            self._listener = Listener(
                listening, self._try, name="weft-trials", max_silent=_MAX_SILENT
            )
        except (OSError, RuntimeError) as error:  # also where there can be no further thread
            unlink(self.name)
            raise OneSidedError(f"no trial can be answered: {error}") from error

    def close(self) -> None:
        """End the thread; blocks for an answer under way, at most some seconds. A second call does
        nothing."""
        unlink(self.name)
        self._listener.close(_ASK_SECONDS + 1.0)

    def _try(self, connected: socket.socket) -> None:
        try:
            self._answer(MemberConnection(connected))
        except PeerError as error:
            _log.debug("a trial of one-sided reading failed: %s", error)
        except Exception:  # noqa: BLE001 (the edge of a thread)
            _log.exception("a trial of one-sided reading failed")
        finally:
            connected.close()

    def _answer(self, connection: MemberConnection) -> None:
        asked, fd = connection.receive(_ASK_SECONDS)
        export: Export | ExportDevice
        try:
            if isinstance(asked, TryDevice):
                export = ExportDevice(0, asked.num_bytes, asked.gpu, asked.handle)
            elif not isinstance(asked, Try):
                raise OneSidedError(f"{connection.peer} began with {type(asked).__name__}")
            elif asked.num_bytes > _MAX_TRIED_BYTES:
                raise OneSidedError(
                    f"{connection.peer} asks for a trial of {asked.num_bytes:,} bytes"
                )
            else:
                export = Export(0, asked.num_bytes)
            mapped = map_export(export, fd, self._device)
        finally:
            if fd is not None:
                os.close(fd)
        try:
            content = torch.zeros(SECRET_BYTES, dtype=torch.uint8, device=self._device)
            mapped.copy(0, content, lambda: None, record_event(self._device))
        finally:
            mapped.close()
        connection.send(Tried(content.cpu().numpy().tobytes()))


class Trials:
    """Results of a process's trials of others; not thread-safe.

    A name is one process's, and a process that could read this one's memory still can: it is not
    asked again with each push.
    """

    def __init__(self) -> None:
        self._passed: LruMapping[tuple[str, torch.device], bool] = LruMapping(_MAX_PASSED)

    def why_not_readable(self, names: Sequence[str], device: torch.device = CPU) -> str:
        """Return ``why_not_readable`` of the names that have not passed yet."""
        unknown = [name for name in names if not self._passed.get((name, device))]
        why = why_not_readable(unknown, device) if unknown else ""
        if not why:
            for name in names:
                self._passed.put((name, device), True)
        return why


def why_not_readable(
    names: Iterable[str],
    device: torch.device = CPU,
    timeout_seconds: float = _ASK_SECONDS,
) -> str:
    """Return why a process of those names cannot read this one's memory; empty if all can. Blocks
    for a fraction of a millisecond each, at most ``timeout_seconds`` in all.

    Args:
        device: Device of that memory.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        secret = secrets.token_bytes(SECRET_BYTES)
        buffer = allocate(SECRET_BYTES, device)
        buffer.copy_(torch.frombuffer(bytearray(secret), dtype=torch.uint8))
        synchronize(device)
        offer, fd = export_of(buffer)[0].offer()
        asked: Try | TryDevice = Try(offer.num_bytes)
        if isinstance(offer, ExportDevice):
            asked = TryDevice(offer.num_bytes, offer.gpu, offer.handle)
        for name in names:
            if not name:
                return "a replica takes part in no trial"
            connection = MemberConnection(connect(name, max(0.001, deadline - time.monotonic())))
            try:
                connection.send(asked, fd)
                tried = connection.receive_message(deadline - time.monotonic())
            finally:
                connection.close()
            if tried != Tried(secret):
                return f"{connection.peer} read other bytes than were written"
    except (RuntimeError, CapacityError) as error:
        return str(error)
    return ""

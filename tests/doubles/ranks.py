"""The engine double with a second rank in a process of its own, which loads in place what the
first one receives."""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout_side.engine import SwitchTimes
from rollout_side.memory.handoff import Handoff, InPlaceLoad, RankHandoff, RankServer
from rollout_side.memory.versions import tensor_in
from tests.doubles.engine import EngineDouble
from tests.fault import strikes
from weft_rl.contract.errors import LoadFailedError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion

_START_SECONDS = 60.0


class TwoRankDouble(EngineDouble):
    """A replica of two ranks: this process has the first, which receives. As with vLLM's, what it
    serves cannot be cloned from it, and a call ends once both ranks have answered."""

    def __init__(self, weights: dict[str, torch.Tensor], **settings: Any) -> None:
        super().__init__(weights, **settings | {"is_readable": False})
        self.store.num_ranks = 2
        name = secrets.token_hex(8)
        self._server = RankServer(name, self.store.handoff.of, self.store.followers.serve)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._rank = context.Process(target=_serve, args=(theirs, name, shapes), daemon=True)
        self._rank.start()
        theirs.close()
        # Its imports take seconds of a busy machine: the deadlines of pushes are not for these.
        assert self._pipe.poll(_START_SECONDS), "its rank did not start"
        self._pipe.recv()
        self._caller = ThreadPoolExecutor(1, "rank-calls")

    async def wait_ended(self) -> None:
        """Return when the second rank has ended, for whatever reason."""
        await asyncio.to_thread(self._rank.join)

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        former = self.load
        await super().load_in_place(transfer_id, version, timeout_seconds)
        if self.load is not former:
            await self._ask("begin", transfer_id, version)

    async def apply_base(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes
    ) -> SwitchTimes:
        was_loading = self.loading == transfer_id
        times = await super().apply_base(transfer_id, version, content_digest)
        if was_loading:
            await self._ask("confirm", content_digest)
        return times

    async def discard(self, transfer_id: str) -> None:
        was_loading = self.loading == transfer_id
        await super().discard(transfer_id)
        if was_loading and await self._ask("end"):
            self.dirty_reason = f"loading {transfer_id} in place was given up"

    async def holds(self) -> dict[str, Any]:
        mine, other = await super().holds(), await self._ask("holds")
        firsts = sorted({*mine["firsts"], *other["firsts"]})
        return {**mine, "firsts": firsts, "is_whole": mine["is_whole"] and other["is_whole"]}

    async def second_base(self) -> dict[str, torch.Tensor]:
        """What the second rank has loaded."""
        base: dict[str, torch.Tensor] = await self._ask("base")
        return base

    async def _ask(self, method: str, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            ok, value = await loop.run_in_executor(self._caller, self._call, method, args)
        except (EOFError, OSError) as error:
            ok, value = False, LoadFailedError("a rank has ended", metadata={"dirty": "true"})
            value.__cause__ = error
        if ok:
            return value
        if value.metadata.get("dirty") == "true":
            self.dirty_reason = value.message
        raise value

    def _call(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        self._pipe.send((method, args))
        answer: tuple[bool, Any] = self._pipe.recv()
        return answer

    def close(self) -> None:
        """End both; blocks at most some seconds."""
        super().close()
        self._server.close()
        self._rank.kill()
        self._rank.join(5)
        self._pipe.close()
        self._caller.shutdown(wait=False)


class LoadingRank:
    """What the second rank holds, and loads in place."""

    def __init__(self, name: str, base: dict[str, torch.Tensor]) -> None:
        self._name, self._base = name, base
        self._load: InPlaceLoad | None = None

    def begin(self, transfer_id: str, version: PolicyVersion) -> None:
        """Load what is received for a transfer, on a thread of its own."""
        handoff = RankHandoff(self._name, 1, transfer_id, version)
        self._load = InPlaceLoad(handoff, self._take)

    def _take(self, handoff: Handoff) -> None:
        try:
            for index, wire in handoff.buckets():
                self.load_bucket(handoff.manifest, index, wire)
        except WeftError as error:
            if not handoff.is_begun:
                raise
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error

    def load_bucket(self, manifest: Manifest, index: int, wire: torch.Tensor) -> None:
        """Have it replace what is held."""
        for slot in (slot for slot in manifest.tensors if slot.bucket == index):
            self._base[slot.meta.name] = tensor_in(slot, wire).clone()

    def confirm(self, content_digest: bytes) -> None:
        """Make sure that it was loaded whole."""
        assert self._load is not None
        self._load.confirm(content_digest)

    def end(self) -> bool:
        """End the load; returns whether weights have changed."""
        assert self._load is not None
        return self._load.end()

    def base(self) -> dict[str, torch.Tensor]:
        """All of it."""
        return self._base

    def holds(self) -> dict[str, Any]:
        """See ``EngineDouble``."""
        tensors = self._base.values()
        return {
            "firsts": sorted({float(t.flatten()[0]) for t in tensors}),
            "is_whole": all(bool((t == t.flatten()[0]).all()) for t in tensors),
        }


def _serve(pipe: Connection, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """The second rank's process: answers until the first one ends."""
    strikes.install("replica rank")
    base = {tensor: torch.zeros(1).expand(shape) for tensor, shape in shapes.items()}
    rank = LoadingRank(name, base)
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            ok, value = True, getattr(rank, method)(*args)
        except WeftError as error:
            ok, value = False, error
        pipe.send((ok, value))

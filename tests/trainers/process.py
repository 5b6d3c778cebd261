"""One rank of a real trainer: ``python -m tests.trainers.process RANK SIZE STORE TARGET``.

STORE is a file for the ranks to meet at, TARGET the coordinator's HOST:PORT. Each line
of its standard input is a JSON object with one command, which every rank is given; it
answers each with a line of JSON. See ``Rank``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fault import strikes
from tests.integration import models
from tests.trainers.kinds import ONE_BATCH, Trainer, wrap
from tests.waits import until
from trainer_side import Publisher, PushOptions, PushResult
from trainer_side.pool.peer import SideGroupRank
from trainer_side.pushes.rank_push import HeldPush
from weft_rl.contract.errors import CapacityError, PeerUnavailableError, WeftError
from weft_rl.contract.manifest import Run
from weft_rl.transport.wire.changes import packed_places

#: Where a saved model is trained: of several GPUs, each rank has its own.
DEVICE = torch.device(os.environ.get("WEFT_TEST_DEVICE", "cpu"))


def _tiny_loss(model: Any, step: int, of_rank: int = 0) -> torch.Tensor:
    torch.manual_seed(1000 * step + of_rank)
    loss: torch.Tensor = model(torch.randint(0, 50, (4,))).pow(2).mean()
    return loss


def _causal_loss(model: Any, step: int, of_rank: int = 0) -> torch.Tensor:
    torch.manual_seed(1000 * step + of_rank)
    ids = torch.randint(4, 250, (2, 12))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


class _Layer(torch.nn.Module):
    def __init__(self, layer: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.q_proj, self.v_proj = layer["q_proj"], layer["v_proj"]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.q_proj(hidden)
        return hidden + self.v_proj(hidden).repeat(1, models.HIDDEN // 16)


class Model(models.Model):
    """The double's model, with a forward: shape (n,) of ids to (n, HIDDEN).

    If it is ``counting``, it counts its forwards in a buffer that its checkpoints hold, as routers
    keep their bias.
    """

    def __init__(self, seed: int, *, counting: bool = False) -> None:
        super().__init__(seed)
        self.layers = torch.nn.ModuleList(map(_Layer, self.layers))
        self._counting = counting
        if counting:
            self.layers[1].register_buffer("seen", torch.zeros(3))
            self.layers[1].register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._counting:
            self.layers[1].seen += torch.arange(3.0)
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _add_second(module: Any) -> None:
    from peft import LoraConfig

    module.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    with torch.no_grad():
        for name, param in module.named_parameters():
            if ".second." in name:
                param.normal_()
                param.data = param.data.bfloat16()


class Rank:
    """Commands are methods; their answers are JSON."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._publisher: Publisher | None = None
        self._trainer: Trainer | None = None
        self._step = 0
        self._futures: list[Future[PushResult]] = []
        #: Slices that this rank packed in the last push: runs of several pieces.
        self._slices = 0

        def fill(push: HeldPush, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
            self._slices += sum(run.repeats > 1 for run in runs)
            fill_original(push, runs, outs)

        fill_original = HeldPush.fill
        HeldPush.fill = fill  # type: ignore[method-assign]

    def make(
        self,
        kind: str,
        model: str = "",
        peft: dict[str, Any] | None = None,
        second: bool = False,
        adapter: str = "",
        counting: bool = False,
    ) -> None:
        """Make a trainer around the double's model, or a saved one at path ``model``; with a saved
        ``adapter``, or a ``second`` one, whose dtype is not that of the base; ``counting`` in a
        persistent buffer. On a GPU it is bfloat16."""
        if model:
            from tests.models import load_hf

            module = load_hf(Path(model))
            if DEVICE.type == "cuda":
                module = module.to(DEVICE, torch.bfloat16)
            layers = list(module.model.layers)
            loss = _causal_loss
        else:
            module = Model(0, counting=counting)
            layers = list(module.layers)
            loss = _tiny_loss
        if adapter:
            from peft import PeftModel

            module = PeftModel.from_pretrained(
                module, adapter, is_trainable=True, autocast_adapter_dtype=False
            )
        if peft is not None:
            module = models.peft_of(module, **peft)
        if second:
            _add_second(module)
        of_rank = 0 if kind in ONE_BATCH else dist.get_rank()
        self._trainer = wrap(kind, module, layers, partial(loss, of_rank=of_rank))

    def make_unlike(self) -> None:
        """Rank 1's model is of another shape."""
        module = Model(0) if dist.get_rank() == 0 else torch.nn.Linear(3, 3)
        self._trainer = Trainer("plain", module, _tiny_loss, None)

    def spoil(self, rank: int) -> None:
        """NaN in what one rank holds."""
        assert self._trainer is not None
        for param in self._trainer.model.parameters():
            local = param.to_local()
            if dist.get_rank() == rank and local.numel():
                with torch.no_grad():
                    local.fill_(float("nan"))

    def spoil_copy(self, rank: int, is_lost: bool = False) -> None:
        """One rank's copy of what the pool committed is another, or gone."""
        assert self._publisher is not None
        deltas = self._publisher._pushing._deltas
        if dist.get_rank() != rank:
            return
        if is_lost:
            deltas._copy = None
        else:
            assert deltas._copy is not None
            copy = deltas._copy
            assert copy.packing.runs is not None
            runs = copy.packing.runs[0]
            first = packed_places(runs, copy.packing.itemsizes(runs))[0].at
            copy.payload(0)[first + 1] ^= 1 << 4

    def hold_at(self, bucket: int) -> None:
        """The sender waits before it packs ``bucket`` while the file "held" exists."""
        if dist.get_rank() != 0:
            return
        from trainer_side.packing.packer import Packer

        held, original = Path(sys.argv[3]).with_name("held"), Packer.pack

        def pack(packer: Any, at: int, *rest: Any, **more: Any) -> Any:
            if at == bucket:
                Packer.pack = original  # type: ignore[method-assign]
                held.touch()
                until(lambda: not held.exists(), 600.0)
                time.sleep(0.5)  # until it is told that the replica left
            return original(packer, at, *rest, **more)

        Packer.pack = pack  # type: ignore[assignment, method-assign]

    def lose_place(self, is_told: bool) -> None:
        """Senders beside rank 0 find their place in the group broken; the coordinator is told, or
        learns of it later."""
        if (peer := self._peer()) is None:
            return
        assert peer._sender is not None
        if is_told:
            peer.close()
        else:
            peer._sender._rank.abort(WeftError("its connection broke"))

    def fail_join(self) -> None:
        """Senders beside rank 0 come to no group, once."""
        if (peer := self._peer()) is None:
            return

        def join(*_: Any) -> None:
            del peer.join  # type: ignore[method-assign]
            raise PeerUnavailableError("the coordinator does not answer this machine")

        peer.join = join  # type: ignore[method-assign]

    def _peer(self) -> SideGroupRank | None:
        assert self._publisher is not None
        return self._publisher._pushing._peer if dist.get_rank() else None

    def fail_gather(self, rank: int) -> None:
        """One rank has no room as it next gives, or takes, what is gathered."""
        if dist.get_rank() != rank:
            return
        from trainer_side.params.sharded import ShardedParams

        original = ShardedParams.fetch

        def fetch(*rest: Any) -> None:
            ShardedParams.fetch = original  # type: ignore[method-assign]
            raise CapacityError("no room")

        ShardedParams.fetch = fetch  # type: ignore[assignment, method-assign]

    def forward(self) -> None:
        """Without gradients."""
        assert self._trainer is not None
        with torch.no_grad():
            self._trainer.loss(self._trainer.model, 0)

    def train(self, steps: int) -> None:
        """Go on training."""
        assert self._trainer is not None
        self._trainer.train(self._step, steps)
        self._step += steps

    def save(self, path: str) -> None:
        """Rank 0 saves the whole weights, by the framework's own way."""
        assert self._trainer is not None
        whole = self._trainer.whole()
        if dist.get_rank() == 0:
            torch.save(whole, path)

    def load(self, path: str) -> None:
        """Every rank loads whole weights that were saved, into a model that is whole here."""
        assert self._trainer is not None
        _, unknown = self._trainer.model.load_state_dict(torch.load(path), strict=False)
        assert not unknown, unknown

    def nudge(self, stride: int, by: float) -> None:
        """Add ``by`` to every so many-th element of what this rank holds."""
        assert self._trainer is not None
        with torch.no_grad():
            for param in self._trainer.model.parameters():
                held = getattr(param, "ds_tensor", param)
                local = getattr(held, "_local_tensor", held).data
                if local.is_contiguous():
                    local.view(-1)[::stride] += by
                else:
                    local[::stride] += by

    def open(
        self,
        max_senders: int | None = None,
        bucket_bytes: int = 2**14,
        backend: Any = "auto",
        delta: Any = "never",
    ) -> None:
        """Make a publisher."""
        self._publisher = Publisher(
            self._target,
            trainer_id="trainer-a",
            progress=None,
            bucket_bytes=bucket_bytes,
            max_senders=max_senders,
            backend=backend,
            delta=delta,
        )

    def push(
        self,
        what: str,
        timeout: float = 60.0,
        model: bool = True,
        check_finite: bool = False,
        **arguments: Any,
    ) -> dict[str, Any]:
        """``push_<what>`` of the publisher; how it ended."""
        assert self._trainer is not None
        if self._publisher is None:
            self.open()
        assert self._publisher is not None
        self._slices = 0
        began = time.time()
        method = getattr(self._publisher, f"push_{what}")
        try:
            given = (self._trainer.model,) if model else ()
            options = PushOptions(check_finite=check_finite)
            version, report = method(*given, timeout_seconds=timeout, options=options, **arguments)
            outcome: dict[str, Any] = {
                "version": version.version, "source": report.source,
                "remarks": report.remarks, "backend": report.backend, "slices": self._slices,
                "is_delta": report.delta.is_delta, "why": report.delta.whole_reason,
                "copied_bytes": report.delta.memory_bytes, "total_bytes": report.total_bytes,
            }  # fmt: skip
        except (RuntimeError, KeyboardInterrupt) as error:
            outcome = {"error": "", "type": type(error).__name__, "message": str(error)}
        except WeftError as error:
            outcome = {
                "error": error.reason, "type": type(error).__name__, "message": error.message
            }  # fmt: skip
        return {**outcome, "began": began, "ended": time.time()}

    def push_disturbed(
        self, what: str, rank: int, how: str, after: float = 0.0, **arguments: Any
    ) -> dict[str, Any]:
        """``push``, in which one rank is disturbed.

        Args:
            how: "interrupt" ``after`` so many seconds, a bad "argument", "skip" the call, or
                "another" policy.
        """
        if dist.get_rank() != rank:
            return self.push(what, **arguments)
        if how == "skip":
            return {"error": "skipped", "type": "", "message": ""}
        if how == "argument":
            arguments["require"] = 0
        elif how == "another":
            what, arguments = "adapter", {**arguments, "policy": "another"}
        elif how == "interrupt":
            signal.setitimer(signal.ITIMER_REAL, after)
        try:
            return self.push(what, **arguments)
        except KeyboardInterrupt:  # as it returned
            return {"error": "", "type": "KeyboardInterrupt", "message": "late"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def push_named(
        self, seed: int, stop: list[int], fail: list[int], give: list[int], timeout: float = 60.0
    ) -> dict[str, Any]:
        """``push_tensors`` of what ``full_tensor`` gathers, in the order of a seed.

        Args:
            stop: After how many tensors each rank's iterator ends; -1 for none.
            fail: After how many it raises.
            give: Whether each rank gives one at all.
        """
        assert self._trainer is not None
        rank, gathered = dist.get_rank(), 0
        module: Any = self._trainer.model
        pairs = list(getattr(module, "module", module).named_parameters())
        random.Random(seed).shuffle(pairs)

        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal gathered
            for index, (name, param) in enumerate(pairs):
                if index == stop[rank]:
                    return
                if index == fail[rank]:
                    raise RuntimeError("out of memory")
                yield name, param.full_tensor() if hasattr(param, "full_tensor") else param
                gathered += 1

        named = {"tensors": gather} if give[rank] else {}
        return {**self.push("tensors", timeout, model=False, **named), "gathered": gathered}

    def push_beside(self, what: str, steps: int, **arguments: Any) -> dict[str, Any]:
        """Push asynchronously and train on meanwhile."""
        assert self._trainer is not None
        assert self._publisher is not None
        future = getattr(self._publisher, f"push_{what}_async")(self._trainer.model, **arguments)
        self.train(steps)
        was_done = future.done()
        return {"version": future.result(60).version.version, "was_done": was_done}

    def change(self) -> None:
        """Whatever this rank holds is something else, without a step of the framework's."""
        assert self._trainer is not None
        model: Any = self._trainer.model
        with torch.no_grad():
            for param in model.parameters():
                held = getattr(param, "ds_tensor", param)
                getattr(held, "_local_tensor", held).data.mul_(3)

    def push_changed(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Push asynchronously, and change the weights before they can be sent."""
        assert self._trainer is not None
        if self._publisher is None:
            self.open()
        assert self._publisher is not None
        lock = self._publisher._pushing.turn._lock
        with lock:
            method = getattr(self._publisher, f"push_{what}_async")
            future = method(self._trainer.model, **arguments)
            self.change()
        result = future.result(60)
        return {"version": result.version.version, "copied": result.report.copied_bytes}

    def change_at_end(self, rank: int) -> None:
        """The weights of one rank change once it has read them all."""
        from trainer_side.pushes.rank_push import RankPush

        original = RankPush.end_packing

        def end_packing(push: RankPush) -> None:
            RankPush.end_packing = original  # type: ignore[method-assign]
            if dist.get_rank() == rank:
                self.change()
            original(push)

        RankPush.end_packing = end_packing  # type: ignore[method-assign]

    def push_async(self, what: str, timeout: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """``push_<what>_async``; for how long the call blocked. See ``outcomes``."""
        assert self._trainer is not None
        assert self._publisher is not None
        began = time.monotonic()
        method = getattr(self._publisher, f"push_{what}_async")
        self._futures.append(
            method(self._trainer.model, timeout_seconds=timeout, **arguments),
        )
        return {"seconds": time.monotonic() - began}

    def outcomes(self) -> dict[str, Any]:
        """How the asynchronous pushes ended, in the order of the calls."""
        futures, self._futures = self._futures, []
        errors = [future.exception(60) for future in futures]
        return {
            "outcomes": [
                f"{type(error).__name__} {error}" if error else str(future.result().version)
                for future, error in zip(futures, errors, strict=True)
            ]
        }

    def close(self) -> None:
        """Of the publisher."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def main() -> None:
    """Serve until standard input closes."""
    # A shell has what it starts in the background ignore it; a test interrupts a rank.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    rank, size, store, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        if torch.cuda.device_count() >= size:  # NCCL refuses two on one
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    strikes.install("trainer rank" if rank else "trainer sender")
    served = Rank(target)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(served, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"crash": repr(error)}
        print(json.dumps(answer if answer is not None else {}), flush=True)
    served.close()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed now and then aborts at exit, after all work


if __name__ == "__main__":
    main()

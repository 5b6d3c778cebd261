"""Planner of deltas: whether the next push is one, and what a rank keeps for it.

Rank 0 chooses for all ranks, by what the pool says that it serves: a copy is never trusted further
than its digest. What this trainer sent, and whose outcome it does not know, needs no rule of its
own: the pool serves the copy's content, or another.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer_side.deltas.choice import (
    Choice,
    DeltaHistory,
    DeltaMode,
    PoolFacts,
    choose,
    why_too_large,
)
from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.deltas.delta_push import (
    NO_CHANGES,
    CopiedPush,
    DeltaPush,
    IdlePush,
    RankChanges,
    compare,
    delta_packing,
    read_into,
)
from trainer_side.packing.packer import gpu_of
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.push_request import DeltaUsage, PushPlan
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import FLAGS, Ranks, agreeing
from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.manifest import MAX_WIRE_BUCKETS, mixed_plan
from weft_rl.transport.group import CPU
from weft_rl.v1 import publish_pb2 as pb

_log = logging.getLogger(__name__)

# What a rank tells the others before they compare: that it has no copy that fits.
_NO_COPY, _ = FLAGS
_NO_MEMORY = "there is no memory for a copy"


class DeltaSelection:
    """Planner of the deltas of one rank, with its copy of what the pool committed last.

    Args:
        mode: Choice of the user; the same on every rank.
        ranks: Ranks of the trainer.
        selection: Selection of the device that buckets are sent from.
    """

    def __init__(self, mode: DeltaMode, ranks: Ranks, selection: BackendSelection) -> None:
        self._mode, self._ranks, self._selection = mode, ranks, selection
        #: Copy of what the pool committed last; None without one.
        self.copy: CommittedCopy | None = None
        self._history: dict[str, DeltaHistory] = {}
        self._refused = ""
        self._why = ""
        #: Device on which the push under way is compared.
        self._device = CPU
        self._is_delta, self._share = False, 0.0
        #: Whether it was said once that there is no memory for a copy.
        self._is_told = False
        self.has_read = False
        """True if the copy holds what the call under way pushes, which need not be read again."""

    def begin(self) -> None:
        """Forget what became of the push before."""
        self._refused = self._why = ""
        self._is_delta, self._share, self.has_read = False, 0.0, False

    def failed(self, plan: PushPlan, error: WeftError) -> bool:
        """Free what a failed push's comparison brought. Return whether the pool has refused a
        delta: then the same push goes on with all elements. Not collective, the same on every
        rank."""
        if not self._is_delta:
            return False
        plan.push.release()
        if error.reason != "DELTA_REFUSED":
            return False
        self._refused = error.message
        self._of(plan).was_useless()
        _log.warning("the delta is sent whole: %s", error.message)
        return True

    def plan(self, plan: PushPlan) -> PushPlan:
        """Return the plan of a delta in place of a push of all elements, or that push, which may
        leave a copy for the next one. Collective; compares where it is to be a delta.

        Raises:
            WeftError: What this rank sends cannot be read; the same on every rank.
        """
        self._is_delta = False
        if self._mode == "never":
            return plan
        if self.has_read:
            return self._read_before(plan)
        self._device = self._device_for(plan)
        told = self._ranks.share(lambda: _encode(self._choice(plan)), all_wait=True)
        choice = _decode(told)
        push, self._why = plan.push, choice.why
        if push.reads_once and choice.how != "whole":
            return self._read(plan, choice)
        if choice.how in ("delta", "mixed"):
            with agreeing(self._ranks) as agreement:
                agreement.flags = _NO_COPY * (not self._fits(push))
            if not agreement.told & _NO_COPY:
                made, why = self._compared(plan, is_mixed=choice.how == "mixed")
                if made is not None:
                    self._is_delta, self._share = True, made.changed_share
                    return replace(plan, push=made)
                self._why = why
            else:
                self._why = "a rank has no copy of what the pool committed last"
        if choice.how == "whole" and not self._refused:
            self.close()
        elif push.sender is not None:
            push.copy = self.copy = self._copy_for(plan)
            if self.copy is None:
                self._why = _NO_MEMORY
        return plan

    def usage(self, plan: PushPlan, transfer: pb.Transfer) -> DeltaUsage:
        """Return the cost and gain of a push's delta, for its report."""
        push, memory_bytes = plan.push, self.copy.memory_bytes if self.copy else 0
        if self._is_delta:
            seconds = push.compared.seconds if isinstance(push, DeltaPush) else 0.0
            num_whole = len(transfer.whole_replica_ids)
            why = self._why if num_whole else ""
            return DeltaUsage(True, self._share, seconds, memory_bytes, why, num_whole)
        return DeltaUsage(memory_bytes=memory_bytes, whole_reason=self._why)

    def committed(self, plan: PushPlan, transfer: pb.Transfer) -> None:
        """Let the copy follow a push that the pool has committed; not collective."""
        push, digest = plan.push, transfer.content_digest.value
        history, seconds = self._of(plan), transfer.staging.ToTimedelta().total_seconds()
        if isinstance(push, DeltaPush):
            history.share = transfer.sent_bytes / max(1, push.num_bytes)
            history.stage_seconds = 0.0 if push.behind is not None else seconds
            if self._mode == "always" or history.pays(push.num_bytes, self._is_on_gpu):
                history.was_useful()
            else:
                history.was_useless()
            self._follow(push, digest)
        elif seconds > 0:
            history.send_rate = push.num_bytes / seconds
        if push.copy is not None and self.copy is push.copy:
            self.copy.committed(digest)

    def _follow(self, push: DeltaPush, digest: bytes) -> None:
        """Bring the copy up to date; without one where it fails, for the push is committed."""
        try:
            push.committed(digest)
        except (WeftError, RuntimeError, MemoryError) as error:
            self.copy = None
            _log.warning("the next push sends all elements, for a new copy of them: %s", error)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type != "cpu"

    def _device_for(self, plan: PushPlan) -> torch.device:
        """Return the device that buckets are packed on: also where they are sent from the host, the
        GPU that their elements lie on."""
        device, push = self._selection.device_of(plan.backend), plan.push
        if device.type != "cpu" or push.sender is None:
            return device
        if push.reads_once:
            return _gpu_in_use() or device
        runs = push.packing.runs
        return (runs and gpu_of(push, runs[0])) or device

    def close(self) -> None:
        """Give the copy's memory back."""
        if self.copy is not None:
            self.copy.settle()
        self.copy = None

    def _of(self, plan: PushPlan) -> DeltaHistory:
        return self._history.setdefault(plan.backend, DeltaHistory())

    def _choice(self, plan: PushPlan) -> Choice:
        """Choose at rank 0."""
        push, target = plan.push, plan.target
        if self._refused:
            return Choice("keep", f"the pool refused a delta: {self._refused}")
        content = target.base_content_digest
        facts = PoolFacts(
            served=target.base_layout_digest + content if content else b"",
            copied=self.copy.key if self.copy is not None and self._fits(push) else b"",
            refusal=target.delta_refusal,
            takers_share=target.num_delta_replicas
            / max(1, target.num_replicas, target.num_delta_replicas),
            on_device=self._is_on_gpu,
            num_bytes=push.num_bytes,
        )
        history = self._of(plan)
        choice = choose(self._mode, facts, history)
        history.num_paused = max(0, history.num_paused - 1)
        if choice.how == "keep" and push.reads_once:
            self.copy = self._copy_for(plan)
            if self.copy is None:
                return Choice("whole", _NO_MEMORY)
        return choice

    def _fits(self, push: RankPush) -> bool:
        """Return whether this rank has a copy of what it sends, if it sends any."""
        if push.sender is None:
            return True
        copy = self.copy
        return copy is not None and copy.is_valid and _is_same(copy, push)

    def _copy_for(self, plan: PushPlan) -> CommittedCopy | None:
        """Return memory for a copy of what this rank sends: the former one's if it fits."""
        if self.copy is not None and _is_same(self.copy, plan.push):
            return self.copy
        self.close()  # its memory, before the next is made
        try:
            return CommittedCopy(plan.push.copied_as, self._device)
        except (RuntimeError, MemoryError) as error:
            level = logging.INFO if self._is_told else logging.WARNING
            _log.log(level, "there is no memory for what deltas are made from: %s", error)
            self._is_told = True
            return None

    def _compared(self, plan: PushPlan, *, is_mixed: bool) -> tuple[DeltaPush | None, str]:
        """Compare at every rank that sends; return its part of the delta, or why there is none.

        Args:
            is_mixed: True if all elements are sent behind it.
        """
        push, copy, changes = plan.push, self.copy, NO_CHANGES
        wires = push.packing.plan.buckets
        with agreeing(self._ranks):
            if push.is_prepared_together:
                push.prepare()
            if push.sender is not None:
                assert copy is not None, "it fits"
                changes = compare(push, copy, self._device, finite=plan.finite)
        values = torch.zeros(len(wires) + 1, dtype=torch.int64)
        if push.sender is not None:
            values[list(push.packing.plan.sent_by(push.sender))] = torch.tensor(changes.sizes)
        values[-1] = changes.num_changes
        *sizes, num_changes = self._ranks.add_up(values).result()
        self._note(plan, changes)
        own = None if push.sender is None else copy
        made, why = self._delta(plan, push, changes, sizes, num_changes, own, is_mixed=is_mixed)
        if made is None:
            push.release()
        return made, why

    def _delta(
        self,
        plan: PushPlan,
        whole: RankPush,
        changes: RankChanges,
        sizes: Sequence[int],
        num_changes: int,
        copy: CommittedCopy | None,
        *,
        is_mixed: bool,
    ) -> tuple[DeltaPush | None, str]:
        """Return this rank's part of a delta, or why there is none; the same on every rank.

        Args:
            whole: Push of all elements.
            changes: Changes of this rank.
            sizes, num_changes: Payloads and elements of all ranks.
            copy: Copy that they were made from; None at a rank that sends none.
            is_mixed: True if all elements are sent behind it.
        """
        if why := why_too_large(sum(sizes), whole.num_bytes):
            self._of(plan).was_useless()
            return None, why
        packing = delta_packing(whole.packing, plan.target.base_content_digest, sizes)
        mixed = None
        if is_mixed:
            num_buckets = len(packing.plan.buckets) + len(whole.packing.plan.buckets)
            if num_buckets > MAX_WIRE_BUCKETS:
                return None, f"a delta and all elements would have {num_buckets} wire buckets"
            mixed = mixed_plan(packing.plan, whole.packing.plan)
        num_elements = sum(slot.meta.num_elements for slot in packing.manifest.tensors)
        share = num_changes / num_elements
        return DeltaPush(whole, packing, changes, copy, share, mixed), ""

    def _read(self, plan: PushPlan, choice: Choice) -> PushPlan:
        """Read what can be read once into the copy; return the push of a delta, or of the copy.
        Collective: rank 0 alone sends, and has a copy."""
        push, copy, changes = plan.push, self.copy, NO_CHANGES
        is_sender, compares = push.sender is not None, choice.how != "keep"
        with agreeing(self._ranks):
            if is_sender:
                assert copy is not None, "it was chosen so"
                device, finite = self._device, plan.finite
                changes = read_into(push, copy, device, finite=finite, compares=compares)
            else:
                push.read_once(None, self._device)
        self.has_read = True
        made: RankPush = IdlePush(push)

        def decide() -> bytes:
            nonlocal made
            assert copy is not None
            made, why, share = CopiedPush(push, copy), choice.why, 0.0
            if compares:
                self._note(plan, changes)
                sizes, num = changes.sizes, changes.num_changes
                is_mixed = choice.how == "mixed"
                delta, why = self._delta(plan, made, changes, sizes, num, copy, is_mixed=is_mixed)
                if delta is not None:
                    made, share = delta, delta.changed_share
            return f"{share} {why}".encode()

        text, _, why = self._ranks.share(decide, all_wait=True).decode().partition(" ")
        self._share, self._is_delta = float(text), not why
        self._why = why or choice.why
        return replace(plan, push=made)

    def _read_before(self, plan: PushPlan) -> PushPlan:
        """Return the push of what was read into the copy by an attempt before this one; collective.

        Raises:
            InvalidRequestError: The pool's layout has changed.
        """
        push, copy = plan.push, self.copy
        with agreeing(self._ranks):
            if push.sender is None:
                again: RankPush = IdlePush(push)
            elif copy is not None and _is_same(copy, push):
                again = CopiedPush(push, copy)
            else:
                raise InvalidRequestError(
                    "what is pushed cannot be read again, and the pool takes another layout than "
                    "when it was read: push once more"
                )
        if self._refused:
            self._why = f"the pool refused a delta: {self._refused}"
        return replace(plan, push=again)

    def _note(self, plan: PushPlan, changes: RankChanges) -> None:
        if changes.seconds > 0:
            self._of(plan).compare_rate = plan.push.num_bytes / changes.seconds


def _is_same(copy: CommittedCopy, push: RankPush) -> bool:
    """Return whether a copy has the buckets that a push sends."""
    own, packing = copy.packing, push.copied_as
    return own is packing or (
        own.manifest.layout_digest == packing.manifest.layout_digest
        and (own.plan, own.sender, own.runs) == (packing.plan, packing.sender, packing.runs)
    )


def _gpu_in_use() -> torch.device | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _encode(choice: Choice) -> bytes:
    return f"{choice.how} {choice.why}".encode()


def _decode(text: bytes) -> Choice:
    how, _, why = text.decode().partition(" ")
    assert how in ("delta", "mixed", "keep", "whole"), how
    return Choice(how, why)  # type: ignore[arg-type]

"""Client of the pool at the ranks that send: begin at rank 0, send, learn the outcome.

One file, because a push is followed through both of its classes at once: rank 0's client decides
which group it sends in, and the sender, when the group is lost, asks it where to go on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
import torch

from trainer_side.packing.packer import PackedBuckets, PackedLayout, Packer, Reader
from trainer_side.pool.backend_selection import BackendSelection, SelectedBackend
from trainer_side.pool.coordinator_client import CoordinatorClient, data_address
from trainer_side.pool.progress import PushReporter
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import SENDER
from trainer_side.sources.adapter_source import Adapter
from weft_rl import tracing
from weft_rl.contract.adapter import TrainedBase
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotReadyError,
    PeerUnavailableError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
    lost_weights,
    with_lost_weights,
)
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import Listing, Manifest
from weft_rl.contract.names import BASE_POLICY
from weft_rl.interrupts import on_own_thread
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import (
    POLICY_VERSION,
    TICKET,
    duration_to_proto,
    send_plan_to_proto,
)
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.group import same_stream
from weft_rl.transport.sender import MembersLostError, Progress, SenderProgress, SendingRank
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

_log = logging.getLogger(__name__)

# Longest that the error of a failed push waits for the coordinator's word on it.
_VERDICT_SECONDS = 2.0
# Why a call may have been carried out though it has failed.
_UNANSWERED = ("COORDINATOR_AWAY", "DEADLINE")
_STAND_BY_SECONDS = 1.0
# Layouts whose views are kept: a base, its merged form, some adapters.
_MAX_PACKERS = 4

#: Finds the place in the group that a transfer continues in, if it is another than this one.
FindGroup = Callable[[str], GroupTicket | None]


class Outcome(Protocol):
    """Outcome of a push that may still be unknown: a call under way, a future."""

    def done(self) -> bool:
        """Return whether the outcome is known."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> Any:
        """Call ``fn`` when the outcome is known, on any thread."""


@dataclass(kw_only=True)
class PushProgress(SenderProgress):
    """Progress of one push at a rank that sends; it outlives the groups that carry it."""

    packed: PackedBuckets
    """Its buckets."""
    find_group: FindGroup
    """See ``PushSender.begin``."""


def _is_known_or_moved(outcome: Outcome, rank: SendingRank) -> bool:
    return outcome.done() or rank.successor is not None


def _was_dropped(error: Exception) -> bool:
    return isinstance(error, WeftError) and error.reason == "EPOCH_FENCED"


class PoolClient:
    """Coordinator and side group, as the sender of a trainer uses them.

    Used by one thread at a time.

    Args:
        coordinator: Client of the coordinator; closed with this.
        data_host: Address that replicas reach this machine by; None takes the route towards the
            coordinator.
        selection: Selection of the backend that carries the bytes, and of its device.
        reporter: Reporter of progress.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        data_host: str | None,
        selection: BackendSelection,
        reporter: PushReporter,
    ) -> None:
        #: For what is no push.
        self.coordinator = coordinator
        #: Of the push under way.
        self.reporter = reporter
        self._data_host = data_host
        self._host = ""
        self._selection = selection
        self._sender: PushSender | None = None
        #: The trainer's ranks that send in the group that is kept.
        self._senders: tuple[int, ...] = (SENDER,)
        #: That group, where they are others than this one: its id, and its backend.
        self._others_group = ("", "")
        #: What the push under way was begun with.
        self._request: pb.BeginTransferRequest | None = None
        #: Whether the coordinator may have a transfer of it that nobody has seen the end of.
        self._is_open = False
        self._offered = pb.DescribeTargetResponse()
        # Base that an adapter was found to fit last.
        self._fitting: tuple[TrainedBase, str] | None = None
        #: Backend of the group that is kept, and what it was selected for.
        self._selected = SelectedBackend("", "")
        self._selected_for: tuple[object, ...] = ()

    def describe(self, deadline: float, without: Collection[str] = ()) -> pb.DescribeTargetResponse:
        """Return what the pool serves, with the backend to use; block until a replica has described
        it.

        Args:
            without: Backends that another rank of the trainer cannot use.

        Raises:
            PeerUnavailableError: ``COORDINATOR_UNREACHABLE``.
            NotReadyError: ``BACKEND_MISMATCH``.
        """
        with tracing.of_process().span("weft.push.describe"):
            self.coordinator.reach(deadline)
            if self._sender is None:
                # Known now, before anything is begun: what is wrong with it would end every push.
                self._host = data_address(self._data_host, self.coordinator.target)
            target = self.coordinator.describe(deadline)
        self._offered = pb.DescribeTargetResponse()
        self._offered.CopyFrom(target)
        self._select(target, without)
        target.backends[:] = [self._selected.name]
        return target

    def _select(self, target: pb.DescribeTargetResponse, without: Collection[str]) -> None:
        """Select the backend, anew where no group is kept or the pool offers something else."""
        device = self._selection.accelerator
        offer = (*target.backends, *target.gpu_uuids, *target.trial_names, device)
        is_kept = self._sender.usable if self._sender else self._others_group[0] != ""
        if without or not is_kept or offer != self._selected_for:
            self._selected = self._selection.backend(target, without)
            self._selected_for = () if without else offer

    def close(self) -> None:
        """Release the leases and leave the side group; blocks at most some seconds."""
        self.leave_group()
        self.coordinator.close()

    def leave_group(self) -> None:
        """Let the next push have a group of its own; blocks at most some seconds."""
        self._others_group = ("", "")
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def begin(
        self,
        policy: str,
        push: RankPush,
        adapter: Adapter | None,
        deadline: float,
        *,
        min_replicas: int,
        check_finite: bool,
        trained_on: int | None,
        refuse_other_base: bool,
    ) -> pb.BeginTransferResponse:
        """Begin a transfer, after acquiring the lease and making the manifest known as needed.

        Args:
            policy, push: Policy that is pushed, and what of.
            adapter: Adapter that is pushed; None for the base.
            deadline: ``time.monotonic()`` of the push.
            trained_on: Version of the base that the adapter was trained on; None where it is not
                known.
            others: See ``BeginTransferRequest``.
        """
        kind = types_pb2.POLICY_KIND_BASE if adapter is None else types_pb2.POLICY_KIND_ADAPTER
        spec = None
        if adapter is not None:
            spec = types_pb2.AdapterSpec(
                config_json=adapter.config_json,
                base_fingerprint=self._compared(adapter.base, deadline),
                trained_on_base_version=trained_on,
            )
        manifest, plan = push.packing.manifest, push.packing.plan
        is_divided = plan.listing is Listing.WITHIN_BUCKET
        request = pb.BeginTransferRequest(
            request_id=secrets.token_hex(16),
            policy=policy,
            session_id=self.coordinator.leases.session_id,
            layout_digest=manifest.layout_digest,
            adapter=spec,
            require=pb.Requirement(min_replicas=min_replicas),
            check_finite=check_finite,
            refuse_other_base=refuse_other_base,
            carries_runs=plan.listing is Listing.ANYWHERE,
            send_plan=send_plan_to_proto(plan) if is_divided else None,
            protocol_revision=PROTOCOL_REVISION,
        )
        self._request = request
        if push.senders != self._senders:  # a rank keeps its place
            self.leave_group()
        self._senders = push.senders
        tracer = tracing.of_process()
        # The transfer is a part of the push: it lasts longer than its beginning.
        metadata = tracing.call_metadata(tracer.current())
        with tracer.span("weft.push.begin"):
            self._use(self._selected)
            try:
                return self._begin(request, manifest, kind, metadata, deadline)
            except NotReadyError as error:
                is_tried = BACKENDS[request.backend].within_host
                if not is_tried or error.reason != "BACKEND_MISMATCH":
                    raise
                # A replica has come since they were tried. Another push, to the coordinator.
                request.request_id = secrets.token_hex(16)
                self._use(self._selection.backend(self._offered, without=[request.backend]))
                return self._begin(request, manifest, kind, metadata, deadline)

    def _compared(self, base: TrainedBase | None, deadline: float) -> str:
        """Return the fingerprint of the pool's base, once an adapter's own base is like it; empty
        if there is none."""
        if base is None:
            return ""
        fingerprint = self._offered.base_fingerprint
        if self._fitting != (base, fingerprint):
            base.check(self.coordinator.reference(self._offered, deadline))
            self._fitting = base, fingerprint
        return fingerprint

    def _use(self, selected: SelectedBackend) -> None:
        """Put the selected backend into the request of the push."""
        assert self._request is not None
        self._request.backend, self._request.backend_reason = selected.name, selected.why
        is_tried = BACKENDS[selected.name].within_host
        self._request.trial_names[:] = self._offered.trial_names if is_tried else ()

    def _begin(
        self,
        request: pb.BeginTransferRequest,
        manifest: Manifest,
        kind: types_pb2.PolicyKind.ValueType,
        metadata: tuple[tuple[str, str], ...] | None,
        deadline: float,
    ) -> pb.BeginTransferResponse:
        def begin(token: int, left: float) -> pb.BeginTransferResponse:
            request.fencing_token = token
            self.coordinator.put_manifest(manifest, deadline)
            request.group_id = self._kept_group(request.backend)
            request.timeout.CopyFrom(duration_to_proto(deadline - time.monotonic()))
            self._is_open = True
            return self.coordinator.stub.BeginTransfer(request, timeout=left, metadata=metadata)

        while True:
            try:
                begun = self.coordinator.with_lease(
                    request.policy, kind, begin, deadline, "its turn, or for replicas"
                )
            except WeftError as error:
                self._is_open = error.reason in _UNANSWERED
                is_forgotten = error.reason == "MANIFEST_UNKNOWN"  # the coordinator restarted
                if not is_forgotten or not self.coordinator.forget_manifest(manifest):
                    raise
                continue
            self.coordinator.leases.assigned(request.policy, begun.version.version)
            return begun

    def _kept_group(self, backend: str) -> str:
        """Return the group id of the last push, if it suits another one as far as this rank knows.
        Else it is empty. The coordinator has the group only while every rank attends it."""
        sender = self._sender
        if sender is None:
            kept, over = self._others_group
            return kept if over == backend else ""
        return sender.ticket.group_id if sender.suits(backend, self._selection) else ""

    def carry_out(
        self,
        begun: pb.BeginTransferResponse,
        push: RankPush,
        check_finite: bool,
        deadline: float,
    ) -> pb.Transfer:
        """Send, or let the other ranks send, then return the outcome. The group is kept if all went
        well."""
        if not begun.HasField("group"):  # a retried call of a push that has ended
            return self._outcome(begun, deadline, None)
        sender, tracer = None, tracing.of_process()
        try:
            if push.sender is None:
                return self._stay_out(begun, push, deadline)
            # When the group is gone, only the coordinator knows why, or whether the
            # version was committed all the same.
            gone = contextlib.suppress(StaleEpochError, PeerUnavailableError)
            with gone, tracer.span("weft.push.send"):
                progress = self._progress(begun, push)
                self.reporter.waits_for("the replicas to get ready")
                sender = self._sender_for(begun, deadline)
                sending = sender.begin(
                    push,
                    transfer_id=begun.transfer_id,
                    nonce=begun.nonce,
                    deadline=deadline,
                    progress=progress,
                    check_finite=check_finite,
                    find_group=lambda known: self._group_now(begun, known, deadline),
                )
                sender.send(sending)
            with tracer.span("weft.push.await"):
                return self._outcome(begun, deadline, sender)
        except BaseException as error:
            self.give_up(begun, error)
            if names := self._lost_weights(begun, error):
                if isinstance(error, WeftError):
                    raise with_lost_weights(error, names) from error
                _log.error("%s", lost_weights(names))
            raise

    def attend(self, begun: pb.BeginTransferResponse, deadline: float) -> None:
        """Come to the group of a push before steps that may take long. A group that no rank comes
        to is given up. Faults of the group are found when it is sent to."""
        if begun.HasField("group"):
            with contextlib.suppress(StaleEpochError, PeerUnavailableError):
                self._sender_for(begun, deadline)

    def _stay_out(
        self,
        begun: pb.BeginTransferResponse,
        push: RankPush,
        deadline: float,
    ) -> pb.Transfer:
        """Return the outcome of a push that other ranks send, who alone are in its group."""
        progress = self._progress(begun, push)
        with tracing.of_process().span("weft.push.await"):
            push.add_up()
            transfer = self._outcome(begun, deadline, None)
            if progress is not None:  # what is released is told to those who send
                progress(transfer.num_buckets_verified, transfer.num_buckets)
        group = begun.group
        is_same = transfer.epoch == group.epoch  # else its name is known to them alone
        self._others_group = (group.group_id, group.backend) if is_same else ("", "")
        return transfer

    def _progress(self, begun: pb.BeginTransferResponse, push: RankPush) -> Progress | None:
        """Return the push's progress function; None if nobody wants to know."""
        return self.reporter.sends(str(POLICY_VERSION.decode(begun.version)), push.num_bytes)

    def _sender_for(self, begun: pb.BeginTransferResponse, deadline: float) -> PushSender:
        if self._sender is not None:
            if self._sender.usable and self._sender.ticket.group_id == begun.group.group_id:
                self._sender.report_packing(begun.transfer_id)
                return self._sender
            self._sender.close()
            self._sender = None
            self._host = data_address(self._data_host, self.coordinator.target)
        ticket = self._ticket(begun.group)
        while True:
            try:
                self._sender = PushSender(
                    ticket, self._selection.device_of(ticket.backend), self.coordinator.credentials
                )
                return self._sender
            except (StaleEpochError, PeerUnavailableError):
                moved = self._group_now(begun, ticket.group_id, deadline)
                if moved is None:
                    raise
                ticket = moved

    def _group_now(
        self, begun: pb.BeginTransferResponse, known: str, deadline: float
    ) -> GroupTicket | None:
        """Return the ticket of the group that a transfer continues in, if it is another than
        ``known``. A group can be re-formed before this rank came to the one that it knows, and
        there it would not be told."""
        if self._request is None:
            return None
        request = self._request
        try:  # asked again, begin answers what has become of the same transfer
            answer = self.coordinator.call(
                lambda left: self.coordinator.stub.BeginTransfer(request, timeout=left), deadline
            )
        except WeftError:
            return None
        is_other = answer.HasField("group") and answer.group.group_id != known
        if not is_other or answer.transfer_id != begun.transfer_id:
            return None
        return self._ticket(answer.group)

    def _ticket(self, group: pb.GroupPlan) -> GroupTicket:
        return TICKET.decode(group, coordinator=self.coordinator.target, host=self._host)

    def _outcome(
        self, begun: pb.BeginTransferResponse, deadline: float, sender: PushSender | None
    ) -> pb.Transfer:
        """Wait for the commit, the sender standing by; the wait outlives the coordinator."""
        request = pb.AwaitTransferRequest(transfer_id=begun.transfer_id)

        def ask(left: float) -> pb.AwaitTransferResponse:
            # At that deadline the coordinator ends the transfer, and says who did not do what.
            timeout = left + _VERDICT_SECONDS
            call = self.coordinator.stub.AwaitTransfer.future(request, timeout=timeout)
            if sender is not None:
                sender.stand_by(call)
            return call.result()

        transfer = self.coordinator.call(ask, deadline, "the replicas to switch").transfer
        self._is_open = False
        self.coordinator.leases.published(begun.version.policy)
        return transfer

    def give_up(
        self, begun: pb.BeginTransferResponse, error: BaseException, *, has_begun: bool = True
    ) -> None:
        """Tell the coordinator that a push is given up, best effort, and leave the group.

        Args:
            has_begun: True if rank 0 had begun to send: errors found before are told to nobody.
        """
        # Of what this trainer found, rank 0's stream may not have got to tell, if it has one.
        is_own = isinstance(error, TransferTimeoutError | InvalidRequestError)
        sender = self._sender if has_begun else None
        is_told = sender is not None and sender.ticket.epoch >= begun.group.epoch
        if not is_told or is_own or not isinstance(error, WeftError) or type(error) is WeftError:
            self.coordinator.abort(begun, error)
        self._is_open = False
        self.leave_group()

    def end(self, error: BaseException) -> None:
        """Give up a transfer that was begun and has not ended, at any point where ``error`` came.
        Blocks some seconds at most."""
        if self._is_open and self._request is not None:
            self._is_open = False
            self.coordinator.abort(self._request, error)
            self.leave_group()

    def _lost_weights(self, begun: pb.BeginTransferResponse, error: BaseException) -> str:
        """Return replicas that had begun to load a failed push in place, as the coordinator says.
        Best effort."""
        told = isinstance(error, WeftError) and "dirty" in error.metadata
        if told or begun.version.policy != BASE_POLICY:
            return ""
        request = pb.AwaitTransferRequest(transfer_id=begun.transfer_id)
        try:
            self.coordinator.stub.AwaitTransfer(request, timeout=_VERDICT_SECONDS)
        except grpc.RpcError as verdict:
            return error_from_rpc(verdict).metadata.get("replicas", "")
        return ""


class PushSender:
    """Sending rank of a side group, kept across pushes while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        ticket: Place of the sender in its group.
        device: Device of its buffers.
        credentials: Credentials to show to the coordinator; by default this process's.
    """

    def __init__(
        self,
        ticket: GroupTicket,
        device: torch.device,
        credentials: Credentials | None = None,
    ) -> None:
        self.device = device
        self._credentials = credentials
        #: Packers of the last pushes, in the same buffers.
        self._packers: list[Packer] = []
        self._last: PushProgress | None = None
        self._rank = self._join(ticket)

    @property
    def ticket(self) -> GroupTicket:
        """Current place of the sender in its group; another one after members were lost."""
        return self._rank.ticket

    @property
    def usable(self) -> bool:
        """True if the group can carry a further push."""
        return self._rank.usable

    def suits(self, backend: str, selection: BackendSelection) -> bool:
        """Return whether the group suits a further push over a backend; an accelerator may have
        changed."""
        wanted = backend, selection.device_of(backend)
        return self.usable and (self.ticket.backend, self.device) == wanted

    def wait_attended(self) -> None:
        """See ``SendingRank``."""
        self._rank.wait_attended()

    def report_packing(self, transfer_id: str) -> None:
        """Report in a kept group that this rank is at work for a transfer."""
        self._rank.report_packing(transfer_id)

    def begin(
        self,
        reader: Reader,
        *,
        transfer_id: str,
        nonce: int,
        deadline: float,
        progress: Progress | None = None,
        check_finite: bool = False,
        find_group: FindGroup = lambda group_id: None,
    ) -> PushProgress:
        """Make the state of a push that this rank is to ``send``; sends nothing yet.

        Args:
            reader: Content of the push as this rank sends it. It is read once, in order, whatever
                happens.
            transfer_id, nonce: Id and nonce of the transfer.
            deadline: ``time.monotonic()`` at which to give up.
            progress: Function called after each release with buckets verified by all, and in all.
            check_finite: Check each packed bucket for NaN and infinities.
            find_group: Function asked with the id of a group that was dropped before this rank came
                to it: there it could not be told where the transfer continues.
        """
        packer = self._packer_for(reader.packing)
        buckets = PackedBuckets(packer, reader, nonce, check_finite)
        self._last = PushProgress(
            transfer_id, buckets, deadline, progress, packed=buckets, find_group=find_group
        )
        return self._last

    def send(self, sending: PushProgress) -> bytes:
        """Send the buckets that are not verified yet, in as many groups as it takes; each is kept
        until all receivers have verified it.

        Blocks until the last bucket was released. Extra memory is the packer's buffers, and as many
        more while a group is replaced that cannot be aborted (gloo's).

        Returns:
            The content digest.

        Raises:
            NotFiniteError: A tensor holds NaN or infinity; the other ranks were told.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the reader
                failed, and then the other ranks were told.
        """
        while True:
            rank = self._rank
            try:
                return rank.send(sending)
            except Exception as error:
                moves = (
                    isinstance(error, MembersLostError | WeftError) and not sending.packed.spoiled
                )
                if moves and rank.successor is None and _was_dropped(error):
                    rank.successor = sending.find_group(rank.ticket.group_id)
                if not moves or rank.successor is None:
                    rank.give_up(sending.transfer_id, error)
                    raise
                self._rejoin(rank, rank.successor, sending)

    def stand_by(self, outcome: Outcome) -> None:
        """Stay a member until the transfer's outcome is known; block until then.

        A replica may be lost after the last bucket: the survivors then agree once
        more in another group, which needs its sender.

        Args:
            outcome: AwaitTransfer under way; its failure is for the caller to see.
        """
        outcome.add_done_callback(lambda _: self._rank.wake())
        while not outcome.done():
            rank = self._rank
            # Bounded, since the callback may have woken a former rank.
            rank.wait(partial(_is_known_or_moved, outcome, rank), _STAND_BY_SECONDS)
            if rank.successor is not None and self._last is not None:
                try:
                    self.send(self._last)
                except WeftError as error:
                    _log.info("could not resume in another group: %s", error)
                    return

    def _rejoin(self, old: SendingRank, successor: GroupTicket, sending: PushProgress) -> None:
        """Resume in the next group, with other buffers where the old ones are not safe to use."""
        released = old.num_released(sending.transfer_id)
        sending.num_released = max(sending.num_released, released)
        are_safe = on_own_thread(old.leave)
        self._rank = self._join(successor)
        if not are_safe:
            first = bisect_left(sending.indices, sending.num_released)
            held = range(first, len(sending.digests))
            sending.packed.move(held)
            if self.device.type == "cuda":  # they are sent as whatever was digested: at once
                torch.cuda.current_stream(self.device).synchronize()
            self._packers = [sending.packed.packer]

    def _join(self, ticket: GroupTicket) -> SendingRank:
        """Join a group, which is left again if this is interrupted."""
        in_stream = same_stream(self.device)

        def join() -> SendingRank:
            with in_stream():
                return SendingRank(ticket, self.device, self._credentials)

        return on_own_thread(join, SendingRank.leave)

    def abort(self, error: WeftError) -> None:
        """Make ``send`` raise ``error`` soon; from any thread, never blocks."""
        self._rank.abort(error)

    def close(self) -> None:
        """Leave the group; block at most 10 s."""
        on_own_thread(self._rank.leave)
        self._packers = []

    def _packer_for(self, packing: PackedLayout) -> Packer:
        """Return the packer of a packing; a new one uses the buffers of the former ones. Those of
        which it cannot use every buffer are dropped, and their memory with them."""
        for kept in self._packers:
            if kept.packing is packing:
                return kept
        largest = max((packer.buffers for packer in self._packers), key=len, default=[])
        made = Packer(packing, largest, self.device, self.ticket.backend)
        most = largest if _are_among(made.buffers, largest) else made.buffers
        former = [p for p in self._packers[1 - _MAX_PACKERS :] if _are_among(p.buffers, most)]
        self._packers = [*former, made]
        return made


def _are_among(some: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    return all(any(own is buffer for buffer in buffers) for own in some)

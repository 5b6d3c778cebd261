"""Client of the pool at the ranks that send: begin, join the group, say how far it is, learn the
outcome."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Literal

import grpc
import torch

from trainer_side.packing.packer import MixedBuckets, PackedBuckets, PackerCache, Reader
from trainer_side.pool.backend_selection import BackendSelection, SelectedBackend
from trainer_side.pool.coordinator_client import CoordinatorClient, data_address, own_site
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import SENDER
from trainer_side.sources.source import Adapter
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
from weft_rl.progress import ShownProgress, shown
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import (
    POLICY_VERSION,
    TICKET,
    duration_to_proto,
    send_plan_to_proto,
)
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.sender import HeldBuckets, Progress, ResumableProgress, TransferSender
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

_log = logging.getLogger(__name__)

# Longest that the error of a failed push waits for the coordinator's word on it.
_VERDICT_SECONDS = 2.0
# Why a call may have been carried out though it has failed.
_UNANSWERED = ("COORDINATOR_AWAY", "DEADLINE")


UserProgress = Callable[[str, int, int], None]


class PushReporter:
    """Reporter of what the push under way waits for and of what it has sent; shows nothing."""

    @contextlib.contextmanager
    def push(self, policy: str) -> Iterator[None]:
        """Report a push of ``policy`` inside the ``with``."""
        yield

    def waits_for(self, what: str) -> None:
        """Report what the push waits for now."""

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        """Report how far a base, or the files of a checkpoint, are read to know its version by."""

    def sends(self, version: str, total_bytes: int) -> Progress | None:
        """Report that ``version`` was begun; return the function that its sender tells which part
        of its buckets is released, if anybody wants to know."""
        return None


def reporter_for(progress: Literal["auto"] | UserProgress | None) -> PushReporter:
    """Return a reporter to standard error for "auto", or to the given function, or to nobody."""
    if callable(progress):
        return _FunctionReporter(progress)
    return _StreamReporter() if progress == "auto" else PushReporter()


class _FunctionReporter(PushReporter):
    def __init__(self, function: UserProgress) -> None:
        self._function = function

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        self._function(f"reading {name}", read_bytes, total_bytes)

    def sends(self, version: str, total_bytes: int) -> Progress:
        return lambda done, total: self._function(version, done, total)


class _StreamReporter(PushReporter):
    def __init__(self) -> None:
        self._progress = ShownProgress("")

    @contextlib.contextmanager
    def push(self, policy: str) -> Iterator[None]:
        with shown(f"push of {policy}") as self._progress:
            yield

    def waits_for(self, what: str) -> None:
        self._progress.step(f"waiting for {what}")

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        self._progress.step(f"reading {name}, to know the base's version by (once)", total_bytes)
        self._progress.done(read_bytes)

    def sends(self, version: str, total_bytes: int) -> Progress:
        progress = self._progress
        progress.title = f"push of {version}"

        def released(done: int, total: int) -> None:
            progress.step("sending", total_bytes)
            progress.done(total_bytes * done / total)

        return released


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
        offer = (
            *target.backends,
            *target.gpu_uuids,
            *target.nccl_networks,
            *target.trial_names,
            device,
        )
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
        manifest, plan = push.packing.manifest, push.plan
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

    @contextlib.contextmanager
    def carrying_out(self, begun: pb.BeginTransferResponse, push: RankPush) -> Iterator[None]:
        """Let a push be sent, and its outcome awaited, inside the ``with``. If that fails it is
        given up, and the error names the replicas that had begun to load it in place."""
        try:
            yield
        except BaseException as error:
            if begun.HasField("group"):  # else a retried call of a push that has ended
                self.give_up(begun, error)
                if names := self._lost_weights(begun, error):
                    if isinstance(error, WeftError):
                        raise with_lost_weights(error, names) from error
                    _log.error("%s", lost_weights(names))
            raise
        finally:
            push.end_sending()

    def begin_sending(
        self, begun: pb.BeginTransferResponse, push: RankPush, finite: bool, deadline: float
    ) -> tuple[PushSender, ResumableProgress]:
        """Join the push's group; return the sender there and what it is to send."""
        progress = self._progress(begun, push)
        self.reporter.waits_for("the replicas to get ready")
        sender = self._sender_for(begun, deadline)
        sending = sender.begin(begun, push, finite, deadline)
        sending.progress = progress
        sending.find_group = lambda known: self._group_now(begun, known, deadline)
        return sender, sending

    def attend(self, begun: pb.BeginTransferResponse, deadline: float) -> None:
        """Come to the group of a push before steps that may take long. A group that no rank comes
        to is given up. Faults of the group are found when it is sent to."""
        if begun.HasField("group"):
            with contextlib.suppress(StaleEpochError, PeerUnavailableError):
                self._sender_for(begun, deadline)

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
        return TICKET.decode(
            group, coordinator=self.coordinator.target, host=self._host, site=own_site()
        )

    def outcome(
        self,
        begun: pb.BeginTransferResponse,
        push: RankPush,
        deadline: float,
        sender: PushSender | None = None,
    ) -> pb.Transfer:
        """Wait for the commit and return the outcome, the sender standing by; the wait outlives the
        coordinator. The group is kept if all went well."""
        is_sent_by_others = begun.HasField("group") and push.sender is None
        progress = self._progress(begun, push) if is_sent_by_others else None
        if is_sent_by_others:
            push.add_up()
        request = pb.AwaitTransferRequest(transfer_id=begun.transfer_id)

        def ask(left: float) -> pb.AwaitTransferResponse:
            # At that deadline the coordinator ends the transfer, and says who did not do what.
            timeout = left + _VERDICT_SECONDS
            call = self.coordinator.stub.AwaitTransfer.future(request, timeout=timeout)
            if sender is not None:
                sender.stand_by(call)
            return call.result()

        with tracing.of_process().span("weft.push.await"):
            transfer = self.coordinator.call(ask, deadline, "the replicas to switch").transfer
        self._is_open = False
        self.coordinator.leases.published(begun.version.policy)
        if progress is not None:  # what is released is told to those who send
            progress(transfer.num_buckets_verified, transfer.num_buckets)
        if is_sent_by_others:  # in a group of theirs alone
            group, is_same = begun.group, transfer.epoch == begun.group.epoch
            self._others_group = (group.group_id, group.backend) if is_same else ("", "")
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


class PushSender(TransferSender):
    """Sender of the pushes of one rank, which are packed into the same buffers."""

    def __init__(
        self, ticket: GroupTicket, device: torch.device, credentials: Credentials | None = None
    ) -> None:
        super().__init__(ticket, device, credentials)
        self._packers = PackerCache(device)
        #: Packers of deltas that all elements follow in the same push.
        self._mixed_packers = PackerCache(device)

    def suits(self, backend: str, selection: BackendSelection) -> bool:
        """Return whether the group suits a further push over a backend; an accelerator may have
        changed."""
        wanted = backend, selection.device_of(backend)
        return self.usable and (self.ticket.backend, self.device) == wanted

    def begin(
        self, begun: pb.BeginTransferResponse, reader: Reader, finite: bool, deadline: float
    ) -> ResumableProgress:
        """Make the state of a push that this rank is to ``send``; packs nothing yet.

        Args:
            reader: Content of the push as this rank sends it. It is read once, in order, whatever
                happens.
            finite: Check each packed bucket for NaN and infinities.
            deadline: ``time.monotonic()`` at which to give up.
        """

        def packed(part: Reader, packers: PackerCache) -> PackedBuckets:
            packer = packers.find(part.packing, self.ticket.backend)
            return PackedBuckets(packer, part, begun.nonce, finite, packers)

        buckets: HeldBuckets
        if reader.behind is None:
            self._mixed_packers.clear()
            buckets = packed(reader, self._packers)
        else:
            whole = packed(reader.behind, self._packers)
            buckets = MixedBuckets(reader, packed(reader, self._mixed_packers), whole)
        return ResumableProgress(transfer_id=begun.transfer_id, buckets=buckets, deadline=deadline)

    def close(self) -> None:
        """Leave the group, and give the buffers up; block at most 10 s."""
        super().close()
        self._packers.clear()
        self._mixed_packers.clear()

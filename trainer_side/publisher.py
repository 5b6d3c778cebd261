"""Publisher, the class that trainers import to push weights to the pool.

The composer of the trainer side: it introduces a source to the packer, the sender and the control
plane.

The composer of the trainer side: it introduces a source to the packer, the sender
and the control plane.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, TypeVar

import torch

from trainer_side import push_request as checks
from trainer_side.async_pushes import AsyncPushes
from trainer_side.background import Background
from trainer_side.params.choose import Kind
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.client import PoolClient
from trainer_side.pool.coordinator_client import CoordinatorClient
from trainer_side.pool.leases import Notices
from trainer_side.pool.peer import Peer
from trainer_side.pool.progress import reporter_for
from trainer_side.push_report import PushReport
from trainer_side.push_request import PushRequest, PushSettings
from trainer_side.pushes.content import Model
from trainer_side.pushes.rank_push import Packings
from trainer_side.pushing import Pushing
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.ranks.torch_ranks import Together, ranks_of
from trainer_side.sharding.plan import DEFAULT_MAX_SENDERS
from trainer_side.sleeping import RolloutSleep
from trainer_side.sources.named_source import Metadata, NamedTensors
from weft_rl.contract.arguments import check_choice, check_count, check_seconds
from weft_rl.contract.capabilities import BackendChoice
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.names import PolicyVersion, check_name
from weft_rl.contract.push_defaults import (
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_ON_BASE_CHANGE,
    DEFAULT_REQUIRE,
    DEFAULT_TIMEOUT_SECONDS,
    OnBaseChange,
    Require,
)
from weft_rl.rpc.channel import check_target
from weft_rl.rpc.security.credentials import Tls, credentials_of
from weft_rl.transport.digests.wsum64 import warm

_T = TypeVar("_T")


class Publisher(AsyncPushes, RolloutSleep):
    """Publisher of policy versions for one trainer, of one process or of many.

    The model may be plain, or wrapped by DDP, FSDP (1 and 2) or DeepSpeed, with or without PEFT:
    the kind is detected, and named in ``last_report``. Pushes of one publisher run one after the
    other. In a trainer of one process every method may be called from any thread; in one of several
    ranks, every rank makes the same calls in the same order. Leases are renewed in the background
    until ``close``.

    Args:
        coordinator: HOST:PORT; used by rank 0, and by ranks that send shards.
        trainer_id: Stable name of this trainer; owns the policies it pushes.
        require: Number of replicas that must hold a version, received whole and verified, before it
            is committed. By default one: a replica that is lost, stalls, has no room or cannot keep
            up leaves the push, which goes on with those that remain. Or "all" that are ready when
            the push begins: then it fails with that replica (unless one of them loads a base in
            place). The requirement holds until the commit and not after: a replica that dies or
            fails while it switches leaves service and catches up later, and the push succeeds if
            one replica serves the version. ``last_report.num_replicas`` counts those that do,
            ``remarks`` names the others and says why.
        timeout_seconds: Longest time of a push from its call on, waiting for replicas and for
            earlier pushes of this publisher included. Within it a push
            that ends for a reason that passes (too few replicas were left, the coordinator was
            restarted) is begun again by itself: what it raises is final. Named tensors cannot
            be read again.
        connect_seconds: Longest wait for a coordinator that was never reached: the first
            push then fails on every rank with ``COORDINATOR_UNREACHABLE``, which says what
            was tried. Jobs that start together with the pool say 300. A coordinator that was
            reached before is waited for until the push's deadline.
        bucket_bytes: Payload of a bucket; by default what suits the backend. Two are held
            in host memory, or on the accelerator three (four where replicas read them there).
        data_host: Address that the replicas reach this machine by; by default the
            one its routes choose towards the coordinator.
        backend: Backend that carries the bytes. "auto": the best that the pool offers and all can
            use: "nccl" from accelerator to accelerator, "one-sided" where every replica can read
            this process's memory, else "gloo"; ``last_report`` says which, and why. Or one of them
            and no other.
        device: The accelerator that NCCL sends from, for example "cuda:1"; by default
            the current one.
        progress: "auto" draws a bar on a terminal; None is silent; or a function
            of (policy, buckets verified, buckets in all).
        ranks: Processes that push together. "all" of ``torch.distributed`` (one, if it is not
            initialised) or those of a group: each makes a Publisher, and each calls every push, in
            the same order. Rank 0 of them is the sender and speaks for all; ranks that hold shards
            send these themselves, so each must reach the coordinator and the replicas (see
            ``max_senders``). "this" process only: for a trainer whose weights are whole here,
            pushed by one of its ranks.
        kind: Kind that models are held as: detected ("auto"), or refused unless it is so: "whole"
            (plain, DDP, ZeRO-1 and 2), "fsdp1", "fsdp2" (HSDP), "zero3".
        on_publish_again: Called with a policy's name when no replica holds the version that the
            pool should serve any more (all were restarted, say), and this publisher owns the
            policy: once each time that is asked, at the sender, on a thread of its own, one call
            after the other. It may push if the trainer has one rank; until it returns ``close``
            waits some seconds, the end of the process as long as it takes; an exception is logged.
            The weights must not change meanwhile: a trainer that cannot promise that, or has
            several ranks, reads ``wanted`` in its loop instead.
        check_finite: Look for NaN and infinities in what is sent, after the cast, bucket by
            bucket as it is packed. None does so for adapters that are packed on an
            accelerator, where it costs next to nothing, and for nothing else.
        on_base_change: Handling of an adapter that would be served over another base than it was
            trained on; see ``push_adapter``. It never hinders a push of the base.
        tls: Certificates to trust and to show; by default what the environment names
            (``WEFT_TLS_CA``, ``_CERT``, ``_KEY``), or no TLS. Files are reread.
        token: The bearer token to show; by default what the file of ``WEFT_TOKEN_FILE`` holds.
        takeover: Take the policies' leases from another living process of this ``trainer_id``,
            once each, whose pushes then fail with ``LEASE_FENCED``. Otherwise the first push
            fails with ``POLICY_OWNED`` as soon as that process is seen to live.
        max_senders: Most ranks of a sharded trainer that send what they hold (64; at most 256),
            each over a stream of its own to the coordinator; the others pass theirs to one of
            these. With 1, rank 0 gathers and sends all.

    Raises:
        InvalidRequestError: An argument that cannot be right; nothing was tried.
    """

    def __init__(
        self,
        coordinator: str,
        *,
        trainer_id: str,
        require: Require = DEFAULT_REQUIRE,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        bucket_bytes: int | None = None,
        data_host: str | None = None,
        backend: BackendChoice = "auto",
        device: torch.device | str | None = None,
        progress: Literal["auto"] | Callable[[str, int, int], None] | None = "auto",
        ranks: Together = "all",
        kind: Kind = "auto",
        on_publish_again: Callable[[str], None] | None = None,
        check_finite: bool | None = None,
        on_base_change: OnBaseChange = DEFAULT_ON_BASE_CHANGE,
        connect_seconds: float = DEFAULT_CONNECT_SECONDS,
        takeover: bool = False,
        max_senders: int | None = None,
        tls: Tls | None = None,
        token: str | None = None,
    ) -> None:
        check_target(coordinator)
        credentials = credentials_of(tls, token)
        check_name(trainer_id, "trainer")
        checks.check_data_host(data_host)
        checks.check_ranks(ranks)
        check_choice("backend", backend, BackendChoice)
        check_count("bucket_bytes", bucket_bytes)
        check_count("max_senders", max_senders, MAX_SENDERS)
        checks.check_callable("on_publish_again", on_publish_again)
        if progress != "auto":
            checks.check_callable("progress", progress)
        send_from = checks.check_device(device)
        check_seconds("connect_seconds", connect_seconds)
        pushing_ranks = ranks_of(ranks)
        warm()
        self._settings = PushSettings(
            ranks=pushing_ranks,
            kind=kind,
            require=require,
            timeout_seconds=timeout_seconds,
            check_finite=check_finite,
            on_base_change=on_base_change,
        )
        self._notices = Notices(on_publish_again) if on_publish_again else None
        self._coordinator: CoordinatorClient | None = None
        selection = BackendSelection(backend, send_from)
        client = None
        if pushing_ranks.rank == SENDER:
            self._coordinator = CoordinatorClient(
                coordinator,
                trainer_id,
                connect_seconds=connect_seconds,
                takeover=takeover,
                on_wanted=self._notices.put if self._notices else None,
                credentials=credentials,
            )
            reporter = reporter_for(progress)
            client = PoolClient(self._coordinator, data_host, selection, reporter)
        self._pushing = Pushing(
            pushing_ranks,
            client,
            Packings(pushing_ranks, bucket_bytes, max_senders or DEFAULT_MAX_SENDERS),
            Peer(coordinator, data_host, selection, credentials),
        )
        self._background = Background(self._pushing, ranks_of(ranks))

    @property
    def last_report(self) -> PushReport | None:
        """Costs of the last push that succeeded; None before the first."""
        return self._pushing.last_report

    def push_adapter(
        self,
        model: Model,
        policy: str,
        *,
        adapter_name: str = "default",
        cast: bool = True,
        check_finite: bool | None = None,
        check_base: bool = True,
        base_version: int | None = None,
        on_base_change: OnBaseChange | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
    ) -> PolicyVersion:
        """Push a LoRA adapter; return once the replicas serve it (see ``require``).

        Args:
            model: A PEFT model, wrapped or not, read in place (its base is not read), or
                a directory that PEFT saved.
            policy: The adapter's name in the pool.
            adapter_name: Name of the adapter in the PEFT model.
            cast: Cast floats to the dtype that the replicas serve adapters in.
            check_finite: Whether NaN and infinities end the push, with ``NotFiniteError``;
                by default as for ``Publisher``. A base is refused at begin by a pool where
                a replica loads it in place.
            check_base: Compare the base model's names and shapes with the pool's.
            base_version: The N of the base@N that the adapter was trained on. If it is not
                given: what this publisher pushed last from the same base model, or 0 if the
                checkpoint that this was loaded from is what the replicas were started with;
                else it is not known (base@?).
            on_base_change: Handling of the adapter where the pool serves another base: "warn"
                (``last_report.remarks`` says so), "refuse" with ``BaseMismatchError``, also where
                it is not known which base it was trained on, or "ignore"; by default as for
                ``Publisher``.
            require: Replicas that must hold it; by default as for ``Publisher``.
            timeout_seconds: Longest time of this push; by default as for ``Publisher``.

        Returns:
            The version, for example ``math@17``; requests may name it, or ``math``.

        Raises:
            InvalidAdapterError: The replicas cannot serve it; nothing changed.
            BaseMismatchError: It belongs to another base; nothing changed.
            NotFiniteError: A tensor holds NaN or infinity; nothing that is served changed.
            PeerUnavailableError: A rank or the coordinator is gone, or no replica is left, until
                the deadline; or with ``require="all"`` a replica; nothing changed.
            TransferTimeoutError: The deadline passed; find out what happened before pushing again.
            WeftError: It was refused or failed for another reason; nothing changed.
        """
        request = self._settings.adapter(
            model, policy, adapter_name, cast, check_base, base_version, on_base_change
        ).with_options(check_finite, require, timeout_seconds)
        return self._push(request)

    def push_base(
        self,
        model: Model | None = None,
        *,
        named_tensors: NamedTensors | None = None,
        metadata: Metadata | None = None,
        cast: bool = True,
        check_finite: bool | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
    ) -> PolicyVersion:
        """Push every weight of the base model; return once the replicas serve it.

        Args:
            model: A torch or transformers model, wrapped or not, read in place, or a
                directory (or file) of safetensors in checkpoint names.
            named_tensors: Instead, an iterator of every weight as (checkpoint name, full tensor),
                or a function that makes one: in any order, each copied before the next is asked
                for. Given at every rank, in step, or at rank 0 alone.
            metadata: Names in the order of ``named_tensors``, each with something that has its
                shape and dtype; needed where a replica loads a base in place.
            cast, check_finite, require, timeout_seconds: See ``push_adapter``.

        Returns:
            The version, for example ``base@3``.

        Raises:
            InvalidManifestError: Not exactly the served model's tensors.
            WeftError: See ``push_adapter``.
        """
        request = self._settings.model_or_named(model, named_tensors, metadata, cast)
        request = request.with_options(check_finite, require, timeout_seconds)
        return self._push(request)

    def push_merged(
        self,
        model: torch.nn.Module,
        *,
        adapter_name: str = "default",
        cast: bool = True,
        check_finite: bool | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
    ) -> PolicyVersion:
        """Push a PEFT model's base with an adapter merged in, as a version of the base.

        Tensors are merged one by one on the way out, in float32, rounded once: the trained weights
        are only read, and memory is that of ``push_base``. A base quantised by bitsandbytes is
        dequantised first.

        Args:
            model: A PEFT model, wrapped or not.
            adapter_name: Name of the adapter in the PEFT model.
            cast, check_finite, require, timeout_seconds: See ``push_adapter``.

        Returns:
            The version, for example ``base@3``.

        Raises:
            UnsupportedError: A kind of layer that cannot be merged so; names it.
            WeftError: See ``push_base``.
        """
        request = self._settings.base(model, cast, adapter_name)
        request = request.with_options(check_finite, require, timeout_seconds)
        return self._push(request)

    @property
    def wanted(self) -> frozenset[str]:
        """Policies owned here that no replica can serve until they are pushed again.

        Learnt with the leases, within a third of their time to live; a push of the policy takes it
        out. Does not block. Known at the sender, empty at other ranks: a trainer of several ranks
        broadcasts it, for all must push.
        """
        self._pushing.turn.check_process("wanted")
        return self._coordinator.leases.wanted if self._coordinator is not None else frozenset()

    def close(self) -> None:
        """Wait for pushes under way, release the leases and leave the side group.

        Blocks at most until the deadlines of those pushes, and some seconds. Pushes that
        are asked for later fail with ``PUBLISHER_CLOSED``; closing twice is no error.

        Raises:
            InvalidRequestError: From within a push of this publisher, or in a forked process.
        """
        self._pushing.turn.check("close")
        if self._notices is not None:
            self._notices.close()  # what it calls may push until then
        self._background.close()
        self._pushing.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pushing.turn.is_of_this_process:
            self.close()

    def _between_pushes(
        self, call: str, work: Callable[[Ranks, CoordinatorClient | None], _T], deadline: float
    ) -> _T:
        self._background.wait_idle(call, deadline)
        return self._pushing.between_pushes(call, work, deadline)

    def _push(self, request: PushRequest) -> PolicyVersion:
        began = time.monotonic()
        deadline = began + request.timeout_seconds
        try:
            # In the order of the calls, on every rank.
            self._background.wait_idle(f"the push of {request.policy}", deadline)
            return self._pushing.push(request, began=began, deadline=deadline)
        except KeyboardInterrupt:
            # Where it was, many calls deep, tells nobody anything.
            raise KeyboardInterrupt(f"a push of {request.policy} was interrupted") from None

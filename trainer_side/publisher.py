"""Publisher, the class that trainers import to push weights to the pool.

The composer of the trainer side: it introduces a source to the packer, the sender and the control
plane. One file: half of it is one class's documentation of what users call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from trainer_side.background import BackgroundPusher, WhenBusy
from trainer_side.delta_selection import DeltaSelection
from trainer_side.deltas.choice import DeltaMode
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.client import PoolClient, reporter_for
from trainer_side.pool.coordinator_client import CoordinatorClient
from trainer_side.pool.leases import NoticeQueue
from trainer_side.pool.peer import SideGroupRank
from trainer_side.push_request import PushOptions, PushResult, PushSettings
from trainer_side.pushes.content import Model
from trainer_side.pushes.rank_push import RankPushFactory
from trainer_side.pushing import PushExecutor
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.ranks.torch_ranks import Together, ranks_of
from trainer_side.rollout_sleep import RolloutSleep
from trainer_side.sources.named_source import Metadata, NamedTensors
from weft_rl.contract.backends import BackendChoice
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.names import PolicyVersion, check_name
from weft_rl.contract.options import (
    DEFAULT_BASE,
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_REQUESTS_SECONDS,
    DEFAULT_REQUIRE,
    DEFAULT_TIMEOUT_SECONDS,
    Require,
    SleepLevel,
    WhenRunning,
    check_choice,
    check_count,
    check_seconds,
    shown_value,
)
from weft_rl.rpc.channel import check_target, is_host
from weft_rl.rpc.security.credentials import Tls, credentials_of
from weft_rl.transport.digests.wsum64 import warm

_T = TypeVar("_T")


class Publisher:
    """Publisher of policy versions for one trainer, of one process or of many.

    The model may be plain, or wrapped by DDP, FSDP (1 and 2) or DeepSpeed, with or without PEFT:
    the kind is detected, and named in each push's ``report.source``. Pushes of one publisher run
    one after the other. In a trainer of one process every method may be called from any thread; in
    one of several ranks, every rank makes the same calls in the same order. Leases are renewed in
    the background until ``close``.

    Args:
        coordinator: HOST:PORT; used by rank 0, and by ranks that send shards.
        trainer_id: Stable name of this trainer; owns the policies it pushes.
        require: Number of replicas that must hold a version, received whole and verified, before it
            is committed. By default one: a replica that is lost, stalls, has no room or cannot keep
            up leaves the push, which goes on with those that remain. Or "all" that are ready when
            the push begins: then it fails with that replica (unless one of them loads a base in
            place). The requirement holds until the commit and not after: a replica that dies or
            fails while it switches leaves service and catches up later, and the push succeeds if
            one replica serves the version. ``report.num_replicas`` counts those that do,
            ``report.remarks`` names the others and says why.
        timeout_seconds: Longest time of a push from its call on, waiting for replicas and for
            earlier pushes of this publisher included. Within it a push
            that ends for a reason that passes (too few replicas were left, the coordinator was
            restarted) is begun again by itself: what it raises is final. An iterator of named
            tensors cannot be read again, unless a copy is kept for deltas.
        connect_seconds: Longest wait for a coordinator that was never reached: the first
            push then fails on every rank with ``COORDINATOR_UNREACHABLE``, which says what
            was tried. Jobs that start together with the pool say 300. A coordinator that was
            reached before is waited for until the push's deadline.
        backend: Backend that carries the bytes. "auto": the best that the pool offers and all can
            use: "nccl" from accelerator to accelerator, "one-sided" where every replica can read
            this process's memory, else "stream", over TCP; ``report.backend`` says which, and
            ``report.backend_reason`` why. Or one of them and no other.
        ranks: Processes that push together. "all" of ``torch.distributed`` (one, if it is not
            initialised) or those of a group: each makes a Publisher, and each calls every push, in
            the same order. Rank 0 of them is the sender and speaks for all; ranks that hold shards
            send these themselves, so each must reach the coordinator and the replicas (see
            ``max_senders``). "this" process only: for a trainer whose weights are whole here,
            pushed by one of its ranks.
        progress: "auto" shows on standard error what a push waits for and what it has sent: a bar
            on a terminal (if rich is installed), elsewhere a line every 10 s. None is silent. Or a
            function of (version, buckets verified, buckets in all), and of ("reading ...", bytes
            read, bytes in all) while the base of an adapter is read, once, to know its version by.
        on_publish_again: Called with a policy's name when no replica holds the version that the
            pool should serve any more (all were restarted, say), and this publisher owns the
            policy: once each time that is asked, at the sender, on a thread of its own, one call
            after the other. It may push if the trainer has one rank; until it returns ``close``
            waits some seconds, the end of the process as long as it takes; an exception is logged.
            The weights must not change meanwhile: a trainer that cannot promise that, or has
            several ranks, reads ``wanted`` in its loop instead.
        takeover: Take the policies' leases from another living process of this ``trainer_id``,
            once each, whose pushes then fail with ``LEASE_FENCED``. Otherwise the first push
            fails with ``POLICY_OWNED`` as soon as that process is seen to live.
        tls: Certificates to trust and to show; by default what the environment names
            (``WEFT_TLS_CA``, ``_CERT``, ``_KEY``), or no TLS. Files are reread.
        token: The bearer token to show; by default what the file of ``WEFT_TOKEN_FILE`` holds.
        options: Options of every push that is given none of its own.
        delta: Whether a push of the base sends only the elements that have changed since the
            version that the pool committed last; the version is the same. "auto": where that is
            faster, by what the backend was measured to carry; from then on each rank keeps a copy
            of what it sends, in the served dtype, on the accelerator where it has room, else in the
            host's memory. "always": from the second push on, wherever a replica can take it.
            "never": no copy, no delta. Replicas that cannot take a delta are sent all elements in
            the same transfer. ``report.delta`` says what was done, and why.
        bucket_bytes: Payload of a bucket; by default what suits the backend. Two are held
            in host memory (page-locked, and one more on the accelerator, where the weights lie
            there), or on the accelerator three (four where replicas read them there).
        data_host: Address that the replicas reach this machine by; by default the
            one its routes choose towards the coordinator.
        device: The accelerator that NCCL sends from, for example "cuda:1"; by default
            the current one.
        max_senders: Most ranks of a sharded trainer that send what they hold (256), each over a
            stream of its own to the coordinator. Where more hold some, rank 0 gathers and sends
            all.

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
        connect_seconds: float = DEFAULT_CONNECT_SECONDS,
        backend: BackendChoice = "auto",
        ranks: Together = "all",
        progress: Literal["auto"] | Callable[[str, int, int], None] | None = "auto",
        on_publish_again: Callable[[str], None] | None = None,
        takeover: bool = False,
        tls: Tls | None = None,
        token: str | None = None,
        options: PushOptions | None = None,
        delta: DeltaMode = "auto",
        bucket_bytes: int | None = None,
        data_host: str | None = None,
        device: torch.device | str | None = None,
        max_senders: int | None = None,
    ) -> None:
        check_target(coordinator)
        credentials = credentials_of(tls, token)
        check_name(trainer_id, "trainer")
        _check_data_host(data_host)
        _check_ranks(ranks)
        check_choice("backend", backend, BackendChoice)
        check_choice("delta", delta, DeltaMode)
        check_count("bucket_bytes", bucket_bytes)
        check_count("max_senders", max_senders, MAX_SENDERS)
        _check_callable("on_publish_again", on_publish_again)
        check_choice("takeover", takeover, Literal[True, False])
        if not (isinstance(progress, str) and progress == "auto"):
            _check_callable("progress", progress)
        send_from = _check_device(device)
        check_seconds("connect_seconds", connect_seconds)
        pushing_ranks = ranks_of(ranks, "calls")
        warm()
        self._settings = PushSettings(
            ranks=pushing_ranks,
            require=require,
            timeout_seconds=timeout_seconds,
            options=PushOptions() if options is None else options,
        )
        self._notices = NoticeQueue(on_publish_again) if on_publish_again else None
        self._coordinator: CoordinatorClient | None = None
        selection = BackendSelection(backend, send_from)
        client, reporter = None, reporter_for(progress)
        if pushing_ranks.rank == SENDER:
            self._coordinator = CoordinatorClient(
                coordinator,
                trainer_id,
                connect_seconds=connect_seconds,
                takeover=takeover,
                on_wanted=self._notices.put if self._notices else None,
                credentials=credentials,
                on_wait=reporter.waits_for,
            )
            client = PoolClient(self._coordinator, data_host, selection, reporter)
        self._pushing = PushExecutor(
            pushing_ranks,
            client,
            RankPushFactory(pushing_ranks, bucket_bytes, max_senders or MAX_SENDERS),
            SideGroupRank(coordinator, data_host, selection, credentials),
            DeltaSelection(delta, pushing_ranks, selection),
        )
        self._background = BackgroundPusher(self._pushing, ranks_of(ranks, "copies"))

    # -- pushes that block --------------------------------------------------------------

    def push_adapter(
        self,
        model: Model,
        policy: str,
        *,
        base: str | PolicyVersion = DEFAULT_BASE,
        adapter_name: str = "default",
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
    ) -> PushResult:
        """Push a LoRA adapter; block until the replicas serve it (see ``require``). Collective.

        Args:
            model: A PEFT model, wrapped or not, read in place, or a directory that PEFT saved.
                Nothing of it is kept after the call. Its base is not sent, but digested once.
            policy: The adapter's name in the pool.
            base: Base model that the adapter is for.

                - "auto": the one that it was trained on, as far as that can be found out: the
                  version that holds what its own base holds now, of those that this publisher
                  pushed last and of base@0, what the replicas were started with. Where the pool
                  serves another base, or it is not known (base@?), ``report.remarks`` says so.
                - "base@3", or a ``PolicyVersion``: it was trained on base@3; else as "auto".
                - "same", or "only base@3": the same, but the push is refused with
                  ``BaseMismatchError`` where "auto" and "base@3" remark.
                - "any": whatever base is served; nothing of it is compared.

                Bases are compared by content, not by number; except with "any", so are the names
                and shapes of a PEFT model's base.
            adapter_name: Name of the adapter in the PEFT model.
            require: Replicas that must hold it; by default as for ``Publisher``.
            timeout_seconds: Longest time of this push; by default as for ``Publisher``.
            options: Further options; by default those of ``Publisher``.

        Returns:
            The version (``math@17``; requests may name it, or ``math``) and the report.

        Raises:
            InvalidAdapterError: The replicas cannot serve it; nothing changed.
            BaseMismatchError: It belongs to another base; nothing changed.
            NotFiniteError: A tensor holds NaN or infinity; nothing that is served changed.
            ModelChangedError: What is pushed was changed while it was read; nothing was committed.
            PeerUnavailableError: A rank or the coordinator is gone, or no replica is left, until
                the deadline; or with ``require="all"`` a replica; nothing changed.
            TransferTimeoutError: The deadline passed; find out what happened before pushing again.
            WeftError: It was refused or failed for another reason; nothing changed.
        """
        settings = self._settings.but(require, timeout_seconds, options)
        return self._pushing.push(settings.adapter(model, policy, base, adapter_name))

    def push_base(
        self,
        model: Model,
        *,
        draft: Model | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
    ) -> PushResult:
        """Push every weight of the base model; block until the replicas serve it. Collective.

        Args:
            model: A torch or transformers model, wrapped or not, read in place, or a
                directory (or file) of safetensors in checkpoint names.
            draft: Model that drafts tokens for it (EAGLE, a draft model), as it is saved for the
                replicas' ``--speculative-config``: a part of the same version. Layers for
                multi-token prediction are a part of ``model``, where it has them. Without it, the
                replicas keep the one that they have.
            require, timeout_seconds, options: See ``push_adapter``.

        Returns:
            The version (``base@3``) and the report.

        Raises:
            InvalidManifestError: Not exactly the served model's tensors, or not those of the model
                that drafts tokens.
            UnsupportedError: ``draft``, and no replica takes one.
            WeftError: See ``push_adapter``.
        """
        settings = self._settings.but(require, timeout_seconds, options)
        return self._pushing.push(settings.base(model, draft=draft))

    def push_tensors(
        self,
        tensors: NamedTensors | None = None,
        *,
        metadata: Metadata | None = None,
        draft: bool = False,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
    ) -> PushResult:
        """Push every weight of the base model as named tensors; block until the replicas serve it.
        Collective.

        Args:
            tensors: An iterator of every weight as (checkpoint name, full tensor), a mapping, or a
                function that makes one of these: in any order, each tensor on any device and copied
                before the next is asked for, so its memory may be used again then. Given at every
                rank, in step, or at rank 0 alone (None elsewhere). What one rank gives in a dict,
                a list or a tuple is read where it lies; else, for a delta, all is read before it
                is sent.
            metadata: Names in the order of ``tensors``, each with something that has its
                shape and dtype; needed where a replica loads a base in place, but not of a
                collection that one rank gives.
            draft: True if the tensors of the model that drafts tokens are among them: layers for
                multi-token prediction by their checkpoint names, another model's by its own behind
                "draft_model.". Otherwise they are left out, unless ``metadata`` lists them.
            require, timeout_seconds, options: See ``push_adapter``.

        Returns:
            The version (``base@3``) and the report.

        Raises:
            InvalidManifestError: Not exactly the served model's tensors.
            UnsupportedError: A replica loads bases in place, and there is no ``metadata``; or
                ``draft``, and no replica takes one.
            WeftError: See ``push_adapter``.
        """
        settings = self._settings.but(require, timeout_seconds, options)
        return self._pushing.push(settings.tensors(tensors, metadata, draft=draft))

    def push_merged(
        self,
        model: torch.nn.Module,
        *,
        adapter_name: str = "default",
        draft: Model | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
    ) -> PushResult:
        """Push a PEFT model's base with an adapter merged in, as a version of the base. Block until
        the replicas serve it; collective.

        Tensors are merged one by one on the way out, in float32, rounded once: the trained weights
        are only read, and memory is that of ``push_base``. A base quantised by bitsandbytes is
        dequantised first.

        Args:
            model: A PEFT model, wrapped or not.
            adapter_name: Name of the adapter in the PEFT model.
            draft: See ``push_base``.
            require, timeout_seconds, options: See ``push_adapter``.

        Returns:
            The version (``base@3``) and the report.

        Raises:
            UnsupportedError: A kind of layer that cannot be merged so; names it.
            WeftError: See ``push_base``.
        """
        settings = self._settings.but(require, timeout_seconds, options)
        return self._pushing.push(settings.merged(model, adapter_name, draft))

    # -- pushes beside the training -----------------------------------------------------

    def push_adapter_async(
        self,
        model: Model,
        policy: str,
        *,
        base: str | PolicyVersion = DEFAULT_BASE,
        adapter_name: str = "default",
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PushResult]:
        """Copy an adapter as it is now and push the copy; return once it is copied.

        The ranks wait for each other; then each copies what it holds to host memory that is
        used again, and looks at all else that the push reads: settings, structure, the base.
        Training may continue at once, and the model may become anything. What the host has no
        room for is read later, and refused with ``ModelChangedError`` if it changed by then.
        The report says what the copy cost. At most two pushes of a policy wait,
        each with such a copy: a further call blocks, alike on every rank and before it
        copies, until one of them has begun. If none does within this push's
        ``timeout_seconds``, it ends on every rank with ``TransferTimeoutError``, and nothing
        was copied.

        Args:
            when_busy: "replace" makes earlier pushes of this policy that have not begun
                fail with ``REPLACED``, and blocks for none of them; "queue" sends them all,
                in order.
            others: See ``push_adapter``.

        Returns:
            A future that ends as ``push_adapter`` would, the same on every rank. It
            cannot be cancelled.
        """
        settings = self._settings.but(require, timeout_seconds, options)
        request = settings.adapter(model, policy, base, adapter_name)
        return self._background.submit(request, when_busy)

    def push_base_async(
        self,
        model: Model,
        *,
        draft: Model | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PushResult]:
        """Copy the base as it is now and push the copy; see ``push_adapter_async``. Checkpoints in
        files are not copied, but refused if they are written before they are sent."""
        settings = self._settings.but(require, timeout_seconds, options)
        return self._background.submit(settings.base(model, draft=draft), when_busy)

    def push_merged_async(
        self,
        model: torch.nn.Module,
        *,
        adapter_name: str = "default",
        draft: Model | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        options: PushOptions | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PushResult]:
        """Copy base and adapter as they are now and push them merged; see
        ``push_adapter_async``."""
        settings = self._settings.but(require, timeout_seconds, options)
        return self._background.submit(settings.merged(model, adapter_name, draft), when_busy)

    # -- the pool -----------------------------------------------------------------------

    def rollouts_asleep(
        self,
        *,
        level: SleepLevel = 1,
        when_running: WhenRunning = "finish",
        timeout_seconds: float = DEFAULT_REQUESTS_SECONDS,
    ) -> AbstractContextManager[tuple[str, ...]]:
        """Have the replicas that share a GPU with this trainer sleep inside the ``with``, so that
        training has their memory.

        At its beginning nothing more is routed to them; once their requests have ended they sleep,
        and the KV cache is gone. A push inside the ``with`` wakes the weights of those that it
        reaches; its end wakes weights and KV cache, and returns once they take requests. A replica
        that missed versions meanwhile is routed to once it has them. The sleep is a part of this
        publisher's lease of the base, which is acquired: when that ends, they wake by themselves.

        Beginning and end are collective and wait for pushes under way. If the ``with`` ends by an
        exception, or if it could not begin, the sender alone has the replicas woken, and waits some
        seconds for them at most: no rank is left waiting for another.

        Args:
            level: vLLM's sleep level: 1 moves the weights to host memory, 2 discards them, which
                takes none where a push of the base brings others inside the ``with``. Without
                one a replica wakes with a copy of its own, or from its checkpoint's files; else it
                is routed to once it was brought one.
            when_running: Running requests "finish", or "abort" with what they have.
            timeout_seconds: Longest time for those to end; to fall asleep, and to wake, an engine
                may take three minutes more.

        Returns:
            A context manager, which gives the names of the replicas that sleep; none where none
            shares a GPU.

        Raises:
            InvalidRequestError: An argument that cannot be right; nothing was tried.
            NotReadyError: At the beginning. ``SLEEP_DISABLED``: a replica was started without
                ``--enable-sleep``. ``TRANSFER_UNDER_WAY``: one loads a base in place.
            TransferTimeoutError: At the beginning: requests did not end; that replica takes
                requests again. At the end: not in time; they are woken all the same.
            RequestConflictError: At the beginning: one was woken meanwhile, by an operator.
            WeftError: See ``push_adapter``.
        """
        return RolloutSleep(
            level,
            when_running,
            timeout_seconds,
            in_step=self._between_pushes,
            tell=self._tell,
            coordinator=self._coordinator,
        )

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
        """Run ``work`` between pushes; see ``InStep``."""
        try:
            return self._pushing.between_pushes(call, work, deadline)
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException, *, is_beside: bool = False) -> None:
        """Tell the other ranks that this one does not come to its next call, unless they know the
        error, or the call was none that they make.

        Args:
            is_beside: True if it was to be carried out beside the training.
        """
        turn = self._pushing.turn
        if self._settings.ranks.size > 1 and turn.is_of_this_process and not turn.is_held_here:
            self._background.leave(error, is_beside=is_beside)


def _check_data_host(host: object) -> None:
    """Refuse a value that cannot name an address of this machine."""
    if host is None:
        return
    is_text = isinstance(host, str) and host != "" and is_host(host)
    if not is_text or "/" in str(host) or str(host).count(":") == 1:
        raise InvalidRequestError(
            f"data_host={shown_value(host)}: give a name or address of this machine, without "
            "scheme or port"
        )


def _check_callable(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a function."""
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name}={shown_value(value)}: give a function, or None")


def _check_ranks(ranks: object) -> None:
    """Refuse a value that cannot say which processes push together."""
    if isinstance(ranks, str) and ranks in ("all", "this"):
        return
    if not (dist.is_available() and isinstance(ranks, dist.ProcessGroup)):
        raise InvalidRequestError(
            f"ranks={shown_value(ranks)}: use 'all', 'this' or a torch.distributed process group"
        )


def _check_device(device: object) -> torch.device | None:
    """Return the accelerator to send from; None if none was named."""
    if device is None:
        return None
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        text = f"device={shown_value(device)}: {error}"
        raise InvalidRequestError(text.splitlines()[0]) from None
    if found.type != "cuda":
        raise InvalidRequestError(
            f"device={str(found)!r} is no CUDA device: to send from host memory, leave it out or "
            "say backend='gloo'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (found.index or 0) >= count:
        raise InvalidRequestError(
            f"device={str(found)!r}: this process has {count or 'no'} CUDA "
            f"device{'' if count == 1 else 's'}"
        )
    return found


def _of_all_ranks(method: Callable[..., _T]) -> Callable[..., _T]:
    """Return a method of ``Publisher`` that tells the other ranks why this one does not come to
    the call, if it fails before they are at it together: for an argument, or an interrupt."""

    @functools.wraps(method)
    def call(self: Publisher, *args: object, **named: object) -> _T:
        try:
            return method(self, *args, **named)
        except BaseException as error:
            self._tell(error, is_beside=method.__name__.endswith("_async"))
            if isinstance(error, KeyboardInterrupt):  # where it was inside tells nobody anything
                error.with_traceback(None)
            raise

    return call


# Whatever it is called with: a name that is misspelt is an argument, too.
for _collective in (
    Publisher.push_adapter,
    Publisher.push_base,
    Publisher.push_tensors,
    Publisher.push_merged,
    Publisher.push_adapter_async,
    Publisher.push_base_async,
    Publisher.push_merged_async,
    Publisher.rollouts_asleep,
):
    setattr(Publisher, _collective.__name__, _of_all_ranks(_collective))

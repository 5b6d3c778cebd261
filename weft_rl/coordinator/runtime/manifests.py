"""Manifests and references: uploads, bounded caches by content, and look-ups in the catalog.

Uploads come few at a time, each within its time. What a stream has sent so far is held here, as
Python objects of many times its size. So the other streams wait, unread, for their turn; gRPC's
flow control holds their bytes back.

A manifest that is not cached is asked of a replica that holds its version.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol, TypeVar

from weft_rl.containers import LruMapping
from weft_rl.contract.draft_layers import DRAFT_MODEL, MAX_DRAFT_PREFIXES
from weft_rl.contract.errors import DigestMismatchError, TransferTimeoutError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, Reference, with_widest_floats
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    RecordedFacts,
    VersionLayout,
    VersionRecord,
)
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.v1 import types_pb2

MAX_AT_ONCE: Final = 4
#: Longest that a stream whose turn it is may take, and may pause: others wait for it.
MAX_UPLOAD_SECONDS: Final = 120.0
MAX_PAUSE_SECONDS: Final = 10.0

_Whole = TypeVar("_Whole", covariant=True)


class Decoder(Protocol[_Whole]):
    """Decoder that takes chunks one by one; see ``weft_rl.rpc.manifest_codec``."""

    def add(self, chunk: Any) -> None:
        """Take the next chunk, or refuse it."""

    def finish(self) -> _Whole:
        """Return the decoded value, once all chunks have come; slow, so called on a thread."""


class UploadQueue:
    """Streams of chunks that are being read. Used on one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)

    async def read(self, requests: AsyncIterator[Any], decoder: Decoder[_Whole]) -> _Whole:
        """Wait for a turn, then read a stream to its end.

        Args:
            requests: Messages, each with a ``chunk``.
            decoder: Refuses what is too much as soon as it comes.

        Raises:
            TransferTimeoutError: It took, or paused, too long.
            WeftError: The decoder's refusal.
        """
        async with self._turn:
            deadline = asyncio.get_running_loop().time() + MAX_UPLOAD_SECONDS
            while (request := await _next(requests, deadline)) is not None:
                decoder.add(request.chunk)
            return await asyncio.to_thread(decoder.finish)


async def _next(requests: AsyncIterator[Any], deadline: float) -> Any:
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(min(deadline, now + MAX_PAUSE_SECONDS)):
            return await anext(requests, None)
    except TimeoutError:
        raise TransferTimeoutError(
            f"a stream of chunks must come within {MAX_UPLOAD_SECONDS:.0f} s, without a pause of "
            f"{MAX_PAUSE_SECONDS:.0f} s: send it again"
        ) from None


# -- caches and look-ups ---------------------------------------------------------

MAX_MANIFESTS: Final = 64
#: About 2 GiB of Python objects at the very most, names included.
MAX_TENSORS_HELD: Final = 4_000_000
MAX_CHARS_HELD: Final = 256 * 2**20
_MAX_ENCODED: Final = 4
_MAX_REFERENCES: Final = 4

_log = logging.getLogger(__name__)


class LayoutCache:
    """Cache of the layouts used last. A transfer keeps its own layout alive itself."""

    def __init__(self) -> None:
        self._layouts: LruMapping[bytes, VersionLayout] = LruMapping(
            MAX_MANIFESTS, lambda layout: self._count(layout, -1)
        )
        self._encoded: LruMapping[bytes, list[types_pb2.ManifestChunk]] = LruMapping(_MAX_ENCODED)
        self._num_tensors = 0
        self._num_chars = 0

    def put(self, manifest: Manifest) -> VersionLayout:
        """Add a manifest, drop the least recently used beyond the bounds, return its layout."""
        known = self.get(manifest.layout_digest)
        if known:
            return known
        layout = VersionLayout.of(manifest)
        self._layouts.put(layout.digest, layout)
        self._count(layout, 1)
        while len(self._layouts) > 1 and (
            self._num_tensors > MAX_TENSORS_HELD or self._num_chars > MAX_CHARS_HELD
        ):
            self._layouts.drop_oldest()
        return layout

    def _count(self, layout: VersionLayout, sign: int) -> None:
        assert layout.manifest is not None
        tensors = layout.manifest.tensors
        self._num_tensors += sign * len(tensors)
        self._num_chars += sign * sum(len(slot.meta.name) for slot in tensors)

    def get(self, layout_digest: bytes) -> VersionLayout | None:
        """Return a layout that is still known, or None."""
        return self._layouts.get(layout_digest)

    async def chunks(self, layout: VersionLayout) -> list[types_pb2.ManifestChunk]:
        """Return a layout as chunks to send; encoded once for all receivers."""
        known = self._encoded.get(layout.digest)
        if known:
            return known
        assert layout.manifest is not None
        made: list[types_pb2.ManifestChunk] = []
        for chunk in manifest_to_chunks(layout.manifest):
            made.append(chunk)
            await asyncio.sleep(0)  # a large manifest must not block the loop
        self._encoded.put(layout.digest, made)
        return made


@dataclass(frozen=True)
class DescribedReference:
    """A reference for the replicas that load it, and its name."""

    reference: Reference
    name: str
    """Name of it, equal where the description is; ``DescribeTargetResponse.reference_name``."""

    @cached_property
    def exceptions(self) -> dict[DataType, DtypeTable]:
        """Dtypes of the floats that differ from the base's, by that; filled when asked for."""
        return {}


class ReferenceCache:
    """Base models that replicas have described, of the last few fingerprints."""

    def __init__(self) -> None:
        #: By fingerprint, then by ``Capabilities.reference_digest``, oldest first.
        self._references: LruMapping[str, dict[str, Reference]] = LruMapping(_MAX_REFERENCES)
        #: By fingerprint: prefixes of what the files of any replica hold for drafts.
        self._prefixes: LruMapping[str, tuple[str, ...]] = LruMapping(_MAX_REFERENCES)
        self._descriptions: dict[tuple[str, str, frozenset[str]], DescribedReference] = {}

    def put(self, reference: Reference, told: Collection[str] = ()) -> None:
        """Add what a replica's base consists of.

        Args:
            reference: Its description.
            told: Digests of the replicas that are here. Descriptions of others are dropped beyond
                a bound.
        """
        digest, name = reference.details_digest, reference.fingerprint
        known = {**(self._references.get(name) or {})}
        known.pop(digest, None)
        idle = [one for one in known if one not in told]
        for one in idle[: max(0, len(idle) + 1 - _MAX_REFERENCES)]:
            del known[one]
        prefixes = {*reference.draft_prefixes, *(self._prefixes.get(name) or ())}
        layers = sorted(prefix for prefix in prefixes if not prefix.startswith(DRAFT_MODEL))
        self._references.put(name, {**known, digest: reference})
        self._prefixes.put(name, tuple(layers[:MAX_DRAFT_PREFIXES]))
        self._descriptions = {}

    def describe(
        self, fingerprint: str, draft_fingerprint: str = "", digests: Collection[str] = ()
    ) -> DescribedReference | None:
        """Return what a base that is known consists of; or None.

        Args:
            draft_fingerprint: It has such a draft. Empty: none.
            digests: ``Capabilities.reference_digest`` of the replicas that load it, which may hold
                floats in other dtypes: it has those that hold all. If one is not known here, or
                there are none: of all that are known.
        """
        known = self._references.get(fingerprint)
        if not known:
            return None
        wanted = frozenset(digests if digests and known.keys() >= {*digests} else known)
        key = fingerprint, draft_fingerprint, wanted
        if key not in self._descriptions:
            made = self._make(known, wanted, draft_fingerprint)
            if made is None:
                return None
            self._descriptions[key] = made
        return self._descriptions[key]

    def get(
        self, fingerprint: str, draft_fingerprint: str = "", digests: Collection[str] = ()
    ) -> Reference | None:
        """Return the reference of ``describe``."""
        found = self.describe(fingerprint, draft_fingerprint, digests)
        return found.reference if found else None

    def _make(
        self, known: dict[str, Reference], wanted: frozenset[str], draft_fingerprint: str
    ) -> DescribedReference | None:
        newest_first = [digest for digest in reversed(known) if digest in wanted]
        newest, *others = (replace(known[digest], draft=()) for digest in newest_first)
        made = with_widest_floats([newest, *others]) if others else newest
        layers = self._prefixes.get(made.fingerprint) or ()
        if draft_fingerprint:
            all_drafts = {
                digest: one
                for digest, one in reversed(known.items())
                if one.draft_fingerprint == draft_fingerprint
            }
            drafts = [one for digest, one in all_drafts.items() if digest in wanted]
            drafts = drafts or [*all_drafts.values()]
            if not drafts:
                return None
            draft = with_widest_floats(drafts)
            own = dict.fromkeys((*draft.draft_prefixes, *layers))
            made = replace(made, draft=draft.draft, draft_prefixes=tuple(own)[:MAX_DRAFT_PREFIXES])
        else:
            made = replace(made, draft_prefixes=layers)
        parts = (made.fingerprint, draft_fingerprint, *sorted(wanted), *made.draft_prefixes)
        return DescribedReference(made, hashlib.sha256("\n".join(parts).encode()).hexdigest())


def dtype_exceptions(described: DescribedReference, base_dtype: DataType) -> DtypeTable:
    """Return the dtypes of a description's floats that differ from the base's."""
    made = described.exceptions
    if base_dtype not in made:
        made[base_dtype] = DtypeTable.of(described.reference.dtype_exceptions(base_dtype))
    return made[base_dtype]


#: Most bytes of the names in ``DescribeTargetResponse.base_dtype_exceptions``.
_MAX_EXCEPTIONS_BYTES: Final = 2**19


@dataclass(frozen=True)
class DtypeTable:
    """Dtypes that some floats are sent in, or a digest of them where they are too many to tell."""

    by_name: Mapping[str, DataType]
    digest: bytes = b""

    @classmethod
    def of(cls, by_name: Mapping[str, DataType]) -> DtypeTable:
        """Make them of all that there are."""
        if sum(map(len, by_name)) <= _MAX_EXCEPTIONS_BYTES:
            return cls(by_name)
        lines = "".join(f"{name} {dtype:d}\n" for name, dtype in sorted(by_name.items()))
        return cls({}, hashlib.sha256(lines.encode()).digest())


#: Finds a version's record in the catalog, if any.
FindVersion = Callable[[PolicyVersion], Awaitable[VersionRecord | None]]


class VersionReader(Protocol):
    """Client that can ask a replica for a manifest."""

    async def describe(self, address: str, version: PolicyVersion) -> Manifest:
        """Return the manifest of a version that the replica at ``address`` holds.

        Raises:
            WeftError: It does not answer, or holds no copy.
        """

    async def facts(self, address: str, version: PolicyVersion, digest: bytes) -> RecordedFacts:
        """Return the facts to record of a version that the replica holds with ``digest``.

        Raises:
            WeftError: It does not answer, or does not hold it.
        """


def new_transfer_ids() -> TransferIds:
    """Return unguessable names and secrets for a transfer and its group."""
    return TransferIds(
        transfer_id=f"t-{secrets.token_hex(8)}",
        nonce=secrets.randbits(64),
        group_id=f"g-{secrets.token_hex(8)}",
        group_secret=secrets.token_urlsafe(32),
        secret=secrets.token_urlsafe(32),
    )


async def look_up(
    effect: effects.LookUp, find: FindVersion, manifests: LayoutCache, describer: VersionReader
) -> events.LookedUp:
    """Look up a version's record and its layout.

    A coordinator that was restarted has no manifests: the source tells it. A replica that
    restores a version itself is sent nothing: the digest of the layout is enough.
    """
    record: VersionRecord | None = None
    layout: VersionLayout | None = None
    failure: Failure | None = None
    try:
        record = await find(effect.version)
        if record is not None:
            layout = await _layout_of(effect, record, manifests, describer)
    except Exception as error:  # noqa: BLE001 (what is looked up is waited for)
        failure = _failure_of(error)
    return events.LookedUp(
        replica_id=effect.replica_id,
        incarnation=effect.incarnation,
        source_id=effect.source_id,
        version=effect.version,
        ids=new_transfer_ids(),
        record=record,
        layout=layout,
        failure=failure,
    )


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, WeftError):
        return Failure.of(error)
    _log.error("a version could not be looked up", exc_info=error)
    return Failure("INTERNAL", "looking it up failed; the coordinator's log says how")


async def describe_held(
    effect: effects.DescribeVersion, find: FindVersion, describer: VersionReader
) -> events.VersionDescribed:
    """Ask a replica for the facts of a version, and look up what the catalog has of it by then."""
    facts: RecordedFacts | None = None
    recorded: VersionRecord | None = None
    failure: Failure | None = None
    try:
        facts = await describer.facts(effect.address, effect.version, effect.digest)
        recorded = await find(effect.version)
    except Exception as error:  # noqa: BLE001 (what is looked up is waited for)
        failure = _failure_of(error)
    return events.VersionDescribed(
        replica_id=effect.replica_id,
        incarnation=effect.incarnation,
        version=effect.version,
        digest=effect.digest,
        facts=facts,
        failure=failure,
        recorded=recorded,
    )


async def _layout_of(
    effect: effects.LookUp, record: VersionRecord, manifests: LayoutCache, describer: VersionReader
) -> VersionLayout:
    known = manifests.get(record.layout_digest)
    if known is not None:
        return known
    if effect.source_id == effect.replica_id:
        size = record.content_digest.size_bytes if record.content_digest else 0
        return VersionLayout(None, record.layout_digest, size, 0, 0)
    manifest = await describer.describe(effect.source_address, effect.version)
    if manifest.layout_digest != record.layout_digest:
        raise DigestMismatchError(
            f"{effect.source_id} holds {effect.version} in another layout than was committed"
        )
    return manifests.put(manifest)

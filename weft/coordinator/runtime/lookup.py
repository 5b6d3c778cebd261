"""What a clone needs to know, from the catalog and, if need be, from its source; and what
the catalog needs to know of what replicas hold."""

from __future__ import annotations

import secrets
from typing import Protocol

from weft.contract.errors import WeftError
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions import effects, events
from weft.coordinator.decisions.state.transfer import FreshIds
from weft.coordinator.decisions.state.values import Failure, Layout, VersionFacts, VersionRecord
from weft.coordinator.runtime.catalog.database import Catalog
from weft.coordinator.runtime.manifests import LayoutCache


class Describer(Protocol):
    """Who can ask a replica for a manifest."""

    async def describe(self, address: str, version: PolicyVersion) -> Manifest:
        """The manifest of a version that the replica at ``address`` holds.

        Raises:
            WeftError: It does not answer, or holds no copy.
        """

    async def facts(self, address: str, version: PolicyVersion, digest: bytes) -> VersionFacts:
        """What is to be recorded of a version that it holds with that digest.

        Raises:
            WeftError: It does not answer, or does not hold it.
        """


def fresh_ids() -> FreshIds:
    """Unguessable names for a transfer and its group."""
    return FreshIds(
        transfer_id=f"t-{secrets.token_hex(8)}",
        nonce=secrets.randbits(64),
        group_id=f"g-{secrets.token_hex(8)}",
        group_secret=secrets.token_urlsafe(32),
        secret=secrets.token_urlsafe(32),
    )


async def look_up(
    effect: effects.LookUp, catalog: Catalog, manifests: LayoutCache, describer: Describer
) -> events.LookedUp:
    """The version's record and its layout. A coordinator that was restarted has no
    manifests: the source tells it. What a replica restores itself is not sent: of its
    layout the digest will do."""
    record = catalog.find_version(effect.version)
    layout: Layout | None = None
    failure: Failure | None = None
    if record is not None:
        layout = manifests.get(record.layout_digest)
        if layout is None and effect.source_id == effect.replica_id:
            size = record.content_digest.size_bytes if record.content_digest else 0
            layout = Layout(None, record.layout_digest, size, 0, 0)
        if layout is None:
            try:
                layout = await _fetch(effect, record, manifests, describer)
            except WeftError as error:
                failure = Failure.of(error)
    return events.LookedUp(
        replica_id=effect.replica_id,
        incarnation=effect.incarnation,
        source_id=effect.source_id,
        version=effect.version,
        ids=fresh_ids(),
        record=record,
        layout=layout,
        failure=failure,
    )


async def describe_held(
    effect: effects.DescribeHeld, catalog: Catalog, describer: Describer
) -> events.HeldDescribed:
    """What a replica says of a version, and what the catalog has of it by then."""
    facts: VersionFacts | None = None
    failure: Failure | None = None
    try:
        facts = await describer.facts(effect.address, effect.version, effect.digest)
    except WeftError as error:
        failure = Failure.of(error)
    return events.HeldDescribed(
        replica_id=effect.replica_id,
        incarnation=effect.incarnation,
        version=effect.version,
        digest=effect.digest,
        facts=facts,
        failure=failure,
        recorded=catalog.find_version(effect.version),
    )


async def _fetch(
    effect: effects.LookUp, record: VersionRecord, manifests: LayoutCache, describer: Describer
) -> Layout:
    manifest = await describer.describe(effect.source_address, effect.version)
    if manifest.layout_digest != record.layout_digest:
        raise WeftError(
            f"{effect.source_id} holds {effect.version} in another layout than was committed",
            reason="DIGEST_MISMATCH",
        )
    return manifests.put(manifest)

"""Facts that a replica knows of a version beside its number, as a catalog records them."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.layout.manifest import Manifest
from weft_rl.rpc.codec import content_to_proto
from weft_rl.v1 import types_pb2


@dataclass(frozen=True)
class VersionFacts:
    """Recorded facts of one version, as plain values that can be kept and compared."""

    digest: bytes
    """Content digest: ``weft.v1.ContentDigest.value``."""
    message: bytes
    """Serialized ``weft.v1.VersionFacts``."""

    def to_proto(self) -> types_pb2.VersionFacts:
        """Return the facts as the message that the coordinator takes."""
        return types_pb2.VersionFacts.FromString(self.message)


def spilled_facts(manifest: Manifest, digest: bytes, config_json: str) -> VersionFacts:
    """Make the facts of a spilled version from its files; ``config_json`` is empty for a base."""
    adapter = types_pb2.AdapterSpec(config_json=config_json) if config_json else None
    facts = types_pb2.VersionFacts(
        content_digest=content_to_proto(manifest, digest),
        layout_digest=manifest.layout_digest,
        adapter=adapter,
    )
    return VersionFacts(digest, facts.SerializeToString())

"""What a replica knows of a version beside its number: what a catalog records of it."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.layout.manifest import Manifest
from weft_rl.rpc.codec import content_to_proto
from weft_rl.v1 import types_pb2


@dataclass(frozen=True)
class VersionFacts:
    """What is recorded of one version; plain, so that it can be kept and compared."""

    digest: bytes
    """``weft.v1.ContentDigest.value``."""
    message: bytes
    """The ``weft.v1.VersionFacts``, serialized."""

    def to_proto(self) -> types_pb2.VersionFacts:
        """The message that the coordinator takes."""
        return types_pb2.VersionFacts.FromString(self.message)


def spilled_facts(manifest: Manifest, digest: bytes, config_json: str) -> VersionFacts:
    """What the files of a spilled version say; ``config_json`` is empty for a base."""
    adapter = types_pb2.AdapterSpec(config_json=config_json) if config_json else None
    facts = types_pb2.VersionFacts(
        content_digest=content_to_proto(manifest, digest),
        layout_digest=manifest.layout_digest,
        adapter=adapter,
    )
    return VersionFacts(digest, facts.SerializeToString())

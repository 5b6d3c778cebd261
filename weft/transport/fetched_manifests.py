"""Manifests by layout digest, fetched once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import grpc

from weft.contract.lru import Lru
from weft.contract.manifest import Manifest
from weft.rpc.manifest_codec import manifest_from_chunks
from weft.rpc.status import error_from_rpc
from weft.v1 import rendezvous_pb2 as pb
from weft.v1 import types_pb2
from weft.v1.rendezvous_pb2_grpc import RendezvousServiceStub

#: Layouts kept: one for the base and one for each of some adapters.
MAX_KEPT = 32


class FetchedManifests:
    """Least-recently-used manifests of one process; used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: Lru[bytes, Manifest] = Lru(MAX_KEPT)

    def get(
        self,
        layout_digest: bytes,
        stub: RendezvousServiceStub,
        credential: pb.GroupCredential,
        timeout_seconds: float,
        speak: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """The manifest, from memory or (blocking) from the coordinator.

        Args:
            speak: Called with each part that comes.

        Raises:
            NotReadyError: The coordinator does not know it (MANIFEST_UNKNOWN).
            InvalidManifestError: What came is not what the digest names.
        """
        manifest = self._kept.get(layout_digest)
        if manifest is None:
            request = pb.GetManifestRequest(credential=credential, layout_digest=layout_digest)
            try:
                responses = stub.GetManifest(request, timeout=timeout_seconds)
                manifest = manifest_from_chunks(_spoken(responses, speak))
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error
            self._kept.put(layout_digest, manifest)
        return manifest


def _spoken(
    responses: Iterable[pb.GetManifestResponse], speak: Callable[[], None]
) -> Iterator[types_pb2.ManifestChunk]:
    for response in responses:
        speak()
        yield response.chunk

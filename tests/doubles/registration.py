"""How a replica that is no agent registers: over stubs of asyncio, without torch."""

from __future__ import annotations

from typing import Any

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.names import VersionVector
from weft_rl.contract.tensors import Reference
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import CAPABILITIES, vector_to_proto
from weft_rl.rpc.manifest_codec import reference_to_chunks
from weft_rl.v1 import registry_pb2


async def register(
    stub: Any,
    capabilities: Capabilities,
    reference: Reference,
    *,
    vector: VersionVector,
    timeout: float = 30.0,
    **fields: Any,
) -> registry_pb2.RegisterResponse:
    """Register, and put the reference of the base where the coordinator wants it.

    Args:
        fields: Of the request, and of its report: replica_id, incarnation, address, ...
    """
    of_report = registry_pb2.ReplicaReport.DESCRIPTOR.fields_by_name.keys() & fields.keys()
    report = registry_pb2.ReplicaReport(
        version_vector=vector_to_proto(vector), **{name: fields.pop(name) for name in of_report}
    )
    request = registry_pb2.RegisterRequest(
        capabilities=CAPABILITIES.encode(capabilities),
        report=report,
        model_name="tiny",
        **{"protocol_revision": PROTOCOL_REVISION, **fields},
    )
    response = await stub.Register(request, timeout=timeout, wait_for_ready=True)
    if response.reference_wanted:
        chunks = [
            registry_pb2.PutReferenceRequest(chunk=chunk)
            for chunk in reference_to_chunks(reference)
        ]
        await stub.PutReference(iter(chunks), timeout=timeout)
    return response

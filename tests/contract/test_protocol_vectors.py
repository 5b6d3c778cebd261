"""docs/protocol_vectors.json: it is what the code makes, and what docs/protocol.md says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.contract import protocol_decoder as outside
from tests.contract import protocol_vectors
from weft.contract.errors import DigestMismatchError
from weft.contract.manifest import plan_buckets
from weft.transport.payload import verify_bucket

VECTORS: dict[str, Any] = json.loads(protocol_vectors.PATH.read_text())
PAGE = protocol_vectors.PATH.with_suffix("").with_name("protocol.md").read_text()
_ALGORITHMS = {1: "xxh3_64", 2: "wsum64"}


def test_the_file_is_what_the_code_makes() -> None:
    again = "make vectors writes it anew"
    assert protocol_vectors.make() == VECTORS, again


def test_the_decoder_knows_nothing_of_ours() -> None:
    tree = ast.parse(Path(outside.__file__).read_text())
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not imported & {"weft", "trainer_side", "rollout_side", "weft_cli", "tests", "torch"}
    assert "xxhash" in imported


@pytest.fixture(params=VECTORS["pushes"], ids=lambda push: _ALGORITHMS[push["digest_algorithm"]])
def push(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_buckets_are_read_as_the_page_says(push: dict[str, Any]) -> None:
    algorithm, nonce = push["digest_algorithm"], int(push["nonce"], 16)
    payloads, digests = [], []
    for index, bucket in enumerate(push["buckets"]):
        wire = bytes.fromhex(bucket["wire"])
        payload, digest = outside.open_bucket(wire, index, nonce, algorithm)
        assert (len(payload), f"{digest:016x}") == (bucket["payload_bytes"], bucket["digest"])
        assert wire[len(payload) :][:32].hex() == bucket["trailer"]
        payloads.append(payload)
        digests.append(digest)
    for tensor in push["tensors"]:
        assert outside.values(payloads[tensor["bucket"]], tensor) == tensor["values"]
    assert outside.content_digest(digests).hex() == push["content_digest"]
    assert sum(map(len, payloads)) == push["total_bytes"]
    layout = outside.layout_digest(algorithm, push["buckets"], push["tensors"])
    assert layout.hex() == push["layout_digest"]


def test_replicas_take_the_buckets_and_read_nothing_after_the_trailer(push: dict[str, Any]) -> None:
    manifest = plan_buckets(protocol_vectors.metas(), 512, push["digest_algorithm"])
    for index, bucket in enumerate(push["buckets"]):
        wire = torch.frombuffer(bytearray.fromhex(bucket["wire"]), dtype=torch.uint8)
        end = bucket["payload_bytes"] + 32
        wire[end:] = 0xFF
        digest = verify_bucket(wire, manifest, index, protocol_vectors.NONCE)
        assert f"{digest:016x}" == bucket["digest"]
        wire[end - 1] += 1
        with pytest.raises(DigestMismatchError):
            verify_bucket(wire, manifest, index, protocol_vectors.NONCE)
        with pytest.raises(ValueError, match=f"bucket {index}"):
            outside.open_bucket(
                bytes(wire.tolist()), index, protocol_vectors.NONCE, push["digest_algorithm"]
            )


def test_digests_of_more_than_a_row() -> None:
    vector = VECTORS["digests"]
    payload = bytes((7 * i + 3) % 256 for i in range(vector["num_bytes"]))
    for number, name in _ALGORITHMS.items():
        assert f"{outside.digest(payload, number):016x}" == vector[name]


def test_the_digests_of_a_checkpoint_and_of_a_base_model() -> None:
    vector = VECTORS["checkpoint"]
    stored = [{**t, "content": bytes.fromhex(t["content"])} for t in vector["tensors"]]
    for tensor, told in zip(stored, vector["tensors"], strict=True):
        assert f"{outside.wsum64(tensor['content']):016x}" == told["digest"]
    assert outside.checkpoint_digest(stored[::-1]).hex() == vector["digest"]
    base = VECTORS["fingerprint"]
    found = outside.fingerprint(base["architecture"], base["tensors"])
    assert found == base["fingerprint"]


def test_names() -> None:
    vector = VECTORS["names"]
    assert {name: outside.is_name(name) for name in vector["names"]} == vector["names"]
    for text, parsed in vector["versions"].items():
        assert outside.parse_version(text) == (tuple(parsed) if parsed else None)
    for policy, name in vector["in_the_way"].items():
        assert outside.name_in_the_way(policy, vector["served_names"]) == name


@pytest.mark.parametrize("vector", VECTORS["errors"], ids=lambda vector: vector["reason"])
def test_errors(vector: dict[str, Any]) -> None:
    details = bytes.fromhex(vector["grpc-status-details-bin"])
    code, *told = outside.error_info(details)
    assert told == [vector["message"], vector["reason"], vector["metadata"]]
    assert code == grpc.StatusCode[vector["status"]].value[0]
    is_bound = vector["status"] == "RESOURCE_EXHAUSTED"
    assert outside.retry_seconds(details) == (1 if is_bound else None)


def test_what_the_page_quotes_is_in_the_file() -> None:
    """Every hexadecimal number of 16 digits or more."""
    quoted = set(re.findall(r"\b[0-9a-f]{16,}\b", PAGE))
    everything = protocol_vectors.PATH.read_text()
    assert len(quoted) >= 6
    assert {number for number in quoted if number not in everything} == set()

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
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.transport.wire.buckets import verify_bucket, verify_runs

VECTORS: dict[str, Any] = json.loads(protocol_vectors.PATH.read_text())
PAGE = protocol_vectors.PATH.with_suffix("").with_name("protocol.md").read_text()


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
    assert not imported & {"weft_rl", "trainer_side", "rollout_side", "tests", "torch"}
    assert "xxhash" in imported


@pytest.fixture(params=VECTORS["pushes"], ids=["wsum64"])
def push(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_buckets_are_read_as_the_page_says(push: dict[str, Any]) -> None:
    nonce = int(push["nonce"], 16)
    payloads, digests = [], []
    for index, bucket in enumerate(push["buckets"]):
        wire = bytes.fromhex(bucket["wire"])
        payload, own = outside.open_bucket(wire, index, nonce, push["tensors"])
        assert len(payload) == bucket["payload_bytes"]
        assert wire[len(payload) :][:32].hex() == bucket["trailer"]
        assert bytes.fromhex(bucket["trailer"])[7::-1].hex() == bucket["digest"]
        payloads.append(payload)
        digests += own
    assert [f"{digest:016x}" for digest in digests] == push["tensor_digests"]
    for tensor in push["tensors"]:
        assert outside.values(payloads[tensor["bucket"]], tensor) == tensor["values"]
    assert outside.content_digest(digests).hex() == push["content_digest"]
    assert sum(map(len, payloads)) == push["total_bytes"]
    layout = outside.layout_digest(push["buckets"], push["tensors"])
    assert layout.hex() == push["layout_digest"]


def test_replicas_take_the_buckets_and_read_nothing_after_the_trailer(push: dict[str, Any]) -> None:
    manifest = plan_buckets(protocol_vectors.metas(), 512)
    for index, bucket in enumerate(push["buckets"]):
        wire = torch.frombuffer(bytearray.fromhex(bucket["wire"]), dtype=torch.uint8)
        end = bucket["payload_bytes"] + 32
        wire[end:] = 0xFF
        digests = verify_bucket(wire, manifest, index, protocol_vectors.NONCE)
        own = [push["tensor_digests"][tensor] for tensor in manifest.tensors_by_bucket[index]]
        assert [f"{digest:016x}" for digest in digests] == own
        wire[end - 1] += 1
        with pytest.raises(DigestMismatchError):
            verify_bucket(wire, manifest, index, protocol_vectors.NONCE)
        with pytest.raises(ValueError, match=f"bucket {index}"):
            outside.open_bucket(
                bytes(wire.tolist()), index, protocol_vectors.NONCE, push["tensors"]
            )


def test_buckets_of_several_senders_are_read_as_the_page_says() -> None:
    push = VECTORS["shared_push"]
    nonce, found = int(push["nonce"], 16), []
    manifest = plan_buckets(protocol_vectors.metas(protocol_vectors.SHARED), 1024)
    for index, bucket in enumerate(push["wire_buckets"]):
        wire, size = bytes.fromhex(bucket["wire"]), bucket["payload_bytes"]
        own = outside.open_shared_bucket(wire, size, index, nonce, push["tensors"])
        assert [run for run, _, _ in own] == bucket["runs"]
        assert [f"{digest:016x}" for _, digest, _ in own] == bucket["run_digests"]
        found += own
        tensor = torch.frombuffer(bytearray(wire), dtype=torch.uint8)
        runs, digests, _ = verify_runs(tensor, size, manifest, index, nonce)
        assert [list(run) for run in runs] == bucket["runs"]
        assert [f"{digest:016x}" for digest in digests] == bucket["run_digests"]
    contents = outside.put_together(push["tensors"], found)
    digests = list(map(outside.wsum64, contents))
    assert [f"{digest:016x}" for digest in digests] == push["tensor_digests"]
    assert outside.content_digest(digests).hex() == push["content_digest"]
    for tensor, content in zip(push["tensors"], contents, strict=True):
        assert outside.values(content, {**tensor, "offset_bytes": 0}) == tensor["values"]
    with pytest.raises(ValueError, match="came once"):
        outside.put_together(push["tensors"], found[1:])


def test_changes_are_read_as_the_page_says() -> None:
    vector = VECTORS["changes"]
    payload = bytes.fromhex(vector["payload"])
    old = [bytes.fromhex(text) for text in vector["old"]]
    tensors = list(map(bytearray, old))
    changes = outside.apply_changes(payload, vector["runs"], vector["itemsizes"], tensors)
    assert [bytes(tensor).hex() for tensor in tensors] == vector["new"]
    assert [f"{change:016x}" for change in changes] == vector["digest_changes"]
    for number, tensor in enumerate(tensors):
        own = sum(
            change for change, run in zip(changes, vector["runs"], strict=True) if run[0] == number
        )
        digests = outside.wsum64(bytes(tensor)), outside.wsum64(old[number])
        assert (digests[0] - digests[1] - own) % 2**64 == 0
    with pytest.raises(ValueError, match="other weights"):
        outside.apply_changes(payload, vector["runs"], vector["itemsizes"], tensors)
    headers = [payload[32 + 8 * block :][:8] for block in range(4)]
    assert [header[:2] == b"\xff\xff" for header in headers] == [False, True, False, False]
    assert headers[2] == bytes(8)


def test_digests_of_more_than_a_row() -> None:
    vector = VECTORS["digests"]
    payload = bytes((7 * i + 3) % 256 for i in range(vector["num_bytes"]))
    assert f"{outside.wsum64(payload):016x}" == vector["wsum64"]


def test_the_digests_of_a_checkpoint_and_of_a_base_model() -> None:
    vector = VECTORS["checkpoint"]
    stored = [{**t, "content": bytes.fromhex(t["content"])} for t in vector["tensors"]]
    for tensor, told in zip(stored, vector["tensors"], strict=True):
        assert f"{outside.wsum64(tensor['content']):016x}" == told["digest"]
    assert outside.checkpoint_digest(stored[::-1]).hex() == vector["digest"]
    base = VECTORS["fingerprint"]
    found = outside.fingerprint(base["architecture"], base["tensors"])
    assert found == base["fingerprint"]
    found = outside.reference_digest(base["tensors"], base["modules"])
    assert found == base["reference_digest"]


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

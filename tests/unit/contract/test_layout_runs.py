"""What buckets carry when their sender chooses: any cut of any order covers the layout once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.contract.errors import DigestMismatchError, InvalidManifestError
from weft.contract.layout_runs import (
    Run,
    bucket_sums,
    check_carries_runs,
    joined,
    pack_runs,
    run_wire_sizes,
    unpack_runs,
)
from weft.contract.manifest import (
    ALIGN_BYTES,
    TRAILER_BYTES,
    WSUM64,
    XXH3_64,
    Bucket,
    Manifest,
    TensorSlot,
    align_up,
    make_manifest,
    plan_buckets,
)
from weft.contract.tensors import DataType, TensorMeta
from weft.transport.payload import payload_digest, run_digest
from weft.transport.runs import open_runs, seal_runs


def layout(sizes: list[int], capacity: int = 1024) -> Manifest:
    metas = [TensorMeta(f"t.{i}.w", DataType.UINT8, (size,)) for i, size in enumerate(sizes)]
    return plan_buckets(metas, capacity, WSUM64)


def cut(manifest: Manifest, order: list[int]) -> list[list[Run]]:
    """What each bucket carries when tensors come in an order: cut where a payload ends."""
    buckets: list[list[Run]] = []
    room = [bucket.payload_bytes for bucket in manifest.buckets]
    for slot in (manifest.tensors[i] for i in order):
        first, left = slot.offset_bytes, align_up(slot.meta.num_bytes)
        while left:
            if not buckets or not room[len(buckets) - 1]:
                buckets.append([])
            size = min(left, room[len(buckets) - 1])
            buckets[-1].append(Run(slot.bucket, first, size))
            room[len(buckets) - 1] -= size
            first, left = first + size, left - size
    return buckets


SIZES = st.lists(st.integers(1, 4000), min_size=1, max_size=12)


@given(SIZES, st.sampled_from([256, 1024, 4096]), st.randoms())
def test_any_order_fills_the_layouts_payloads_and_covers_every_byte_once(sizes, capacity, random):
    manifest = layout(sizes, capacity)
    order = list(range(len(sizes)))
    random.shuffle(order)
    buckets = cut(manifest, order)
    assert len(buckets) == len(manifest.buckets)
    wire_sizes = run_wire_sizes(manifest)
    for index, runs in enumerate(buckets):
        payload = manifest.buckets[index].payload_bytes
        assert sum(run.num_bytes for run in runs) == payload
        table = pack_runs(runs)
        assert payload + TRAILER_BYTES + len(table) <= wire_sizes[index]
        assert unpack_runs(table + b"\7" * 100, manifest, index) == runs
    flat = [(run, 1) for runs in buckets for run in runs]
    random.shuffle(flat)
    assert sum(bucket_sums(manifest, flat)) == len(flat)
    with pytest.raises(InvalidManifestError, match="did not come"):
        bucket_sums(manifest, flat[1:])
    with pytest.raises(InvalidManifestError, match="came twice"):
        bucket_sums(manifest, [*flat, flat[0]])


@given(SIZES, st.sampled_from([256, 1024]), st.randoms())
def test_what_was_staged_digests_as_if_it_had_come_in_the_layouts_order(sizes, capacity, random):
    """Runs are sealed, opened and put where they belong; the sums are the buckets' digests."""
    manifest = layout(sizes, capacity)
    generator = torch.Generator().manual_seed(random.randrange(1000))
    payloads = [
        torch.randint(0, 256, (b.payload_bytes,), generator=generator, dtype=torch.uint8)
        for b in manifest.buckets
    ]
    staged = [torch.zeros_like(payload) for payload in payloads]
    order = list(range(len(sizes)))
    random.shuffle(order)
    received = []
    wire_sizes = run_wire_sizes(manifest)
    for index, runs in enumerate(cut(manifest, order)):
        wire = torch.full((wire_sizes[index],), 9, dtype=torch.uint8)
        parts = [payloads[r.bucket][r.offset_bytes : r.end_bytes] for r in runs]
        payload = torch.cat(parts)
        wire[: payload.numel()] = payload
        digested = [
            (run, run_digest(part, run.offset_bytes)) for run, part in zip(runs, parts, strict=True)
        ]
        sent = seal_runs(wire, payload.numel(), 5, index, joined(digested))
        digest, opened = open_runs(wire, manifest, index, 5)
        assert (digest, opened) == (sent, joined(digested))
        received += opened
        at = 0
        for run, _ in opened:
            staged[run.bucket][run.offset_bytes : run.end_bytes] = wire[at : at + run.num_bytes]
            at += run.num_bytes
    assert all(map(torch.equal, staged, payloads))
    assert bucket_sums(manifest, received) == [payload_digest(p, WSUM64) for p in payloads]


def test_the_layouts_own_order_makes_one_run_a_bucket() -> None:
    manifest = layout([300, 500, 900, 10])
    for index, runs in enumerate(cut(manifest, [0, 1, 2, 3])):
        whole = Run(index, 0, manifest.buckets[index].payload_bytes)
        assert joined((run, 2) for run in runs) == [(whole, 2 * len(runs))]


def sealed(manifest: Manifest) -> torch.Tensor:
    wire = torch.zeros(run_wire_sizes(manifest)[0], dtype=torch.uint8)
    size = manifest.buckets[0].payload_bytes
    wire[:size] = torch.arange(size) % 251
    seal_runs(wire, size, 5, 0, [(Run(0, 0, size), run_digest(wire[:size], 0))])
    return wire


def test_a_changed_byte_of_payload_trailer_or_list_is_found() -> None:
    manifest = layout([700])
    size = manifest.buckets[0].payload_bytes
    read = size + TRAILER_BYTES + len(pack_runs([Run(0, 0, size)]))
    for place in [*range(0, size, 97), *range(size, read)]:
        wire = sealed(manifest)
        wire[place] ^= 1
        with pytest.raises(DigestMismatchError):
            open_runs(wire, manifest, 0, 5)
    wire = sealed(manifest)
    wire[read:] = 255  # means nothing
    open_runs(wire, manifest, 0, 5)
    with pytest.raises(DigestMismatchError, match="nonce"):
        open_runs(wire, manifest, 0, 6)


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [Run(0, 0, 256)],
        [Run(7, 0, 768)],
        [Run(0, 256, 768)],
        [Run(0, 0, 768), Run(0, 0, 0)],
        [Run(0, 0, 700), Run(0, 700, 68)],
        [Run(0, 2**63, 768)],
    ],
    ids=["none", "short", "no such bucket", "behind its end", "empty", "misaligned", "huge"],
)
def test_a_list_that_cannot_be_right_is_refused(runs: list[Run]) -> None:
    with pytest.raises(DigestMismatchError):
        unpack_runs(pack_runs(runs), layout([700]), 0)


def test_a_list_that_is_cut_off_is_refused() -> None:
    with pytest.raises(DigestMismatchError, match="room"):
        unpack_runs(pack_runs([Run(0, 0, 768)])[:-1], layout([700]), 0)


def test_a_layout_that_runs_cannot_fill_is_refused() -> None:
    check_carries_runs(layout([700, 5]))
    meta = TensorMeta("w", DataType.UINT8, (700,))
    with pytest.raises(InvalidManifestError, match="wsum64"):
        check_carries_runs(plan_buckets([meta], 1024, XXH3_64))
    gap = make_manifest([TensorSlot(meta, 0, ALIGN_BYTES)], [Bucket(4 * ALIGN_BYTES, 1)], WSUM64)
    with pytest.raises(InvalidManifestError, match="gaps"):
        check_carries_runs(gap)

"""``push_tensors`` over a real coordinator, real gRPC and gloo; doubles of engines.

One file: every case pushes to the same pool, by the same helpers that make names and tensors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, same, until, weights
from trainer_side import Publisher, PushOptions
from weft_rl.cli.main import app
from weft_rl.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    NotFiniteError,
    PeerUnavailableError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.rpc.channel import open_channel
from weft_rl.transport.member import AttendStream
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

# The embedding of the double's model is larger: it is cut between several buckets.
BUCKET_BYTES = 2048
Pairs = list[tuple[str, torch.Tensor]]


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, bucket_bytes=BUCKET_BYTES
    ) as running:
        yield running


def pairs_of(seed: int, shuffled_by: int | None = None) -> Pairs:
    pairs = list(weights(Model(seed)).items())
    if shuffled_by is not None:
        random.Random(shuffled_by).shuffle(pairs)
    return pairs


def served(engines: list[EngineDouble], seed: int) -> bool:
    return all(same(engine.base, weights(Model(seed))) for engine in engines)


def content_digest(pool: Pool, version: int) -> str:
    with open_channel(pool.target) as channel:
        listed = InspectServiceStub(channel).ListVersions(pb.ListVersionsRequest(policy="base"))
    return next(v for v in listed.versions if v.version.version == version).content_digest_hex


def test_tensors_may_come_in_any_order(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    for number, order in enumerate((None, 1, 2, 3), 1):
        version, report = publisher.push_tensors(iter(pairs_of(number, order)))
        assert str(version) == f"base@{number}"
        assert served(engines, number)
    assert report.source == "named tensors"
    assert report.num_replicas == 2


@pytest.mark.parametrize("metadata", [False, True])
def test_layers_for_drafts_are_left_out_where_the_pool_has_no_place_for_them(
    pool: Pool, metadata: bool
) -> None:
    engine = EngineDouble(weights(Model()))
    engine.reference = replace(engine.reference, draft_prefixes=("mtp.",))
    pool.add_replica("replica-0", engine)
    first, *rest = pairs_of(3)
    pairs = [first, ("mtp.fc.weight", torch.ones(3, 5)), *rest, ("mtp.norm", torch.ones(2))]
    known = {"metadata": pairs} if metadata else {}
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        publisher.push_tensors(iter(pairs), **known)
        assert same(engine.base, weights(Model(3)))
        more = [*pairs, ("other.weight", torch.ones(3, 5))]
        known = {"metadata": more} if metadata else {}
        with pytest.raises(InvalidManifestError, match=r"other\.weight"):
            publisher.push_tensors(iter(more), **known)


DRAFT = {"draft_model.fc.weight": torch.ones(3, 5), "draft_model.norm": torch.ones(2)}


@pytest.fixture
def drafting(pool: Pool) -> EngineDouble:
    """A replica that drafts tokens."""
    engine = EngineDouble(weights(Model()), base_copies=1)
    metas = [TensorMeta(n, DataType.FLOAT32, tuple(t.shape)) for n, t in DRAFT.items()]
    engine.describe_draft(metas, ("draft_model.t2d",))
    pool.add_replica("replica-0", engine)
    return engine


@pytest.mark.parametrize("metadata", [False, True])
def test_the_draft_is_among_the_tensors_if_it_is_said(
    drafting: EngineDouble, publisher: Publisher, metadata: bool
) -> None:
    pairs = [*DRAFT.items(), *pairs_of(3), ("draft_model.t2d", torch.ones(7))]
    known = {"metadata": pairs} if metadata else {}
    publisher.push_tensors(iter(pairs), draft=True, **known)
    assert same(drafting.base, {**weights(Model(3)), **DRAFT})
    lacking = pairs[1:]
    known = {"metadata": lacking} if metadata else {}
    with pytest.raises(InvalidManifestError, match=r"draft_model\.fc\.weight' is missing"):
        publisher.push_tensors(iter(lacking), draft=True, **known)
    known = {"metadata": pairs[2:]} if metadata else {}
    publisher.push_tensors(iter(pairs[2:] if metadata else pairs), **known)
    assert same(drafting.base, weights(Model(3)))


def test_replicas_that_come_back_with_wider_floats_get_them(
    pool: Pool, publisher: Publisher
) -> None:
    """From the same trainer, by the same coordinator."""
    draft = {name: tensor + 1 / 512 for name, tensor in DRAFT.items()}  # no bfloat16 is that
    pairs = [*draft.items(), *pairs_of(3)]
    found = []
    for dtype in (DataType.BFLOAT16, DataType.FLOAT32):
        engine = EngineDouble(weights(Model()), base_copies=1)
        metas = [TensorMeta(n, dtype, tuple(t.shape)) for n, t in draft.items()]
        engine.describe_draft(metas)
        pool.add_replica("replica-0", engine)
        publisher.push_tensors(iter(pairs), draft=True)
        found.append({name: engine.base[name] for name in draft})
        pool.remove_replica("replica-0")
    narrow = {name: tensor.bfloat16() for name, tensor in draft.items()}
    assert same(found[0], narrow)
    assert same(found[1], draft)


class Draft(torch.nn.Module):
    """As it is saved, but for a table that no engine loads."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(width, 3, bias=False)
        self.norm = torch.nn.Parameter(torch.rand(2))
        self.register_buffer("t2d", torch.ones(4, dtype=torch.bool))


def test_a_model_is_pushed_with_its_draft(drafting: EngineDouble, publisher: Publisher) -> None:
    draft = Draft()
    version, report = publisher.push_base(Model(2), draft=draft)
    assert str(version) == "base@1"
    own = {f"draft_model.{name}": p.detach() for name, p in draft.named_parameters()}
    assert same(drafting.base, {**weights(Model(2)), **own})
    assert "Draft" in report.source
    publisher.push_base_async(Model(4), draft=draft).result(20)
    assert same(drafting.base, {**weights(Model(4)), **own})
    publisher.push_base(Model(1))
    assert same(drafting.base, weights(Model(1)))
    for wrong, words in ((Draft(6), "has shape"), (Model(), "not a tensor of the model that dr")):
        with pytest.raises(InvalidManifestError, match=words):
            publisher.push_base(Model(3), draft=wrong)
    assert same(drafting.base, weights(Model(1)))


def test_merged_weights_are_pushed_with_a_draft(
    drafting: EngineDouble, publisher: Publisher
) -> None:
    draft, model = Draft(), peft_of(Model(2))
    _, report = publisher.push_merged(model, draft=draft)
    assert "Draft" in report.source
    whole = dict(drafting.base)
    own = {f"draft_model.{name}": p.detach() for name, p in draft.named_parameters()}
    merged = weights(peft_of(Model(2)).merge_and_unload())
    assert {name: whole.pop(name) for name in own}.keys() == own.keys()
    torch.testing.assert_close(whole, merged)
    publisher.push_merged(model)
    assert same(drafting.base, whole)
    publisher.push_merged_async(model, draft=draft).result(20)
    assert same(drafting.base, {**whole, **own})
    with pytest.raises(InvalidRequestError, match=r"push_merged\(draft=\) takes a torch module or"):
        publisher.push_merged(model, draft=3)  # type: ignore[arg-type]


def test_a_checkpoint_is_pushed_with_its_draft_from_the_shell(
    pool: Pool, drafting: EngineDouble, tmp_path: Path
) -> None:
    draft = Draft()
    own = {name: p.detach() for name, p in draft.named_parameters()}
    save_file(weights(Model(3)), tmp_path / "model.safetensors")
    save_file(own, tmp_path / "draft.safetensors")

    def push(policy: str) -> Result:
        command = [
            "push",
            "-c",
            pool.target,
            "--policy",
            policy,
            str(tmp_path / "model.safetensors"),
        ]
        return CliRunner().invoke(app, [*command, "--draft", str(tmp_path / "draft.safetensors")])

    assert push("base").exit_code == 0
    assert same(
        drafting.base,
        {**weights(Model(3)), **{f"draft_model.{name}": tensor for name, tensor in own.items()}},
    )
    refused = push("math")
    assert isinstance(refused.exception, InvalidRequestError)
    assert "--draft needs --policy base" in str(refused.exception)


def test_a_draft_is_refused_where_no_replica_takes_one(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    with pytest.raises(UnsupportedError, match="no replica of the pool takes a model that drafts"):
        publisher.push_base(Model(2), draft=Draft())
    with pytest.raises(UnsupportedError, match="draft=True: no replica"):
        publisher.push_tensors(iter(pairs_of(3)), draft=True)
    with pytest.raises(InvalidRequestError, match="draft"):
        publisher.push_base(Model(2), draft=3)  # type: ignore[arg-type]
    assert not any(engine.base_version for engine in engines)


def test_a_replica_that_does_not_draft_is_beside_one_that_does(
    pool: Pool, drafting: EngineDouble, publisher: Publisher
) -> None:
    pool.add_replica("replica-1", EngineDouble(weights(Model())))
    _, report = publisher.push_base(Model(2), draft=Draft(), require=2)
    assert report.num_replicas == 2


def test_a_replica_that_comes_later_clones_the_draft_too(
    pool: Pool, drafting: EngineDouble, publisher: Publisher
) -> None:
    publisher.push_base(Model(2), draft=Draft())
    late = EngineDouble(weights(Model()))
    late.reference, late.capabilities = drafting.reference, drafting.capabilities
    pool.add_replica("replica-1", late)
    until(lambda: late.base_version == 1)
    assert same(late.base, drafting.base)
    assert len(late.base) == len(weights(Model())) + len(DRAFT)


def test_what_is_staged_and_its_digest_do_not_depend_on_the_order(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    for order in (None, 7):
        publisher.push_tensors(pairs_of(1, order))
    first, second = content_digest(pool, 1), content_digest(pool, 2)
    assert first == second != ""
    publisher.push_tensors(pairs_of(2, 7))
    assert content_digest(pool, 3) != first


def test_a_replica_that_comes_later_clones_what_came_in_no_order(
    pool: Pool, publisher: Publisher
) -> None:
    first = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-0", first)
    publisher.push_tensors(pairs_of(1, 5))
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-1", late)
    until(lambda: same(late.base, weights(Model(1))))
    publisher.push_base(Model(2))  # the same group carries either kind
    publisher.push_tensors(pairs_of(3, 6))
    assert served([first, late], 3)


def reusing_one_buffer(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """As a framework that gathers into the same memory each time."""
    tensors = weights(Model(seed))
    buffer = torch.empty(max(t.numel() for t in tensors.values()))
    for name, tensor in tensors.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        buffer.fill_(float("nan"))  # whoever looks again sees it


@pytest.mark.parametrize("metadata", [False, True])
def test_each_tensor_is_copied_before_the_next_is_asked_for(
    engines: list[EngineDouble], publisher: Publisher, metadata: bool
) -> None:
    publisher.push_tensors(reusing_one_buffer(4), metadata=weights(Model(4)) if metadata else None)
    assert served(engines, 4)


def test_a_function_that_makes_an_iterator_is_called_once_a_push(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    made: list[int] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        made.append(1)
        return reusing_one_buffer(5)

    publisher.push_tensors(make)
    publisher.push_tensors(make)
    assert len(made) == 2
    assert served(engines, 5)


def test_a_state_dict_views_and_other_dtypes_are_taken(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    given = {name: tensor.double() for name, tensor in weights(Model(6)).items()}
    name = "layers.0.q_proj.weight"
    given[name] = given[name].t().contiguous().t()  # of other strides
    publisher.push_tensors(given)
    assert served(engines, 6)


def without(pairs: Pairs, index: int) -> Pairs:
    return pairs[:index] + pairs[index + 1 :]


def changed(pairs: Pairs, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Pairs:
    return [(n, change(t) if i == index else t) for i, (n, t) in enumerate(pairs)]


def extra(pairs: Pairs) -> Pairs:
    return [*pairs, ("another.weight", torch.ones(3))]


WRONG: dict[str, tuple[Callable[[Pairs], Pairs], str]] = {
    "missing": (
        lambda p: without(p, 3),
        "'layers.0.v_proj.weight' is missing: the iterator ended after",
    ),
    "nothing": (lambda p: [], r"'embed.weight' is missing \(and 12 more\)"),
    "extra": (extra, "'another.weight' is not a tensor of the served model"),
    "extra at first": (lambda p: extra(p)[::-1], "'another.weight' is not a tensor"),
    "repeated": (lambda p: [*p, p[4]], "'layers.0.v_proj.bias' came twice"),
    "repeated at once": (lambda p: [p[0], *p], "'embed.weight' came twice"),
    "of another shape": (
        lambda p: changed(p, 0, lambda t: t.t()),
        r"'embed.weight' has shape \(32,50\), the served model has \(50,32\)",
    ),
    "of another dtype": (
        lambda p: changed(p, 2, lambda t: t.long()),
        "'layers.0.q_proj.bias' is int64, the served model takes float32",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_served_models_fails_and_nothing_changes(
    engines: list[EngineDouble], publisher: Publisher, wrong: str
) -> None:
    spoil, message = WRONG[wrong]
    with pytest.raises(InvalidManifestError, match=message):
        publisher.push_tensors(iter(spoil(pairs_of(1))))
    assert served(engines, 0)
    until(lambda: all(engine.store.usage().staging_bytes == 0 for engine in engines))
    publisher.push_tensors(pairs_of(2, 1))  # the next is none the worse
    assert served(engines, 2)


@pytest.mark.parametrize("wrong", sorted({*WRONG} - {"extra at first"}))
def test_metadata_is_refused_before_a_tensor_is_asked_for(
    engines: list[EngineDouble], publisher: Publisher, wrong: str
) -> None:
    def never() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("asked for a tensor")

    with pytest.raises(WeftError) as caught:
        publisher.push_tensors(never, metadata=WRONG[wrong][0](pairs_of(1)))
    assert caught.value.reason == "INVALID_MANIFEST"
    assert served(engines, 0)


@pytest.mark.parametrize("wrong", sorted({*WRONG} - {"nothing"}))
def test_what_is_not_as_metadata_said_fails(
    engines: list[EngineDouble], publisher: Publisher, wrong: str
) -> None:
    with pytest.raises(InvalidManifestError):
        publisher.push_tensors(iter(WRONG[wrong][0](pairs_of(1))), metadata=weights(Model()))
    assert served(engines, 0)
    publisher.push_tensors(iter(pairs_of(2)), metadata=weights(Model()))
    assert served(engines, 2)


def test_a_dtype_is_not_cast_unless_it_may_be(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    half = changed(pairs_of(1), 1, lambda t: t.bfloat16())
    with pytest.raises(InvalidManifestError, match=r"is bfloat16, .* takes float32: push with"):
        publisher.push_tensors(half, options=PushOptions(cast=False))
    publisher.push_tensors(half)
    assert torch.equal(engines[0].base[half[1][0]], half[1][1].float())


@pytest.mark.parametrize("place", ["first", "last", "behind it"])
@pytest.mark.parametrize("metadata", [False, True])
def test_a_tied_duplicate_is_dropped_if_it_is_equal(
    engines: list[EngineDouble], publisher: Publisher, place: str, metadata: bool
) -> None:
    pairs = pairs_of(1)
    at = {"first": 0, "last": len(pairs), "behind it": 1}[place]
    tied = [*pairs[:at], ("lm_head.weight", pairs[0][1].clone()), *pairs[at:]]
    said = tied if metadata else None
    publisher.push_tensors(iter(tied), metadata=said)
    assert served(engines, 1)
    off = tied[at][1].clone()
    off[49, 31] += 0.001
    unequal = [*pairs[:at], ("lm_head.weight", off), *pairs[at:]]
    with pytest.raises(InvalidManifestError, match=r"nor equal to 'embed\.weight'"):
        publisher.push_tensors(iter(unequal), metadata=said)
    assert served(engines, 1)


class Boom(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_the_iterator_raises_is_raised_and_nothing_changes(
    engines: list[EngineDouble], publisher: Publisher, after: int
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs_of(1)[:after]
        raise Boom("the gather failed")

    with pytest.raises(Boom, match="the gather failed"):
        publisher.push_tensors(failing())
    assert served(engines, 0)
    publisher.push_tensors(pairs_of(2))
    assert served(engines, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Model(), "push_tensors takes an iterator of .*, not Model"),
        ("weights", "push_tensors takes an iterator of .*, not str"),
        (7, "push_tensors takes an iterator of .*, not int"),
        (lambda: 7, "push_tensors takes an iterator of .*, not int"),
        ([1], "given int by the iterator: it must give pairs"),
        ([("embed.weight", 3)], "a pair of str and int"),
        ([("embed.weight", torch.ones(50, 32, device="meta"))], "is not here whole"),
    ],
)
def test_what_is_no_iterator_of_named_tensors_is_refused(
    engines: list[EngineDouble], publisher: Publisher, given: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        publisher.push_tensors(given)
    assert served(engines, 0)


def test_refusals_of_the_pool_come_before_a_tensor_is_asked_for(
    pool: Pool, publisher: Publisher
) -> None:
    def never() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("asked for a tensor")

    pool.add_replica("small", EngineDouble(weights(Model()), staging_capacity_bytes=100))
    with pytest.raises(WeftError) as caught:
        publisher.push_tensors(never)
    assert caught.value.reason == "STAGING_FULL"


def test_what_is_not_finite_ends_it_by_name(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[40, 3] = float("inf")
        return tensor

    with pytest.raises(NotFiniteError, match=r"'embed\.weight' holds"):
        publisher.push_tensors(
            changed(pairs_of(1), 0, spoil)[::-1], options=PushOptions(check_finite=True)
        )
    assert served(engines, 0)


def test_a_replica_that_loads_in_place_must_know_the_order(
    pool: Pool, publisher: Publisher
) -> None:
    """What turned out to be missing would leave it with mixed weights."""
    staged = EngineDouble(weights(Model()))
    in_place = EngineDouble(weights(Model()), in_place=True)
    pool.add_replica("replica-0", staged)
    pool.add_replica("replica-1", in_place)
    with pytest.raises(UnsupportedError, match=r"'replica-1' loads .* \(metadata=\)"):
        publisher.push_tensors(iter(pairs_of(1)))
    order = pairs_of(1, 3)
    meta = [(name, tensor.to("meta")) for name, tensor in order]
    publisher.push_tensors(iter(order), metadata=meta)
    assert served([staged, in_place], 1)
    publisher.push_tensors(pairs_of(2, 5))  # all are there, and are looked at beforehand
    assert served([staged, in_place], 2)


def test_survivors_get_the_rest_though_it_cannot_be_read_again(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    """A replica is lost in the middle: what was sent and not verified is still held."""
    lost: list[int] = []

    def losing() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(pairs_of(3, 2)):
            if index == 8:
                lost.append(index)
                pool.remove_replica("replica-1")
            yield pair

    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, bucket_bytes=BUCKET_BYTES,
        require=1,
    ) as publisher:  # fmt: skip
        report = publisher.push_tensors(losing()).report
        assert lost == [8]
        assert report.num_replicas == 1
    assert same(engines[0].base, weights(Model(3)))
    assert served(engines[1:], 0)


def test_without_a_survivor_the_push_fails_by_name(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    def losing() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(pairs_of(3)):
            if index == 8:
                pool.remove_replica("replica-1")
            yield pair

    with pytest.raises(PeerUnavailableError, match="replica-1"):
        publisher.push_tensors(losing(), require="all")
    assert served(engines, 0)


@pytest.mark.parametrize("is_function", [True, False])
def test_without_anybody_left_only_what_can_be_read_again_is_begun_again(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, is_function: bool
) -> None:
    made: list[int] = []

    def losing() -> Iterator[tuple[str, torch.Tensor]]:
        made.append(0)
        for index, pair in enumerate(pairs_of(3)):
            if index == 8 and len(made) == 1:
                for name in ("replica-0", "replica-1"):
                    pool.remove_replica(name)
                pool.add_replica("replica-2", EngineDouble(weights(Model())))
            yield pair

    if is_function:
        report = publisher.push_tensors(losing).report
        assert len(made) == 2
        assert any("begun again" in each for each in report.remarks)
    else:
        with pytest.raises(PeerUnavailableError, match="give a function that makes the iterator"):
            publisher.push_tensors(losing())


def test_other_names_altogether_are_not_taken_for_tied(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    asked: list[str] = []

    def prefixed() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(1000):
            asked.append(f"module.{index}")
            yield asked[-1], torch.zeros(32, 32)

    with pytest.raises(InvalidManifestError, match=r"'module\.16' is not a tensor"):
        publisher.push_tensors(prefixed)
    assert len(asked) == 17


def test_a_push_that_fails_at_once_does_not_keep_the_next_one_waiting(
    engines: list[EngineDouble], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group may not have formed yet, and its stream not have said a word."""

    def say_nothing(requests: Iterator[object]) -> Iterator[object]:
        for _ in requests:
            pass
        yield from ()

    real = AttendStream.__init__

    def join(self: AttendStream, stub: Any, credential: Any, rank: int, **how: Any) -> None:
        silent = SimpleNamespace(Attend=lambda requests: stub.Attend(say_nothing(requests)))
        real(self, silent if rank == 0 else stub, credential, rank, **how)

    monkeypatch.setattr(AttendStream, "__init__", join)
    with pytest.raises(InvalidManifestError, match=r"'another\.weight'"):
        publisher.push_tensors(extra(pairs_of(1))[::-1])
    monkeypatch.setattr(AttendStream, "__init__", real)
    began = time.monotonic()
    publisher.push_tensors(pairs_of(2))
    assert time.monotonic() - began < 8
    assert served(engines, 2)

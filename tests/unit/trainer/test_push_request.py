"""What a user may mistype is refused by the call itself, with what to write instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_side import PolicyVersion, Publisher, PushOptions
from trainer_side.push_request import RequestedBase
from weft_rl.contract.errors import InvalidNameError, InvalidRequestError

# Nobody listens there, and nothing of this connects.
NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"coordinator": "weft"}, "names no port: give HOST:PORT, as in weft:50051"),
        ({"coordinator": "http://weft:50051"}, "without a scheme"),
        ({"coordinator": "unix:/run/weft"}, "without a scheme"),
        ({"coordinator": "weft:0"}, "a port from 1 to 65535"),
        ({"coordinator": "weft:70000"}, "a port from 1 to 65535"),
        ({"coordinator": ":50051"}, "names no port|give a host"),
        ({"coordinator": 50051}, "as a string"),
        ({"data_host": "tcp://here"}, "without scheme or port"),
        ({"data_host": "here:80"}, "without scheme or port"),
        ({"data_host": ""}, "without scheme or port"),
        ({"ranks": "x"}, "ranks='x': use 'all', 'this' or a torch.distributed process group"),
        ({"ranks": None}, "ranks=None"),
        ({"backend": "mpi"}, "use one of 'auto', 'nccl', 'one-sided', 'stream', 'gloo'"),
        ({"options": "fast"}, r"options='fast': give trainer_side.PushOptions\(...\)"),
        ({"device": "cuda:0"}, "this process has no CUDA device"),
        ({"device": "cpu"}, "is no CUDA device"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"timeout_seconds": 0}, "more than 0"),
        ({"timeout_seconds": -1}, "more than 0"),
        ({"timeout_seconds": float("nan")}, "more than 0"),
        ({"timeout_seconds": "60"}, "give seconds"),
        ({"connect_seconds": 0}, "connect_seconds=0"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: give a whole number"),
        ({"bucket_bytes": 1.5}, "bucket_bytes=1.5"),
        ({"max_senders": 0}, "max_senders=0: give a whole number, at least 1 and at most 256"),
        ({"max_senders": 257}, "at most 256"),
        ({"require": 0}, "require=0"),
        ({"progress": "bar"}, "progress='bar': give a function"),
        ({"on_publish_again": "math"}, "give a function"),
    ],
)
def test_a_publisher_is_not_made_of_what_cannot_be_right(
    changes: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments: dict[str, Any] = {"coordinator": NOWHERE, "trainer_id": "t", **changes}
    with pytest.raises(InvalidRequestError, match=match):
        Publisher(**arguments)


@pytest.mark.parametrize("trainer_id", [None, 7, "", "a b"])
def test_a_trainer_has_a_name(trainer_id: Any) -> None:
    with pytest.raises(InvalidNameError):
        Publisher(NOWHERE, trainer_id=trainer_id)


def test_usual_targets_are_taken() -> None:
    for target in ("weft:50051", "10.0.0.1:1", "[::1]:50051", "weft.pool.svc.cluster.local:443"):
        Publisher(target, trainer_id="t").close()


_MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("push", "match"),
    [
        (lambda p: p.push_base(None), "push_base takes a torch module or a directory, not None"),
        (lambda p: p.push_base([("a", torch.ones(1))]), "not list: push_tensors takes named"),
        (lambda p: p.push_tensors(), "push_tensors: give an iterator of"),
        (lambda p: p.push_tensors(_MODEL), "push_tensors takes an iterator of .*, not Linear"),
        (lambda p: p.push_tensors(7), "push_tensors takes an iterator of .*, not int"),
        (lambda p: p.push_base(_MODEL, options={}), r"options=\{\}: give trainer_side.PushOptions"),
        (lambda p: p.push_base(_MODEL.state_dict()), "not a state_dict"),
        (lambda p: p.push_base_async(OrderedDict()), "not a state_dict"),
        (lambda p: p.push_adapter(3, "math"), "push_adapter takes .*, not int"),
        (lambda p: p.push_adapter_async(None, "math"), "push_adapter takes"),
        (lambda p: p.push_merged("dir"), "push_merged takes a torch module, not str"),
        (lambda p: p.push_merged_async("dir"), "push_merged takes a torch module, not str"),
        (lambda p: p.push_adapter(_MODEL, 3), "names are strings"),
        (lambda p: p.push_adapter(_MODEL, None), "names are strings"),
        (lambda p: p.push_base(_MODEL, timeout_seconds=0), "timeout_seconds=0"),
        (lambda p: p.push_base(_MODEL, timeout_seconds=-3.0), "timeout_seconds=-3.0"),
        (lambda p: p.push_base(_MODEL, require="most"), "require='most'"),
        (lambda p: p.push_base_async(_MODEL, when_busy="drop"), "when_busy='drop'"),
    ],
)
def test_a_bad_push_is_refused_before_anything_is_tried(
    push: Callable[[Publisher], object], match: str
) -> None:
    with (
        Publisher(NOWHERE, trainer_id="t", connect_seconds=300) as publisher,
        pytest.raises(InvalidRequestError, match=match),
    ):
        push(publisher)


def test_a_closed_publisher_says_so() -> None:
    publisher = Publisher(NOWHERE, trainer_id="t", connect_seconds=300)
    publisher.close()
    publisher.close()
    for push in (publisher.push_base, publisher.push_base_async, publisher.push_merged):
        with pytest.raises(InvalidRequestError, match="is closed") as caught:
            push(_MODEL)
        assert caught.value.reason == "PUBLISHER_CLOSED"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "megatron"}, "'zero3'"),
        ({"check_finite": None}, "check_finite=None: use one of True, False"),
        ({"cast": 1}, "cast=1: use one of True, False"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        PushOptions(**options)


@pytest.mark.parametrize(
    ("base", "requested"),
    [
        ("auto", RequestedBase()),
        ("same", RequestedBase(is_required=True)),
        ("any", RequestedBase(is_compared=False)),
        ("base@3", RequestedBase(version=3)),
        (PolicyVersion("base", 0), RequestedBase(version=0)),
        ("only base@3", RequestedBase(version=3, is_required=True)),
    ],
)
def test_one_word_says_which_base_an_adapter_is_for(base: Any, requested: RequestedBase) -> None:
    assert RequestedBase.parse(base) == requested


@pytest.mark.parametrize(
    "base", [None, 3, True, "", "warn", "base", "base@-1", "base@x", "math@3", "only", "only same"]
)
def test_what_cannot_be_meant_of_a_base(base: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'auto', 'same', 'any', 'base@N' of the base"):
        RequestedBase.parse(base)

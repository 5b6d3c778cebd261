"""What the protos' comments say of statuses, and whether a call has kept to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from weft_rl.contract.errors import WeftError
from weft_rl.rpc import inbound, reflection
from weft_rl.v1 import (
    admin_pb2,
    generate_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
)

_FILES = (
    admin_pb2, generate_pb2, inspect_pb2, publish_pb2, registry_pb2, rendezvous_pb2, replica_pb2,
)  # fmt: skip
_CODES = (
    "INVALID_ARGUMENT|NOT_FOUND|ALREADY_EXISTS|FAILED_PRECONDITION|ABORTED|RESOURCE_EXHAUSTED|"
    "UNAVAILABLE|DEADLINE_EXCEEDED|DATA_LOSS|UNIMPLEMENTED|PERMISSION_DENIED|INTERNAL"
)
_WORD = re.compile(rf"(?:(?P<code>{_CODES})/)?(?P<reason>[A-Z][A-Z]+(?:_[A-Z]+)*)\b")
_SERVICE, _METHOD = 6, 2  # in the path of a method: fields of a file, and of a service
#: Every call may answer these: see types.proto.
ANYWHERE = {
    ("INVALID_ARGUMENT", "INVALID_REQUEST"),
    ("INTERNAL", "INTERNAL"),
    ("UNAVAILABLE", "COORDINATOR_AWAY"),
    ("RESOURCE_EXHAUSTED", "TOO_SLOW"),
    ("UNAUTHENTICATED", "UNAUTHENTICATED"),
    ("PERMISSION_DENIED", "ROLE_MISSING"),
    ("PERMISSION_DENIED", "POLICY_NOT_ALLOWED"),
    ("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS"),
}
#: What has its answer from elsewhere: a transfer's own failure, "or the reason that a rank gave".
_ANYTHING = {"/weft.v1.PublishService/AwaitTransfer"}


@cache
def comments() -> dict[str, str]:
    """What is said of the statuses of each method, by its path: in its own comment, and in that
    of its service."""
    found = {}
    for module in _FILES:
        file = reflection.described(module.DESCRIPTOR)
        said = {(*p.path,): p.leading_comments for p in file.source_code_info.location}
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):
                both = said[_SERVICE, i], said[_SERVICE, i, _METHOD, j]
                listed = (re.split(r"Statuses[^:]*:", comment, maxsplit=1)[1:] for comment in both)
                path = f"/{file.package}.{service.name}/{method.name}"
                found[path] = ". ".join(text for (text,) in filter(None, listed))
    return found


@cache
def statuses(method: str) -> frozenset[tuple[str, str]]:
    """Statuses and reasons that the comment of a method lists: ``STATUS/REASON``, and after a
    comma or an "or" further reasons of the same status. What a parenthesis says is skipped."""
    listed = comments()[method]
    while (shorter := re.sub(r"\([^()]*\)", "", listed)) != listed:
        listed = shorter
    code, found = "", set[tuple[str, str]]()
    for word in _WORD.finditer(listed):
        code = word["code"] or code
        if code:
            found.add((code, word["reason"]))
    return frozenset(found)


def undocumented(method: str, status: str, reason: str) -> str:
    """What is wrong with a failure of a method; empty where its comment lists it."""
    if method in _ANYTHING or (status, reason) in ANYWHERE:
        return ""
    if (status, reason) in statuses(method):
        return ""
    return f"{method} answered {status}/{reason}, which its comment does not list"


@pytest.fixture(autouse=True)
def keeps_to_comments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in whose process a call was answered with a status that its comment lacks."""
    wrong = set[str]()
    typed = inbound._typed

    def checked(error: Exception, method: str) -> WeftError:
        made = typed(error, method)
        if not isinstance(error, NotImplementedError):  # of a double without the method
            wrong.add(undocumented(method, made.status, made.reason))
        return made

    monkeypatch.setattr(inbound, "_typed", checked)
    yield
    wrong.discard("")
    assert not wrong, "\n".join(sorted(wrong))

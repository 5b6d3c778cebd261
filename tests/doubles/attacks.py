"""What hostile clients do to a coordinator: tests ask what each is answered, and
``benchmarks.attacked`` pushes meanwhile.

``python -m tests.doubles.attacks NAME TARGET`` does one of ``ATTACKS`` again and again, with the
credentials of its environment: from the first line of its input, ``attacking`` is printed once an
attempt is answered, until the second, when it prints how often it was answered what, as JSON.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from tests.doubles.certificates import Authority
from tests.doubles.raw_http2 import DATA, HEADERS, RawClient, frame
from weft_rl.contract.errors import WeftError
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import admin_pb2, types_pb2
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

SECONDS = 10.0
Attempts: TypeAlias = Generator[str, None, None]
#: Who is known: a trainer, and Mallory, who may push a policy of her own.
ACCESS = """
[[identity]]
san = "127.0.0.1"
roles = ["replica", "coordinator"]

[[identity]]
san = "trainer.test"
roles = ["publish"]
policies = ["math", "code"]

[[identity]]
san = "mallory.test"
roles = ["publish", "inspect"]
policies = ["chess"]
"""
#: The beginning of a message of 1 MiB.
_BEGUN = b"\0\0\x10\0\0"
#: A status, as HPACK has it the first time on a connection.
_RESOURCE_EXHAUSTED = b"grpc-status\x018"


def identities(
    authority: Authority, folder: Path, mallory: str = "mallory.test"
) -> dict[str, Credentials]:
    """What clients show, good and bad, to a server that trusts ``authority``."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    strange = Authority(folder).credentials(mallory, file="strange")
    return {
        "trainer": authority.credentials("trainer.test"),
        "mallory": authority.credentials(mallory),
        "nobody": Credentials(tls_ca=authority.path),
        "strange": replace(strange, tls_ca=authority.path),
        "expired": authority.credentials(mallory, file="expired", not_after=yesterday),
    }


def refusal(call: Callable[[], object]) -> WeftError:
    """The error that a call is answered with, which must not succeed."""
    try:
        call()
    except grpc.RpcError as error:
        return error_from_rpc(error)
    raise AssertionError("what an attacker asks for was done")


# -- requests ------------------------------------------------------------------------


def acquire(stub: PublishServiceStub, policy: str, session: str, **more: Any) -> int:
    """Take a lease of an adapter; returns its fencing token."""
    request = pb.AcquirePolicyRequest(
        policy=policy, kind=types_pb2.POLICY_KIND_ADAPTER, trainer_id="t", session_id=session,
        **more,
    )  # fmt: skip
    token: int = stub.AcquirePolicy(request, timeout=SECONDS).lease.fencing_token
    return token


def displaced(stub: PublishServiceStub) -> tuple[int, int]:
    """The fencing token of the session ``old`` of ``code``, and of ``new``, which took over."""
    old = acquire(stub, "code", "old")
    return old, acquire(stub, "code", "new", displaced_token=old)


def begin(stub: PublishServiceStub, token: int, session: str) -> object:
    """Begin a push of ``code``, as the holder of this lease does."""
    request = pb.BeginTransferRequest(
        policy="code", fencing_token=token, session_id=session, request_id="again",
        layout_digest=bytes(32), backend="gloo", protocol_revision=PROTOCOL_REVISION,
    )  # fmt: skip
    return stub.BeginTransfer(request, timeout=SECONDS)


def abort(stub: PublishServiceStub, policy: str, token: int) -> object:
    """Abort somebody's push."""
    request = pb.AbortTransferRequest(transfer_id="t-1", policy=policy, fencing_token=token)
    return stub.AbortTransfer(request, timeout=SECONDS)


# -- attacks: each step is an attempt, and yields what it was answered -----------------


def handshakes(target: str, who: Credentials) -> Attempts:
    """Connections of somebody who shows a bad certificate, or none."""
    while True:
        try:
            with closing(RawClient(target, who)) as client:
                answered = next(client.frames(SECONDS), None)
                yield "it is served" if answered else "no connection"
        except OSError:
            yield "no connection"


def wrong_role(target: str, who: Credentials) -> Attempts:
    """Orders of somebody who is known, and is no operator."""
    with open_channel(target, who) as channel:
        stub, order = AdminServiceStub(channel), admin_pb2.CordonRequest(replica_id="replica-0")
        while True:
            yield refusal(lambda: stub.Cordon(order, timeout=SECONDS)).reason


def other_policy(target: str, who: Credentials) -> Attempts:
    """The fencing token of a lease of one's own, for somebody else's policy."""
    with open_channel(target, who) as channel:
        stub = PublishServiceStub(channel)
        token = acquire(stub, "chess", "m")
        while True:
            yield refusal(lambda: abort(stub, "math", token)).reason


def replayed_token(target: str, who: Credentials) -> Attempts:
    """The fencing token of a lease that somebody has taken over."""
    with open_channel(target, who) as channel:
        stub = PublishServiceStub(channel)
        old, _ = displaced(stub)
        while True:
            yield refusal(lambda: begin(stub, old, "old")).reason


def oversized(target: str, who: Credentials) -> Attempts:
    """The beginning of a message that says it is a byte above the bound."""
    size = (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")
    while True:
        with closing(RawClient(target, who)) as client:
            call = "weft.v1.PublishService/RenewLease"
            stream = client.call(call, b"\0" + size + b"x" * 16_000, whole=False)
            frames = client.frames(SECONDS)
            ended = next(f.data for f in frames if (f.kind, f.stream) == (HEADERS, stream))
            yield "RESOURCE_EXHAUSTED" if _RESOURCE_EXHAUSTED in ended else "another status"


def idle_connections(target: str, who: Credentials, count: int = 1000) -> Attempts:
    """Connections on which nothing is ever asked."""
    with ExitStack() as stack:
        idle = [stack.enter_context(closing(RawClient(target, who))) for _ in range(count)]
        for client in idle:
            assert next(client.frames(SECONDS), None), "it is not served"
        while True:
            yield "held"


def slow_streams(target: str, who: Credentials, clients: int = 10) -> Attempts:
    """A hundred calls on each connection whose requests come a byte at a time."""
    with ExitStack() as stack:
        calls = {}
        for _ in range(clients):
            client = stack.enter_context(closing(RawClient(target, who)))
            method = "weft.v1.PublishService/PutManifest"
            calls[client] = [client.call(method, _BEGUN, whole=False) for _ in range(100)]
        while True:
            for client, streams in calls.items():
                client.send(b"".join(frame(DATA, 0, stream, b"x") for stream in streams))
            yield "held"


def unread_watches(target: str, who: Credentials, clients: int = 10) -> Attempts:
    """Ten watches on each connection that never read what comes."""
    with ExitStack() as stack:
        for _ in range(clients):
            client = stack.enter_context(closing(RawClient(target, who, window=0)))
            for _ in range(10):
                client.call("weft.v1.InspectService/WatchEvents")
        while True:
            yield "held"


@dataclass(frozen=True)
class Attack:
    """An attack as it is run in a process of its own."""

    text: str
    attempts: Callable[[str, Credentials], Attempts]
    who: str
    """Which of ``identities`` it shows."""
    answer: str
    """What every attempt must be answered."""
    per_second: float = 50.0
    """Attempts, at most; what an attack costs the attacker is not what is asked."""


ATTACKS = {
    "no-certificate": Attack("no certificate", handshakes, "nobody", "no connection"),
    "wrong-ca": Attack("another CA's certificate", handshakes, "strange", "no connection"),
    "expired": Attack("an expired certificate", handshakes, "expired", "no connection"),
    "wrong-role": Attack("right certificate, wrong role", wrong_role, "mallory", "ROLE_MISSING"),
    "other-policy": Attack(
        "a token for another policy", other_policy, "mallory", "POLICY_NOT_ALLOWED"
    ),
    "replayed-token": Attack(
        "a replayed fencing token", replayed_token, "trainer", "LEASE_FENCED"
    ),
    "oversized": Attack("messages above 4 MiB", oversized, "mallory", "RESOURCE_EXHAUSTED"),
    "idle": Attack("1,000 idle connections", idle_connections, "mallory", "held"),
    "slow-streams": Attack(
        "1,000 slow-loris streams", slow_streams, "mallory", "held", per_second=1.0
    ),
    "unread": Attack("100 watches that never read", unread_watches, "mallory", "held"),
}  # fmt: skip


def main(name: str, target: str) -> None:
    """Attack from one line of standard input to the next, or its end."""
    attack, answers = ATTACKS[name], Counter[str]()
    sys.stdin.readline()
    with closing(attack.attempts(target, Credentials.from_environment())) as attempts:
        for answer in attempts:
            answers[answer] += 1
            if answers.total() == 1:
                print("attacking", flush=True)
            if select.select([sys.stdin], [], [], 1.0 / attack.per_second)[0]:
                break
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Pushes where everybody shows a certificate, or a token, and has its own role."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.certificates import Authority
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, lora, peft_of, same, weights
from tests.waits import until
from trainer_side import Publisher, Tls
from weft_rl.contract.errors import NotAllowedError, WeftError
from weft_rl.coordinator.runtime.live_groups import LiveGroups
from weft_rl.rpc.security.credentials import VARIABLES, Credentials
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security

_TOKENS = {name: f"{name}-0123456789abcdef0123456789abcdef" for name in ("trainer", "replica")}
_COORDINATOR = """
[[identity]]
{replica}
roles = ["replica"]

[[identity]]
{trainer}
roles = ["publish"]
policies = ["math", "base"]
"""
_REPLICA = """
[[identity]]
{replica}
roles = ["coordinator"]
"""


def _sans() -> dict[str, str]:
    return {"replica": 'san = "127.0.0.1"', "trainer": 'san = "trainer.test"'}


def _tokens() -> dict[str, str]:
    return {
        name: f'name = "{name}"\ntoken_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"'
        for name, token in _TOKENS.items()
    }


@pytest.fixture(params=["certificates", "tokens"])
def secured(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pool, dict[str, Any]]]:
    """A pool of two, and how a trainer is known there."""
    authority = Authority(tmp_path)
    known = _sans() if request.param == "certificates" else _tokens()
    at_coordinator, at_replica = tmp_path / "coordinator.toml", tmp_path / "replica.toml"
    at_coordinator.write_text(_COORDINATOR.format(**known))
    at_replica.write_text(_REPLICA.format(**known))
    server = authority.credentials("localhost", "127.0.0.1", file="server")
    trainer: dict[str, Any] = {"tls": Tls(ca=authority.path), "token": _TOKENS["trainer"]}
    if request.param == "certificates":
        own = authority.credentials("trainer.test")
        trainer = {"tls": Tls(ca=own.tls_ca, cert=own.tls_cert, key=own.tls_key)}
    else:
        file = tmp_path / "token"
        file.write_text(_TOKENS["replica"])
        server = Credentials(
            tls_cert=server.tls_cert,
            tls_key=server.tls_key,
            tls_ca=server.tls_ca,
            token_file=str(file),
        )
    for variable, value in server.to_environment().items():
        monkeypatch.setenv(variable, value)
    with running_pool(tmp_path / "weft.db", credentials=server, access=at_coordinator) as pool:
        pool.security = Security(credentials=server, access=AccessFile(at_replica))
        for replica_id in ("replica-0", "replica-1"):
            pool.add_replica(replica_id, EngineDouble(weights(Model())))
        yield pool, trainer


def _engines(pool: Pool) -> list[EngineDouble]:
    engines = [agent.engine for agent in pool.agents.values()]
    assert all(isinstance(engine, EngineDouble) for engine in engines)
    return engines  # type: ignore[return-value]


def test_a_push_goes_through_and_one_of_another_policy_does_not(
    secured: tuple[Pool, dict[str, Any]],
) -> None:
    pool, known = secured
    model = peft_of(Model())
    with Publisher(pool.target, trainer_id="t", timeout_seconds=20, **known) as publisher:
        assert str(publisher.push_adapter(model, "math").version) == "math@1"
        with pytest.raises(NotAllowedError) as refused:
            publisher.push_adapter(model, "chess")
        assert refused.value.reason == "POLICY_NOT_ALLOWED"
        assert str(publisher.push_base(Model(seed=5)).version) == "base@1"
    assert all(same(engine.adapter("math@1"), lora(model)) for engine in _engines(pool))


def test_a_stranger_is_told_why(
    secured: tuple[Pool, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, known = secured
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    stranger: dict[str, Any] = {"tls": known["tls"], "token": "guessed"}
    if "token" not in known:
        ca = str(known["tls"].ca)
        own = Authority(tmp_path).credentials("trainer.test", file="strange")
        stranger = {"tls": Tls(ca=ca, cert=own.tls_cert, key=own.tls_key)}
    with (
        Publisher(
            pool.target, trainer_id="t", timeout_seconds=20, connect_seconds=2, **stranger
        ) as publisher,
        pytest.raises(WeftError) as refused,
    ):
        publisher.push_adapter(peft_of(Model()), "math")
    assert refused.value.reason in ("UNAUTHENTICATED", "COORDINATOR_UNREACHABLE")
    if refused.value.reason == "COORDINATOR_UNREACHABLE":
        assert "certificate" in refused.value.message


def test_a_mistake_that_refuses_every_replica_ends_none(
    secured: tuple[Pool, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the access file, or a token that is rotated first: they serve on, and are back."""
    monkeypatch.setattr("weft_rl.rpc.security.guard.LOOK_SECONDS", 0.05)
    pool, known = secured
    file = tmp_path / ("token" if "token" in known else "coordinator.toml")
    right = file.read_text()
    agents = list(pool.agents.values())
    model = peft_of(Model())
    with Publisher(pool.target, trainer_id="t", timeout_seconds=20, **known) as publisher:
        publisher.push_adapter(model, "math")
        file.write_text(right.replace("127.0.0.1", "elsewhere").replace("replica-", "replaced-"))
        until(lambda: not any(agent.is_ready for agent in agents))
        until(lambda: all("UNAUTHENTICATED" in agent.refusing for agent in agents))
        assert all(str(agent.requested("math@1")) == "math@1" for agent in agents)
        file.write_text(right)
        until(lambda: all(agent.is_ready for agent in agents))
        assert str(publisher.push_adapter(model, "math").version) == "math@2"


@pytest.mark.parametrize("secured", ["certificates"], indirect=True)
def test_certificates_are_rotated_under_running_pushes(
    secured: tuple[Pool, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, known = secured
    tls = known["tls"]
    monkeypatch.setattr("weft_rl.rpc.channel._LOOK_SECONDS", 0.0)
    stop = threading.Event()
    pushed, failures = [], []

    def push() -> None:
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20, **known) as publisher:
            while not stop.is_set():
                try:
                    pushed.append(str(publisher.push_adapter(peft_of(Model()), "math").version))
                except WeftError as error:
                    failures.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    try:
        pool_ca = Authority.of(str(tls.ca))
        for _ in range(5):
            before = len(pushed)
            pool_ca.issue(str(tls.cert), str(tls.key), "trainer.test")
            server = Credentials.from_environment()
            pool_ca.issue(server.tls_cert, server.tls_key, "localhost", "127.0.0.1")
            deadline = threading.Event()
            while len(pushed) < before + 2 and not failures and not deadline.wait(0.05):
                assert thread.is_alive()
    finally:
        stop.set()
        thread.join(30)
    assert not failures
    assert len(pushed) >= 10


@pytest.mark.parametrize("secured", ["tokens"], indirect=True)
@pytest.mark.parametrize("wrong", ["nobody", "trainer"])
def test_a_token_of_the_coordinators_own_that_is_wrong_is_found_before_bytes_are_sent(
    secured: tuple[Pool, dict[str, Any]],
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a group that is kept nobody is told to join: it was found at the commit."""
    pool, known = secured
    file = tmp_path / "token"
    started = list[str]()
    send_start = LiveGroups.send_start

    def noting(groups: LiveGroups, group_id: str, *args: Any) -> None:
        started.append(group_id)
        send_start(groups, group_id, *args)

    with Publisher(pool.target, trainer_id="t", timeout_seconds=20, **known) as publisher:
        publisher.push_adapter(peft_of(Model()), "math")
        monkeypatch.setattr(LiveGroups, "send_start", noting)
        file.write_text(_TOKENS.get(wrong, "x" * 40))
        began = time.monotonic()
        with pytest.raises(NotAllowedError, match="refuses this coordinator"):
            publisher.push_adapter(peft_of(Model(3)), "math")
        assert time.monotonic() - began < 5
        assert not started
        file.write_text(_TOKENS["replica"])
        model = peft_of(Model(4))
        version = publisher.push_adapter(model, "math").version
    assert all(same(engine.adapter(str(version)), lora(model)) for engine in _engines(pool))

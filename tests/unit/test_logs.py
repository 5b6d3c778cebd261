"""How lines are written, in either format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from weft import logs
from weft.rpc.security.guard import audit

_NAMES = ("weft", "rollout_side", "trainer_side", "weft.audit")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    kept = [
        (logger, logger.handlers[:], logger.level, logger.propagate)
        for logger in map(logging.getLogger, _NAMES)
    ]
    yield
    for logger, handlers, level, propagate in kept:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_text(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("weft.x").info("%d of %s", 1, "two")
    logging.getLogger("weft.x").debug("not this")
    assert capfd.readouterr().err.endswith(" INFO weft.x: 1 of two\n")


def test_json_is_one_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    logging.getLogger("rollout_side.x").warning('a "b"\nand more: %s', "ä")
    try:
        raise ValueError("twice")
    except ValueError:
        logging.getLogger("weft").exception("failed")
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "WARNING",
        "logger": "rollout_side.x",
        "message": 'a "b"\nand more: ä',
    }
    assert second["exception"].endswith("ValueError: twice")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_audit_log_is_json_in_either_format(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", log_format)
    logs.configure("info", log_format)  # again changes nothing
    audit("anna", "ipv4:10.0.0.7:1", "weft.v1.AdminService/Pin", {"policy": "math"}, "OK")
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["who"], line["policy"], line["result"]) == ("anna", "math", "OK")


def test_children_log_as_their_parent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "info")
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    logs.configure_as_parent()
    logging.getLogger("rollout_side").info("here")
    assert json.loads(capfd.readouterr().err)["message"] == "here"


@pytest.mark.parametrize(("level", "log_format"), [("loud", "text"), ("info", "xml")])
def test_what_there_is_not(level: str, log_format: str) -> None:
    with pytest.raises(ValueError, match="there is no log"):
        logs.configure(level, log_format)

"""How lines are written, in either format."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft_rl import logs
from weft_rl.rpc.security.guard import audit

_NAMES = ("weft_rl", "rollout_side", "trainer_side", "weft_rl.audit")


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
    logging.getLogger("weft_rl.x").info("%d of %s", 1, "two")
    logging.getLogger("weft_rl.x").debug("not this")
    assert capfd.readouterr().err.endswith(" INFO weft_rl.x: 1 of two\n")


def test_json_is_one_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    logging.getLogger("rollout_side.x").warning('a "b"\nand more: %s', "ä")
    try:
        raise ValueError("twice")
    except ValueError:
        logging.getLogger("weft_rl").exception("failed")
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


_PRINTS = r"""
import logging, os, subprocess, sys, warnings
from weft_rl import logs
logs.configure("info", "json")
logs.write_json_only()
logging.getLogger("weft_rl.x").info("ours")
print("printed", flush=True)
os.write(2, b"by a library in C\n\n")
warnings.warn("beware", stacklevel=1)
subprocess.run(["sh", "-c", "echo by a child; echo 50% >&2"], check=True)
print("10%\r20%\r100%", file=sys.stderr)
print('(EngineCore pid=7) {"message": "by vLLM"}')
print("{no object}")
raise ValueError("twice")
"""


def test_every_line_of_a_process_is_json_from_the_first_to_the_last() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    printed = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    assert printed == ["printed", "by a child", "by vLLM", "{no object}"]
    errors = [json.loads(line) for line in done.stderr.splitlines()]
    said = {error["message"] for error in errors}
    assert {"ours", "by a library in C", "100%", "50%"} <= said
    assert any("UserWarning: beware" in line for line in said)
    (last,) = [error for error in errors if "exception" in error]
    assert last["exception"].endswith("ValueError: twice")


def test_vllms_processes_are_told_to_write_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(logs.VLLM_VARIABLE, "own.json")
    logs.configure_vllm()
    assert os.environ[logs.VLLM_VARIABLE] == "own.json"  # the user's stays
    monkeypatch.setenv(logs.VLLM_VARIABLE, "")
    logs.configure_vllm("warning")
    made = json.loads(Path(os.environ[logs.VLLM_VARIABLE]).read_text())
    root = logging.getLogger()
    kept = root.handlers[:]
    try:
        logging.config.dictConfig(made)  # as vLLM does
        logger = logging.getLogger("vllm.engine")
        logger.warning("%d blocks", 7, extra={"vllm_process_name": "EngineCore"})
        logger.info("not this")
        logging.getLogger("other.library").warning("beware")
    finally:
        root.handlers[:] = kept
        logging.getLogger("vllm").handlers.clear()
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["message"], first["process"]) == ("7 blocks", "EngineCore")
    assert (second["logger"], second["message"]) == ("other.library", "beware")


def test_a_thread_that_ends_by_an_error_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    logs.configure("info", "json")

    def fail() -> None:
        raise ValueError("nobody expected this")

    thread = threading.Thread(target=fail, name="weft-x")
    thread.start()
    thread.join()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "the thread weft-x has ended"
    assert "nobody expected this" in json.loads(line)["exception"]


@pytest.mark.parametrize("module", ["trainer_side", "weft_rl.cli"])
def test_a_line_of_bitsandbytes_that_says_nothing_is_left_out(module: str) -> None:
    said = (
        f"import logging, {module}\n"
        "logger = logging.getLogger('bitsandbytes.backends.cpu.ops')\n"
        "logger.warning('Failed to load CPU gemm_4bit_forward from kernels-community: %s.', 1)\n"
        "logger.warning('of something else')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "of something else\n"

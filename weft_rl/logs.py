"""Logging of Weft's processes."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, get_args

_log = logging.getLogger(__name__)

#: Environment variable that says from which level on; child processes inherit it.
LEVEL_VARIABLE = "WEFT_LOG_LEVEL"
#: Environment variable that says how lines are written; child processes inherit it.
FORMAT_VARIABLE = "WEFT_LOG_FORMAT"
LogFormat = Literal["text", "json"]
_NAMES = ("weft_rl", "rollout_side", "trainer_side")
#: Its lines are JSON objects already.
_AUDIT = "weft_rl.audit"
#: Names the file by which vLLM's processes configure their logging, from their first line on.
VLLM_VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
#: How long the last lines of a process may take to be written; the longest that one may be.
_VLLM_PREFIX: Final = re.compile(r"^(\x1b\[[\d;]*m)?\([^()]* pid=\d+\)(\x1b\[[\d;]*m)? ")
_LAST_LINES_SECONDS, _MAX_LINE_BYTES = 1.0, 2**20


class JsonFormatter(logging.Formatter):
    """Formatter that writes a record as one line, a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if process := getattr(record, "vllm_process_name", ""):
            line["process"] = process
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, log_format: str = "text") -> None:
    """Write our own lines, from ``level`` on, to the standard error. Idempotent.

    By a handler of our own: libraries configure the root logger, or find that another
    one has. The audit log has one JSON object a line in either format.

    Raises:
        ValueError: There is no such level, or no such format.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}")
    if log_format not in get_args(LogFormat):
        raise ValueError(f"there is no log format {log_format!r}")
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    formatter = JsonFormatter() if log_format == "json" else text
    for name in _NAMES:
        _write(name, formatter).setLevel(number)
    _write(_AUDIT, logging.Formatter("%(message)s"))
    threading.excepthook = _say_end


def _say_end(ended: threading.ExceptHookArgs) -> None:
    """Say in the log that a thread has ended by an error; its owner finds out by itself."""
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = ended.thread.name if ended.thread is not None else "unknown"
    _log.critical("the thread %s has ended", name, exc_info=ended.exc_value)


def _write(name: str, formatter: logging.Formatter) -> logging.Logger:
    """Have a logger write to the standard error, and nowhere else."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.propagate = False
    return logger


def configure_vllm(level: str | None = None) -> None:
    """Configure vLLM's processes, this one included, to write JSON; a configuration that they have
    otherwise stays.

    Args:
        level: Level of vLLM's own lines; VLLM_LOGGING_LEVEL, or INFO, if None.
    """
    if os.environ.get(VLLM_VARIABLE) or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}
    config: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.{JsonFormatter.__name__}"}},
        "handlers": {"all": handler, "warnings": {**handler, "level": "WARNING"}},
        "loggers": {
            "vllm": {
                "handlers": ["all"],
                "level": (level or os.environ.get("VLLM_LOGGING_LEVEL", "INFO")).upper(),
                "propagate": False,
            },
        },
        "root": {"handlers": ["warnings"]},
    }
    descriptor, path = tempfile.mkstemp(suffix=".json", prefix="weft-logs-")
    with os.fdopen(descriptor, "w") as file:
        json.dump(config, file)
    os.environ[VLLM_VARIABLE] = path
    atexit.register(Path(path).unlink, missing_ok=True)


def write_json_only() -> None:
    """Make JSON objects of all other lines that this process and its children print from now on:
    warnings, exceptions that nobody catches, and what libraries in C write.

    They go through a pipe to a thread of this process; JSON objects pass as they are.
    """
    logging.captureWarnings(True)
    _write("py.warnings", JsonFormatter())
    sys.excepthook = _log_exception
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        _PrintedLines(stream, descriptor).start()


def _log_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger(__name__).critical("the process ends", exc_info=(kind, error, traceback))


class _PrintedLines:
    """Lines that are printed to a descriptor, which becomes a pipe."""

    def __init__(self, stream: Any, descriptor: int) -> None:
        self._stream, self._descriptor = stream, descriptor
        self._out = os.dup(descriptor)
        self._lines, writes = os.pipe()
        os.dup2(writes, descriptor)
        os.close(writes)
        self._name = "stderr" if descriptor == 2 else "stdout"
        self._thread = threading.Thread(target=self._run, name=f"json-{self._name}", daemon=True)

    def start(self) -> None:
        """Start the thread; it ends with the process, once its last lines are written."""
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
        os.dup2(self._out, self._descriptor)
        # A child that lives on has the pipe, too: it is not waited for.
        self._thread.join(_LAST_LINES_SECONDS)

    def _run(self) -> None:
        rest = b""
        while chunk := os.read(self._lines, 2**16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._write(lines)
        self._write([rest])

    def _write(self, lines: list[bytes]) -> None:
        made = [_as_object(line, self._name) for line in lines]
        left = memoryview("".join(f"{line}\n" for line in made if line).encode())
        while left:
            try:
                left = left[os.write(self._out, left) :]
            except OSError:  # nobody reads any more
                return


def _as_object(line: bytes, name: str) -> str:
    """Return a printed line as a JSON object; as it is, where it is one; empty where it says
    nothing."""
    # A progress bar writes over what it wrote.
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2].rstrip()
    # vLLM's processes put who they are before what is written to their streams.
    whole = _VLLM_PREFIX.sub("", text)
    if whole.startswith("{") and whole.endswith("}"):
        with contextlib.suppress(ValueError):
            json.loads(whole)
            return whole
    if not text:
        return ""
    return JsonFormatter().format(
        logging.LogRecord(f"printed.{name}", logging.INFO, "", 0, "%s", (text,), None)
    )


def leave_out_noise() -> None:
    """Leave out a line of bitsandbytes' about a kernel that it does without; before its import."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    if _is_no_noise not in logger.filters:
        logger.addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in str(record.msg)


def configure_as_parent() -> None:
    """Configure logging as ``weft``, which started this process, told it to."""
    level = os.environ.get(LEVEL_VARIABLE, "warning")
    configure(level, os.environ.get(FORMAT_VARIABLE, "text"))

"""The demo's processes end with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from tests.waits import until
from weft_rl.cli.demo.main import _how_far
from weft_rl.cli.demo.processes import Process
from weft_rl.progress import STARTING

_PARENT = """
import sys, time
from pathlib import Path
from weft_rl.cli.demo.processes import Process
child = Process("child", ["-c", "import time; print('up', flush=True); time.sleep(60)"],
                Path(sys.argv[1]), {})
child.line(lambda text: text == "up", 20)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_demo_that_is_killed_leaves_no_process(tmp_path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert select.select([child], [], [], 10)[0], "the child outlived it"
    finally:
        parent.stdout.close()
        os.close(child)


_STOPPING = """
import signal, sys, time
from pathlib import Path
from weft_rl.cli.demo.processes import interrupt_once
signal.signal(signal.SIGTERM, interrupt_once)
try:
    print("up", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.5)
    Path(sys.argv[1]).touch()
"""


def test_who_is_stopping_its_own_is_interrupted_once(tmp_path) -> None:
    """Its parent's end is signalled more than once, and so may an impatient caller."""
    stopped = tmp_path / "stopped"
    child = subprocess.Popen(
        [sys.executable, "-c", _STOPPING, stopped], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.send_signal(signal.SIGTERM)
    until(lambda: child.send_signal(signal.SIGTERM) or child.poll() is not None, every_seconds=0.02)
    child.communicate(timeout=10)
    assert stopped.exists()


def test_the_demo_says_what_each_replica_does(tmp_path) -> None:
    """As their logs say, which they write every few seconds while an engine starts."""
    first, second = (Process(name, ["-c", ""], tmp_path, {}) for name in ("replica-0", "replica-1"))
    try:
        assert _how_far([first, second]) == "the replicas' processes start"
        first.log_path.write_text(
            f"12:00 INFO main: {STARTING}: importing vLLM (5 s)\n"
            f"12:01 INFO main: {STARTING}: starting the engine of /tmp/model (15 s)\nother\n"
        )
        assert _how_far([first, second]) == "replica-0 starting the engine"
        second.log_path.write_text(f"12:00 INFO main: {STARTING}: importing vLLM (5 s)\n")
        assert _how_far([first, second]) == (
            "replica-0 starting the engine, replica-1 importing vLLM"
        )
    finally:
        first.stop()
        second.stop()

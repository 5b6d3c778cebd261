"""The demo's processes end with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

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
    while child.poll() is None and not stopped.exists():
        child.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    child.communicate(timeout=10)
    assert stopped.exists()

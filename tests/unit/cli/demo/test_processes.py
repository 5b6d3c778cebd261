"""The demo's processes end with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_PARENT = """
import sys, time
from pathlib import Path
from weft_cli.demo.processes import Process
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

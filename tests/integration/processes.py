"""The coordinator as a process of its own."""

from weft_rl.cli.demo.processes import Process

COORDINATOR = (
    "-m", "weft_rl", "coordinator", "--heartbeat-seconds", "0.2", "--lost-after-seconds", "3",
)  # fmt: skip


def start_coordinator(work, listen="127.0.0.1:0"):
    args = (*COORDINATOR, "--listen", listen, "--catalog", str(work / "weft.db"))
    process = Process("coordinator", args, work, {})
    line = process.line(lambda text: text.startswith("listening on "), 30)
    return process, line.removeprefix("listening on ")

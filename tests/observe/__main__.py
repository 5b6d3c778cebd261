"""``make observe``: a real Prometheus looks at the demo.

promtool tests the alerts of the chart; then Prometheus scrapes ``weft demo --keep``, and every
panel of the dashboard, and every series that an alert asks for, must have data. What has none is
named. Everything listens on loopback, and ends by its pid.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.observe import rules
from tests.observe.dashboard import panels
from tests.observe.prometheus import Prometheus, Target, running
from tests.waits import until
from weft_rl.cli.demo.processes import Process, interrupt_once

_DEMO_SECONDS: Final = 240.0
_PUSH_SECONDS: Final = 120.0
_SCRAPE_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 60.0
#: Each series of these grows while trainers push an adapter and the base.
_MOVED_BY_PUSHES: Final = (
    "weft_pushes_started_total",
    'weft_pushes_finished_total{result="committed"}',
    "weft_bytes_staged_total",
    "weft_stage_seconds_count",
    "weft_commit_seconds_count",
    "weft_pause_seconds_count",
    "weft_switches_total",
    "weft_load_seconds_count",
    "weft_replica_pause_seconds_count",
)
#: Of Kubernetes, which is not here.
_NOT_OURS: Final = "kubelet_"


@contextmanager
def demo(work: Path) -> Iterator[tuple[str, list[Target]]]:
    """The demo, once it has passed and pushes on: its coordinator, and who has metrics."""
    process = Process("demo", ("-m", "weft_rl", "demo", "--keep"), work, {})
    try:
        said = process.line(lambda text: text.startswith("coordinator listens on "), _DEMO_SECONDS)
        coordinator = said.removeprefix("coordinator listens on ").partition(";")[0]
        targets: list[Target] = []
        while True:
            line = process.line(lambda text: bool(text.strip()), _DEMO_SECONDS)
            if found := re.match(r" +metrics of (\S+) +(http\S+)$", line):
                name = found[1]
                labels = rules.LABELS[re.sub(r"-\d+$", "", name)]
                targets.append(Target(found[2], labels["service"], {**labels, "pod": name}))
            elif targets:
                break
        yield coordinator, targets
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        finally:
            process.stop()


def await_that(what: str, unmet: Callable[[], list[str]], seconds: float) -> None:
    """Wait until nothing is unmet any more."""
    until(
        lambda: not unmet(),
        seconds,
        every_seconds=1.0,
        why=lambda: f"not all {what}: {'; '.join(unmet())}",
    )


def not_up(prometheus: Prometheus, targets: list[Target]) -> list[str]:
    """Targets that are not scraped, or whose job the dashboard does not offer."""
    up = {target["scrapeUrl"] for target in prometheus.targets() if target["health"] == "up"}
    offered = {series.labels["job"] for series in prometheus.query("weft_build_info")}
    return [t.url for t in targets if t.url not in up or t.job not in offered]


def not_moved(prometheus: Prometheus) -> list[str]:
    """Series that pushes have not moved yet."""
    still = []
    for counter in _MOVED_BY_PUSHES:
        if not prometheus.query(counter):
            still.append(f"there is no {counter}")
        unmoved = prometheus.query(f"{counter} unless increase({counter}[5m]) > 0")
        still += [f"{counter} {dict(series.labels)}" for series in unmoved]
    return still


def refuse_an_order(coordinator: str) -> None:
    """A call that is refused, which the pool counts by its reason."""
    command = [sys.executable, "-m", "weft_rl", "cordon", "nobody", "-c", coordinator]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, f"{done.stdout}{done.stderr}"


def empty_panels(prometheus: Prometheus) -> list[str]:
    """Panels of the dashboard that would show nothing, or not what their legend names."""
    empty = []
    for panel in panels():
        found = [s for s in prometheus.query(panel.expression) if math.isfinite(s.value)]
        if not found:
            empty.append(f"panel {panel.title!r} has no data: {panel.expression}")
        elif not any(panel.shown <= series.labels.keys() for series in found):
            empty.append(f"panel {panel.title!r} lacks a label of {sorted(panel.shown)}")
    return empty


def empty_alerts(prometheus: Prometheus, alerts: list[rules.Rule]) -> list[str]:
    """Alerts that could never fire: a series that they ask for is not there."""
    empty = [
        f"alert {rule['name']} cannot be evaluated: {rule['lastError']}"
        for rule in prometheus.rules()
        if rule["health"] != "ok"
    ]
    for alert in alerts:
        selectors = re.findall(r"\w+\{[^}]*\}", alert["expr"])
        assert selectors, alert["expr"]
        empty += [
            f"alert {alert['alert']} asks for what is not there: {selector}"
            for selector in selectors
            if not selector.startswith(_NOT_OURS) and not prometheus.query(selector)
        ]
    return empty


def observe(program: str, alerts: list[rules.Rule], rules_file: Path, work: Path) -> list[str]:
    """Scrape the demo; returns what has no data."""
    with demo(work) as (coordinator, targets):
        print(f"the demo runs, {len(targets)} of its processes have metrics", flush=True)
        assert len(targets) == 3, targets
        with running(program, targets, rules_file, work) as prometheus:
            await_that("is scraped", lambda: not_up(prometheus, targets), _SCRAPE_SECONDS)
            refuse_an_order(coordinator)
            await_that("is moved by pushes", lambda: not_moved(prometheus), _PUSH_SECONDS)
            print(f"{len(_MOVED_BY_PUSHES)} counters move with pushes", flush=True)
            empty = empty_panels(prometheus) + empty_alerts(prometheus, alerts)
            firing = [rule["name"] for rule in prometheus.rules() if rule["state"] == "firing"]
            print(f"alerts that fire: {', '.join(firing) or 'none'}", flush=True)
    return empty


def main() -> int:
    """Test the rules, then look at the demo."""
    parser = argparse.ArgumentParser(prog="python -m tests.observe", description=main.__doc__)
    parser.add_argument("--helm", default="helm", help="the program that renders the chart")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt_once)  # ends what runs, too
    prometheus, promtool = map(shutil.which, ("prometheus", "promtool"))
    if prometheus is None or promtool is None:
        print("Prometheus is not installed: apt-get install prometheus", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-observe-") as name:
        work = Path(name)
        alerts = rules.render(options.helm, work / "rules.yaml")
        count = rules.check(promtool, work / "rules.yaml", alerts)
        print(
            f"{len(alerts)} alerts fire on what they are for, and not else: {count} cases",
            flush=True,
        )
        empty = observe(prometheus, alerts, work / "rules.yaml", work)
    for line in empty:
        print(line)
    if not empty:
        num = len({panel.title for panel in panels()})
        print(f"{num} panels and {len(alerts)} alerts have data ({time.monotonic() - began:.0f} s)")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())

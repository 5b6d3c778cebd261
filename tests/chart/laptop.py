"""``make chart-run``: what ``helm install -f values-cpu.yaml`` starts, as processes.

The rendered pods run within the limits that they name (`pod_processes`): memory, /dev/shm, a
read-only root, volumes. The replicas must become ready; `helm test`'s pod pushes and asks; a base
is pushed, too; then every pod is stopped as Kubernetes does, within its grace period.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.chart.pod_processes import Pod, PodError, lacking, network
from tests.chart.rendering import NAMESPACE, Rendered, Resource, render

_READY_SECONDS = 400.0
_TEST_SECONDS = 300.0
_DOMAIN = f"{NAMESPACE}.svc.cluster.local"


def _say(text: str) -> None:
    print(text, flush=True)


def _run_test(pod: Pod) -> None:
    began = time.monotonic()
    pod.start()
    code = pod.wait(_TEST_SECONDS)
    if code != 0:
        raise PodError(f"{pod.name} ended with {code}\n{pod.tail()}")
    _say(
        f"{pod.name}: passed in {time.monotonic() - began:.0f} s; " + "; ".join(pod.check_limits())
    )


def _pushes_a_base(test: Resource) -> Resource:
    """The test's pod, which pushes the whole model instead."""
    spec = copy.deepcopy(test)
    (container,) = spec["containers"]
    container["command"] = ["weft", "push", "/models/tiny", "--policy=base", "--require=all"]
    container["args"] = ["--trainer-id=helm-test-base", f"--timeout={_TEST_SECONDS}"]
    return spec


def run(rendered: Rendered, work: Path, paths: dict[str, str]) -> None:
    """Install, push, ask, and uninstall; raises PodError for what Kubernetes would not bear."""
    files = {r["metadata"]["name"]: r["data"] for r in rendered.all("ConfigMap")}
    with network(work) as net, ExitStack() as ends:

        def pod(name: str, spec: Resource, image: str, *names: str) -> Pod:
            made = Pod(name, spec, net, work / name, paths[image], names, files)
            ends.callback(made.close)
            return made

        coordinator = pod(
            "weft-coordinator-0", rendered.pod("-coordinator"), "coordinator",
            f"weft-coordinator.{_DOMAIN}",
        )  # fmt: skip
        replicas = []
        for n in range(rendered.of("StatefulSet")["spec"]["replicas"]):
            names = [f"weft-replicas-{n}.weft-replicas.{_DOMAIN}"]
            # A Service is an address of its own; here it is that of its first pod.
            names += [f"weft-openai.{_DOMAIN}"] if n == 0 else []
            replicas.append(pod(f"weft-replicas-{n}", rendered.pod("-replicas"), "replica", *names))
        coordinator.start()
        _say(f"{coordinator.name}: ready in {coordinator.wait_until_ready(60):.0f} s")
        with ThreadPoolExecutor() as pool:
            list(pool.map(Pod.start, replicas))
            for made, seconds in zip(
                replicas,
                pool.map(lambda each: each.wait_until_ready(_READY_SECONDS), replicas),
                strict=True,
            ):
                _say(f"{made.name}: ready in {seconds:.0f} s")
        status = coordinator.execute("weft", "status")
        if not all(made.name in status for made in replicas):
            raise PodError(
                f"weft status in {coordinator.name} does not show the replicas:\n{status}"
            )
        _say(status)
        _run_test(pod("weft-test", rendered.pod("-test"), "replica"))
        _run_test(pod("weft-base", _pushes_a_base(rendered.pod("-test")), "replica"))
        for made in (coordinator, *replicas):
            if not made.answers("readinessProbe"):
                raise PodError(f"{made.name} is not ready after the pushes\n{made.tail()}")
        with ThreadPoolExecutor() as pool:
            for made, seconds in zip(replicas, pool.map(Pod.delete, replicas), strict=True):
                _say(f"{made.name}: stopped in {seconds:.0f} s; " + "; ".join(made.check_limits()))
        for made in (coordinator, *replicas):
            made.check_lines()
        seconds = coordinator.delete()
        _say(
            f"{coordinator.name}: stopped in {seconds:.0f} s; "
            + "; ".join(coordinator.check_limits())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = str(Path(sys.executable).parent)
    parser.add_argument("--coordinator", default=here, help="bin of the coordinator's environment")
    parser.add_argument("--replica", required=True, help="bin of the replicas' environment")
    parser.add_argument("--set", action="append", default=[], help="as Helm's")
    parser.add_argument("--keep", action="store_true", help="leave the logs where they are")
    args = parser.parse_args()
    if missing := lacking():
        sys.exit(f"pods are run as processes here, which needs {missing}")
    work = Path(tempfile.mkdtemp(prefix="weft-pods-"))
    work.chmod(0o755)
    paths = {kind: str(Path(getattr(args, kind)).absolute()) for kind in ("coordinator", "replica")}
    try:
        run(render("cpu", *args.set), work, paths)
    except PodError as error:
        sys.exit(str(error))
    finally:
        if args.keep:
            _say(f"logs are below {work}")
        else:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()

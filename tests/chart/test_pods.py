"""What pods are allowed, what they are given, and when they are thought well or ill of."""

import http.client
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.chart.rendering import (
    CHART,
    HELM,
    NAMESPACE,
    PROFILES,
    ROOT,
    RefusedError,
    Rendered,
    args,
    containers,
    render,
)
from weft_rl import __version__
from weft_rl.cli.doctor import SHM_BYTES


@pytest.fixture(params=PROFILES)
def rendered(request):
    return render(request.param)


def replica(rendered):
    return rendered.container("-replicas")


def coordinator(rendered):
    return rendered.container("-coordinator")


# -- the `restricted` level, which a test hook has to meet, too ------------------------


def test_every_pod_is_what_the_restricted_level_asks(rendered):
    pods = list(rendered.pods())
    assert {name.rpartition("-")[2] for name, _ in pods} == {"coordinator", "replicas", "test"}
    for name, pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= {
                "configMap", "emptyDir", "persistentVolumeClaim", "secret",
            }  # fmt: skip
        for container in containers(spec):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "hostPort" not in str(container.get("ports"))
            added = context["capabilities"].get("add", [])
            rdma = "rdma" in str(container["resources"]) and name.endswith("-replicas")
            assert added == (["IPC_LOCK"] if rdma else [])


def test_what_is_mounted_is_there_and_what_is_there_is_mounted(rendered):
    for _, pod in rendered.pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        if "spill" in {
            m["name"] for c in containers(pod["spec"]) for m in c.get("volumeMounts", [])
        }:
            volumes.add("spill")  # of a claim template
        mounted = set()
        for container in containers(pod["spec"]):
            names = [mount["name"] for mount in container.get("volumeMounts", [])]
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            # What changes in a Secret or a ConfigMap must reach the process.
            assert not any("subPath" in mount for mount in container.get("volumeMounts", []))
            mounted |= set(names)
        assert mounted == volumes


def test_variables_are_said_once_and_before_they_are_used(rendered):
    for _, pod in rendered.pods():
        for container in containers(pod["spec"]):
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(set(names)) == len(names)
            for arg in container.get("args", []):
                assert set(re.findall(r"\$\((\w*)\)?", arg)) <= {*names}, arg


def test_probes_and_services_name_ports_that_a_container_has(rendered):
    by_labels = [(pod["metadata"]["labels"], pod["spec"]) for _, pod in rendered.pods()]
    for service in rendered.all("Service"):
        selector = service["spec"]["selector"]
        chosen = [spec for labels, spec in by_labels if selector.items() <= labels.items()]
        assert len(chosen) == 1
        ports = {port["name"] for port in chosen[0]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name in ("-coordinator", "-replicas"):
        container = rendered.container(name)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert len(set(ports.values())) == len(ports)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["grpc"]["port"] == ports["health"]
        assert args(container)["--health"] == f"0.0.0.0:{ports['health']}"
        assert args(container)["--listen"] == f"0.0.0.0:{ports['grpc']}"
        metrics = args(container).get("--metrics")
        assert metrics == (f"0.0.0.0:{ports['metrics']}" if "metrics" in ports else None)


def test_selectors_choose_their_own_pods(rendered):
    labels = {name: pod["metadata"]["labels"] for name, pod in rendered.pods()}
    for kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        for resource in rendered.all(kind):
            selector = resource["spec"]["selector"]["matchLabels"].items()
            chosen = [name for name, found in labels.items() if selector <= found.items()]
            assert chosen == [resource["metadata"]["name"]]


@pytest.mark.parametrize("pinned", ["tag=v1", "digest=sha256:" + 64 * "a", ""])
def test_a_pod_of_another_chart_is_the_same_if_its_image_is_pinned(pinned, tmp_path):
    newer = shutil.copytree(CHART, tmp_path / "weft")
    described = yaml.safe_load((newer / "Chart.yaml").read_text())
    versions = {"version": "99.0.0", "appVersion": "99.0.0"}
    (newer / "Chart.yaml").write_text(yaml.safe_dump(described | versions))
    sets = [f"{kind}.image.{pinned}" for kind in ("coordinator", "replicas") if pinned]
    for server in ("-coordinator", "-replicas"):
        pods = [
            next(pod for name, pod in render("gpu", *sets, chart=chart).pods() if server in name)
            for chart in (CHART, newer)
        ]
        assert (pods[0] == pods[1]) == bool(pinned)


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_default_image_is_one_that_the_dockerfiles_make(gpus):
    rendered = render("gateway", f"replicas.gpus={gpus}")
    for name in ("-replicas", "-test"):
        repository, _, tag = rendered.container(name)["image"].partition(":")
        assert tag == __version__
        dockerfile = f"{repository.removeprefix('weft-')}.Dockerfile"
        assert (ROOT / "helm/images" / dockerfile).is_file()
        assert ("cuda" in repository) == bool(gpus)


@pytest.mark.parametrize(
    ("sets", "least"),
    [
        ([], SHM_BYTES[0] // 2**20),  # one worker process
        (["replicas.tensorParallelSize=4"], 256 + 4 * 4 * 1),  # OMP_NUM_THREADS is 1
        (['replicas.env=[{"name": "VLLM_MQ_MAX_CHUNK_BYTES_MB", "value": "32"}]'], 336),
        (
            [
                "replicas.tensorParallelSize=2",
                "replicas.env=[]",
                "replicas.resources.requests.cpu=8",
            ],
            256 + 4 * 2 * 4,
        ),
        (["replicas.gpus=2", "replicas.tensorParallelSize=2"], 256),
        (["replicas.gpus=1"], 1),  # no worker processes
    ],
)
def test_less_shared_memory_than_vllm_checks_is_refused(sets, least):
    def shm(mebibytes):
        rendered = render("cpu", *sets, f"replicas.memory.shmGib={mebibytes / 1024:.10f}")
        volume = next(v for v in rendered.pod("-replicas")["volumes"] if v["name"] == "shm")
        return volume["emptyDir"]["sizeLimit"]

    assert shm(least) == f"{least}Mi"
    if least > 1:
        with pytest.raises(RefusedError, match=f"does not start with less than {least} in /dev/sh"):
            shm(least - 1)


@contextmanager
def api_server(stateful_set):
    """As much of a Kubernetes API server as `lookup` asks; yields a kubeconfig's text."""
    group = {"groupVersion": "apps/v1", "version": "v1"}
    listed = {"name": "statefulsets", "namespaced": True, "kind": "StatefulSet", "verbs": ["get"]}
    answers = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "groups": [
            {"name": "apps", "versions": [group], "preferredVersion": group}]},
        "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1",
                          "resources": [listed]},
        "/apis/apps/v1/namespaces/rl/statefulsets/weft-replicas": stateful_set,
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "reason": "NotFound", "code": 404, "status": "Failure"}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
        yield json.dumps({
            "clusters": [{"name": "a", "cluster": cluster}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "namespace": NAMESPACE}}],
            "current-context": "a",
        })  # fmt: skip
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def render_there(kubeconfig, path, *options):
    """What an upgrade applies: Helm asks the cluster what `lookup` looks for."""
    path.write_text(kubeconfig)
    command = [HELM, "template", "weft", CHART, "--namespace", NAMESPACE, "--dry-run=server"]
    command += ["--kubeconfig", path, "--values", PROFILES["gpu"], *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    documents = yaml.load_all(done.stdout, yaml.CSafeLoader)
    return Rendered(tuple(each for each in documents if each))


@pytest.mark.parametrize("live", [4, 6, 0])
def test_turning_the_autoscaler_on_stops_no_replica(live, tmp_path):
    """A field that is left out of an upgrade becomes its default, 1, until the scaler looks."""
    metric = {"type": "Pods", "pods": {"metric": {"name": "m"}, "target": {"type": "Value"}}}
    scaled = [
        "--set=replicas.autoscaling.enabled=true",
        f"--set-json=replicas.autoscaling.metrics={json.dumps([metric])}",
    ]
    there = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "weft-replicas", "namespace": NAMESPACE},
        "spec": {"replicas": live},
    }
    config = tmp_path / "kubeconfig"
    with api_server(there) as kubeconfig:
        upgraded = render_there(kubeconfig, config, *scaled)
        assert upgraded.of("StatefulSet")["spec"].get("replicas") == live
        assert upgraded.of("HorizontalPodAutoscaler")["spec"]["minReplicas"] == 1
        # Without an autoscaler the values say how many, whatever there are.
        assert render_there(kubeconfig, config).of("StatefulSet")["spec"]["replicas"] == 4
    with api_server(None) as kubeconfig:  # the first installation
        first = render_there(kubeconfig, config, *scaled)
        assert "replicas" not in first.of("StatefulSet")["spec"]


def test_probes_of_readiness_name_what_the_servers_serve(rendered):
    for server, source in (
        ("-coordinator", "weft_rl/coordinator/server.py"),
        ("-replicas", "rollout_side/service/main.py"),
    ):
        ready = rendered.container(server)["readinessProbe"]["grpc"]["service"]
        assert f'"{ready}"' in (ROOT / source).read_text()


def test_the_documentation_says_what_is_left_when_the_release_goes():
    """cert-manager keeps the Secret of a Certificate that goes, unless it is told otherwise."""
    assert render("gpu").all("Secret") == []  # none is Helm's to remove
    end = (ROOT / "docs/helm.md").read_text().partition("- **The end**")[2].partition("\n\n")[0]
    assert "Secrets that cert-manager made" in end


def test_the_tests_time_is_of_all_that_it_does(monkeypatch):
    """Of waiting for a replica, and then for an answer: not of each."""
    program = runpy.run_path(str(CHART / "files/push_and_ask.py"))
    clock = [0.0]

    def urlopen(request, **_):
        clock[0] += 1
        if request.full_url.endswith("/v1/models") and clock[0] > 50:
            return io.BytesIO(b'{"data": [{"id": "base"}]}')
        raise urllib.error.HTTPError(request.full_url, 503, "", {}, io.BytesIO(b"not ready"))

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    args = ["--model=a", "--openai=http://a", "--timeout=60", "--without-adapter"]
    monkeypatch.setattr(sys, "argv", ["push_and_ask.py", *args])
    with pytest.raises(SystemExit, match="/v1/completions answered 503: not ready"):
        program["main"]()
    assert 60 <= clock[0] <= 62


@pytest.mark.parametrize(
    "failure",
    [
        TimeoutError("timed out"),
        http.client.RemoteDisconnected("closed without an answer"),
        http.client.IncompleteRead(b"{"),
    ],
)
def test_the_test_asks_again_where_an_answer_is_cut_off(failure, monkeypatch):
    """urllib wraps what fails before a request is sent, and nothing that fails after."""
    program = runpy.run_path(str(CHART / "files/push_and_ask.py"))
    clock, answers = [0.0], [failure, io.BytesIO(b'{"model": "base"}')]

    def urlopen(*_, **__):
        clock[0] += 1
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    openai = program["OpenAI"]("http://a", None)
    assert openai.call("/v1/completions", {}, until=60) == {"model": "base"}
    answers.append(failure)
    with pytest.raises(SystemExit, match=f"http://a does not answer: {re.escape(str(failure))}"):
        openai.call("/v1/completions", {}, until=0)


def test_a_laptop_that_is_said_to_be_enough_is():
    """Pods ask for so much, and a cluster's own for 1 CPU and 1 GiB beside them."""
    rendered = render("cpu")
    cpus, gib = 1.0, 1.0
    for name, pod in rendered.pods():
        asked = [container["resources"]["requests"] for container in pod["spec"]["containers"]]
        pods = 2 if name.endswith("-replicas") else 1
        cpus += pods * sum(int(each["cpu"].removesuffix("m")) / 1000 for each in asked)
        gib += pods * sum(int(each["memory"].removesuffix("Mi")) / 1024 for each in asked)
    assert rendered.of("StatefulSet")["spec"]["replicas"] == 2
    for path in (ROOT / "docs/helm.md", CHART / "values-cpu.yaml"):
        ((told_cpus, told_gib),) = re.findall(r"\b(\d+) CPUs and (\d+) GiB", path.read_text())
        assert cpus <= int(told_cpus) <= 2 * cpus
        assert gib <= int(told_gib) <= 2 * gib

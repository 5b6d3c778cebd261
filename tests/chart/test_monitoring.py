"""What Prometheus, Grafana and a collector of traces are given, and the notes that Helm prints."""

import json
import re
import shutil

import pytest
import yaml

from tests.chart.rendering import CHART, PROFILES, args, render
from weft_rl.rpc.security.access import Identity, Role, parse_access
from weft_rl.v1.admin_pb2_grpc import AdminServiceServicer

MONITORED = (
    "metrics.enabled=true",
    "metrics.auth=true",
    "metrics.serviceMonitor.enabled=true",
    "metrics.serviceMonitor.scheme=https",
)

#: The metrics of Weft's that rules may speak of, with their labels.
METRICS = {
    "weft_pushes_started_total": {"kind"},
    "weft_pushes_finished_total": {"kind", "result"},
    "weft_stage_seconds": {"kind"},
    "weft_commit_seconds": {"kind"},
    "weft_pause_seconds": set(),
    "weft_bytes_staged_total": {"kind"},
    "weft_replicas": {"state", "reason"},
    "weft_versions_served": {"kind"},
    "weft_store_bytes": {"store"},
    "weft_store_limit_bytes": {"store"},
    "weft_leases_held": set(),
    "weft_policies_lost": set(),
    "weft_policies_over_another_base": set(),
    "weft_unused_files": set(),
    "weft_heartbeats_missed_total": set(),
    "weft_clones_total": {"result"},
    "weft_stalls_total": set(),
    "weft_refusals_total": {"reason"},
}


def rules(profile):
    (group,) = render(profile).of("PrometheusRule")["spec"]["groups"]
    return group["rules"]


@pytest.mark.parametrize("profile", ["gpu", "everything"])
def test_alerts_speak_of_this_pool_and_of_metrics_that_there_are(profile):
    pool = {"gpu": "weft", "everything": "pool-a"}[profile]
    for rule in rules(profile):
        expression = rule["expr"]
        assert not re.search(r"\b[A-Z]{4,}\b", expression), expression  # a word not filled in
        assert expression.count("(") == expression.count(")")
        selectors = re.findall(r"([a-z_]+)(?:\{([^}]*)\})", expression)
        assert selectors
        for metric, matchers in selectors:
            assert 'namespace="rl"' in matchers
            assert pool in matchers or metric.startswith("kubelet_")
            if metric.startswith("weft_"):
                name = metric.removesuffix("_bucket")
                own = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)) - {"namespace", "service"}
                assert own <= METRICS[name], metric
        assert set(re.findall(r"\bweft_\w+", expression)) <= {m for m, _ in selectors}


def test_alerts_say_what_to_do():
    names = [rule["alert"] for rule in rules("everything")]
    assert len(set(names)) == len(names) > 10
    for rule in rules("everything"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert len(rule["annotations"]["description"]) > 40
        assert rule["annotations"]["runbook_url"] == (
            f"https://runbooks.example/weft#{rule['alert'].lower()}"
        )
    assert not any("runbook_url" in rule["annotations"] for rule in rules("gpu"))
    stuck = next(rule for rule in rules("gpu") if rule["alert"] == "WeftPushStuck")
    assert stuck["for"] == "900s"  # maxTransferSeconds, and 5 minutes


def test_monitors_scrape_the_metrics_port_of_every_pod():
    rendered = render("gpu")
    services = {s["metadata"]["name"]: s for s in rendered.all("Service")}
    scraped = {}
    for monitor in rendered.all("ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        (name,) = [n for n, s in services.items() if selector <= s["metadata"]["labels"].items()]
        ports = {port["name"] for port in services[name]["spec"]["ports"]}
        scraped[name] = [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
        assert set(scraped[name]) <= ports
    # The headless one: replicas that are not ready are looked at, too.
    assert scraped == {"weft-coordinator": ["metrics"], "weft-replicas": ["metrics", "http"]}
    assert render("cpu").all("ServiceMonitor") == []


def test_monitors_verify_and_show_credentials_where_metrics_ask():
    rendered = render("everything")
    for monitor in rendered.all("ServiceMonitor"):
        endpoint = monitor["spec"]["endpoints"][0]
        assert endpoint["scheme"] == "https"
        certificates = {c["spec"]["secretName"]: c["spec"] for c in rendered.all("Certificate")}
        secret = endpoint["tlsConfig"]["ca"]["secret"]["name"]
        assert endpoint["tlsConfig"]["serverName"] in certificates[secret]["dnsNames"]
        assert "basicAuth" not in endpoint  # nobody is known by a password
        shown = endpoint["tlsConfig"]["cert"]["secret"]
        assert endpoint["tlsConfig"]["keySecret"] == {"name": shown["name"], "key": "tls.key"}
        assert shown["key"] == "tls.crt"
        (name,) = certificates[shown["name"]]["dnsNames"]
        assert "client auth" in certificates[shown["name"]]["usages"]
        rules_of = parse_access(rendered.of("ConfigMap", "-access")["data"]["access.toml"])
        assert rules_of.identify([name], None).may_call("weft.v1.InspectService/GetPool")
        assert rules_of.identify([name], None).roles == {Role.INSPECT}
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_prometheus_shows_the_certificate_of_a_secret_that_is_there():
    rendered = render(
        "tokens", *MONITORED, "access.by=certificates", "tls.monitorSecret=prometheus-tls",
        "networkPolicy.enabled=false", access={"by": "certificates", "identities": []},
    )  # fmt: skip
    for monitor in rendered.all("ServiceMonitor"):
        tls = monitor["spec"]["endpoints"][0]["tlsConfig"]
        assert tls["cert"] == {"secret": {"name": "prometheus-tls", "key": "tls.crt"}}
    assert (
        "weft-monitor.rl.svc.cluster.local"
        in (rendered.of("ConfigMap", "-access")["data"]["access.toml"])
    )


def test_prometheus_shows_a_token_where_callers_are_known_by_tokens():
    rendered = render("tokens", *MONITORED, "metrics.serviceMonitor.basicAuthSecret=scraper")
    for monitor in rendered.all("ServiceMonitor"):
        endpoint = monitor["spec"]["endpoints"][0]
        assert endpoint["basicAuth"]["password"] == {"name": "scraper", "key": "password"}
        assert endpoint["tlsConfig"].keys() == {"ca", "serverName"}


def test_no_certificate_is_made_for_who_has_to_show_none():
    certificates = render("gpu").all("Certificate")
    assert not any("monitor" in each["metadata"]["name"] for each in certificates)
    assert "monitor" not in render("gpu").of("ConfigMap", "-access")["data"]["access.toml"]


def test_who_scrapes_is_let_in():
    """By the policy of the network, from where Prometheus is."""
    rendered = render("gpu")
    (rule,) = rendered.of("NetworkPolicy", "-metrics")["spec"]["ingress"]
    assert any("namespaceSelector" in peer for peer in rule["from"])
    for monitor in rendered.all("ServiceMonitor"):
        service = rendered.of("Service", monitor["metadata"]["name"].removeprefix("weft"))
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            assert {"protocol": "TCP", "port": ports[endpoint["port"]]} in rule["ports"]
            assert {"targetLabel": "release", "replacement": "weft"} in endpoint["relabelings"]


def test_the_dashboard_is_the_file_of_the_chart(tmp_path):
    chart = tmp_path / "weft"
    shutil.copytree(CHART, chart)
    (chart / "dashboards").mkdir(exist_ok=True)
    variables = [{"name": "namespace"}, {"name": "release"}, {"name": "job", "current": {}}]
    dashboard = {
        "title": 'a "pool"',
        "uid": "weft-pool",
        "panels": [{"expr": "rate(x[$__rate_interval])", "id": 1000000}],
        "templating": {"list": variables},
    }
    (chart / "dashboards/weft.json").write_text(json.dumps(dashboard, indent=2))
    config = render("everything", chart=chart).of("ConfigMap", "-dashboard")
    (name,) = config["data"]
    shown = json.loads(config["data"][name])
    assert name == "weft-rl-weft.json"
    assert shown.pop("title") == "Weft rl/weft"
    assert shown.pop("uid") != dashboard.pop("uid")
    for variable, value in zip(variables, ("rl", "weft"), strict=False):
        variable["current"] = {"text": [value], "value": [value]}
    dashboard.pop("title")
    assert shown == dashboard
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not any("dashboard" in str(r["metadata"]) for r in render("cpu", chart=chart).resources)
    (chart / "dashboards/weft.json").unlink()
    bare = chart.rename(tmp_path / "bare")
    names = [c["metadata"]["name"] for c in render("gpu", chart=bare).all("ConfigMap")]
    assert sorted(names) == ["weft-access", "weft-test"]


def test_two_releases_have_a_dashboard_each():
    """Grafana knows one by its uid, and its sidecar a file by its name, of all namespaces."""
    made = [render("gpu", release=release).of("ConfigMap", "-dashboard") for release in ("a", "b")]
    names = [name for each in made for name in each["data"]]
    boards = [json.loads(text) for each in made for text in each["data"].values()]
    assert len(set(names)) == len({board["uid"] for board in boards}) == 2
    assert all(len(board["uid"]) <= 40 for board in boards)
    for board, release in zip(boards, ("a", "b"), strict=True):
        current = {v["name"]: v["current"] for v in board["templating"]["list"]}
        assert current["release"]["value"] == [release]
        assert current["namespace"]["value"] == ["rl"]
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                assert target["expr"].count('namespace=~"$namespace",release=~"$release"') == (
                    target["expr"].count("{")
                )


# -- notes -----------------------------------------------------------------------------------


def notes(profile, chart_dir, *settings):
    """What Helm prints after an installation; it renders that on a cluster only."""
    chart = chart_dir / "weft"
    shutil.copytree(CHART, chart)
    shutil.copy(chart / "templates/NOTES.txt", chart / "files/NOTES.txt")
    (chart / "templates/notes.yaml").write_text(
        "kind: Notes\nmetadata: {name: notes}\n"
        'text: {{ tpl (.Files.Get "files/NOTES.txt") . | toJson }}\n'
    )
    return render(profile, *settings, chart=chart).of("Notes")["text"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_notes_say_how_to_look_around(profile, tmp_path):
    text = notes(profile, tmp_path)
    rendered = render(profile)
    name = rendered.of("Deployment")["metadata"]["name"]
    assert f"kubectl -n rl exec deployment/{name} -- weft status\n" in text
    shown = {"everything": "https", "tokens": None}.get(profile, "http")
    assert (f"service/{name} 9090   # the page: {shown}://127.0.0.1:9090" in text) == bool(shown)
    assert ("role operator" in text) == (profile != "cpu")
    assert ("The pool is insecure" in text) == (profile == "cpu")
    assert ("IPC_LOCK" in text) == (profile == "everything")
    assert ("through the gateway, llm.example.com\n" in text) == (profile == "everything")
    assert ("asks nobody for a key" in text) == (profile == "gateway")
    assert "unencrypted" in text
    assert "<no value>" not in text
    assert "\n\n\n" not in text


@pytest.mark.parametrize("pod", ["-coordinator", "-replicas"])
@pytest.mark.parametrize(
    ("profile", "endpoint"), [("everything", "http://collector.monitoring:4317"), ("gpu", None)]
)
def test_servers_trace_where_a_collector_is_named(profile, endpoint, pod):
    container = render(profile).container(pod)
    env = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
    assert env.get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint
    assert ("--traces" in args(container)) == (endpoint is not None)


def test_the_files_of_alerts_are_yaml():
    assert yaml.safe_load((CHART / "files/alerts.yaml").read_text())["alerts"]


def test_the_alert_of_a_full_store_advises_what_kubernetes_allows():
    """Claim templates of a StatefulSet that is there are refused; claims may grow."""
    full = next(rule for rule in rules("gpu") if rule["alert"] == "WeftStoreNearlyFull")
    said = full["annotations"]["description"]
    assert "replicas.memory.adaptersGib" in said
    # Nothing of a push is refused for a spill directory: see docs/operations.md.
    assert "push of an adapter that finds no room is refused" in said
    _, _, steps = said.partition("With claimPerReplica")
    order = [
        "enlarge the claims",
        "kubectl delete statefulset --cascade=orphan",
        "helm upgrade",
    ]
    assert [*map(steps.index, order)] == sorted(map(steps.index, order))
    gib = {n: render("gpu", f"replicas.spill.gib={n}").of("StatefulSet")["spec"] for n in (1, 2)}
    assert gib[1]["volumeClaimTemplates"] != gib[2]["volumeClaimTemplates"]
    own = [render("everything", f"replicas.spill.gib={n}").of("StatefulSet") for n in (1, 2)]
    assert all("volumeClaimTemplates" not in each["spec"] for each in own)  # an upgrade is enough


def test_the_notes_say_only_what_is_so(tmp_path):
    label = "from pods with the label weft-pool"
    assert label not in notes("tokens", tmp_path / "a")  # whose network has no policy
    assert f"{label}=weft, here or in trainers\n" in notes("gpu", tmp_path / "b")
    quick = notes("cpu", tmp_path / "c", "replicas.probes.startup.failureThreshold=3")
    assert "(a load may take 30 s)" in quick
    seconds = render("cpu").pod("-test")["activeDeadlineSeconds"]
    assert f"test weft --timeout {seconds}s " in quick
    # The namespace of docs/helm.md has another level already, which kubectl keeps otherwise.
    rdma = notes("everything", tmp_path / "e")
    assert "pod-security.kubernetes.io/enforce=privileged --overwrite\n" in rdma
    operator = re.search(r"What changes the pool \(([a-z, ]+)\)", notes("gpu", tmp_path / "d"))
    for word in operator[1].split(", "):
        method = next(m for m in vars(AdminServiceServicer) if m.lower().startswith(word))
        assert not Identity("a", frozenset({Role.PUBLISH}), ("*",)).may_call(
            f"weft.v1.AdminService/{method}"
        )


def test_the_notes_say_what_is_given_and_does_not_work_by_itself(tmp_path):
    alone = notes("cpu", tmp_path / "a", "metrics.prometheusRule.enabled=true",
                  "model.sharedCache.enabled=true", "model.tiny=false", "model.name=a/b",
                  "model.sharedCache.accessMode=ReadWriteOnce", "replicas.count=1")  # fmt: skip
    assert "The alerts need the pool's metrics in that Prometheus" in alone
    # Of a metric that there is not, only absent() makes a value.
    (always,) = [rule["alert"] for rule in rules("gpu") if "absent(" in rule["expr"]]
    assert f"Until then {always}\nis always sent, and no other alert on a metric of Weft's" in alone
    closed = "networkPolicy.egress.enabled=true"
    assert "more; without a rule for\nwhere Qwen/Qwen3-8B is downloaded from" in notes(
        "gpu", tmp_path / "c", closed
    )
    assert "networkPolicy.egress.extra lets them reach more.\n" in notes(
        "cpu", tmp_path / "d", closed
    )
    assert "networkPolicy.egress" not in notes("everything", tmp_path / "e") + alone
    assert "The shared cache is ReadWriteOnce: one node must run every pod" in alone
    plain = notes("cpu", tmp_path / "b")
    assert "The alerts need" not in plain
    assert "The shared cache is" not in plain

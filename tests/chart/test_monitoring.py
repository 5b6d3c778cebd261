"""Rules and dashboards for Prometheus and Grafana, and the notes that Helm prints."""

import json
import re
import shutil

import pytest

from tests.chart.golden import notes
from tests.chart.rendering import CHART, PROFILES, render
from weft_rl.rpc.security.access import Identity, Role, parse_access
from weft_rl.v1.admin_pb2_grpc import AdminServiceServicer

#: The metrics of Weft's that rules may speak of, with their labels.
METRICS = {
    "weft_pushes_started_total": {"kind"},
    "weft_pushes_finished_total": {"kind", "result"},
    "weft_stage_seconds": {"kind"},
    "weft_commit_seconds": {"kind"},
    "weft_pause_seconds": set(),
    "weft_bytes_staged_total": {"kind"},
    "weft_transfer_bytes_total": {"form"},
    "weft_replicas": {"state", "reason"},
    "weft_versions_served": {"kind"},
    "weft_store_bytes": {"store"},
    "weft_store_limit_bytes": {"store"},
    "weft_undo_versions": set(),
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


def test_the_notes_name_calls_of_operators():
    said = re.search(r"What changes the pool \(([a-z, ]+)\)", notes("gpu"))
    for word in said[1].split(", "):
        method = next(m for m in vars(AdminServiceServicer) if m.lower().startswith(word))
        assert not Identity("a", frozenset({Role.PUBLISH}), ("*",)).may_call(
            f"weft.v1.AdminService/{method}"
        )


@pytest.mark.parametrize("profile", PROFILES)
def test_the_notes_have_no_hole(profile):
    assert "<no value>" not in notes(profile)
    assert "\n\n\n" not in notes(profile)

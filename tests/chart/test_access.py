"""Who is let in: certificates, tokens, rules and networks."""

import hashlib
import tomllib

import pytest
import yaml

from tests.chart.rendering import PROFILES, args, containers, render
from weft_rl.rpc.security.access import parse_access

SECURE = [profile for profile in PROFILES if profile != "cpu"]
SERVERS = ("-coordinator", "-replicas")


def rules(rendered):
    text = rendered.of("ConfigMap", "-access")["data"]["access.toml"]
    return tomllib.loads(text)["identity"]


def volumes(rendered, pod):
    return {volume["name"]: volume for volume in rendered.pod(pod)["volumes"]}


def environment(container):
    return {v["name"]: v.get("value") for v in container.get("env", [])}


@pytest.mark.parametrize("profile", SECURE)
def test_servers_show_a_certificate_and_know_who_may_call(profile):
    rendered = render(profile)
    for server in SERVERS:
        container = rendered.container(server)
        options = args(container)
        mounts = {m["name"]: m["mountPath"] for m in container.get("volumeMounts", [])}
        assert options["--tls-cert"] == f"{mounts['tls']}/tls.crt"
        assert options["--tls-key"] == f"{mounts['tls']}/tls.key"
        assert options["--tls-ca"] == f"{mounts['tls']}/ca.crt"
        assert options["--access"] == f"{mounts['access']}/access.toml"
        assert "--insecure" not in options


def test_without_credentials_servers_say_that_they_are_insecure():
    rendered = render("cpu")
    for server in SERVERS:
        container = rendered.container(server)
        assert "--insecure" in args(container)
        assert not {"tls", "access", "token"} & volumes(rendered, server).keys()
    assert [c["metadata"]["name"] for c in rendered.all("ConfigMap")] == ["weft-test"]


def test_no_secret_is_in_an_argument_or_a_plain_variable():
    for profile in SECURE:
        for _, pod in render(profile).pods():
            for container in containers(pod["spec"]):
                for variable in container.get("env", []):
                    if any(word in variable["name"] for word in ("TOKEN", "API_KEY")):
                        # By reference, or the path of a file.
                        assert variable.get("value", "/etc/weft").startswith("/etc/weft")
            for volume in pod["spec"]["volumes"]:
                if "secret" in volume:
                    assert volume["secret"]["defaultMode"] == 0o440


def test_each_process_has_a_certificate_of_its_own():
    rendered = render("gpu")
    made = {c["metadata"]["name"]: c["spec"] for c in rendered.all("Certificate")}
    assert made.keys() == {"weft-coordinator", "weft-replicas", "weft-test"}
    for pod in ("-coordinator", "-replicas", "-test"):
        secret = volumes(rendered, pod)["tls"]["secret"]["secretName"]
        assert secret == made[f"weft{pod}"]["secretName"]
    for spec in made.values():
        assert {"server auth", "client auth"} <= set(spec["usages"])
    given = render("tokens")
    assert given.all("Certificate") == []
    for pod, secret in (("-coordinator", "coordinator-tls"), ("-test", "test-tls")):
        assert volumes(given, pod)["tls"]["secret"]["secretName"] == secret


@pytest.mark.parametrize("profile", ["gpu", "everything"])
def test_names_that_are_dialled_are_in_the_certificates_and_in_the_rules(profile):
    rendered = render(profile)
    names = {c["metadata"]["name"]: c["spec"]["dnsNames"] for c in rendered.all("Certificate")}
    options = args(rendered.container("-replicas"))
    coordinator = next(n for name, n in names.items() if name.endswith("-coordinator"))
    replicas = next(n for name, n in names.items() if name.endswith("-replicas"))
    dialled = options["--coordinator"].rpartition(":")[0]
    assert dialled in coordinator
    domain = dialled.partition(".svc.")[2]
    wildcard = options["--advertise-host"].replace("$(POD_NAME)", "*")
    assert wildcard in replicas
    for service in rendered.all("Service"):
        name = service["metadata"]["name"]
        dialled_by = {name, f"{name}.rl", f"{name}.rl.svc", f"{name}.rl.svc.{domain}"}
        assert dialled_by <= {*(coordinator if name.endswith("-coordinator") else replicas)}
    openai = args(rendered.container("-test"))["--openai"]
    assert openai.partition("://")[2].rpartition(":")[0] in replicas
    roles = {rule["san"]: rule["roles"] for rule in rules(rendered)}
    assert roles[dialled] == ["coordinator", "inspect"]
    assert roles[wildcard] == ["replica"]


def test_rules_have_the_pools_own_processes_and_then_the_users():
    by_certificate = rules(render("gpu"))
    assert [rule["roles"] for rule in by_certificate[:3]] == [
        ["coordinator", "inspect"],
        ["replica"],
        ["publish", "inspect"],
    ]
    assert by_certificate[2]["policies"] == ["helm-test"]
    assert by_certificate[3] == {
        "san": "trainer-a.trainers.weft",
        "roles": ["publish", "inspect"],
        "policies": ["base", "math", "code-*"],
    }
    by_token = rules(render("tokens"))
    assert [rule["name"] for rule in by_token] == [
        "coordinator", "replicas", "helm-test", "trainer-a", 'evaluator "1"',
    ]  # fmt: skip
    assert all("san" not in rule and len(rule["token_sha256"]) == 64 for rule in by_token)


def test_limits_of_an_identity_can_be_raised_with_the_pool():
    def limits(*sets):
        return tomllib.loads(
            render("gpu", *sets).of("ConfigMap", "-access")["data"]["access.toml"]
        )["limits"]

    assert limits() == {"requests": 1024, "streams": 1024}
    assert limits("access.limits.streams=100000") == {"requests": 1024, "streams": 100000}


def test_rules_of_ones_own_are_taken_instead():
    rendered = render("gpu", "access.existingConfigMap=mine", "access.identities=null")
    assert volumes(rendered, "-replicas")["access"]["configMap"]["name"] == "mine"
    assert not [c for c in rendered.all("ConfigMap") if c["metadata"]["name"].endswith("-access")]


def test_tokens_are_files_of_each_process():
    rendered = render("tokens")
    for pod, secret in (("-coordinator", "coordinator-token"), ("-replicas", "replicas-token")):
        assert args(rendered.container(pod))["--token-file"] == "/etc/weft/token/token"
        assert volumes(rendered, pod)["token"]["secret"]["secretName"] == secret
    tests = rendered.container("-test")
    assert environment(tests)["WEFT_TOKEN_FILE"] == "/etc/weft/token/token"
    assert "WEFT_TLS_CERT" not in environment(tests)
    assert environment(tests)["WEFT_TLS_CA"] == "/etc/weft/tls/ca.crt"
    assert "token" not in volumes(render("gpu"), "-replicas")


def test_the_tests_pod_shows_its_certificate_by_the_environment():
    tests = render("gpu").container("-test")
    assert environment(tests)["WEFT_TLS_CERT"] == "/etc/weft/tls/tls.crt"
    assert environment(tests)["WEFT_COORDINATOR"] == "weft-coordinator.rl.svc.cluster.local:50051"


@pytest.mark.parametrize("profile", PROFILES)
def test_who_is_in_the_coordinators_pod_may_look_and_no_more(profile):
    """`kubectl exec` runs `weft status` there, with what the environment names."""
    token = hashlib.sha256(b"token").hexdigest()
    rendered = render(profile, f"access.tokens.coordinator.sha256={token}")
    container = rendered.container("-coordinator")
    given, options = environment(container), args(container)
    assert given["WEFT_COORDINATOR"] == args(rendered.container("-replicas"))["--coordinator"]
    files = {name: value for name, value in given.items() if value.startswith("/etc/weft")}
    assert set(files.values()) <= set(options.values())
    if profile == "cpu":
        assert files == {}
        return
    access = parse_access(rendered.of("ConfigMap", "-access")["data"]["access.toml"])
    if access.by_certificate:
        assert files.keys() == {"WEFT_TLS_CERT", "WEFT_TLS_KEY", "WEFT_TLS_CA"}
        who = access.identify([given["WEFT_COORDINATOR"].rpartition(":")[0]], None)
    else:
        assert files.keys() == {"WEFT_TOKEN_FILE", "WEFT_TLS_CA"}
        who = access.identify([], "token")
    assert who.may_call("weft.v1.InspectService/GetPool")
    assert not who.may_call("weft.v1.AdminService/Cordon")
    assert not who.may_call("weft.v1.PublishService/BeginTransfer")


# -- networks ------------------------------------------------------------------------------


def policy(rendered, suffix):
    return rendered.of("NetworkPolicy", suffix)["spec"]


def test_members_reach_each_other_on_every_tcp_port():
    rendered = render("everything")
    spec = policy(rendered, "-members")
    member = {"weft-pool": "pool-a"}
    assert spec["podSelector"]["matchLabels"] == member
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"protocol": "TCP"}]
    own, *others = rule["from"]
    assert own == {"podSelector": {"matchLabels": member}}
    assert [o["namespaceSelector"]["matchLabels"] for o in others] == [
        {"kubernetes.io/metadata.name": "team-a"},
        {"kubernetes.io/metadata.name": "team-b"},
    ]
    # A namespace alone would let all of its pods in.
    assert all(o["podSelector"]["matchLabels"] == member for o in others)
    for _, pod in rendered.pods():
        assert member.items() <= pod["metadata"]["labels"].items()


def test_a_trainer_of_several_pools_comes_in_without_the_label_of_one():
    trainers = [{"podSelector": {"matchLabels": {"app": "trainer"}}}]
    label = render("everything")
    added = render("everything", networkPolicy={"trainers": trainers})
    (rule,) = policy(added, "-members")["ingress"]
    (labelled,) = policy(label, "-members")["ingress"]
    assert rule == {**labelled, "from": [*labelled["from"], *trainers]}
    assert policy(added, "-members-egress")["egress"][0]["to"] == rule["from"]


def test_health_and_metrics_are_let_in_apart():
    rendered = render("gpu")
    health, metrics = policy(rendered, "-health"), policy(rendered, "-metrics")
    assert health["ingress"] == [{"ports": [{"protocol": "TCP", "port": 50052}]}]
    (rule,) = metrics["ingress"]
    assert {port["port"] for port in rule["ports"]} == {9090, 8000}
    assert "monitoring" in str(rule["from"])
    assert {p["port"] for p in policy(render("cpu"), "-metrics")["ingress"][0]["ports"]} == {9090}


def test_clients_reach_the_replicas_api_and_operators_the_coordinator():
    rendered = render("everything")
    clients, operators = policy(rendered, "-clients"), policy(rendered, "-operators")
    assert clients["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "replica"
    assert clients["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert operators["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
    assert operators["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 50051}]
    assert not [p for p in render("gpu").all("NetworkPolicy") if "operators" in str(p["metadata"])]


@pytest.mark.parametrize("enabled", [True, False])
def test_what_pods_may_reach_is_said_only_where_it_is_asked_for(enabled):
    rendered = render("everything", networkPolicy={"egress": {"enabled": enabled, "extra": []}})
    made = [p for p in rendered.all("NetworkPolicy") if "Egress" in p["spec"]["policyTypes"]]
    assert len(made) == (2 if enabled else 0)


def reached(rendered, name, protocol):
    """Peers and ports that a pod's policies let it reach; all peers, or ports, if None."""
    labels = next(pod for maker, pod in rendered.pods() if maker.endswith(name))["metadata"]
    for each in rendered.all("NetworkPolicy"):
        selector = each["spec"]["podSelector"]
        chosen = selector.get("matchLabels", {}).items() <= labels["labels"].items() and all(
            e["operator"] == "In" and labels["labels"].get(e["key"]) in e["values"]
            for e in selector.get("matchExpressions", ())
        )
        for rule in each["spec"].get("egress", ()) if chosen else ():
            for port in rule["ports"]:
                if port.get("protocol", "TCP") == protocol:
                    for peer in rule.get("to", [None]):
                        yield peer, port.get("port")


def test_pods_reach_members_and_dns_and_what_is_added():
    rendered = render("everything")
    added = yaml.safe_load(PROFILES["everything"].read_text())["networkPolicy"]["egress"]["extra"]
    extra = [(to, port["port"]) for rule in added for to in rule["to"] for port in rule["ports"]]
    (replicas,) = (
        {"podSelector": {"matchLabels": s["spec"]["selector"]["matchLabels"]}}
        for s in rendered.all("StatefulSet")
    )
    control = (replicas, 50051)
    members = [(peer, None) for peer in policy(rendered, "-members")["ingress"][0]["from"]]
    assert len(members) == 3
    for pod, own in (("-coordinator", []), ("-replicas", members), ("-test", members)):
        found = [*reached(rendered, pod, "TCP")]
        assert found == [(None, 53), control, *extra, *own], pod
        assert [*reached(rendered, pod, "UDP")] == [(None, 53)]


def test_a_trainer_of_the_namespace_may_reach_what_it_will():
    """The label of members is in no rule of what may be reached."""
    for each in render("everything").all("NetworkPolicy"):
        if "egress" in each["spec"]:
            assert "app.kubernetes.io/instance" in each["spec"]["podSelector"]["matchLabels"]


def test_no_rule_lets_everybody_in_but_to_the_health_port():
    for profile in PROFILES:
        for resource in render(profile).all("NetworkPolicy"):
            (kind,) = resource["spec"]["policyTypes"]
            assert {"ingress", "egress"} & resource["spec"].keys() == {kind.lower()}
            for rule in resource["spec"].get("ingress", ()):
                assert rule.get("from") or resource["metadata"]["name"].endswith("-health")
    assert render("tokens").all("NetworkPolicy") == []

"""Who is let in: certificates, tokens, rules and networks."""

import hashlib
import tomllib

import pytest

from tests.chart.rendering import PROFILES, args, containers, render
from weft_rl.rpc.security.access import parse_access

SECURE = [profile for profile in PROFILES if profile != "cpu"]


def rules(rendered):
    text = rendered.of("ConfigMap", "-access")["data"]["access.toml"]
    return tomllib.loads(text)["identity"]


def environment(container):
    return {v["name"]: v.get("value") for v in container.get("env", [])}


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


def test_no_rule_lets_everybody_in_but_to_the_health_port():
    for profile in PROFILES:
        for resource in render(profile).all("NetworkPolicy"):
            (kind,) = resource["spec"]["policyTypes"]
            assert {"ingress", "egress"} & resource["spec"].keys() == {kind.lower()}
            for rule in resource["spec"].get("ingress", ()):
                assert rule.get("from") or resource["metadata"]["name"].endswith("-health")
    assert render("tokens").all("NetworkPolicy") == []

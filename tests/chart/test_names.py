"""Names and enums that a real API server takes; schemas alone do not say all of its rules."""

import re

import pytest

from tests.chart.golden import COMMON_LABELS
from tests.chart.rendering import PROFILES, containers, render
from weft_rl import __version__

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PORT = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")

#: The longest that Helm takes, ones that begin with a digit or have dots, and the plain one.
RELEASES = ["weft", "a" * 53, "0rl", "team.a.rl", "x" * 40 + ".0", "weft-" + "y" * 48, "9" * 53]


def names(resources):
    """Kinds and names of objects."""
    return {(resource["kind"], resource["metadata"]["name"]) for resource in resources}


def labels_of(resource):
    """Every map of labels or selectors in an object."""
    found = []

    def look(node):
        if isinstance(node, dict):
            for key, child in node.items():
                is_map = key in ("labels", "matchLabels", "selector") and isinstance(child, dict)
                if is_map and all(isinstance(value, str) for value in child.values()):
                    found.append(child)
                look(child)
        elif isinstance(node, list):
            for child in node:
                look(child)

    look({key: value for key, value in resource.items() if key != "spec"})
    if resource["kind"] != "PrometheusRule":
        look(resource.get("spec"))
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_names_are_valid_whatever_the_release_is_called(profile, release):
    rendered = render(profile, release=release)
    for resource in rendered.resources:
        name = resource["metadata"]["name"]
        assert SUBDOMAIN.fullmatch(name)
        assert len(name) <= 253
        if resource["kind"] == "Service":
            assert DNS_1035.fullmatch(name), name
        for labels in labels_of(resource):
            for key, value in labels.items():
                assert KEY.fullmatch(key), key
                assert LABEL.fullmatch(value), value
    stateful = rendered.of("StatefulSet")["metadata"]["name"]
    # Its pods' host names, and the label that has its name and a hash.
    assert DNS_1123.fullmatch(f"{stateful}-999")
    assert len(f"{stateful}-1234567890") <= 63


def test_two_long_releases_do_not_share_names():
    first, second = (render("cpu", release="a" * 52 + end).resources for end in "bc")
    assert not names(first) & names(second)


@pytest.mark.parametrize("profile", PROFILES)
def test_objects_are_named_once_and_are_in_the_releases_namespace(profile):
    resources = render(profile).resources
    assert len(names(resources)) == len(resources)
    assert {r["metadata"]["namespace"] for r in resources} == {"rl"}
    own = [r for r in resources if "labels" in r["metadata"]]
    extra = {"TLSRoute", "ConfigMap"} if profile == "everything" else set()  # its extraObjects
    assert {r["kind"] for r in resources if r not in own} == extra
    for resource in own:
        labels = {key: resource["metadata"]["labels"][key] for key in COMMON_LABELS}
        assert labels.pop("helm.sh/chart") == f"weft-{__version__}"
        pool = "pool-a" if profile == "everything" else "weft"
        assert [*labels.values()].count(pool) == (1 if profile == "everything" else 3)
        assert {*labels.values()} == {"Helm", __version__, "weft", pool}


@pytest.mark.parametrize("profile", PROFILES)
def test_ports_containers_and_volumes_have_valid_names(profile):
    for _, pod in render(profile).pods():
        for volume in pod["spec"]["volumes"]:
            assert DNS_1123.fullmatch(volume["name"])
        for container in containers(pod["spec"]):
            assert DNS_1123.fullmatch(container["name"])
            for port in container.get("ports", []):
                assert PORT.fullmatch(port["name"])
    for service in render(profile).all("Service"):
        for port in service["spec"]["ports"]:
            assert PORT.fullmatch(port["name"])


ENUMS = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "podManagementPolicy": {"OrderedReady", "Parallel"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "fsGroupChangePolicy": {"Always", "OnRootMismatch"},
    "medium": {"", "Memory"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "whenDeleted": {"Delete", "Retain"},
    "whenScaled": {"Delete", "Retain"},
    "clusterIP": {"None"},
}


@pytest.mark.parametrize("profile", PROFILES)
def test_choices_are_those_that_the_server_knows(profile):
    # Offline schemas of Kubernetes have them as plain strings.
    seen = set()

    def look(node):
        if isinstance(node, dict):
            for key, child in node.items():
                if key in ENUMS:
                    seen.add(key)
                    assert child in ENUMS[key]
                look(child)
        elif isinstance(node, list):
            for child in node:
                look(child)

    for resource in render(profile).resources:
        look(resource.get("spec"))
    assert len(seen) >= 6

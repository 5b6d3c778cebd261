"""Releases beside each other share nothing, and the chart's own places are taken."""

import re

import pytest

from tests.chart.rendering import PROFILES, RefusedError, args, render


def test_no_place_of_the_tests_pod_may_be_taken():
    own = {mount["mountPath"] for mount in render("gpu").container("-test")["volumeMounts"]}
    assert len(own) > 3
    for path in own:
        with pytest.raises(RefusedError, match=f"tests.extraVolumeMounts: .*{path} is taken"):
            render("gpu", tests={"extraVolumeMounts": [{"name": "ca", "mountPath": path}]})


@pytest.mark.parametrize(
    ("first", "second"), [("qwen", "llama"), ("weft", "weft-coordinator"), ("weft", "weft-2")]
)
@pytest.mark.parametrize("profile", ["gpu", "gateway"])
def test_two_releases_in_one_namespace_share_nothing(profile, first, second):
    one, two = render(profile, release=first), render(profile, release=second)
    assert not one.made() & two.made()
    assert len(one.made()) == len(two.made()) > 15
    labels = [pod["metadata"]["labels"].items() for _, pod in two.pods()]
    selectors = [r["spec"]["selector"] for r in one.all("Service")]
    selectors += [r["spec"]["podSelector"]["matchLabels"] for r in one.all("NetworkPolicy")]
    selectors += [r["spec"]["selector"]["matchLabels"] for r in one.all("PodDisruptionBudget")]
    assert len(selectors) > 4
    assert not any(selector.items() <= found for selector in selectors for found in labels)
    for rendered in (one, two):
        dialled = args(rendered.container("-replicas"))["--coordinator"]
        assert ("Service", dialled.partition(".")[0]) in rendered.made()


@pytest.mark.parametrize("server", ["coordinator", "replicas"])
def test_no_place_of_the_charts_own_may_be_taken(server):
    """The refusals name each volume and each place that a server's pod has in any profile."""
    volumes, paths = set(), set()
    for profile in PROFILES:
        pod = render(profile, f"{server}.extraVolumes=[]", f"{server}.extraVolumeMounts=[]")
        mounts = pod.container(f"-{server}")["volumeMounts"]
        volumes |= {mount["name"] for mount in mounts}
        paths |= {mount["mountPath"] for mount in mounts}
    assert len(volumes) == len(paths) > 4
    taken = {
        "extraVolumes": [{"name": name, "emptyDir": {}} for name in volumes],
        "extraVolumeMounts": [{"name": "a", "mountPath": path} for path in paths],
    }
    with pytest.raises(RefusedError) as refusal:
        render("cpu", **{server: taken})
    refused = set(re.findall(r"the (?:name|mountPath) (\S+) is taken", str(refusal.value)))
    assert refused == volumes | paths

"""The examples of Argo CD and Flux are valid, and make two pools that share nothing."""

import re

import pytest
import yaml

from tests.chart.rendering import ROOT, render
from tests.chart.validation import VERSIONS, check, custom_errors, is_custom
from weft_rl import __version__

EXAMPLES = {
    name: [*yaml.safe_load_all((ROOT / f"helm/examples/{name}.yaml").read_text())]
    for name in ("argo-cd", "flux")
}


def by_argo_cd(applications):
    """Name and values of each release, the text of the template filled in as Argo CD does."""
    spec = applications["spec"]
    for element in spec["generators"][0]["list"]["elements"]:

        def filled(text, element=element):
            return re.sub(r"\{\{ \.(\w+) \}\}", lambda match: str(element[match[1]]), text)

        source = spec["template"]["spec"]["source"]
        assert source["targetRevision"] == __version__
        helm = source["helm"]
        yield filled(helm["releaseName"]), yaml.safe_load(filled(helm["values"]))


def merged(under, over):
    """Values under others, as Helm merges them."""
    both = {k: merged(under[k], v) for k, v in over.items() if isinstance(under.get(k), dict)}
    return under | over | both


def by_flux(documents):
    """Name and values of each release, those of the ConfigMap under its own."""
    config = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    for release in (d for d in documents if d["kind"] == "HelmRelease"):
        assert release["spec"]["chart"]["spec"]["version"] == __version__
        (source,) = release["spec"]["valuesFrom"]
        shared = yaml.safe_load(config[source["name"]]["values.yaml"])
        yield release["metadata"]["name"], merged(shared, release["spec"]["values"])


def pools(example):
    """What each release of an example would install."""
    documents = EXAMPLES[example]
    found = by_argo_cd(documents[0]) if example == "argo-cd" else by_flux(documents)
    return {name: render("", release=name, **values) for name, values in found}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_valid(example):
    check(EXAMPLES[example], VERSIONS[0])
    assert custom_errors([each for each in EXAMPLES[example] if is_custom(each)]) == []


def test_argo_cd_takes_the_number_of_replicas_that_git_says():
    """What it ignores it never changes; only an autoscaler's number is not its own."""
    (applications,) = EXAMPLES["argo-cd"]
    spec = applications["spec"]["template"]["spec"]
    scaled = [rendered.all("HorizontalPodAutoscaler") for rendered in pools("argo-cd").values()]
    assert "/spec/replicas" not in str(spec.get("ignoreDifferences")) or all(scaled)


def test_the_lines_for_an_autoscaler_are_argo_cds():
    """They are a comment, which nothing else reads."""
    text = (ROOT / "helm/examples/argo-cd.yaml").read_text()
    head, _, tail = text.partition("      # ignoreDifferences:")
    assert tail
    with_them = re.sub("^      # ", "      ", f"      # ignoreDifferences:{tail}", flags=re.M)
    (options,) = re.findall(r"#   (syncOptions: .+)", head)
    applications = yaml.safe_load(re.sub(r"(?m)^(        )syncOptions: .+", rf"\1{options}", head)
                                  + with_them)  # fmt: skip
    spec = applications["spec"]["template"]["spec"]
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]
    (ignored,) = spec["ignoreDifferences"]
    assert ignored == {"group": "apps", "kind": "StatefulSet", "jsonPointers": ["/spec/replicas"]}
    assert custom_errors([applications]) == []


def test_a_field_that_its_kind_has_not_is_found():
    (applications,) = EXAMPLES["argo-cd"]
    spec = applications["spec"]["template"]["spec"]
    wrong = applications | {"spec": applications["spec"] | {"template": {"spec": spec | {"a": 1}}}}
    assert any("/spec/template/spec/a is unknown" in error for error in custom_errors([wrong]))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_makes_two_pools_that_share_nothing_but_what_is_theirs_to_share(example):
    first, second = pools(example).values()
    assert not first.made() & second.made()
    for rendered in (first, second):
        check(rendered.resources, VERSIONS[-1])
        assert custom_errors([each for each in rendered.resources if is_custom(each)]) == []
        pods = [pod["spec"] for _, pod in rendered.pods()]
        assert all("@sha256:" in pod["containers"][0]["image"] for pod in pods)
    assert {model(first), model(second)} == {"Qwen/Qwen3-8B", "Qwen/Qwen3-32B"}


def model(rendered):
    """What the replicas serve."""
    given = rendered.container("-replicas")["args"]
    return given[given.index("--") + 1]


def test_both_examples_make_the_same_pools():
    argo, flux = pools("argo-cd"), pools("flux")
    assert argo.keys() == flux.keys()
    for name, rendered in argo.items():
        assert rendered.container("-replicas") == flux[name].container("-replicas")

"""Everything that is rendered is valid for every Kubernetes that the chart says it is for."""

import json
import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tests.chart.rendering import CHART, HELM, PROFILES, ROOT, RefusedError, render
from tests.chart.validation import VERSIONS, check, custom_errors, is_custom
from weft_rl import __version__

sys.path.insert(0, str(ROOT / "helm"))
import values_table


@pytest.mark.parametrize("profile", ["", *PROFILES])
def test_lint_has_nothing_to_say(profile):
    command = [HELM, "lint", "--strict", CHART]
    command += ["--values", PROFILES[profile]] if profile else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("profile", PROFILES)
def test_objects_are_valid_and_have_no_unknown_field(profile, version):
    check(render(profile).resources, version)


def test_validation_is_strict():
    (service, *_) = render("cpu").all("Service")
    service["spec"]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check([service], VERSIONS[-1])


def test_objects_of_operators_are_valid_and_have_no_unknown_field():
    custom = [r for profile in PROFILES for r in render(profile).resources if is_custom(r)]
    assert {r["kind"] for r in custom} == {
        "ServiceMonitor", "PrometheusRule", "Certificate", "ScaledObject",
        "HTTPRoute", "GRPCRoute", "TLSRoute", "BackendTLSPolicy",
    }  # fmt: skip
    assert custom_errors(custom) == []


def test_validation_of_operators_objects_is_strict():
    rendered = render("everything")
    monitor, certificate = rendered.all("ServiceMonitor")[0], rendered.all("Certificate")[0]
    scaled = render("gateway").of("ScaledObject")
    scaled["spec"]["triggers"][0]["kind"] = "prometheus"
    monitor["spec"]["endpoints"][0]["portz"] = "metrics"
    certificate["spec"]["usages"].append("world peace")
    errors = "\n".join(custom_errors([monitor, certificate, scaled]))
    assert "/spec/triggers/0/kind" in errors
    assert "/spec/endpoints/0/portz" in errors
    assert "/spec/usages/4" in errors


def test_the_chart_asks_for_the_oldest_kubernetes_that_is_tested():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={VERSIONS[0]}-0"


def test_the_chart_installs_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


# -- values ------------------------------------------------------------------------


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def nodes(node, path=""):
    """Every schema in a schema, with where it is."""
    yield path, node
    for key, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}.{key}")


def test_the_schema_is_closed():
    everywhere = [*nodes(SCHEMA)]
    for name, definition in SCHEMA["definitions"].items():
        everywhere += nodes(definition, f"definitions.{name}")
    objects = [(path, node) for path, node in everywhere if node.get("type") == "object"]
    # What is Kubernetes' own is left to Kubernetes, and says so.
    open_ones = [
        path
        for path, node in objects
        if "additionalProperties" not in node and "own" not in node.get("$comment", "")
    ]
    assert len(objects) > 30
    assert open_ones == []


def test_the_schema_and_the_values_have_the_same_keys():
    def compare(schema, values, path):
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema:
            return
        assert set(schema["properties"]) - {"global"} == set(values), path
        for key, child in values.items():
            compare(schema["properties"][key], child, f"{path}.{key}")

    compare(SCHEMA, VALUES, "")


def test_every_value_has_a_comment_and_the_readme_its_table():
    def leaves(values, path=()):
        for key, value in values.items():
            if isinstance(value, dict) and value and ".".join((*path, key)) not in described:
                yield from leaves(value, (*path, key))
            else:
                yield ".".join((*path, key))

    text = (CHART / "values.yaml").read_text()
    described = [value.path for value in values_table.described(text)]
    assert [*leaves(VALUES)] == described
    readme = (CHART / "README.md").read_text()
    assert values_table.with_table(readme, text) == readme


def test_the_schema_refuses_every_value_of_a_wrong_type():
    wrong = {}
    described = [*values_table.described((CHART / "values.yaml").read_text())]
    for value in described:
        *parents, last = value.path.split(".")
        node = wrong
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = "text" if isinstance(value.default, list | dict) else ["a list"]
    with pytest.raises(RefusedError) as refusal:
        render("cpu", **wrong)
    refused = set(re.findall(r"^- ([\w.]+): ", str(refusal.value), re.MULTILINE))
    assert {value.path for value in described} - refused == set()


def test_every_value_is_used():
    templates = "".join(p.read_text() for p in CHART.glob("templates/*"))
    for value in values_table.described((CHART / "values.yaml").read_text()):
        name = value.path.rpartition(".")[2]
        if name in ("coordinatorSecret", "replicasSecret", "testSecret"):
            name = "%sSecret"  # by the process's name
        assert re.search(rf"[.\"]{name}\b|{name}\"", templates), value.path

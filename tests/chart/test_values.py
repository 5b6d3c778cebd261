"""Whatever a key is set to is rendered as what it is: null, large numbers, text like a number."""

import copy
import json
import re
import subprocess

import pytest
import yaml

from tests.chart.rendering import CHART, HELM, PROFILES, RefusedError, StrictLoader, render
from tests.chart.validation import VERSIONS, check

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
PROFILE = yaml.safe_load(PROFILES["everything"].read_text())


def keys(schema, values, path=()):
    """Place, default, and whether the schema requires it, of every key that the schema knows."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for key, child in schema.get("properties", {}).items():
        if key in values:
            yield (*path, key), values[key], key in schema.get("required", ())
            if isinstance(values[key], dict):
                yield from keys(child, values[key], (*path, key))


KEYS = [*keys(SCHEMA, VALUES)]
REQUIRED = [place for place, _, required in KEYS if required]
OPTIONAL = {".".join(place): (place, value) for place, value, required in KEYS if not required}


def everything(place, value):
    """The values of the profile that has everything, with another at a place."""
    values = node = copy.deepcopy(PROFILE)
    for key in place[:-1]:
        node = node.setdefault(key, {})
    node[place[-1]] = value
    return values


def with_nulls(places):
    """Values that have null at each place, and nothing else."""
    values = {}
    for place in places:
        node = values
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = None
    return values


def outcome(values):
    """What the values render, or what refuses them."""
    try:
        return render("", **values).resources
    except RefusedError as refusal:
        return re.findall(r"^- .*", str(refusal), re.MULTILINE) or str(refusal)


def nothing(value):
    """What a key without a value means; of a map, each of the default's keys is without one."""
    return dict.fromkeys(value) if isinstance(value, dict) else type(value)()


def pruned(node):
    """An object without its empty maps."""
    if isinstance(node, dict):
        return {key: pruned(child) for key, child in node.items() if child != {}}
    return [pruned(child) for child in node] if isinstance(node, list | tuple) else node


def leaves(node):
    """All that is neither a map nor a list in an object."""
    if isinstance(node, dict | list | tuple):
        children = node.values() if isinstance(node, dict) else node
        return [leaf for child in children for leaf in leaves(child)]
    return [node]


def holes(node):
    """Whether an object has a null or what Go prints for one."""
    wrong = ("<no value>", "<nil>")
    return any(leaf is None or any(w in str(leaf) for w in wrong) for leaf in leaves(node))


def test_only_what_can_be_empty_may_be_null():
    """No number, nor a switch that is on: null would say 0, or off, of what keeps a pool safe."""
    assert [path for path, (_, value) in OPTIONAL.items() if value is True] == []
    assert {type(value) for _, value in OPTIONAL.values()} == {str, bool, list, dict}
    assert len(REQUIRED) > 80


NUMBERS = [place for place, value, _ in KEYS if type(value) in (int, float)]


@pytest.mark.parametrize("place", NUMBERS, ids=".".join)
@pytest.mark.parametrize("number", [0.00001, 1000000])
def test_a_number_is_written_in_digits(place, number):
    """Go writes 1e+06 of a million that comes from a file, which is no size to Kubernetes."""
    values = everything(place, number)
    values["replicas"]["resources"] = {}  # no limit that the number could be above
    rendered = outcome(values)
    if isinstance(rendered, tuple):
        assert not re.search(r"\d[eE][-+]?\d", re.sub(r"sha256:\w+|[\w-]{20,}", "", str(rendered)))


TEXTS = [place for place, value, _ in KEYS if isinstance(value, str)]


@pytest.mark.parametrize("place", TEXTS, ids=".".join)
def test_text_stays_text(place):
    """A Secret may be called 12345: YAML would make a number of it."""
    assert 12345 not in leaves(outcome(everything(place, "12345")))


def test_a_namespace_and_a_model_may_be_called_as_anything():
    command = [HELM, "template", "12345", CHART, "--namespace", "12345"]
    command += ["--values", PROFILES["everything"], "--set-string", "fullnameOverride=true"]
    command += ["--set-json", "extraObjects=[]"]  # their own text
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resources = [each for each in yaml.load_all(done.stdout, StrictLoader) if each]
    assert 12345 not in leaves(resources)
    check([each for each in resources if each["kind"] != "ConfigMap"], VERSIONS[-1])
    for name in ("*", "&a", "!a", "{a", "%a", "@a", "`a", "a:", "null", "~", "1e3", "'a", '"a'):
        for suffix in ("-replicas", "-test"):
            given = render("gpu", model={"name": name}).container(suffix)["args"]
            assert name in given or f"--model={name}" in given


@pytest.mark.parametrize("depth", sorted({len(place) for place in REQUIRED}))
def test_a_null_is_refused_where_a_value_is_needed(depth):
    places = [place for place in REQUIRED if len(place) == depth]
    refused = outcome(with_nulls(places))
    expected = [f"- {'.'.join(p[:-1]) or '(root)'}: {p[-1]} is required" for p in places]
    assert set(expected) - set(refused) == set()


@pytest.mark.parametrize("path", OPTIONAL)
def test_a_null_elsewhere_means_empty(path):
    place, value = OPTIONAL[path]
    null = outcome(everything(place, None))
    assert pruned(null) == pruned(outcome(everything(place, nothing(value))))
    assert not isinstance(null, str), null  # no sentence, but a template that broke off
    assert not holes(null)


def test_everything_that_may_be_null_may_be_so_at_once():
    """But for what has to say which model there is, and how the pool is secured."""
    values = with_nulls(place for place, value in OPTIONAL.values() if not isinstance(value, dict))
    values["insecure"] = values["model"]["tiny"] = True
    resources = outcome(values)
    assert isinstance(resources, tuple), resources
    assert not holes(resources)
    check(resources, VERSIONS[-1])

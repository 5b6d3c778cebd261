"""Renders the chart as Helm would install it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "weft"
HELM = Path(sys.executable).parent / "helm"
NAMESPACE = "rl"

#: Files of values by name: the chart's own profiles, and some that turn on what those do not.
PROFILES = {
    path.stem.removeprefix("values-"): path
    for path in (*CHART.glob("values-*.yaml"), *Path(__file__).parent.glob("profiles/*.yaml"))
}

#: Those whose callers are known by tokens.
BY_TOKENS = ("tokens", "gateway")

Resource = dict[str, Any]


class StrictLoader(yaml.CSafeLoader):
    """Loads YAML, and refuses a key that is there twice, as Helm and strict servers do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is there twice: {sorted(keys)}"
        return super().construct_mapping(node, deep)


class RefusedError(Exception):
    """Helm refused the values; says what it printed."""


@dataclass(frozen=True)
class Rendered:
    """The objects of one release."""

    resources: tuple[Resource, ...]

    def of(self, kind: str, suffix: str = "") -> Resource:
        """The one object of a kind, or the one of those whose name ends so."""
        found = [r for r in self.all(kind) if r["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, f"{len(found)} of {kind} *{suffix}"
        return found[0]

    def all(self, kind: str) -> list[Resource]:
        """Every object of a kind."""
        return [resource for resource in self.resources if resource["kind"] == kind]

    def made(self) -> set[tuple[str, str]]:
        """Kinds and names of all that the release makes, Secrets of its certificates included."""
        names = {(each["kind"], each["metadata"]["name"]) for each in self.resources}
        return names | {("Secret", each["spec"]["secretName"]) for each in self.all("Certificate")}

    def pods(self) -> Iterator[tuple[str, Resource]]:
        """Each pod that would run: the name of what makes it, and metadata with spec."""
        for resource in self.resources:
            if resource["kind"] == "Pod":
                yield resource["metadata"]["name"], resource
            elif resource["kind"] in ("Deployment", "StatefulSet"):
                yield resource["metadata"]["name"], resource["spec"]["template"]

    def pod(self, suffix: str) -> Resource:
        """The spec of the one pod whose maker's name ends so."""
        found = [pod["spec"] for name, pod in self.pods() if name.endswith(suffix)]
        assert len(found) == 1
        return found[0]

    def container(self, suffix: str) -> Resource:
        """The chart's own container of that pod; sidecars of the values come after it."""
        first: Resource = self.pod(suffix)["containers"][0]
        return first


def containers(spec: Resource) -> list[Resource]:
    """All containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def args(container: Resource) -> dict[str, str]:
    """A container's options by name; those without a value have "". What comes after ``--`` is
    not among them."""
    own = container["args"]
    own = own[: own.index("--")] if "--" in own else own
    return {name: value for name, _, value in (arg.partition("=") for arg in own)}


def render(
    profile: str, *sets: str, release: str = "weft", chart: Path = CHART, **values: Any
) -> Rendered:
    """The chart with the values of a profile ("" has none) and more: ``a.b=c`` as on the command
    line (JSON, if it begins with a bracket), or whole top-level values.

    Raises:
        RefusedError: Helm refused them.
    """
    done = _template(profile, sets, release, chart, json.dumps(values, sort_keys=True))
    if done.returncode:
        raise RefusedError(done.stderr)
    documents = (each for each in yaml.load_all(done.stdout, StrictLoader) if each)
    return Rendered(tuple(documents))


@functools.cache
def _template(
    profile: str, sets: tuple[str, ...], release: str, chart: Path, values: str
) -> subprocess.CompletedProcess[str]:
    command = [HELM, "template", release, chart, "--namespace", NAMESPACE]
    command += ["--kube-version", "1.36.0", "--values", "-"]
    command[-2:-2] = ["--values", PROFILES[profile]] if profile else []
    for pair in sets:
        command += ["--set-json" if pair.partition("=")[2].startswith("[") else "--set", pair]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False)

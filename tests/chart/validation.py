"""Validates objects as every Kubernetes that the chart is for would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import kubernetes_validate

from tests.chart.rendering import ROOT, Resource

VERSIONS = [f"1.{minor}.0" for minor in range(30, 37)]
#: Groups that Kubernetes has not by itself.
CUSTOM = (
    "monitoring.coreos.com", "cert-manager.io", "keda.sh", "gateway.networking.k8s.io",
    "argoproj.io", "helm.toolkit.fluxcd.io", "source.toolkit.fluxcd.io",
)  # fmt: skip


def is_custom(resource: Resource) -> bool:
    """Whether an operator brings its kind."""
    return resource["apiVersion"].partition("/")[0] in CUSTOM


def custom_errors(resources: Sequence[Resource]) -> list[str]:
    """What the CRDs' own validators say of objects, unknown fields included."""
    command = ["node", ROOT / "tests/chart/crds/validate.mjs", ROOT / ".venv-chart/npm"]
    done = subprocess.run(
        command, input=json.dumps(resources), capture_output=True, text=True, check=True
    )
    errors: list[str] = json.loads(done.stdout)
    return errors


def check(resources: Sequence[Resource], version: str) -> None:
    """Raises kubernetes_validate's error for an object that is not valid, or has a field that its
    kind has not."""
    for resource in resources:
        if not is_custom(resource):
            kubernetes_validate.validate(resource, version, strict=True)

"""The example of a trainer fits the pool of the profile that it names."""

import pytest
import yaml

from tests.chart.rendering import CHART, ROOT, render
from tests.chart.validation import VERSIONS, check, custom_errors, is_custom

TRAINER = [*yaml.safe_load_all((ROOT / "helm/examples/trainer-job.yaml").read_text())]


def of(kind):
    (found,) = [resource for resource in TRAINER if resource["kind"] == kind]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_example_is_valid(version):
    check(TRAINER, version)


def test_its_certificate_is_valid_and_of_the_pools_issuer():
    assert custom_errors([resource for resource in TRAINER if is_custom(resource)]) == []
    pool = render("gpu").all("Certificate")[0]["spec"]["issuerRef"]
    assert of("Certificate")["spec"]["issuerRef"] == pool
    assert pool["kind"] == "ClusterIssuer"  # it is in another namespace


def test_the_pool_lets_it_in():
    values = yaml.safe_load((CHART / "values-gpu.yaml").read_text())
    (san,) = of("Certificate")["spec"]["dnsNames"]
    (identity,) = [i for i in values["access"]["identities"] if i["san"] == san]
    assert "publish" in identity["roles"]
    assert "base" in identity["policies"]
    namespaces = {resource["metadata"]["namespace"] for resource in TRAINER}
    assert namespaces == set(values["networkPolicy"]["trainerNamespaces"])
    job = of("Job")["spec"]["template"]
    member = render("gpu").of("NetworkPolicy", "-members")["spec"]["podSelector"]["matchLabels"]
    assert job["metadata"]["labels"] == member
    own, pool = of("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert own["podSelector"]["matchLabels"] == pool["podSelector"]["matchLabels"] == member


def test_it_dials_the_coordinator_with_its_certificate():
    (container,) = of("Job")["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container.get("env", [])}
    tests = render("gpu").container("-test")
    expected = {v["name"]: v["value"] for v in tests["env"] if v["name"].startswith("WEFT_")}
    assert {k: v for k, v in environment.items() if k.startswith("WEFT_")} == expected
    assert container["image"] == tests["image"]
    for key in ("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"):
        assert container["securityContext"][key] == tests["securityContext"][key]


def test_its_script_is_python():
    compile(of("ConfigMap")["data"]["train.py"], "train.py", "exec")

"""The chart as an archive, and as an artifact of an OCI registry."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from contextlib import suppress

import pytest
import yaml

from tests.chart.rendering import CHART, HELM, PROFILES, ROOT, render
from tests.waits import until
from weft_rl import __version__

sys.path.insert(0, str(ROOT / "helm"))
from package import package

FOLDER = ROOT / ".venv-chart/registry/usr/bin"
REGISTRY = shutil.which("docker-registry", path=f"{FOLDER}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return package(HELM, tmp_path_factory.mktemp("package"))


def test_the_archive_is_the_same_each_time(archive, tmp_path, monkeypatch):
    copy = shutil.copytree(CHART, tmp_path / "weft")  # as a checkout elsewhere, at another time
    (copy / "values.yaml").touch()
    assert package(HELM, tmp_path / "a", copy).read_bytes() == archive.read_bytes()
    assert archive.name == f"weft-{__version__}.tgz"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    with tarfile.open(package(HELM, tmp_path / "b")) as opened:
        assert {member.mtime for member in opened} == {1700000000}


def test_the_archive_has_every_file_of_the_chart_and_no_other(archive):
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=CHART, capture_output=True, text=True, check=True
    ).stdout.split()
    with tarfile.open(archive) as opened:
        packed = {member.name.removeprefix("weft/") for member in opened}
    assert packed == set(tracked)


def test_the_archive_renders_what_the_chart_does(archive):
    for profile in PROFILES:
        assert render(profile, chart=archive) == render(profile)


@pytest.fixture
def registry(tmp_path):
    """The address of a registry on loopback, on a port that the system chooses."""
    if REGISTRY is None:
        pytest.skip("no docker-registry: apt-get install docker-registry")
    config = tmp_path / "registry.yml"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "store")}}
    http = {"addr": "127.0.0.1:0"}
    config.write_text(yaml.safe_dump({"version": 0.1, "storage": storage, "http": http}))
    log = tmp_path / "registry.log"
    with log.open("w") as lines:
        server = subprocess.Popen([REGISTRY, "serve", config], stdout=lines, stderr=lines)
    try:
        address = re.compile(r"listening on (127\.0\.0\.1:\d+)")
        yield until(lambda: address.search(log.read_text()), 30, why=log.read_text)[1]
    finally:
        with suppress(ProcessLookupError):
            server.terminate()
        server.wait(30)


def test_a_registry_takes_the_archive_and_gives_it_back(archive, registry, tmp_path):
    def helm(*words):
        command = [HELM, *words, "--plain-http"]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    helm("push", archive, f"oci://{registry}/charts")
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    url = f"http://{registry}/v2/charts/weft/manifests/{__version__}"
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=30) as answer:
        manifest = json.load(answer)
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert layer["digest"] == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    source = f"oci://{registry}/charts/weft"
    helm("pull", source, "--version", __version__, "--destination", tmp_path)
    assert (tmp_path / archive.name).read_bytes() == archive.read_bytes()
    installed = helm("template", "weft", source, "--namespace=rl", f"--values={PROFILES['gpu']}")
    names = {each["metadata"]["name"] for each in yaml.safe_load_all(installed.stdout) if each}
    assert names == {r["metadata"]["name"] for r in render("gpu").resources}

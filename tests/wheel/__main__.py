"""``python -m tests.wheel``: what is released, installed where there is nothing of ours.

Builds the sdist, and from it the wheel, of the files that git knows. With each Python that the
classifiers name, it installs the wheel into an empty environment with the coordinator's extra and
into another with the trainer's; and uses both, outside the source tree. ``--only coordinator``
makes the first, which needs no torch; ``--python 3.12`` takes that Python alone.
"""

from __future__ import annotations

import argparse
import email.message
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import date
from pathlib import Path

from markdown_it import MarkdownIt

from release.__main__ import release
from tests.wheel.environment import Environment, interpreter, run
from tests.wheel.running import Running
from weft_rl import __version__

ROOT = Path(__file__).parents[2]
#: Where helm may be; without it the chart is left out, which has tests of its own.
HELM_PATH = f"{ROOT / '.venv-chart/bin'}:{os.environ.get('PATH', '')}"
PACKAGES = ("rollout_side", "trainer_side", "weft_rl")

#: What an environment of the trainer's extra holds beside torch and what torch itself needs.
TRAINERS = {
    "googleapis-common-protos", "grpcio", "grpcio-status", "markdown-it-py", "mdurl", "numpy",
    "pip", "protobuf", "pygments", "rich", "setuptools", "weft-rl", "xxhash",
}  # fmt: skip

USER = """\
from trainer_side import PolicyVersion, Publisher
with Publisher("127.0.0.1:50051", trainer_id="a") as publisher:
    version: PolicyVersion = publisher.push_adapter("adapter", policy="math").version
"""
MISUSE = 'from trainer_side import Publisher\nPublisher("127.0.0.1:50051", trainer_id=7)\n'

#: A package of others: its module and its script have the name of our script.
NAMESAKE = "weft==0.9.118"

#: The pushes of a trainer; its model has the names and shapes of the double that serves it.
TRAINER = """\
import sys
import torch
from trainer_side import Publisher
root = torch.nn.Module()
root.layers = torch.nn.ModuleList([torch.nn.Module()])
for name, shape in {"t0": (1024,), "q_proj": (64, 64)}.items():
    part = torch.nn.Module()
    part.weight = torch.nn.Parameter(torch.ones(shape))
    root.layers[0].add_module(name, part)
with Publisher(sys.argv[1], trainer_id="a", timeout_seconds=60, progress=None) as publisher:
    version, report = publisher.push_base(root)
    print(version, report.num_replicas)
"""

PROTOS = """\
from importlib.resources import files
import weft_rl.v1
root = files("weft_rl") / "protos"
for proto in sorted((root / "weft/v1").iterdir(), key=lambda p: p.name):
    print(proto.name, proto.read_bytes().hex())
"""


def build(work: Path) -> Path:
    """The wheel as `make release` makes it, of what git knows: tagged in a repository of its own,
    under today's date in the changelog. Two builds were compared."""
    source = work / "source"
    listed = run("git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    changelog = source / "CHANGELOG.md"
    dated = changelog.read_text().replace("(unreleased)", f"({date.today()})", 1)
    changelog.write_text(dated)
    tag = f"v{__version__}"
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "all"), ("tag", tag)):
        run("git", "-C", source, *words)
    files = release(source, tag, work / "release", shutil.which("helm", path=HELM_PATH))
    (wheel,) = (path for path in files if path.suffix == ".whl")
    notes = (work / "release" / f"weft-{__version__}.md").read_text()
    assert notes.startswith("The first release.")
    assert notes in dated
    return wheel


def metadata_of(wheel: Path) -> email.message.Message:
    """What the package index is told of a wheel; the payload is the long description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def pythons_of(wheel: Path) -> list[str]:
    """The versions of Python that the classifiers name."""
    classifiers = "\n".join(metadata_of(wheel).get_all("Classifier", []))
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)


def check_contents(wheel: Path) -> None:
    """Every module of ours, the types, the protos and nothing else; metadata that says so."""
    said = metadata_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "--", *PACKAGES)
    wanted = {
        name for name in tracked.split() if name != "weft_rl/protos" and (ROOT / name).exists()
    }
    wanted |= {
        f"weft_rl/protos/weft/v1/{p.name}" for p in (ROOT / "protos/weft/v1").glob("*.proto")
    }
    assert {f"{package}/py.typed" for package in PACKAGES} < wanted
    found = {name for name in names if ".dist-info/" not in name}
    assert found == wanted, f"the wheel differs from the tree: {sorted(found ^ wanted)}"
    assert said["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert {"trainer", "coordinator", "rollout"} <= set(said.get_all("Provides-Extra", []))
    assert pythons_of(wheel), "the classifiers name no version of Python"
    check_description(said)


def check_description(said: email.message.Message) -> None:
    """The README as the package index shows it: whole, alpha, and without a link that leads
    nowhere."""
    assert said["Description-Content-Type"] == "text/markdown"
    text = str(said.get_payload())
    assert "Weft is alpha" in text
    assert "Development Status :: 3 - Alpha" in said.get_all("Classifier", [])
    headings = re.compile(r"^##? .+$", re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert headings.findall(text) == headings.findall(readme)
    inline = (token.children or [] for token in MarkdownIt().parse(text) if token.type == "inline")
    links = [str(t.attrs[a]) for ts in inline for t in ts for a in ("href", "src") if a in t.attrs]
    dead = [link for link in links if not re.match(r"https?://", link)]
    assert not dead, f"links that lead nowhere in a package index: {dead}"


def start_coordinator(environment: Environment, cwd: Path) -> Running:
    """A coordinator of that environment; ``said`` is its address."""
    options = ["--listen", "127.0.0.1:0", "--log-level", "warning"]
    command = [environment.script("weft"), "coordinator", *options]
    return Running(command, cwd, ready="listening on ")


def check_coordinator(environment: Environment, coordinator: Running) -> None:
    """The command line and the protos are there, without torch and vLLM."""
    assert not environment.has("torch", "vllm", "xxhash")
    assert "coordinator" in environment.call("weft", "--help")
    assert "grpcio" in environment.call("weft", "version")
    assert "pool" in environment.call("weft", "doctor", "--json", "-c", coordinator.said)
    status = environment.call("weft", "status", "-c", coordinator.said)
    assert "0 of 0 replicas ready" in status, status
    for command in ("push . --policy math", "rollout -- model"):
        refused = environment.refused("weft", *command.split())
        assert re.search(r"pip install '/.+\.whl\[[a-z,]*trainer\]'", refused), refused
    protos = environment.call("python", "-c", PROTOS)
    assert protos == "".join(
        f"{proto.name} {proto.read_bytes().hex()}\n"
        for proto in sorted((ROOT / "protos/weft/v1").iterdir())
    )


def check_beside_namesake(environment: Environment, coordinator: Running) -> None:
    """Install the other package that is named weft; ours works by its own names."""
    environment.install(NAMESAKE, "--no-deps", "--ignore-requires-python")
    assert environment.has("weft")
    for command in (["weft-rl"], ["python", "-m", "weft_rl"]):
        status = environment.call(*command, "status", "-c", coordinator.said)
        assert "0 of 0 replicas ready" in status, status


def check_trainer(environment: Environment, coordinator: Running, work: Path) -> None:
    """A trainer pushes to a replica; its environment is small, and mypy sees our types."""
    assert not environment.has("vllm", "typer", "transformers")
    extra = environment.distributions() - environment.closure("torch") - TRAINERS
    assert not extra, f"the trainer's extra brings {sorted(extra)}"
    refused = environment.refused("weft", "status")
    assert re.search(r"pip install '/.+\.whl\[coordinator\]'", refused), refused
    check_types(environment, work)
    double = [sys.executable, "-m", "tests.doubles.replica_process", coordinator.said, "r0"]
    with Running([*double, "1", "1024", "--keep"], ROOT, ready="ready"):
        pushed = environment.call("python", "-c", TRAINER, coordinator.said)
        assert pushed == "base@1 1\n", pushed


def check_types(environment: Environment, work: Path) -> None:
    """mypy takes a user's script, and finds what is wrong in another."""
    (work / "user.py").write_text(USER)
    (work / "misuse.py").write_text(MISUSE)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull,
        "--python-executable", environment.python, "user.py", "misuse.py",
    ]  # fmt: skip
    checked = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, checked.stdout + checked.stderr
    assert re.match(r"misuse\.py:2: .*\"trainer_id\"", errors[0]), errors


def main() -> int:
    """Build, install, use."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=main.__doc__)
    parser.add_argument("--only", choices=["coordinator"], help="leave the trainer's extra out")
    parser.add_argument(
        "--python", action="append", help="a version, such as 3.12; by default the classifiers'"
    )
    parser.add_argument("--torch", default="torch", help="what pip installs as torch")
    parser.add_argument("--torch-index", help="where, if the usual index lacks it")
    options = parser.parse_args()
    began = time.monotonic()

    def done(what: str) -> None:
        print(f"{what} ({time.monotonic() - began:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory(prefix="weft-wheel-") as name:
        work, outside = Path(name), Path(name) / "outside"
        outside.mkdir()
        wheel = build(work)
        check_contents(wheel)
        done(f"built {wheel.name}")
        num_trainers = 0
        for version in options.python or pythons_of(wheel):
            python, folder = interpreter(version), work / version
            server = Environment(folder / "coordinator", cwd=outside, python=python)
            server.install(f"{wheel}[coordinator]")
            with start_coordinator(server, outside) as coordinator:
                check_coordinator(server, coordinator)
                done(f"Python {version}: a coordinator and the command line run without torch")
                check_beside_namesake(server, coordinator)
                done("so they do beside another package that is named weft")
                if options.only == "coordinator":
                    continue
                trainer = Environment(folder / "trainer", cwd=outside, python=python)
                try:
                    trainer.install(options.torch, otherwise=options.torch_index)
                except RuntimeError:  # an index with builds for one Python alone
                    done(f"not tried: a trainer with Python {version}: no {options.torch}")
                    continue
                num_trainers += 1
                trainer.install(f"{wheel}[trainer]")
                check_trainer(trainer, coordinator, outside)
                status = server.call("weft-rl", "status", "-c", coordinator.said)
                assert "base@1" in status, status
                done("a trainer without vLLM pushed, and mypy sees its types")
        assert num_trainers or options.only, "the trainer's extra was tried with no Python"
    return 0


if __name__ == "__main__":
    sys.exit(main())

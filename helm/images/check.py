"""What `make images` runs, because no image can be built without a registry of base images.

    python helm/images/check.py [IMAGE ...]

Installs the images for CPU into empty environments by the script that their Dockerfiles run, and
uses what is there; resolves the one for CUDA by the same script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

_TRACES = """\
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
"""
_COORDINATOR = """\
import importlib.util
from importlib.resources import files
assert importlib.util.find_spec("torch") is None, "the coordinator's image has torch"
import weft_rl.coordinator.server
assert (files("weft_rl.coordinator.page") / "static/index.html").is_file(), "it has no page"
"""
# The chart's init container and its test's pod need the model's library, too.
_REPLICA = """\
import rollout_side.service.main, trainer_side, vllm, safetensors
import vllm.model_executor.models.qwen3_vl  # needs torchvision
from pathlib import Path
from weft_rl.cli.demo.tiny_model import make_model
make_model(Path("tiny"))
"""
#: By image, whether it is resolved only, what is asked of it once installed, and its command.
IMAGES = {
    "coordinator": (False, _COORDINATOR + _TRACES, "coordinator"),
    "replica-cpu": (False, _REPLICA + _TRACES, "rollout"),
    "replica-cuda": (True, "", ""),
}


def copy_source(work: Path) -> Path:
    """A copy of what git knows: what is left of former builds is in no image either."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / "source" / name, follow_symlinks=False)
    return work / "source"


def check(image: str, source: Path, work: Path) -> None:
    """Install one image's packages, or resolve them, and use them."""
    dry, program, command = IMAGES[image]
    environment = work / image
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    print(f"{image}: {'resolving' if dry else 'installing'}", flush=True)
    subprocess.run(
        ["sh", "helm/images/install.sh", image, *(["--dry-run"] if dry else [])],
        cwd=source,
        env=env | {"PYTHON": str(python)},
        check=True,
    )
    if not dry:
        subprocess.run([python, "-c", program], cwd=work, env=env, check=True)
        subprocess.run(
            [environment / "bin/weft", command, "--help"],
            cwd=work,
            env=env,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    print(f"{image}: {'can be installed' if dry else 'works'}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="weft-images-") as work:
        source = copy_source(Path(work))
        for image in sys.argv[1:] or IMAGES:
            check(image, source, Path(work))


if __name__ == "__main__":
    main()

"""The program that takes the place of TRL's `vllm-serve`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.replicas import LORA_ARGS, running_coordinator, running_replicas, served_versions
from tests.integrations.migration import run_pasted
from tests.integrations.pool import ROOT
from weft_rl.cli.demo.tiny_model import make_model

_DIFFERENCE = re.compile(r"'sampling/sampling_logp_difference/max': '?([0-9.e+-]+)")


def differences(printed: str) -> list[float]:
    """What TRL logged of each step."""
    return [float(number) for number in _DIFFERENCE.findall(printed)]


def promised() -> tuple[float, float]:
    """The figures of the page: in float32, and as TRL's default is."""
    page = (ROOT / "docs/integrations/trl.md").read_text()
    text = r"With `bf16=False` it was below (\S+) [^;]*; as pasted, up to (\S+),"
    found = re.search(text, " ".join(page.split()))
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.mark.timeout(900)  # two trainings
def test_from_vllm_serve(tmp_path: Path) -> None:
    """As pasted, and in float32: TRL turns bf16 on by itself."""
    make_model(tmp_path / "model")
    in_float32, in_bf16 = promised()
    with (
        running_coordinator(tmp_path) as coordinator,
        running_replicas(tmp_path, coordinator.target, [tmp_path / "model"], *LORA_ARGS),
    ):

        def run(name: str, program: str) -> list[float]:
            (work := tmp_path / name).mkdir()
            (work / f"{name}.py").write_text(program)
            command, env = [sys.executable, f"{name}.py"], {"ACCELERATE_USE_CPU": "true"}
            model = tmp_path / "model"
            return differences(run_pasted(work, [], command, coordinator.target, model, env))

        program = (ROOT / "examples/from_trl_vllm_serve.py").read_text()
        pasted = run("pasted", program)
        assert len(pasted) == 3
        assert in_float32 < max(pasted) <= in_bf16, pasted
        assert served_versions(coordinator.target) == {"math": 3}
        exact = run("exact", program.replace("max_steps=3,", "max_steps=3, bf16=False,"))
        assert len(exact) == 3
        assert max(exact) <= in_float32, exact
        assert served_versions(coordinator.target) == {"math": 6}

"""docs/start.md, Two machines: its blocks, run as they stand on two machines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.downloads import put_into_cache
from tests.two_machines.machines import ROOT, Machine, Server, lacking, two_machines
from tests.unit.docs.pages import Block, parse
from weft_rl.cli.demo.tiny_model import make_model

pytestmark = [pytest.mark.skipif(bool(lacking()), reason=lacking()), pytest.mark.timeout(600)]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SECONDS = 180.0
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # this host has other work
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def blocks() -> dict[str, list[Block]]:
    """The blocks of the section: those without certificates, those with, and the program."""
    page = ROOT / "docs/start.md"
    section = re.search(r"^## Two machines$(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert section
    plain, secured = (
        parse(page, text).blocks for text in section[1].split("\n**With certificates.**")
    )
    return {
        "insecure": [block for block in plain if block.language == "bash"],
        "certificates": [block for block in secured if block.language == "bash"],
        "program": [block for block in plain if block.language == "python"],
    }


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    make_model(tmp_path / "model")
    with two_machines(tmp_path, *ADDRESSES) as made:
        for machine in made:
            put_into_cache(tmp_path / "model", machine.files / "huggingface")
        yield made


def follow(steps: list[Block], machines: list[Machine]) -> str:
    """Run blocks in their order; returns what those that end have printed."""
    by_address = {machine.address: machine for machine in machines}
    starting: list[Server] = []
    said = ""
    for step in steps:
        where = re.match(r"# on ([\d.]+)", step.text)
        assert where, step.text
        machine = by_address[where[1]]
        if re.search(r"^weft (coordinator|rollout)", step.text, re.MULTILINE):
            starting.append(machine.serve(step.text, **_ENV))
            if "weft coordinator" in step.text:
                starting[-1].wait_until_ready()
            continue
        for server in starting:
            server.wait_until_ready()
        code, text = machine.run(step.text, _SECONDS, **_ENV)
        assert code == 0, f"{step.text}\n{text}\n{[s.log.read_text()[-3000:] for s in starting]}"
        said += text
    return said


@pytest.mark.parametrize("kind", ["insecure", "certificates"])
def test_the_section_as_it_stands(kind: str, machines: list[Machine]) -> None:
    first, second = machines
    (program,) = blocks()["program"]
    (first.files / "train.py").write_text(program.text)
    said = follow(blocks()[kind], machines)
    assert re.search(r"2 of 2 replicas ready", said), said
    for number in (1, 2, 3):
        assert f"math@{number} is served by 2 replicas\n4 samples, of math@{number}" in said

    shown = "export WEFT_COORDINATOR=10.77.0.1:50051\n"
    if kind == "certificates":
        code, text = first.run(f"{shown}weft status", _SECONDS)
        assert code != 0, f"who shows no certificate is let in:\n{text}"
        assert (second.files / "replica.key").exists()
        assert not (second.files / "ca.key").exists()
        shown += "export WEFT_TLS_CA=ca.pem WEFT_TLS_CERT=trainer.pem WEFT_TLS_KEY=trainer.key\n"
    code, text = first.run(f"{shown}weft transfers --purpose push --json", _SECONDS)
    assert code == 0, text
    carried = [transfer["backend"] for transfer in json.loads(text)["transfers"]]
    assert carried == ["gloo"] * 3, "weights went over the network"

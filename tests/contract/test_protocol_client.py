"""examples/protocol_client.py, which imports nothing of ours, against a real coordinator."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest

from tests.contract.conftest import Pool
from tests.contract.protocol_vectors import PATH
from tests.doubles.tiny_model import ADAPTER_CONFIG, ADAPTER_MANIFEST, ADAPTER_METAS
from weft_rl.v1 import inspect_pb2, publish_pb2

_ROOT = Path(__file__).parents[2]
_SHOWN = r"^\$ python examples/protocol_client\.py .*\n((?:.+\n)+)```"
_PROGRAM = _ROOT / "examples" / "protocol_client.py"
_ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

needs_a_client = pytest.mark.skipif(
    not any(shutil.which(name, path=_ENVIRONMENT["PATH"]) for name in ("grpcurl", "buf")),
    reason="neither grpcurl nor buf is installed",
)


def test_it_imports_nothing_of_ours() -> None:
    tree = ast.parse(_PROGRAM.read_text())
    imported = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT directory of the tiny model, written by hand."""
    header, end = {}, 0
    for meta in ADAPTER_METAS:
        offsets = [end, end + meta.num_bytes]
        header[meta.name] = {"dtype": "BF16", "shape": meta.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(end)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    return tmp_path


async def _run(*words: str | Path) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, _PROGRAM, *words, env=_ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@needs_a_client
async def test_it_begins_a_push_and_gives_it_up(pool: Pool, adapter: Path) -> None:
    replica = await pool.replica()
    replica.attends = False
    code, out, err = await _run(pool.target, adapter, "math")
    assert code == 0, err
    (shown,) = re.findall(_SHOWN, PATH.with_name("protocol.md").read_text(), re.MULTILINE)
    assert out == shown
    assert f"manifest {ADAPTER_MANIFEST.layout_digest.hex()[:12]}" in out
    trainer = await pool.trainer()
    listed = await trainer.inspect.ListTransfers(inspect_pb2.ListTransfersRequest())
    (transfer,) = listed.transfers
    assert transfer.purpose == publish_pb2.TRANSFER_PURPOSE_PUSH
    assert transfer.failure.reason == "TRANSFER_ABORTED"
    assert "a stranger's first try" in transfer.failure.message


@needs_a_client
async def test_it_says_why_it_is_refused(pool: Pool, adapter: Path) -> None:
    await pool.trainer()
    code, out, err = await _run(pool.target, adapter, "math")
    assert (code, out) == (1, "")
    assert err.startswith("refused: ALREADY_EXISTS/POLICY_OWNED: policy 'math' is owned by")

"""What a migration's page shows is what examples/ have, which `make migrations` runs."""

from __future__ import annotations

import pytest

from tests.unit.docs.pages import ROOT, Block, page

_SHOWN = {
    "docs/integrations/trl.md": ["from_trl_vllm_serve.py"],
    "docs/integrations/ms-swift.md": ["from_swift_rollout.py", "from_swift_rollout.sh"],
    "docs/integrations/verl.md": ["from_verl_checkpoint_engine.sh"],
}


def applied(block: Block) -> str:
    """What a block says once what it removes is gone."""
    if block.language != "diff":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if not line.startswith("-"))


@pytest.mark.parametrize(("name", "files"), _SHOWN.items())
def test_the_program_of_a_page_is_the_example(name: str, files: list[str]) -> None:
    shown = [applied(block) for block in page(name).blocks]
    for file in files:
        text = (ROOT / "examples" / file).read_text()
        assert any(program.strip() in text and len(program) > 300 for program in shown), file


@pytest.mark.parametrize("name", _SHOWN)
def test_nothing_is_left_out_of_a_block(name: str) -> None:
    assert not [block.text for block in page(name).blocks if "..." in block.text]

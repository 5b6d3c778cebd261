"""Members of a stream group, and the cables between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.certificates import Authority
from tests.doubles.wires import Wires
from weft_rl.transport.stream import listening


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    made = Wires(listening.address_of)
    monkeypatch.setattr(listening, "address_of", made.address_of)
    yield made
    made.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)

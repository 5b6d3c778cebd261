"""Members of a stream group, and the cables between them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.certificates import Authority
from tests.doubles.wires import Wires


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    made = Wires(socket.create_connection)
    monkeypatch.setattr(socket, "create_connection", made.connect)
    yield made
    made.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)

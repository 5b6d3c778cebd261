"""What a start has shown of a reload is kept for the next start of the same engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_side.vllm_engine.loading.reload_proof import ReloadVerdict


def test_it_is_kept_for_the_same_engine_alone(tmp_path: Path) -> None:
    ReloadVerdict("a", tmp_path).put(["", ""])
    ReloadVerdict("b", tmp_path).put(["", "it gives 'w' other values"])
    assert ReloadVerdict("a", tmp_path).get() == ""
    assert ReloadVerdict("b", tmp_path).get() == "it gives 'w' other values"
    assert ReloadVerdict("c", tmp_path).get() is None


def test_nothing_is_kept_of_what_was_not_told(tmp_path: Path) -> None:
    ReloadVerdict("a", tmp_path).put(["", None])
    ReloadVerdict("", tmp_path).put([""])
    assert not [*tmp_path.iterdir()]
    assert ReloadVerdict("", tmp_path).get() is None


@pytest.mark.parametrize("change", [
    lambda entry: b"", lambda entry: b"{", lambda entry: b"[" * 100_000,
    lambda entry: json.dumps({**entry, "found": 1}).encode(),
    lambda entry: json.dumps({**entry, "format": 0}).encode(),
    lambda entry: json.dumps({**entry, "of": ["another"]}).encode(),
])  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, change: object) -> None:
    ReloadVerdict("a", tmp_path).put([""])
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(change(json.loads(kept.read_text())))  # type: ignore[operator]
    assert ReloadVerdict("a", tmp_path).get() is None


def test_it_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ReloadVerdict("a").put([""])
    assert len([*(tmp_path / "weft" / "reloads").iterdir()]) == 1

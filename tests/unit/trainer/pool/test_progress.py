"""What whoever waits for a push is told of it."""

from __future__ import annotations

import pytest

from trainer_side.pool.client import PushReporter, reporter_for
from weft_rl.progress import ShownProgress


def test_a_function_is_told_what_is_read_and_what_is_sent() -> None:
    told: list[tuple[str, int, int]] = []
    reporter = reporter_for(lambda *now: told.append(now))
    reporter.reads("the base model", 3, 10)
    sent = reporter.sends("math@1", 100)
    assert sent is not None
    sent(1, 4)
    assert told == [("reading the base model", 3, 10), ("math@1", 1, 4)]


def test_a_bar_has_a_label_and_the_bytes_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = ShownProgress("push of math")
    reporter = reporter_for("auto")
    monkeypatch.setattr(reporter, "_progress", bar)
    reporter.reads("the base model", 4_000_000_000, 16_000_000_000)
    assert bar.share == 0.25
    words = "push of math: reading the base model, to know the base's version by (once)"
    assert bar.text().startswith(f"{words} 4.00 GB of 16.0 GB")


def test_nobody_is_told_where_nobody_asks() -> None:
    reporter = reporter_for(None)
    reporter.reads("the base model", 3, 10)
    assert type(reporter) is PushReporter
    assert reporter.sends("math@1", 100) is None

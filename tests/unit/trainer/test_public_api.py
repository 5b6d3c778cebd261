"""Public names and signatures change on purpose: they are compared with a committed text."""

from __future__ import annotations

import difflib

import trainer_side
from tests.unit.trainer.public_api import SNAPSHOT, render


def test_the_public_api_is_as_committed() -> None:
    known, found = SNAPSHOT.read_text(), render()
    changes = "\n".join(
        difflib.unified_diff(
            known.splitlines(), found.splitlines(), "committed", "now", lineterm=""
        )
    )
    assert known == found, (
        f"{changes}\nthe public API has changed: if that is meant, say so in the changelog and run "
        "`python -m tests.unit.trainer.public_api`"
    )


def test_every_public_name_can_be_imported() -> None:
    for name in trainer_side.__all__:
        assert getattr(trainer_side, name).__doc__

"""How often one fact of a replica is said: a ratchet, whose bounds only fall."""

from __future__ import annotations

import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
#: The fact, and how many files may name it: those that declare it (proto and value), the one that
#: finds it out, and the one that shows it.
FACTS = {"draft_version": 4}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_of_a_replica_is_named_in_few_files(fact: str) -> None:
    files = [
        str(path.relative_to(_ROOT))
        for folder in ("protos", "rollout_side", "trainer_side", "weft_rl")
        for path in (_ROOT / folder).rglob("*")
        if path.suffix in (".py", ".proto", ".js")
        and "v1" not in path.relative_to(_ROOT).parts[1:2]
        if fact in path.read_text()
    ]
    assert len(files) <= FACTS[fact], files

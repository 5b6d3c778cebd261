"""The protos' comments, docs/protocol.md and the code speak of the same reasons and kinds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import documented
from tests.contract.protocol_vectors import PATH
from weft_rl.contract import errors
from weft_rl.contract.errors import REASONS
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.purposes.push import Push
from weft_rl.coordinator.decisions.purposes.repair import Restore
from weft_rl.coordinator.decisions.purposes.rollback import RollbackPurpose
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.v1 import inspect_pb2, publish_pb2

_ROOT = Path(__file__).parents[2]
_PAGE = PATH.with_name("protocol.md").read_text()
_OURS = ("weft_rl", "trainer_side", "rollout_side")
#: Of failures that no call answers.
_LOCAL = "never sent: what a process says of itself"
#: Metadata of those.
_LOCAL_KEYS = {"target", "found", "supported", "num_changed"}


def _calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """Every call in our code, by the last name of what is called."""
    for folder in _OURS:
        for path in (_ROOT / folder).rglob("*.py"):
            if path.parent.name == "v1":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    yield path, name, node


def _said() -> Iterator[tuple[str, str, str]]:
    """Where a reason is given as a word, by which type, and the reason."""
    for path, name, node in _calls():
        words = [k.value for k in node.keywords if k.arg == "reason"]
        words += node.args[:1] if name == "Failure" else []
        for word in words:
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield f"{path}:{node.lineno}", name, word.value


def _table(heading: str) -> dict[str, str]:
    """The rows of the page's table with that heading, by their first cell."""
    _, _, rest = _PAGE.partition(f"\n| {heading} |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return {row.split(" | ")[0].strip("| "): row.split(" | ", 1)[1] for row in rows}


def _listed() -> dict[str, set[str]]:
    """The page's reasons, by status."""
    return {
        status: set(re.findall(r"`([A-Z_]+)`", cell))
        for status, cell in _table("status | reasons").items()
    }


def test_each_reason_has_one_status() -> None:
    local = _listed()[_LOCAL]
    wrong = []
    for place, name, reason in _said():
        if reason in local and reason not in REASONS:
            continue
        known, kind = REASONS.get(reason), getattr(errors, name, None)
        if known is None or (kind is not None and kind.status != known.status):
            wrong.append(f"{place}: {name} with {reason}")
    assert wrong == []
    assert {reason for _, _, reason in _said()} > {"MANIFEST_UNKNOWN", "TRANSFER_UNDER_WAY"}


@pytest.mark.parametrize("method", sorted(documented.comments()))
def test_comments_list_reasons_with_their_status(method: str) -> None:
    wrong = [
        f"{status}/{reason}"
        for status, reason in documented.statuses(method)
        if reason not in REASONS or REASONS[reason].status != status
    ]
    assert wrong == []


def test_the_page_lists_every_reason_and_no_other() -> None:
    listed = _listed()
    local = listed.pop(_LOCAL)
    for status, reasons in listed.items():
        assert reasons == {r for r, t in REASONS.items() if t.status == status and r not in local}
    raised = {reason for _, _, reason in _said()}
    assert local <= raised | set(REASONS)
    commented = {r for method in documented.comments() for _, r in documented.statuses(method)}
    anywhere = {reason for _, reason in documented.ANYWHERE}
    sent = set().union(*listed.values()) - anywhere
    assert sent - commented == set()
    assert local & commented == set()


def test_the_page_lists_every_key_of_metadata_and_no_other() -> None:
    listed = {key for row in _table("key | what it says") for key in re.findall(r"`(\w+)`", row)}
    used = set[str]()
    for _, name, node in _calls():
        if name == "field":  # of a dataclass
            continue
        given = [k.value for k in node.keywords if k.arg == "metadata"]
        if name in ("Failure", "error_from_reason"):
            given += node.args
        for value in given:
            if isinstance(value, ast.Dict):
                used |= {k.value for k in value.keys if isinstance(k, ast.Constant)}
    signed = {"num_failed_ranks", "incarnation"}  # added to what there is
    assert listed == (used | signed) - _LOCAL_KEYS


def test_kinds_of_events_are_those_of_the_protos() -> None:
    wire = {kind.name for kind in inspect_pb2.EventKind.DESCRIPTOR.values}
    assert wire == {f"EVENT_KIND_{name}" for name in ("UNSPECIFIED", *EventKind.__members__)}
    decisions = _ROOT / "weft_rl" / "coordinator" / "decisions"
    code = "".join(p.read_text() for p in decisions.rglob("*.py") if p.parent.name != "effects")
    by_name = {f"{p.name}_{end}" for p in (Clone, Restore) for end in ("ended", "failed")}
    never = [k for k in EventKind if f"EventKind.{k.name}" not in code and k.value not in by_name]
    assert never == []


def test_purposes_are_those_of_the_protos() -> None:
    names = {purpose.name.upper() for purpose in (Push, Clone, Restore, RollbackPurpose)}
    wire = {purpose.name for purpose in publish_pb2.TransferPurpose.DESCRIPTOR.values}
    assert {f"TRANSFER_PURPOSE_{name}" for name in names | {"UNSPECIFIED"}} == wire

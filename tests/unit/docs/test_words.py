"""Class names end in a word of docs/concepts.md, or in a noun that every programmer knows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
_CONCEPTS = _ROOT / "docs" / "concepts.md"


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Words that one must know; another one replaces one of these.
MAX_WORDS = 40

#: Nouns that need no page.
GENERAL = _listed(
    """
    activity addition agent answer answerer attempt backend backoff bar batch block blocker buffer
    byte cache call callback caller capabilities catalog cell certificate change channel check chunk
    client cloner codec collector command config connection content conversion copy credentials
    deadline declaration decoder device digest dispatcher document drain drainer driver element
    engine entry error event executor export exporter factor factory facts failure feed file filler
    finding fingerprint flag folder formatter frame gate generation guard handle handoff handshake
    heartbeat history holder id identity image interceptor key kind layout level limit line link
    list listener listing load loader lock log loop manager mapping mark member membership memory
    message meta method metrics model module note operation option order outcome packer page param
    parity part phase piece pipeline place plan pool port probe process progress prompt proof
    publisher purpose pusher queue range rank rate reader reason receiver record rectangle ref
    refusal registration reporter request requirement reservation response result ring role rollout
    row rule sample sampler sampling security segment selection sender server service servicer
    session settings signal sink size sleeper slice slot snapshot source span spec spiller split
    state step store stream sum switch table tensor text thread ticket time tls token trace tracer
    tracker trainer transaction trial type usage vector verdict view wait waker walk watcher
    watermark window word work worker writer difference problem severity
    """
)
#: Verbs that begin the names of events and effects, which are orders and reports of one thing.
VERBS = _listed(
    """
    abort acquire announce await begin call check close commit describe discard drain drop fit
    forget join leave load look open rebind refuse register release renew reply report restore
    retire save send set sleep take tick uncordon wake
    """
)
_VERB_PHRASES = ("state/events.py", "state/effects.py")
_MESSAGES = "messages.py"


def _words() -> set[str]:
    """Read the words of the table in concepts.md, without what stands before their heads."""
    rows = re.findall(r"^\| ([^|]+) \| ", _CONCEPTS.read_text(), re.MULTILINE)
    cells = [word.strip() for row in rows for word in row.split(",")]
    return {cell.split()[-1] for cell in cells if cell not in ("word", "---")}


def _parts(name: str) -> list[str]:
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z0-9]*|[A-Z]+", name)
    return [part.lower() for part in found]


def _is_known(word: str, known: set[str] | frozenset[str]) -> bool:
    singular = {word, word.removesuffix("s"), re.sub("ies$", "y", word), word.removesuffix("ed")}
    return not singular.isdisjoint(known)


def _classes(root: Path) -> Iterator[tuple[Path, str]]:
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.parent.name != "v1":
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        yield path.relative_to(root), node.name


def _is_plain(path: Path, name: str, known: set[str]) -> bool:
    parts = _parts(name)
    if path.name == _MESSAGES:  # they bear the names of the protocol
        return True
    if str(path).endswith(_VERB_PHRASES) and any(_is_known(p, known | VERBS) for p in parts):
        return True
    return bool(parts) and _is_known(parts[-1], known)


def test_class_names_end_in_known_words() -> None:
    known = _words() | GENERAL
    found = {name for path, name in _classes(_ROOT) if not _is_plain(path, name, known)}
    assert sorted(found) == [], "name these by words of docs/concepts.md"


def test_there_are_few_words() -> None:
    assert len(_words()) <= MAX_WORDS


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(name for _, name in _classes(_ROOT) if not name.startswith("_"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert twice == [], "one word, one thing: give one of them another name"

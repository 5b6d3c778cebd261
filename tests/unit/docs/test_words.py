"""Class names end in a word that the manual explains, or in a term of programming."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.docs.pages import pages

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
_CONCEPTS = _ROOT / "docs" / "concepts.md"


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Words that one must know; another one replaces one of these.
MAX_WORDS = 40

#: Terms of programming that no page has to explain. Explain another word on a page, or rename its
#: class, rather than add it here.
GENERAL = _listed(
    """
    activity addition channel codec conversion dispatcher entry executor factory feed flag formatter
    gate interceptor listener mapping note param record rectangle ref requirement
    reservation selection signal snapshot spec table tracker usage view walk watermark window
    """
)
MAX_GENERAL = 34
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


def _explained() -> set[str]:
    """Read the words of the manual's prose, and who does what its verbs say."""
    manual = (page for page in pages() if page.name.startswith(("docs/", "README")))
    words = set(re.findall(r"[a-z]{3,}", " ".join(page.plain for page in manual).lower()))
    return words | {f"{word}er" for word in words} | {f"{word}r" for word in words}


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
    known = _words() | _explained() | GENERAL
    found = {name for path, name in _classes(_ROOT) if not _is_plain(path, name, known)}
    assert sorted(found) == [], "name these by words of docs/concepts.md"


def test_there_are_few_words() -> None:
    assert len(_words()) <= MAX_WORDS
    assert len(GENERAL) <= MAX_GENERAL


def test_each_term_is_of_a_class_and_on_no_page() -> None:
    ends = {_parts(name)[-1] for _, name in _classes(_ROOT) if _parts(name)}
    unused = {term for term in GENERAL if not any(_is_known(end, {term}) for end in ends)}
    assert sorted(unused | (GENERAL & (_words() | _explained()))) == []


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(name for _, name in _classes(_ROOT) if not name.startswith("_"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert twice == [], "one word, one thing: give one of them another name"

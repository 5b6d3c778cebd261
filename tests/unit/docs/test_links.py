"""Links of the manual lead somewhere, and the files that it names are there."""

import re
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.unit.docs.pages import ROOT, Block, Page, pages, read

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
BARE_URL = re.compile(r"https?://[^\s)>`]+")
#: What looks like a path; ``*`` and ``{a,b}`` may stand in it.
PATH = re.compile(r"[\w.*{},-]+(?:/[\w.*{},-]+)*/?")
SUFFIXES = (".py", ".md", ".proto", ".toml", ".sql", ".binpb")


def dead_links(page: Page) -> list[str]:
    """Links that lead nowhere, and addresses that cannot be right."""
    dead = []
    for target in LINK.findall(page.plain):
        if BARE_URL.match(target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        is_there = path.exists() and ROOT in (path, *path.parents)
        if not is_there or (anchor and not _has(path, anchor)):
            dead.append(target)
    for url in BARE_URL.findall(page.plain):
        parts = urlsplit(url)
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc):
            dead.append(url)
    return dead


def _has(path: Path, anchor: str) -> bool:
    return path.suffix == ".md" and anchor in read(path).anchors


def missing_files(page: Page) -> list[str]:
    """Paths in backticks that begin with a folder of ours, or end as our files do."""
    missing = []
    top = {entry.name for entry in ROOT.iterdir() if not entry.name.endswith(".egg-info")}
    top.discard("build")  # what commands make, and a clone lacks
    for span in page.spans:
        path, _, name = span.partition(":")
        if not PATH.fullmatch(path) or path.startswith("."):
            continue
        first, slash, _ = path.partition("/")
        if (slash and first in top) or (not slash and path.endswith(SUFFIXES)):
            anywhere = not slash and page.name.startswith("tests/")
            found = [p for one in _alternatives(path) for p in _find(page, one, anywhere)]
            if len(found) < len(_alternatives(path)) or (name and not _defines(found, name)):
                missing.append(span)
    return missing


def _alternatives(path: str) -> list[str]:
    """``a/{b,c}.py`` is two."""
    if (braces := re.search(r"\{([^}]*)\}", path)) is None:
        return [path]
    return [path.replace(braces[0], one, 1) for one in braces[1].split(",")]


def _find(page: Page, path: str, anywhere: bool):
    if anywhere:  # but in environments, which have a hundred thousand files
        own = [each for each in ROOT.iterdir() if not each.name.startswith((".", "build"))]
        return list(chain.from_iterable(folder.rglob(path) for folder in own))[:1]
    for folder in (ROOT, page.path.parent):
        if found := list(folder.glob(path)):
            return found[:1]
    return []


def _defines(paths, name: str) -> bool:
    return any(
        path.is_file() and re.search(rf"\b{re.escape(name.split('.')[-1])}\b", path.read_text())
        for path in paths
    )


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert not dead_links(page)


@pytest.mark.parametrize(
    "page",
    pages(),
    ids=lambda page: page.name,
)
def test_every_file_that_is_named_is_there(page):
    assert not missing_files(page)


def test_every_page_of_the_manual_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        reached.add(path := todo.pop())
        for target in LINK.findall(read(path).plain):
            linked = (path.parent / target.partition("#")[0]).resolve()
            if linked.suffix == ".md" and linked not in reached and linked.exists():
                todo.append(linked)
    unreached = [page.name for page in pages() if page.path not in reached]
    assert not unreached


def test_what_is_wrong_is_found():
    page = Page(
        ROOT / "docs/none.md",
        "# A b, `c`\n[x](#b) [x](none.md) [x](../README.md#nowhere) [x](../LICENSE)\n"
        "https://example.org/x http://nowhere `weft_rl/none.py` `weft_rl/rpc/{codec,none}.py`\n"
        "`weft_rl/rpc/codec.py:nothing_of_it` `weft_rl/rpc/*_codec.py` `none.py` `Makefile`",
        (Block("", "`weft_rl/none.py`"),),
    )
    assert page.anchors == {"a-b-c"}
    wrong = {"#b", "none.md", "../README.md#nowhere", "http://nowhere"}
    assert set(dead_links(page)) == wrong
    assert missing_files(page) == [
        "weft_rl/none.py", "weft_rl/rpc/{codec,none}.py", "weft_rl/rpc/codec.py:nothing_of_it",
        "none.py",
    ]  # fmt: skip

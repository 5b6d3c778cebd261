"""The pages of the manual, cut into prose and blocks of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Where pages lie: the root itself, and all that is below these.
FOLDERS = ("benchmarks", "docs", "examples", "helm", "protos", "tests")

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_HTML_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\">")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """One file of Markdown."""

    path: Path
    prose: str
    """Its text without the fenced blocks."""
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def spans(self) -> list[str]:
        """What stands in backticks, each on one line."""
        return [" ".join(match[2].split()) for match in _INLINE.finditer(self.prose)]

    @property
    def plain(self) -> str:
        """The prose without what stands in backticks."""
        return _INLINE.sub("``", self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name after ``#``, as GitHub makes it of the headings."""
        found: set[str] = set(_HTML_ANCHOR.findall(self.prose))
        for heading in _HEADING.findall(self.prose):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
            slug = base = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = 0
            while slug in found:
                slug = f"{base}-{(number := number + 1)}"
            found.add(slug)
        return found


def read(path: Path) -> Page:
    """Cut a page."""
    return parse(path, path.read_text())


def parse(path: Path, text: str) -> Page:
    """Cut the text of a page, or a part of it."""
    prose: list[str] = []
    blocks: list[Block] = []
    opened: re.Match[str] | None = None
    inside: list[str] = []
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, inside = fence, []
        elif opened is not None and line.strip() == opened[2]:
            blocks.append(Block(opened[3].strip(), "\n".join(inside)))
            opened = None
        else:
            (prose if opened is None else inside).append(line)
    assert opened is None, f"{path}: a block of code is never closed"
    return Page(path, "\n".join(prose), tuple(blocks))


@cache
def pages() -> tuple[Page, ...]:
    """Every page of the repository."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*.md")
    return tuple(read(path) for path in sorted(found))


def page(name: str) -> Page:
    """One page by its path in the repository."""
    return next(p for p in pages() if p.name == name)

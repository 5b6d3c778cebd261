"""Pages of the site beside docs/: linked files, the commands, the API of a trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
#: Where the site has files of the repository that are not below docs/.
_ELSEWHERE = "repository"
_LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".proto": "proto"}
_REFERENCE = "reference/trainer.md", "reference/commands.md"
_API = """# The trainer's API

Everything that a trainer imports from `trainer_side`.

::: trainer_side
    options:
      show_root_heading: false

## Integrations

::: trainer_side.integrations.hf.PushCallback

::: trainer_side.integrations.trl.attach

::: trainer_side.integrations.trl_async.PoolAsyncGRPOTrainer

::: trainer_side.integrations.swift.install
"""


def _uri(path: Path) -> str:
    """Return the place of a file of the repository in the site's sources."""
    if path.is_relative_to(_DOCS):
        return path.relative_to(_DOCS).as_posix()
    place = f"{_ELSEWHERE}/{path.relative_to(_ROOT).as_posix()}"
    return place if path.suffix in (".md", ".png", ".svg") else f"{place}.md"


def _linked(text: str, page: Path) -> Iterator[Path]:
    """Yield the files that a page links to, of the repository and not below docs/."""
    for _, target, _ in _LINK.findall(text):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(_ROOT) and not path.is_relative_to(_DOCS):
            yield path


def _source(path: Path) -> str:
    """Return the page that shows a file of code."""
    name = path.relative_to(_ROOT)
    return f"# `{name}`\n\n`````{_LANGUAGES.get(path.suffix, '')}\n{path.read_text()}\n`````\n"


def _commands() -> str:
    """Return the page of all commands with their options."""
    words = [sys.executable, "-m", "typer", "weft_rl.cli.main", "utils", "docs", "--name", "weft"]
    made = subprocess.run(words, cwd=_ROOT, check=True, capture_output=True, text=True)
    text = re.sub(r"\*\*Commands\*\*:.*?(?=^## )", "", made.stdout, count=1, flags=re.M | re.S)
    return text.replace("# `weft`", "# Commands", 1)


def on_files(files: Files, config: Any) -> Files:
    """Add what docs/ links to outside of itself, and the reference."""
    todo = [path for file in files if (path := Path(file.abs_src_path)).suffix == ".md"]
    seen: set[Path] = set()
    while todo:
        page = todo.pop()
        for path in _linked(page.read_text(), page):
            if path in seen:
                continue
            seen.add(path)
            if path.suffix == ".md":
                todo.append(path)
            is_code = _uri(path) != f"{_ELSEWHERE}/{path.relative_to(_ROOT).as_posix()}"
            given = {"content": _source(path)} if is_code else {"abs_src_path": str(path)}
            files.append(File.generated(config, _uri(path), **given))
    for uri, content in zip(_REFERENCE, (_API, _commands()), strict=True):
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files of the repository to their pages here."""
    here = page.file.src_uri
    origin = _ROOT / here.removeprefix(f"{_ELSEWHERE}/") if here.startswith(_ELSEWHERE) else None
    source = origin or _DOCS / here

    def led(match: re.Match[str]) -> str:
        path = (source.parent / match[2]).resolve()
        if not path.is_file() or not path.is_relative_to(_ROOT):
            return match[0]
        target = os.path.relpath(_uri(path), Path(here).parent)
        return f"{match[1]}{target}{match[3]}"

    return _LINK.sub(led, markdown)

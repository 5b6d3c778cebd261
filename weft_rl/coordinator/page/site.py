"""Paths of the page: its files, and the JSON that they draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from weft_rl.coordinator.page.document import Document
from weft_rl.telemetry.http_server import Request, Response
from weft_rl.telemetry.site import Page

_FOLDER: Final = Path(__file__).parent / "static"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Nothing is loaded from elsewhere, and nothing that a name or a reason may hold is run.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def pages(document: Document) -> dict[str, Page]:
    """Return the pages by path; all of them are for callers who may inspect."""
    return {
        "/v1/pool.json": Page(answer=document),
        "/favicon.ico": Page(answer=_shows(_FOLDER / "icon.svg")),  # browsers ask unasked
        **{
            f"/page/{file.name}" if file.name != _INDEX else "/": Page(answer=_shows(file))
            for file in sorted(_FOLDER.iterdir())
        },
    }


def _shows(file: Path) -> Callable[[Request], Response]:
    response = Response(body=file.read_bytes(), content_type=_TYPES[file.suffix], headers=HEADERS)
    return lambda _: response

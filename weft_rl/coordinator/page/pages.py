"""The page: its files, and the lists of InspectService that they draw, as JSON.

Requests are answered on the HTTP server's thread. One answer has a bounded number of entries, so
that it holds the interpreter for some milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc import bounds
from weft_rl.telemetry.site import Page
from weft_rl.v1 import inspect_pb2

#: Those who ask for the same within so long get the same answer, however many they are.
SAME_ANSWER_SECONDS: Final = 0.25
_MAX_ANSWERS: Final = 8
#: Requests that a query fills in, by the name of the list. Answers have at most ``page_size``
#: entries.
_REQUESTS: Final[Mapping[str, Any]] = {
    "pool": inspect_pb2.GetPoolRequest(page_size=100, share_version_vectors=True),
    "replicas": inspect_pb2.ListReplicasRequest(page_size=100, share_version_vectors=True),
    "policies": inspect_pb2.ListPoliciesRequest(page_size=200),
    "transfers": inspect_pb2.ListTransfersRequest(page_size=100),
    "events": inspect_pb2.ListEventsRequest(page_size=500),
}
_FOLDER: Final = Path(__file__).parent / "static"
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
#: Nothing is loaded from elsewhere, and nothing that a name or a reason may hold is run.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def pages(lists: Mapping[str, Callable[[Any], Message]]) -> dict[str, Page]:
    """Return the page's files and its JSON by path; all of them are for callers who may inspect.

    Args:
        lists: Methods of InspectService by the name of what each lists: those of ``_REQUESTS``.
    """
    return {
        **{f"/v1/{name}.json": Page(answer=JsonList(name, lists[name])) for name in _REQUESTS},
        "/favicon.ico": Page(answer=_shows(_FOLDER / "icon.svg")),  # browsers ask unasked
        **{
            f"/page/{file.name}" if file.name != _INDEX else "/": Page(answer=_shows(file))
            for file in sorted(_FOLDER.iterdir())
        },
    }


def _shows(file: Path) -> Callable[[Request], Response]:
    # Not Starlette's StaticFiles, which opens them in threads, at each request.
    body, kind = file.read_bytes(), _TYPES[file.suffix]
    return lambda _: Response(body, headers=_HEADERS, media_type=kind)


class JsonList:
    """Answers to ``GET /v1/NAME.json[?page_size=N][&page_token=TOKEN]``.

    Args:
        answer: Method of InspectService; called on any thread.
    """

    def __init__(self, name: str, answer: Callable[[Any], Message]) -> None:
        self._default, self._answer = _REQUESTS[name], answer
        self._made = LruMapping[str, tuple[float, str]](_MAX_ANSWERS)

    def __call__(self, request: Request) -> Response:
        """Answer a request whose query has fields of the method's request."""
        query, now = str(request.query_params), time.monotonic()
        made_at, body = self._made.get(query) or (float("-inf"), "")
        if now - made_at >= SAME_ANSWER_SECONDS:
            try:
                body = self._make(dict(request.query_params))
            except (InvalidRequestError, ParseError) as error:
                return PlainTextResponse(f"{error}\n", HTTPStatus.BAD_REQUEST)
            self._made.put(query, (now, body))
        return Response(body, media_type="application/json")

    def _make(self, query: dict[str, str]) -> str:
        wanted = type(self._default)()
        ParseDict(query, wanted)
        bounds.check(wanted)
        page_size = min(wanted.page_size or self._default.page_size, self._default.page_size)
        wanted.MergeFrom(self._default)
        wanted.page_size = page_size
        return MessageToJson(self._answer(wanted), preserving_proto_field_name=True, indent=None)

"""Pages of a process, ``/metrics`` and ``/healthz`` among them, and who may read which."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from weft_rl.contract.errors import InvalidRequestError, UnauthenticatedError
from weft_rl.rpc.security.credentials import is_loopback
from weft_rl.rpc.security.guard import audit
from weft_rl.rpc.server import Security
from weft_rl.telemetry.http_server import HttpServer, Request, Response

#: Whoever may call it may read what is shown here: the role inspect, or operator.
_SAME_AS: Final = "weft.v1.InspectService/WatchEvents"
#: Scrapes within so long of each other get the same text.
SAME_TEXT_SECONDS: Final = 0.25
#: The formats that it is kept in: a scraper may make up others.
_MAX_FORMATS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Page:
    """One path of a site."""

    answer: Callable[[Request], Response]
    is_protected: bool = True
    """True if it is shown only to callers who may inspect."""


class Site:
    """Answers to requests, by their paths.

    Args:
        pages: By path.
        security: Says who may read the protected pages. Where nobody is asked who he is, that is
            everybody on this machine; where the process is insecure, everybody at all.
    """

    def __init__(self, pages: Mapping[str, Page], security: Security) -> None:
        self._pages = pages
        self._security = security

    def __call__(self, request: Request) -> Response:
        page = self._pages.get(request.path)
        if page is None:
            return Response.of_text("no such page", HTTPStatus.NOT_FOUND)
        if page.is_protected and (refusal := self._refusal(request)) is not None:
            return refusal
        return page.answer(request)

    def _refusal(self, request: Request) -> Response | None:
        """Return the refusal of a request; None where it is answered."""
        access = self._security.access
        if access is None:
            if self._security.insecure:
                return None
            host = request.headers.get("host", "localhost")
            if request.is_loopback and not is_loopback(host):
                # A page from elsewhere, whose name was made to lead here, asks by that name.
                why = "shown as localhost or 127.0.0.1 only: nobody is asked who he is"
                return self._refuse(request, "", "NOT_PRIVATE", why)
            if request.is_loopback:
                return None
            return self._refuse(
                request, "", "NOT_PRIVATE", "shown on this machine only: nobody is asked who he is"
            )
        if not request.is_private:
            return self._refuse(
                request, "", "NOT_PRIVATE", "a password is taken over HTTPS only: say https://"
            )
        try:
            identity = access.access.identify(request.names, _password(request))
        except UnauthenticatedError as error:
            asked = "" if access.access.by_certificate else 'Basic realm="weft", charset="UTF-8"'
            return self._refuse(request, "", error.reason, "who are you?", asked)
        if not identity.may_call(_SAME_AS):
            why = f"{identity.name} has neither the role inspect nor operator"
            return self._refuse(request, identity.name, "ROLE_MISSING", why)
        return None

    def _refuse(
        self, request: Request, name: str, result: str, why: str, asked: str = ""
    ) -> Response:
        path = request.path[:200]
        audit(name, request.peer, f"{request.method} {path}", {}, result)
        if asked:
            return Response.of_text(why, HTTPStatus.UNAUTHORIZED, WWW_Authenticate=asked)
        return Response.of_text(why, HTTPStatus.FORBIDDEN)


def _password(request: Request) -> str | None:
    """Return the token that a request carries, as a Basic password or a bearer token."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() != "basic":
        return None
    try:
        text = base64.b64decode(value, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text.partition(":")[2] or None


class MetricsText:
    """Text of what a registry says, made at most once in ``SAME_TEXT_SECONDS``.

    So many scrapes at once cost as much as one.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._made: dict[Any, tuple[float, bytes]] = {}

    def __call__(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        now = self._clock()
        made_at, body = self._made.get(content_type, (float("-inf"), b""))
        if now - made_at >= SAME_TEXT_SECONDS:
            body = encode(self._registry)
            if len(self._made) >= _MAX_FORMATS:
                self._made.clear()
            self._made[content_type] = (now, body)
        return Response(body=body, content_type=content_type)


def open_site(
    listen: str,
    registry: CollectorRegistry,
    security: Security,
    *,
    auth: bool = False,
    pages: Mapping[str, Page] | None = None,
) -> tuple[HttpServer, int]:
    """Serve ``/metrics``, ``/healthz`` and ``pages`` on HOST:PORT; returns server and port.

    Args:
        auth: Whether metrics are protected.

    Raises:
        InvalidRequestError: Nobody could ever read what is protected.
        NotReadyError: The address cannot be listened on.
    """
    if auth and security.access is None:
        raise InvalidRequestError(
            "--metrics-auth asks for the tokens or certificates of the access file: give --access"
        )
    if auth and not security.credentials.tls_cert and not is_loopback(listen):
        raise InvalidRequestError(
            f"--metrics-auth on {listen}: a password is taken over TLS only, give --tls-cert and "
            "--tls-key"
        )
    site = Site(
        {
            "/metrics": Page(answer=MetricsText(registry), is_protected=auth),
            "/healthz": Page(answer=lambda _: Response.of_text("ok"), is_protected=False),
            **(pages or {}),
        },
        security,
    )
    ask = security.access is not None and security.access.access.by_certificate
    server = HttpServer(site, security.credentials, ask=ask)
    return server, server.start(listen)

"""Pages of a process, by their paths, and who may read which."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from weft_rl.contract.errors import UnauthenticatedError
from weft_rl.rpc.security.credentials import is_loopback
from weft_rl.rpc.security.guard import audit
from weft_rl.rpc.server import Security

#: Whoever may call it may read what is shown here: the role inspect, or operator.
_SAME_AS: Final = "weft.v1.InspectService/WatchEvents"
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="weft", charset="UTF-8"'}


@dataclass(frozen=True, kw_only=True)
class Page:
    """One path of a site."""

    answer: Callable[[Request], Response]
    """Called on the HTTP server's thread: it is quick, and reads what is replaced and never
    mutated."""
    is_protected: bool = True
    """True if it is shown only to callers who may inspect."""


def build_site(pages: Mapping[str, Page], security: Security) -> Starlette:
    """Return the application that answers GET and HEAD for pages, by their paths.

    Args:
        security: Says who may read the protected pages. Where callers are not identified, that is
            everybody on this machine; where the process is insecure, everybody at all.
    """
    site = Starlette(routes=[Route(path, _endpoint(pages[path], security)) for path in pages])
    site.router.redirect_slashes = False
    return site


def _endpoint(page: Page, security: Security) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        refusal = refuse(request, security) if page.is_protected else None
        return refusal or page.answer(request)

    return answer


def refuse(request: Request, security: Security) -> Response | None:
    """Return the refusal of a request for a protected page; None where it is answered."""
    peer = _address(request)
    is_near = (getattr(peer, "ipv4_mapped", None) or peer).is_loopback
    if security.access is None:
        if security.insecure:
            return None
        if not is_near:
            why = "shown on this machine only: callers are not identified"
            return _refusal(request, "", "NOT_PRIVATE", why)
        if not is_loopback(request.headers.get("host", "localhost")):
            # A page from elsewhere, whose name was made to lead here, asks by that name.
            why = "shown as localhost or 127.0.0.1 only: callers are not identified"
            return _refusal(request, "", "NOT_PRIVATE", why)
        return None
    if request["scheme"] != "https" and not is_near:
        why = "a password is taken over HTTPS only: say https://"
        return _refusal(request, "", "NOT_PRIVATE", why)
    rules = security.access.access
    try:
        identity = rules.identify(request.state.names, _password(request))
    except UnauthenticatedError as error:
        headers = {} if rules.by_certificate else _CHALLENGE
        return _refusal(request, "", error.reason, "who are you?", headers)
    if not identity.may_call(_SAME_AS):
        why = f"{identity.name} has neither the role inspect nor operator"
        return _refusal(request, identity.name, "ROLE_MISSING", why)
    return None


def _address(request: Request) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(_host(request).partition("%")[0])


def _host(request: Request) -> str:
    assert request.client is not None  # the server ends connections of unknown peers
    return request.client.host


def _refusal(
    request: Request, name: str, result: str, why: str, headers: Mapping[str, str] | None = None
) -> Response:
    audit(name, _host(request), f"{request.method} {request['path'][:200]}", {}, result)
    status = HTTPStatus.UNAUTHORIZED if headers else HTTPStatus.FORBIDDEN
    return PlainTextResponse(f"{why}\n", status, headers)


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

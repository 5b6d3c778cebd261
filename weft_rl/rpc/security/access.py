"""Access rules of who may call what: identities, their roles, and the file that has them.

The file is TOML, and names certificates (``san``) or bearer tokens (``token_sha256``), not
both: a server that takes tokens does not ask for certificates::

    [[identity]]
    san = "*.weft-replicas.rl.svc.cluster.local"
    roles = ["replica"]

    [[identity]]
    name = "trainer-a"
    token_sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    roles = ["publish", "inspect"]
    policies = ["math", "code-*"]

Rules that would lock out everybody who calls now are taken for a mistake, and not used, unless
the file begins with ``lock_out = true``.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from weft_rl.contract.errors import (
    InvalidRequestError,
    NotAllowedError,
    UnauthenticatedError,
    WeftError,
)


class Role(enum.StrEnum):
    """Role of an identity in a pool; ``_ALLOWED`` has the calls that each role allows."""

    INSPECT = "inspect"
    """Reader of the pool; changes nothing."""
    GENERATE = "generate"
    """Client that asks replicas for tokens, and reads where requests may be sent."""
    PUBLISH = "publish"
    """Trainer that pushes the policies that its identity names, and forgets them."""
    REPLICA = "replica"
    """Replica that registers with the coordinator, and receives and sends versions."""
    COORDINATOR = "coordinator"
    """Coordinator that gives replicas their orders."""
    OPERATOR = "operator"
    """Operator that gives the pool orders: rolls back, pins, cordons; reads all of it."""


_INSPECT = "weft.v1.InspectService"
#: By role, the services, or single methods, that it may call.
_ALLOWED: Final[dict[Role, frozenset[str]]] = {
    Role.INSPECT: frozenset({_INSPECT, "weft.v1.ReplicaService/GetStatus"}),
    Role.GENERATE: frozenset(
        {"weft.v1.GenerateService", f"{_INSPECT}/WatchRoutes", f"{_INSPECT}/GetPool"}
    ),
    Role.PUBLISH: frozenset(
        {"weft.v1.PublishService", "weft.v1.RendezvousService", "weft.v1.AdminService/ForgetPolicy"}
    ),
    Role.REPLICA: frozenset({"weft.v1.RegistryService", "weft.v1.RendezvousService"}),
    Role.COORDINATOR: frozenset({"weft.v1.ReplicaService"}),
    Role.OPERATOR: frozenset(
        {_INSPECT, "weft.v1.AdminService", "weft.v1.ReplicaService/GetStatus"}
    ),
}
#: What tells a stranger no more than that a server is there and what it is: probes.
_OPEN: Final = frozenset({"grpc.health.v1.Health"})
#: What shows the services themselves; whoever may call anything may read it.
_DESCRIBING: Final = frozenset(
    {
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)
_DIAGNOSTIC: Final = frozenset({"grpc.channelz.v1.Channelz"})


@dataclass(frozen=True)
class Identity:
    """One caller, as a server knows it."""

    name: str
    """Subject alternative name of its certificate, or the name of its token."""
    roles: frozenset[Role]
    policies: tuple[str, ...] = ()
    """Patterns (``*``, ``?``) of the policies that it may publish."""

    def may_call(self, method: str) -> bool:
        """Return whether one of its roles allows a method, as ``package.Service/Method``."""
        service = method.partition("/")[0]
        if service in _OPEN or service in _DESCRIBING:
            return True
        if service in _DIAGNOSTIC:
            return Role.OPERATOR in self.roles
        allowed = (_ALLOWED[role] for role in self.roles)
        return any(service in calls or method in calls for calls in allowed)

    def may_publish(self, policy: str) -> bool:
        """Return whether it may push a policy; asked besides ``may_call``."""
        return any(fnmatchcase(policy, pattern) for pattern in self.policies)


#: Whoever calls a server that asks nobody who he is.
ANYBODY: Final = Identity("anybody", frozenset(Role), ("*",))


def is_open(method: str) -> bool:
    """Return whether a method is answered to everybody, with credentials or without."""
    return method.partition("/")[0] in _OPEN


@dataclass(frozen=True)
class Limits:
    """Numbers of calls that one identity may have in flight at one server."""

    requests: int = 1024
    streams: int = 1024


@dataclass(frozen=True)
class ShownCredentials:
    """Credentials that a caller shows; holds no secret."""

    names: tuple[str, ...]
    """Subject alternative names of its certificate, in lower case."""
    token_sha256: str
    """Digest of its bearer token; empty where it sends none."""


def digest_of(token: str | None) -> str:
    """Return the digest by which the rules know a token; empty where there is none."""
    return hashlib.sha256(token.encode()).hexdigest() if token is not None else ""


@dataclass(frozen=True)
class _Rule:
    identity: Identity
    san: str = ""
    token_sha256: str = ""


@dataclass(frozen=True)
class AccessRules:
    """Rules of one server; immutable, made anew when the file changes."""

    _rules: tuple[_Rule, ...]
    limits: Limits = field(default_factory=Limits)
    may_lock_out: bool = False
    """True if the rules are meant even if nobody who calls now could call under them."""

    @property
    def by_certificate(self) -> bool:
        """True if callers are known by certificates; false if by tokens."""
        return any(rule.san for rule in self._rules)

    def identify(self, names: Iterable[str], token: str | None) -> Identity:
        """Return the identity of a caller.

        Args:
            names: The subject alternative names of its certificate, which was verified.
            token: Its bearer token.

        Raises:
            UnauthenticatedError: It shows nothing, or nothing that the rules name.
        """
        known = tuple(name.lower() for name in names)
        identity = self.find(ShownCredentials(known, digest_of(token)))
        if identity is None:
            raise UnauthenticatedError(self._why_unknown(known, token))
        return identity

    def find(self, shown: ShownCredentials) -> Identity | None:
        """Find the identity with these credentials; None where no rule names them."""
        roles: set[Role] = set()
        policies: list[str] = []
        named = ""
        for rule in self._rules:
            if rule.token_sha256:
                digest = shown.token_sha256
                if not digest or not hmac.compare_digest(digest, rule.token_sha256):
                    continue
                name = rule.identity.name
            else:
                matching = [name for name in shown.names if fnmatchcase(name, rule.san)]
                if not matching:
                    continue
                name = matching[0]
            named = named or name
            roles |= rule.identity.roles
            policies += rule.identity.policies
        return Identity(named, frozenset(roles), tuple(policies)) if named else None

    def _why_unknown(self, names: Sequence[str], token: str | None) -> str:
        if self.by_certificate:
            shown = ", ".join(names[:4]) or "no subject alternative name"
            return f"no identity of the access file has this certificate ({shown})"
        if token is None:
            return "no bearer token was sent: give --token-file, or token= to Publisher"
        return "the bearer token is none of the access file's"


def check_call(identity: Identity, method: str, policy: str | None) -> None:
    """Refuse a call that an identity may not make.

    Args:
        method: As ``package.Service/Method``.
        policy: The policy that the request changes; None where it names none.

    Raises:
        NotAllowedError: ``ROLE_MISSING`` or ``POLICY_NOT_ALLOWED``.
    """
    if not identity.may_call(method):
        roles = ", ".join(sorted(identity.roles)) or "none"
        raise NotAllowedError(
            f"{identity.name} may not call {method.rpartition('/')[2]}: its roles are {roles}",
            reason="ROLE_MISSING",
        )
    is_order = method.startswith("weft.v1.AdminService/") and Role.OPERATOR in identity.roles
    if policy is not None and not is_order and not identity.may_publish(policy):
        patterns = ", ".join(identity.policies) or "none"
        raise NotAllowedError(
            f"{identity.name} may not publish {policy[:80]!r}: its policies are {patterns}",
            reason="POLICY_NOT_ALLOWED",
        )


# -- the file --------------------------------------------------------------------

_KEYS = {"san", "name", "token_sha256", "roles", "policies"}


def parse_access(text: str) -> AccessRules:
    """Parse the rules in a file's text.

    Raises:
        InvalidRequestError: It is no access file; names the identity and what is wrong.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"the access file is not TOML: {error}") from None
    unknown = sorted(table.keys() - {"identity", "limits", "lock_out"})
    if unknown:
        raise InvalidRequestError(
            f"the access file has {unknown[0]!r}, which is none of identity, limits and lock_out"
        )
    may_lock_out = table.get("lock_out", False)
    if not isinstance(may_lock_out, bool):
        raise InvalidRequestError("lock_out of the access file must be true or false")
    entries = table.get("identity", [])
    if not isinstance(entries, list) or not entries:
        raise InvalidRequestError("the access file names no [[identity]]: nobody could call")
    rules = tuple(_rule(number, entry) for number, entry in enumerate(entries, 1))
    if any(rule.san for rule in rules) and any(rule.token_sha256 for rule in rules):
        raise InvalidRequestError(
            "the access file names certificates (san) and tokens (token_sha256): a server asks "
            "for one or the other; use one kind"
        )
    return AccessRules(rules, _limits(table.get("limits", {})), may_lock_out)


def _rule(number: int, entry: Any) -> _Rule:
    where = f"identity {number} of the access file"
    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{where} is no table: write [[identity]]")
    unknown = sorted(entry.keys() - _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        raise InvalidRequestError(f"{where} has {unknown[0]!r}; it may have {known}")
    san, token = _text(entry, "san", where), _text(entry, "token_sha256", where)
    name = _text(entry, "name", where)
    if bool(san) == bool(token):
        raise InvalidRequestError(f"{where} needs one of san and token_sha256")
    if token and (len(token) != 64 or token.strip("0123456789abcdef")):
        raise InvalidRequestError(
            f"{where}: token_sha256 must be 64 hexadecimal digits, as `sha256sum` prints them"
        )
    if token and not name:
        raise InvalidRequestError(f"{where} has a token and needs a name, for the audit log")
    roles = _texts(entry, "roles", where)
    for role in roles:
        if role not in set(Role):
            raise InvalidRequestError(f"{where}: {role!r} is no role; there are {', '.join(Role)}")
    policies = _texts(entry, "policies", where)
    if Role.PUBLISH in roles and not policies:
        raise InvalidRequestError(
            f'{where} publishes, but names no policies: say policies = ["math"], or ["*"] for all'
        )
    if policies and Role.PUBLISH not in roles:
        raise InvalidRequestError(f"{where} names policies, but has not the role publish")
    identity = Identity(name or san, frozenset(map(Role, roles)), tuple(policies))
    return _Rule(identity, san.lower(), token)


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}: {key} must be a string")
    return value


def _texts(entry: dict[str, Any], key: str, where: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequestError(f"{where}: {key} must be a list of strings")
    return value


def _limits(table: Any) -> Limits:
    names = {"requests", "streams"}
    if not isinstance(table, dict) or table.keys() - names:
        raise InvalidRequestError("[limits] of the access file may have requests and streams")
    for name, value in table.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000:
            raise InvalidRequestError(f"[limits] {name} must be a number from 1 to 1000000")
    return Limits(**table)


def as_error(error: Exception) -> WeftError:
    """Return a failure to read the file, as the error that a user is told."""
    if isinstance(error, WeftError):
        return error
    return InvalidRequestError(f"the access file cannot be read: {error}")

"""Guard of a server: identity, permission and limits of each caller, and the audit log.

The audit log has a line for every call that changes something.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import CapacityError, InvalidRequestError, WeftError
from weft_rl.contract.names import BASE_POLICY
from weft_rl.rpc.security.access import (
    ANYBODY,
    AccessRules,
    Identity,
    ShownCredentials,
    as_error,
    check_call,
    digest_of,
    parse_access,
)
from weft_rl.rpc.security.credentials import UsableFiles, read_file

_log = logging.getLogger(__name__)
#: One JSON object a line; a handler of its own may send it elsewhere.
audit_log = logging.getLogger("weft_rl.audit")

#: How often the access file is looked at, at most; and how often a stream is asked whether
#: its identity may still have it.
LOOK_SECONDS: Final = 1.0
STREAM_LOOK_SECONDS: Final = 5.0
#: Callers that are remembered, and for how long: they are those who are connected.
_MAX_CALLERS: Final = 4_096
_CALLER_SECONDS: Final = 60.0
_NOTHING: Final = ShownCredentials((), "")
#: Calls that change nothing that outlives them, or only say again that somebody lives: worth
#: a line where they are refused.
_UNAUDITED: Final = frozenset(
    {
        "weft.v1.PublishService/DescribeTarget",
        "weft.v1.PublishService/GetReference",
        "weft.v1.PublishService/RenewLease",
        "weft.v1.PublishService/AwaitTransfer",
        "weft.v1.RegistryService/CheckReplica",
        "weft.v1.RegistryService/Heartbeat",
        "weft.v1.AdminService/GetBase",
        "weft.v1.GenerateService/Generate",
        "weft.v1.ReplicaService/GetStatus",
        "weft.v1.ReplicaService/DescribeVersion",
        "weft.v1.RendezvousService/CallStore",
        "weft.v1.RendezvousService/GetManifest",
    }
)
#: What a line says of a request, where the request has it.
_FACTS: Final = (
    "policy",
    "version",
    "to_version",
    "num_versions",
    "trainer_id",
    "replica_id",
    "transfer_id",
    "request_id",
    "fingerprint",
    "reason",
)
_MAX_FACT_CHARS: Final = 200
#: Calls that are a part of the base's lease, though they do not name it.
_OF_BASE: Final = frozenset(
    {"weft.v1.PublishService/SleepRollouts", "weft.v1.PublishService/WakeRollouts"}
)
#: The identity whose call is being answered; empty where nobody is asked who he is.
CALLER: Final[ContextVar[str]] = ContextVar("CALLER", default="")
_UNKNOWN: Final = "(unknown)"
#: Of more callers than are counted one by one.
_OTHERS: Final = "(others)", ""
#: What is always worth its line: it was done, or its caller hung up.
_GRANTED: Final = ("OK", "CANCELLED")
#: An operator's order that who may push the policy may give, too.
_FORGET: Final = "weft.v1.AdminService/ForgetPolicy"
#: How a stream ends whose reader takes nothing: worth a line, whatever it reads.
_CUT_OFF: Final = "TOO_SLOW"


class AccessFile:
    """Rules of a file, read again when it changes.

    A change leaves the rules before it in force if it cannot be used, or would lock out everybody
    who calls now.

    Raises:
        InvalidRequestError: The file cannot be read, or says what cannot be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._access: AccessRules | None = None
        self._rules = UsableFiles(str(path), (str(path),), self._read_usable)
        self._looked_at = time.monotonic()
        #: By what they show, when each was let in last, and to which method.
        self._callers: LruMapping[ShownCredentials, tuple[float, str]] = LruMapping(_MAX_CALLERS)
        self._lock = threading.Lock()  # the page's requests come on a thread of their own
        self._access = self._rules.get()

    @property
    def access(self) -> AccessRules:
        """Rules as they are now."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            if (rules := self._rules.get()) is not self._access:
                self._access = rules
                _log.info("%s has new rules, which are used from now on", self._path)
        assert self._access is not None
        return self._access

    def look_again(self) -> None:
        """Read the file now, whether it changed or not."""
        self._looked_at = float("-inf")
        self._rules.look_again()
        _ = self.access

    def note_caller(self, shown: ShownCredentials, method: str) -> None:
        """Remember a caller who was let in, and the method.

        Rules that would refuse everybody who is remembered are not used.
        """
        with self._lock:
            self._callers.put(shown, (time.monotonic(), method))

    def _read_usable(self) -> AccessRules:
        access, now = self._read(), time.monotonic()
        if self._access is None:  # the first rules
            return access
        if access.by_certificate != self._access.by_certificate:
            kind = "certificates" if access.by_certificate else "tokens"
            raise InvalidRequestError(f"it names {kind} now, which takes a restart of the server")
        with self._lock:
            known = self._callers.items()
        callers = [(shown, method) for shown, (at, method) in known if now - at < _CALLER_SECONDS]
        if callers and not access.may_lock_out and not any(map(_lets_in(access), callers)):
            shown, method = callers[-1]
            found = self._access.find(shown)
            who = found.name if found else "unknown"
            raise InvalidRequestError(
                f"it would lock out everybody who called in the last {_CALLER_SECONDS:.0f} s "
                f"({len(callers)}, last {who}, of {method.rpartition('/')[2]}); if that is meant, "
                "begin it with lock_out = true"
            )
        return access

    def _read(self) -> AccessRules:
        try:
            return parse_access(read_file(self._path).decode("utf-8"))
        except (UnicodeDecodeError, WeftError) as error:
            raise as_error(error) from None


def _lets_in(access: AccessRules) -> Callable[[tuple[ShownCredentials, str]], bool]:
    def lets_in(caller: tuple[ShownCredentials, str]) -> bool:
        identity = access.find(caller[0])
        return identity is not None and identity.may_call(caller[1])

    return lets_in


class Guard:
    """Guard of one server; used on its event loop.

    Args:
        file: Access rules; None where nobody is asked who he is.
    """

    def __init__(self, file: AccessFile | None) -> None:
        self._file = file
        self._requests: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    @property
    def asks(self) -> bool:
        """True if callers are asked who they are."""
        return self._file is not None

    @contextmanager
    def call(self, context: Any, method: str, request: Any, *, is_stream: bool) -> Iterator[None]:
        """Let one call in, and count and audit it until it ends.

        Args:
            method: As ``package.Service/Method``.
            request: Its message; None for a stream of them.

        Raises:
            NotAllowedError: Also ``UnauthenticatedError``.
            CapacityError: ``TOO_MANY_CALLS``.
        """
        name, result, is_let_in = "", "OK", False
        try:
            identity, shown = self._identify(context)
            name = identity.name
            if self._file is not None:
                check_call(identity, method, _policy_of(method, request))
                self._file.note_caller(shown, method)
            with self._counted(name, is_stream=is_stream):
                is_let_in = True
                CALLER.set("" if self._file is None else name)  # of this call's own task
                yield
        except WeftError as error:
            result = error.reason
            raise
        except (asyncio.CancelledError, GeneratorExit):
            result = "CANCELLED"
            raise
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            if not is_let_in or _is_worth_a_line(method, result, is_stream=is_stream):
                audit(name, _peer(context), method, _facts(request), result)
            elif _REFUSALS.num_pending:
                _REFUSALS.tell(time.monotonic())

    def _identify(self, context: Any) -> tuple[Identity, ShownCredentials]:
        if self._file is None:
            return ANYBODY, _NOTHING
        token = token_of(context.invocation_metadata())
        names = _names_of(context)
        return self._file.access.identify(names, token), ShownCredentials(names, digest_of(token))

    def check_again(self, context: Any, method: str) -> None:
        """Refuse to continue a stream that the current rules do not allow.

        Raises:
            NotAllowedError: Its identity or role was removed.
        """
        identity, shown = self._identify(context)
        check_call(identity, method, None)
        if self._file is not None:
            self._file.note_caller(shown, method)

    @contextmanager
    def _counted(self, name: str, *, is_stream: bool) -> Iterator[None]:
        if self._file is None:
            yield
            return
        limits = self._file.access.limits
        counts, limit = (
            (self._streams, limits.streams) if is_stream else (self._requests, limits.requests)
        )
        if counts[name] >= limit:
            what = "streams" if is_stream else "requests"
            raise CapacityError(
                f"{name} has {limit} {what} in flight here, as many as one identity may have",
                reason="TOO_MANY_CALLS",
                metadata={"limit": str(limit)},
            )
        counts[name] += 1
        try:
            yield
        finally:
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


def audit(name: str, peer: str, call: str, facts: Mapping[str, str], result: str) -> None:
    """Write a line of the audit log.

    Args:
        name: Name of the caller; empty where nobody knows.
        peer: Address of the caller.
        facts: Facts of the request, by name.
    """
    if not audit_log.isEnabledFor(logging.INFO):
        return
    who, left_out = name or _UNKNOWN, 0
    if result not in _GRANTED:
        now = time.monotonic()
        _REFUSALS.tell(now)
        host = peer.rpartition(":")[0]
        if not _REFUSALS.may_write((who, host), now):
            return
        left_out = _REFUSALS.take_left_out((who, host))
    _write(who, peer, call, facts, result, left_out)


def _write(
    who: str, peer: str, call: str, facts: Mapping[str, str], result: str, left_out: int
) -> None:
    line: dict[str, str | int] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "who": who,
        "from": peer,
        "call": call,
        **facts,
        "result": result,
    }
    if left_out:
        line["left_out"] = left_out
    audit_log.info("%s", json.dumps(line, ensure_ascii=False))


class _Refusals:
    """Limit on the audit log's lines of refused calls, so that no refused caller fills the disk.

    A caller may write ``BURST`` lines at once and one a second; all callers together
    ``BURST_OF_ALL`` and ten a second. What is left out is counted, and told with the caller's next
    line, or once it is silent. Usable from any thread; bounded.
    """

    BURST: Final = 20
    BURST_OF_ALL: Final = 200
    RATE_OF_ALL: Final = 10.0
    SILENT_SECONDS: Final = 10.0
    MAX_CALLERS: Final = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By caller, how many lines it may write, since when.
        self._left: LruMapping[tuple[str, str], tuple[float, float]] = LruMapping(self.MAX_CALLERS)
        self._left_of_all = float(self.BURST_OF_ALL), time.monotonic()
        #: By caller, how many were left out, and when the last was.
        self._left_out: dict[tuple[str, str], tuple[int, float]] = {}

    @property
    def num_pending(self) -> int:
        """Number of callers with lines left out that were not told of yet."""
        return len(self._left_out)

    def may_write(self, caller: tuple[str, str], now: float) -> bool:
        """Return whether a line of a refusal may be written now; counts it where it may not."""
        with self._lock:
            own, since = self._left.get(caller) or (float(self.BURST), now)
            own = min(float(self.BURST), own + now - since)
            of_all, all_since = self._left_of_all
            of_all = min(float(self.BURST_OF_ALL), of_all + (now - all_since) * self.RATE_OF_ALL)
            may = own >= 1 and of_all >= 1
            self._left.put(caller, (own - may, now))
            self._left_of_all = of_all - may, now
            if not may:
                if caller not in self._left_out and len(self._left_out) >= self.MAX_CALLERS:
                    caller = _OTHERS
                number, _ = self._left_out.get(caller, (0, now))
                self._left_out[caller] = number + 1, now
            return may

    def take_left_out(self, caller: tuple[str, str]) -> int:
        """Return how many lines of a caller were left out, and reset the count."""
        with self._lock:
            return self._left_out.pop(caller, (0, 0.0))[0]

    def tell(self, now: float) -> None:
        """Write how many lines were left out, for callers who have been silent since."""
        with self._lock:
            silent = [
                (caller, number)
                for caller, (number, at) in self._left_out.items()
                if now - at >= self.SILENT_SECONDS
            ]
            for caller, _ in silent:
                del self._left_out[caller]
        for (who, host), number in silent:
            _write(who, host, "", {}, "LEFT_OUT", number)


_REFUSALS: Final = _Refusals()


def _is_worth_a_line(method: str, result: str, *, is_stream: bool) -> bool:
    """Return whether an allowed call changes something that outlives it, or tried to."""
    if method.startswith(("weft.v1.InspectService/", "grpc.reflection.")):
        return is_stream and result == _CUT_OFF
    return method not in _UNAUDITED or result not in _GRANTED


def token_of(metadata: Any) -> str | None:
    """Return the bearer token of a call; None where it carries none."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and token:
                return token
    return None


def _names_of(context: Any) -> tuple[str, ...]:
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace").lower() for name in names)


def _peer(context: Any) -> str:
    return urllib.parse.unquote(context.peer() or "")


def _policy_of(method: str, request: Any) -> str | None:
    """Return the policy that a trainer's call changes; None for other calls."""
    if not method.startswith("weft.v1.PublishService/") and method != _FORGET:
        return None
    if method in _OF_BASE:
        return BASE_POLICY
    descriptor = getattr(request, "DESCRIPTOR", None)
    if descriptor is None or "policy" not in descriptor.fields_by_name:
        return None
    return str(request.policy)


def _facts(request: Any) -> dict[str, str]:
    descriptor = getattr(request, "DESCRIPTOR", None)
    if descriptor is None:
        return {}
    found = {}
    for name in _FACTS:
        if name in descriptor.fields_by_name and (value := getattr(request, name)):
            if getattr(value, "DESCRIPTOR", None) is not None:  # a PolicyVersion
                value = f"{value.policy}@{value.version}"
            found[name] = str(value)[:_MAX_FACT_CHARS]
    return found

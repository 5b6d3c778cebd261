"""The page: its files, and the JSON that they draw, of the pool and its history.

A reader says with ``since`` what it has, and gets what has changed. Requests are answered on
the HTTP server's thread, from values that are replaced and never mutated. One answer looks at
replicas and policies for ``LOOK_SECONDS`` each, has about ``MAX_BYTES``, and says whether
there is more.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft_rl.containers import replace
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.policies.republishing import conflicts, publish_again_version
from weft_rl.coordinator.decisions.state.event_kinds import (
    DETAILS,
    KEPT_WITH,
    MAX_KEPT,
    story,
    tone,
    topic,
)
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    VersionDifference,
    explain_state,
    version_differences,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import ReplicaState
from weft_rl.coordinator.messages.wire import (
    policy_to_proto,
    pool_to_proto,
    replica_to_proto,
    transfer_to_proto,
)
from weft_rl.coordinator.page.history import (
    MAX_TRANSFERS,
    SHOWN_SECONDS,
    History,
    Mark,
    PastTransfer,
    without_names,
)
from weft_rl.coordinator.runtime.watchers import Feed, KeptEvent
from weft_rl.rpc.codec import as_dict
from weft_rl.rpc.security.credentials import UNUSED_FILES
from weft_rl.telemetry.site import Page
from weft_rl.v1 import inspect_pb2

#: A thousand replicas that all changed take some answers.
LOOK_SECONDS: Final = 0.02
MAX_BYTES: Final = 512 * 1024
#: Events of one answer.
MAX_EVENTS: Final = 1000
#: Those who ask with the same cursor within so long get the same answer, however many they are.
SAME_ANSWER_SECONDS: Final = 0.25
_MAX_ANSWERS: Final = 8
#: Entries whose end is remembered; who has not heard of older ones begins anew.
MAX_GONE: Final = 1000
#: Transfers under way that are shown.
MAX_UNDER_WAY: Final = 50
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
_CURSOR: Final = re.compile(r"([0-9a-f]{1,32})" + r"\.(\d{1,15})" * 4)

Past = PastTransfer | Mark
_V = TypeVar("_V")


def pages(document: Document) -> dict[str, Page]:
    """Return the page's files and its JSON by path; all of them are for callers who may inspect."""
    return {
        "/v1/pool.json": Page(answer=document),
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


class Document:
    """Answers to ``GET /v1/pool.json``, built from the state, the history and the events.

    Args:
        target: HOST:PORT to dial for the coordinator's services.
        state: Returns the state as it is now, which is replaced and never mutated.
        now: Returns monotonic seconds, as the state has them.
        num_verified: Returns how many buckets every receiver has verified, of a group's transfer.
        unwritten_reason: Returns why events are not in the catalog; empty if they are.
    """

    def __init__(
        self,
        history: History,
        feed: Feed,
        target: str,
        state: Callable[[], PoolState],
        now: Callable[[], float],
        num_verified: Callable[[str, str], int],
        unwritten_reason: Callable[[], str],
    ) -> None:
        self._history, self._feed, self._target = history, feed, target
        self._state, self._now, self._num_verified = state, now, num_verified
        self._unwritten_reason = unwritten_reason
        self._made: dict[str, tuple[float, bytes]] = {}
        self._replicas = Entries[Replica](self._seen_replica, self._replica, time.monotonic)
        self._policies = Entries[Policy](self._seen_policy, self._policy, time.monotonic)

    def __call__(self, request: Request) -> Response:
        """Answer ``GET /v1/pool.json[?since=CURSOR]``."""
        cursor = request["query_string"].decode("latin-1").removeprefix("since=")
        known = _CURSOR.fullmatch(cursor)
        if cursor and known is None:
            return PlainTextResponse("ask with ?since=CURSOR, or nothing\n", HTTPStatus.BAD_REQUEST)
        now = time.monotonic()
        made_at, body = self._made.get(cursor, (float("-inf"), b""))
        if now - made_at >= SAME_ANSWER_SECONDS:
            body = self._answer(known).encode()
            if len(self._made) >= _MAX_ANSWERS:
                self._made.clear()
            self._made[cursor] = (now, body)
        return Response(body, media_type="application/json")

    def _answer(self, known: re.Match[str] | None) -> str:
        state, upto = self._state(), self._history.revision
        is_more = [
            self._replicas.look(state.replicas, LOOK_SECONDS),
            self._policies.look(state.policies, LOOK_SECONDS),
        ]
        has = past, told, replicas, policies = self._known(state, known)
        texts, members, reached = self._past(past, upto)
        newer = self._feed.since(told)
        events = newer[:MAX_EVENTS]
        told = events[-1].revision if events else told
        cursor = (reached, told, self._replicas.revision, self._policies.revision)
        facts = {
            "cursor": ".".join([state.coordinator_id, *map(str, cursor)]),
            "is_new": not any(has),
            "is_more": reached < upto or len(events) < len(newer) or any(is_more),
            "coordinator": self._target,
            "history": {
                "began": self._history.began_at,
                "num_transfers": MAX_TRANSFERS,
                "num_events": MAX_KEPT,
                "seconds": SHOWN_SECONDS,
            },
            "pool": as_dict(self._pool(state)),
            "num_replicas": len(state.replicas),
            "rates": {backend: asdict(rate) for backend, rate in self._history.rates.items()},
            "members": members,
            "events": [_told(event) for event in events],
            "under_way": [
                self._under_way(transfer, state)
                for transfer in islice(state.transfers.values(), MAX_UNDER_WAY)
            ],
            "gone_replicas": self._replicas.gone_since(replicas),
            "gone_policies": self._policies.gone_since(policies),
        }
        lists = {
            "replicas": self._replicas.since(replicas),
            "policies": self._policies.since(policies),
            **texts,
        }
        listed = ",".join(f'"{name}":[{",".join(entries)}]' for name, entries in lists.items())
        return f"{_dumps(facts)[:-1]},{listed}}}"

    def _pool(self, state: PoolState) -> inspect_pb2.GetPoolResponse:
        reason = self._unwritten_reason()
        return pool_to_proto(state, self._now(), time.time(), UNUSED_FILES.list(), reason)

    def _known(self, state: PoolState, cursor: re.Match[str] | None) -> tuple[int, ...]:
        """Return the revisions of history, events, replicas and policies that a reader has.

        All are 0 if it read from another coordinator, or missed too much of what is gone.
        """
        if cursor is None or cursor[1] != state.coordinator_id:
            return (0, 0, 0, 0)
        known = tuple(map(int, cursor.groups()[1:]))
        is_behind = known[2] < self._replicas.forgotten or known[3] < self._policies.forgotten
        return (0, 0, 0, 0) if is_behind else known

    # -- what is now -----------------------------------------------------------------
    # What grows or shrinks with time alone is left out: an entry is sent when it changes.

    def _replica(self, replica: Replica) -> inspect_pb2.Replica:
        message = replica_to_proto(self._state(), replica, self._now())
        message.ClearField("since_heartbeat")
        message.report.ClearField("work")
        if message.report.HasField("drain"):
            message.report.drain.ClearField("time_left")
        return message

    def _policy(self, policy: Policy) -> inspect_pb2.Policy:
        message = policy_to_proto(self._state(), policy, self._now())
        if message.HasField("lease"):
            message.lease.ClearField("time_to_live")
        return message

    def _seen_replica(self, replica: Replica) -> tuple[Replica, str, list[VersionDifference]]:
        is_ready = replica.announced is ReplicaState.READY
        why = "" if is_ready else explain_state(self._state(), replica)[1]
        report = replace(replica.believed_report(0.0), work=None, drain=None)
        differences = version_differences(self._state(), replica)
        return replace(replica, last_heard=0.0, report=report), why, differences

    def _seen_policy(self, policy: Policy) -> tuple[Policy, bool, int, list[int], bool, bool]:
        state, lease = self._state(), policy.lease
        is_held = lease is not None and self._now() < lease.expires_at
        if lease is not None:
            policy = replace(policy, lease=replace(lease, expires_at=0.0, num_renewals=0))
        again = publish_again_version(state, policy.name)
        is_lost = state.is_lost(policy)
        served = PolicyVersion(policy.name, policy.served_version)
        is_over_other = state.is_over_another_base(served)
        unlike = list(conflicts(state, policy.name))
        return policy, is_held, again, unlike, is_lost, is_over_other

    def _under_way(self, transfer: Transfer, state: PoolState) -> dict[str, Any]:
        verified = self._num_verified(transfer.group_id, transfer.transfer_id)
        message = transfer_to_proto(without_names(transfer), state, self._now(), verified)
        return {
            "transfer": as_dict(message),
            "backend": transfer.backend,
            "waits_for": transfer.waits_for if not transfer.version else "",
            "num_targets": len(transfer.targets),
        }

    # -- what was --------------------------------------------------------------------

    def _past(
        self, since: int, upto: int
    ) -> tuple[dict[str, list[str]], dict[int, tuple[str, ...]], int]:
        """Return entries above a revision, the members they name first, and the revision reached.

        Entries are oldest first, and about ``MAX_BYTES``.
        """
        history = self._history
        marks = history.marks.since(since)
        if not since:
            marks = _shown([*history.older_marks.values(), *marks], self._state().wall(self._now()))
        kinds: dict[str, Iterable[Past]] = {
            "transfers": history.transfers.since(since),
            "repairs": history.repairs.since(since),
            "marks": marks,
        }
        found = sorted(
            ((entry.revision, name, entry) for name, entries in kinds.items() for entry in entries),
            key=lambda item: item[0],
        )
        texts: dict[str, list[str]] = {name: [] for name in kinds}
        members: dict[int, tuple[str, ...]] = {}
        num_bytes, reached = 0, since
        for revision, name, entry in found:
            if revision > upto:
                break
            if num_bytes > MAX_BYTES:
                return texts, members, reached
            text = _dumps(_fields(entry))
            texts[name].append(text)
            num_bytes += len(text)
            if isinstance(entry, PastTransfer):
                for them in (entry.targets, entry.served_by):
                    if them.revision > since and them.number not in members:
                        members[them.number] = them.replica_ids
                        num_bytes += sum(map(len, them.replica_ids)) + 3 * len(them.replica_ids)
            reached = revision
        return texts, members, upto


class Entries(Generic[_V]):
    """Entries for the values of a mapping that is replaced and never mutated.

    Used on one thread. A look at all values may take several calls.

    Args:
        seen: Returns the part of a value that is shown, to be compared; quick.
        make: Makes the entry of a value.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        seen: Callable[[_V], Any],
        make: Callable[[_V], Message],
        clock: Callable[[], float],
    ) -> None:
        self._seen, self._make, self._clock = seen, make, clock
        self._known: dict[str, tuple[Any, str, int]] = {}
        """Shown part, entry and revision, by name, in the order of their changes."""
        self._gone: dict[str, int] = {}
        self._to_see: list[str] = []
        self.revision = 0
        self.forgotten = 0
        """Lowest revision whose readers can still be told what is gone."""

    def look(self, values: Mapping[str, _V], seconds: float) -> bool:
        """Look for changed values, for ``seconds`` at most; the next call continues.

        Returns:
            True if there is likely more: some changes were found, and not all values seen.
        """
        until, before = self._clock() + seconds, self.revision
        for name in self._known.keys() - values.keys():
            self._forget(name)
        if not self._to_see:
            self._to_see = list(values)
        while self._to_see:
            name = self._to_see.pop()
            if name in values:
                self._see(name, values[name])
            if self._clock() >= until:
                break
        return bool(self._to_see) and self.revision > before

    def since(self, revision: int) -> list[str]:
        """Return the entries newer than ``revision``; O(these)."""
        found = []
        for _, text, changed in reversed(self._known.values()):
            if changed <= revision:
                break
            found.append(text)
        return found

    def gone_since(self, revision: int) -> list[str]:
        """Return the names that are gone since ``revision``."""
        return [name for name, gone in self._gone.items() if gone > revision]

    def _see(self, name: str, value: _V) -> None:
        seen = self._seen(value)
        known = self._known.get(name)
        if known is not None and known[0] == seen:
            return
        text = _dumps(as_dict(self._make(value)))
        self.revision += 1
        self._known.pop(name, None)
        self._gone.pop(name, None)
        self._known[name] = (seen, text, self.revision)

    def _forget(self, name: str) -> None:
        del self._known[name]
        self.revision += 1
        self._gone[name] = self.revision
        while len(self._gone) > MAX_GONE:
            self.forgotten = self._gone.pop(next(iter(self._gone)))


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _shown(marks: list[Mark], now: float) -> list[Mark]:
    """Return the marks of the time that is shown, and each replica's last before that."""
    before = {mark.replica_id: mark for mark in marks if mark.time < now - SHOWN_SECONDS}
    return [*before.values(), *(m for m in marks if m.time >= now - SHOWN_SECONDS)]


def _told(event: KeptEvent) -> dict[str, Any]:
    """Return an event's fields for the page: those of the message, and how it is shown."""
    kind = event.announced.kind
    return {
        "revision": event.revision,
        "topic": topic(kind),
        "tone": tone(kind),
        "story": story(event.announced),
        "is_detail": kind in DETAILS,
        "kept_with": KEPT_WITH[kind],
        **as_dict(event.message),
    }


def _fields(entry: Past) -> dict[str, Any]:
    """Return an entry's fields for the page: durations are seconds, times seconds since 1970."""
    if isinstance(entry, Mark):
        return {**vars(entry)}
    return {
        **{name: value for name, value in vars(entry).items() if name != "message"},
        "transfer": as_dict(entry.message),
        "targets": entry.targets.number,
        "served_by": entry.served_by.number,
    }

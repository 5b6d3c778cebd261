"""Bounds on messages from outside: on every number, text and list, by its field.

One walk over what is set checks a whole message, nested ones too. So a field that is
added tomorrow is bounded by its type until it gets a rule of its own here. The bounds
are those that ``weft.v1`` states (types.proto, "Bounds"). What depends on more than the
field itself (a name's rule, a known policy) is checked where it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES
from weft_rl.contract.errors import NotReadyError, error_from_reason
from weft_rl.contract.group import (
    MAX_BUCKETS_IN_FLIGHT,
    MAX_GROUP_SIZE,
    MAX_HOPS,
    MAX_RECEIVERS,
    MAX_SENDERS,
)
from weft_rl.contract.names import MAX_VERSION
from weft_rl.contract.sampling import (
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from weft_rl.rpc.channel import MAX_PROMPT_BYTES
from weft_rl.tracing import MAX_TRACEPARENT_CHARS

#: Revision of the protocol that this process speaks. It is raised by a change that an older peer
#: would misunderstand; see docs/protocol.md.
PROTOCOL_REVISION: Final = 1
#: Ten years; longer than anything here waits, runs or pauses.
MAX_DURATION_SECONDS: Final = 315_360_000
MAX_DRAIN_SECONDS: Final = 86_400
#: Bound of versions, tokens, epochs and generations; exact in JSON, too.
MAX_NUMBER: Final = MAX_VERSION
#: Bound of sizes and counts of 64 bits, which a signed integer, and the catalog, can hold.
MAX_SIZE: Final = 2**63 - 1
MAX_ID_CHARS: Final = 256
MAX_CHARS: Final = 4_096
#: Characters that are kept of a text for people: of a process's own, and of one that is typed.
MAX_TEXT_CHARS: Final = 2_000
MAX_REASON_CHARS: Final = 500
MAX_DIGEST_BYTES: Final = 64
MAX_ENTRIES: Final = 65_536
#: Tokens or characters of a prompt, and tokens of an answer; a message has room for no more.
MAX_PROMPT: Final = 2**20
MAX_IMAGES: Final = 64
#: Last second of the year 9999, since 1970.
LAST_SECOND: Final = 253_402_300_799

_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.%A-Za-z]{2,64}\]")

#: Takes the message, the field and its value; raises, or cuts a text in place.
_Check = Callable[[Message, FieldDescriptor, Any], None]


def check(message: Message) -> None:
    """Refuse a message that holds what no honest peer sends; cut texts that are too long.

    Raises:
        InvalidRequestError: Names the field and its bound (or the type that the
            field's reason stands for: ``INVALID_ADAPTER``, ``INVALID_PAGE``).
    """
    checks = _CHECKS.get(type(message))
    if checks is None:
        checks = _CHECKS[type(message)] = _checks_of(message.DESCRIPTOR)
    for name, field, test in checks.values:
        if value := getattr(message, name):  # what is unset, or empty, is within all bounds
            test(message, field, value)
    for name, field, test in checks.messages:
        if message.HasField(name):
            test(message, field, getattr(message, name))


def check_revision(given: int, caller: str) -> None:
    """Refuse a caller that speaks another revision than this coordinator.

    Args:
        given: Revision that it sends; 0 if it sends none.
        caller: Its name, for error messages.

    Raises:
        NotReadyError: ``REVISION_MISMATCH``; says which side is older.
    """
    if given == PROTOCOL_REVISION:
        return
    older = "caller" if given < PROTOCOL_REVISION else "coordinator"
    raise NotReadyError(
        f"{caller} speaks protocol revision {given}, the coordinator protocol revision "
        f"{PROTOCOL_REVISION}: update {caller if older == 'caller' else 'the coordinator'}, which "
        "is older",
        reason="REVISION_MISMATCH",
        metadata={
            "caller_revision": str(given),
            "coordinator_revision": str(PROTOCOL_REVISION),
            "older": older,
        },
    )


def _refuse(field: FieldDescriptor, why: str, reason: str = "INVALID_REQUEST") -> None:
    name = _path(field)
    raise error_from_reason(reason, f"{name} {why}", {"field": name})


def _path(field: FieldDescriptor) -> str:
    assert field.containing_type is not None  # none is an extension
    return f"{field.containing_type.name}.{field.name}"


def _number(low: int, high: int) -> _Check:
    def test(_: Message, field: FieldDescriptor, value: int) -> None:
        if not low <= value <= high:
            _refuse(field, f"is {value}; it must be between {low} and {high}")

    return test


def _finite(_: Message, field: FieldDescriptor, value: float) -> None:
    if not math.isfinite(value):
        _refuse(field, f"is {value}; it must be a finite number")


def _enum(_: Message, field: FieldDescriptor, value: int) -> None:
    assert field.enum_type is not None
    if value not in field.enum_type.values_by_number:
        _refuse(field, f"is {value}, which no {field.enum_type.name} has")


def _text(max_chars: int, *, printable: bool = True, reason: str = "INVALID_REQUEST") -> _Check:
    def test(_: Message, field: FieldDescriptor, value: str) -> None:
        if len(value) > max_chars:
            why = f"has {len(value)} characters; at most {max_chars} are taken"
            _refuse(field, why, reason)
        if printable and not value.isprintable():
            _refuse(field, f"is {value[:80]!r}; its characters must be printable", reason)

    return test


def _kept(max_chars: int) -> _Check:
    """Return a check that cuts an overlong text for messages, instead of refusing it."""

    def cut(message: Message, field: FieldDescriptor, value: str) -> None:
        if len(value) > max_chars:
            setattr(message, field.name, value[:max_chars])

    return cut


def _bytes(max_bytes: int) -> _Check:
    def test(_: Message, field: FieldDescriptor, value: bytes) -> None:
        if len(value) > max_bytes:
            _refuse(field, f"has {len(value)} bytes; at most {max_bytes} are taken")

    return test


def _duration(max_seconds: int) -> _Check:
    def test(_: Message, field: FieldDescriptor, value: Any) -> None:
        seconds, nanos = value.seconds, value.nanos
        if not (0 <= seconds <= max_seconds and 0 <= nanos < 10**9):
            shown = f"{seconds} s" if not nanos else f"{seconds} s and {nanos} ns"
            _refuse(field, f"is {shown}; it must be between 0 and {max_seconds} s")

    return test


def _timestamp(_: Message, field: FieldDescriptor, value: Any) -> None:
    if not (0 <= value.seconds <= LAST_SECOND and 0 <= value.nanos < 10**9):
        _refuse(field, "is no time between the years 1970 and 9999")


def _address(_: Message, field: FieldDescriptor, value: str) -> None:
    host, port = value.rpartition(":")[::2]
    if not _HOST.fullmatch(host) or not _is_port(port):
        _refuse(field, f"is {value[:80]!r}; it must be HOST:PORT with a port of 1 to 65535")


def _is_port(text: str) -> bool:
    return len(text) <= 5 and text.isascii() and text.isdigit() and 1 <= int(text) <= 65_535


def _url(_: Message, field: FieldDescriptor, value: str) -> None:
    try:
        parts = urlsplit(value)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port out of range, a bracket left open
        fine = False
    if not fine or len(value) > MAX_CHARS or not value.isprintable():
        _refuse(field, f"is {value[:80]!r}; it must be a URL such as http://HOST:PORT")


def _anything(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Accept any value: it is checked where it is used, or needs no check."""


def _nested(_: Message, __: FieldDescriptor, value: Message) -> None:
    check(value)


def _each(one: _Check, max_entries: int, *, ordered: bool = False) -> _Check:
    """Return a check of lists whose entries ``one`` takes; of ``ordered`` numbers, the extremes."""

    def test(message: Message, field: FieldDescriptor, values: Any) -> None:
        if len(values) > max_entries:
            _refuse(field, f"has {len(values)} entries; at most {max_entries} are taken")
        entries = values[:]  # a list: the container itself is slow to walk
        for value in (min(entries), max(entries)) if ordered else entries:
            one(message, field, value)

    return test


_ID = _text(MAX_ID_CHARS)
_TEXT = _text(MAX_CHARS, printable=False)

#: By the name of the field, in whatever message.
_BY_NAME: Final[Mapping[str, _Check]] = {
    "address": _address,
    "dirty_reason": _kept(MAX_TEXT_CHARS),
    "refusing": _kept(MAX_TEXT_CHARS),
    "group_id": _ID,
    "http_url": _url,
    "incarnation": _ID,
    "message": _kept(MAX_TEXT_CHARS),
    "nonce": _anything,
    "policy": _ID,
    "pool_id": _ID,
    "reason": _kept(MAX_REASON_CHARS),
    "replica_id": _ID,
    "request_id": _ID,
    "session_id": _ID,
    "staged_transfer_ids": _ID,
    "token": _ID,
    "trainer_id": _ID,
    "transfer_id": _ID,
}
#: By the name of the message and of the field.
_BY_FIELD: Final[Mapping[str, _Check]] = {
    "AbortTransferRequest.message": _kept(MAX_REASON_CHARS),
    "AdapterSpec.config_json": _text(MAX_CONFIG_BYTES, printable=False, reason="INVALID_ADAPTER"),
    "BeginTransferRequest.backend_reason": _kept(MAX_CHARS),
    "BeginTransferRequest.trial_names": _ID,
    "Capabilities.base_refusal": _kept(MAX_REASON_CHARS),
    "Capabilities.gpu_uuids": _ID,
    "SleepRolloutsRequest.gpu_uuids": _ID,
    "Capabilities.nccl_network": _kept(MAX_ID_CHARS),
    "Capabilities.max_lora_rank": _number(0, 65_536),
    "Capabilities.num_receivers": _number(1, MAX_RECEIVERS),
    "Capabilities.tensor_parallel_size": _number(0, 65_536),
    "Capabilities.trial_name": _ID,
    "Drain.reason": _kept(MAX_TEXT_CHARS),
    "OutOfService.reason": _kept(MAX_REASON_CHARS),
    "Drain.time_left": _duration(MAX_DRAIN_SECONDS),
    "GenerateRequest.text": _text(MAX_PROMPT, printable=False),
    "Image.file": _bytes(MAX_PROMPT_BYTES),
    "Pixels.rgb": _bytes(MAX_PROMPT_BYTES),
    "GroupPlan.num_senders": _number(0, MAX_SENDERS),
    "GroupPlan.rank": _number(0, MAX_GROUP_SIZE - 1),
    "GroupPlan.size": _number(2, MAX_GROUP_SIZE),
    "Hello.num_buckets_in_flight": _number(0, MAX_BUCKETS_IN_FLIGHT),
    "CheckpointFile.name": _kept(MAX_ID_CHARS),
    "SleepReplicaRequest.level": _number(0, 2),
    "SleepRequest.level": _number(0, 2),
    "SleepRolloutsRequest.level": _number(0, 2),
    "ListPoliciesRequest.page_size": _anything,
    "ListPoliciesRequest.page_token": _text(200, reason="INVALID_PAGE"),
    "GetPoolRequest.page_size": _anything,
    "ListReplicasRequest.page_size": _anything,
    "ListReplicasRequest.page_token": _text(200, reason="INVALID_PAGE"),
    "ListEventsRequest.page_size": _anything,
    "ListEventsRequest.page_token": _text(200, reason="INVALID_PAGE"),
    "ListTransfersRequest.page_size": _anything,
    "ListTransfersRequest.page_token": _text(200, reason="INVALID_PAGE"),
    "ListVersionsRequest.page_size": _anything,
    "ListVersionsRequest.page_token": _text(20, reason="INVALID_PAGE"),
    "Prepare.trace_context": _text(MAX_TRACEPARENT_CHARS),
    "RankFailed.reason": _ID,
    "Sampling.num_samples": _number(0, MAX_SAMPLES),
    "Sampling.seed": _number(0, MAX_SEED),
    "Sampling.stop": _text(MAX_STOP_CHARS, printable=False),
    "SendPlan.num_senders": _number(1, MAX_SENDERS),
    "SetRetentionRequest.num_versions": _anything,
    "StoreAdd.amount": _anything,
    "StoreAdd.key": _TEXT,
    "StoreCompareSet.desired": _anything,
    "StoreCompareSet.expected": _anything,
    "StoreSet.values": _anything,
    "TensorDigest.digest": _anything,
}
_MAX_ENTRIES: Final[Mapping[str, int]] = {
    "Admission.prompt_token_ids": MAX_PROMPT,
    "Capabilities.backends": 16,
    "Capabilities.gpu_uuids": 1_024,
    "Capabilities.lora_modules": 4_096,
    "Capabilities.lora_unapplied": 1_024,
    "Capabilities.served_names": 4_096,
    "GenerateRequest.images": MAX_IMAGES,
    "SentReport.hops": MAX_HOPS,
    "SleepRolloutsRequest.gpu_uuids": 1_024,
    "SampleChunk.logprobs": MAX_PROMPT,
    "SampleChunk.token_ids": MAX_PROMPT,
    "Sampling.stop": MAX_STOPS,
    "Sampling.stop_token_ids": MAX_STOP_TOKEN_IDS,
    "TokenIds.ids": MAX_PROMPT,
}
#: Whose decoder checks every entry as it comes, and what all of them add up to.
_DECODED: Final = frozenset({"ManifestChunk", "ReferenceChunk"})

_BY_TYPE: Final[Mapping[int, _Check]] = {
    FieldDescriptor.CPPTYPE_INT32: _number(0, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _number(0, MAX_NUMBER),
    FieldDescriptor.CPPTYPE_UINT32: _number(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _number(0, MAX_SIZE),
    FieldDescriptor.CPPTYPE_DOUBLE: _finite,
    FieldDescriptor.CPPTYPE_FLOAT: _finite,
    FieldDescriptor.CPPTYPE_BOOL: _anything,
    FieldDescriptor.CPPTYPE_ENUM: _enum,
    FieldDescriptor.CPPTYPE_STRING: _TEXT,
}
_NUMBERS: Final = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)


@dataclass(frozen=True)
class _MessageChecks:
    """Checks of one message by field: cheaper than a walk over its descriptor."""

    values: list[tuple[str, FieldDescriptor, _Check]]
    messages: list[tuple[str, FieldDescriptor, _Check]]
    """Checks of single messages, which may be absent."""


_CHECKS: dict[type[Message], _MessageChecks] = {}


def _checks_of(descriptor: Any) -> _MessageChecks:
    checks = _MessageChecks([], [])
    for field in descriptor.fields:
        if (test := _check_of(field)) is not _anything:
            is_message = field.message_type is not None and not _is_list(field)
            (checks.messages if is_message else checks.values).append((field.name, field, test))
    return checks


def _is_list(field: FieldDescriptor) -> bool:
    # Not by its label: protobuf 5 and 7 have no common way to ask for that.
    return isinstance(field.default_value, list)


def _check_of(field: FieldDescriptor) -> _Check:
    one = _BY_FIELD.get(_path(field)) or _BY_NAME.get(field.name) or _by_type(field)
    if not _is_list(field):
        return one
    max_entries = _MAX_ENTRIES.get(_path(field), MAX_ENTRIES)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _map(field, max_entries)
    return _each(one, max_entries, ordered=field.cpp_type in _NUMBERS)


def _map(field: FieldDescriptor, max_entries: int) -> _Check:
    assert field.message_type is not None
    of_key, of_value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    keys, values = _each(_check_of(of_key), max_entries), _each(_check_of(of_value), max_entries)

    def test(message: Message, _: FieldDescriptor, entries: Any) -> None:
        keys(message, of_key, list(entries))
        values(message, of_value, [entries[key] for key in entries])

    return test


def _by_type(field: FieldDescriptor) -> _Check:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(MAX_DIGEST_BYTES)
    if field.message_type is None:
        return _BY_TYPE[field.cpp_type]
    if field.message_type.name in _DECODED:
        return _anything
    if field.message_type.full_name == "google.protobuf.Duration":
        return _duration(MAX_DURATION_SECONDS)
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return _timestamp
    return _nested

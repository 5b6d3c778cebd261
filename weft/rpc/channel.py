"""Channels to Weft's servers: the one place where credentials will come in."""

from __future__ import annotations

import json
from typing import Final

import grpc

#: Largest message either way; whatever may be larger is sent in chunks.
MAX_MESSAGE_BYTES: Final = 4 * 2**20
#: A silent connection is probed this often, and given up ``KEEPALIVE_TIMEOUT_MS``
#: later. Servers allow twice that rate (see ``weft.rpc.server``).
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000

# Unary calls that may be sent twice. CallStore is not among them (add, append);
# typed failures are never retried (see weft.rpc.status).
_RETRIED: Final = {
    "weft.v1.InspectService": None,
    "weft.v1.PublishService": (
        "DescribeTarget", "AcquirePolicy", "RenewLease", "ReleasePolicy",
        "BeginTransfer", "AwaitTransfer", "AbortTransfer",
    ),
    "weft.v1.RegistryService": ("Register", "Heartbeat", "Leave"),
    "weft.v1.ReplicaService": None,
}  # fmt: skip
_RETRY_POLICY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config() -> str:
    names: list[dict[str, str]] = []
    for service, methods in _RETRIED.items():
        if methods is None:
            names.append({"service": service})
        else:
            names += [{"service": service, "method": method} for method in methods]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})


CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted coordinator is found again within two seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The control plane is next door: an http_proxy meant for the internet is
    # not on the way to it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", _service_config()),
]


def open_channel(target: str) -> grpc.Channel:
    """Open a blocking channel to ``HOST:PORT``; connects at the first call.

    The caller closes it. Not to be carried over a fork.
    """
    return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)


def open_aio_channel(target: str) -> grpc.aio.Channel:
    """Open an asyncio channel to ``HOST:PORT``; call it on the running loop.

    The caller closes it.
    """
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)

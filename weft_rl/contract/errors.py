"""Every failure that Weft reports, as a type, a reason and a gRPC status.

A reason and its context travel as ``google.rpc.ErrorInfo`` (see ``weft_rl.rpc.status``). The
other side rebuilds the type from the reason, never from the text of the message.
"""

from __future__ import annotations

from typing import ClassVar


class WeftError(Exception):
    """Base of all typed failures.

    Args:
        message: Problem and remedy, in words for the user.
        reason: One of ``REASONS``; the type's own default when omitted.
        metadata: Further facts for programs (``member``, ``holder``, ...).
    """

    status: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        # A lone surrogate (of a path, of JSON) can be neither logged nor printed nor sent.
        self.message = message.encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]"


class InvalidRequestError(WeftError):
    """Malformed call; the caller fixes it."""

    status = "INVALID_ARGUMENT"
    default_reason = "INVALID_REQUEST"


class InvalidManifestError(InvalidRequestError):
    """Names, shapes, dtypes or layout that cannot be right."""

    default_reason = "INVALID_MANIFEST"


class InvalidAdapterError(InvalidRequestError):
    """An adapter that the engine would refuse, ignore or misread."""

    default_reason = "INVALID_ADAPTER"


class NotFiniteError(InvalidRequestError):
    """NaN or infinity in a tensor to be sent; metadata ``parameter`` names the first."""

    default_reason = "NOT_FINITE"


class InvalidNameError(InvalidRequestError):
    """A policy, trainer or replica name outside the rule."""

    default_reason = "INVALID_NAME"


class NotFoundError(WeftError):
    """Name of something that is not known; list again."""

    status = "NOT_FOUND"
    default_reason = "VERSION_UNKNOWN"


class RequestConflictError(WeftError):
    """Use of an id again for something else; stop."""

    status = "ALREADY_EXISTS"
    default_reason = "REQUEST_CONFLICT"


class PolicyOwnedError(RequestConflictError):
    """Ownership of the policy by another trainer; metadata names it."""

    default_reason = "POLICY_OWNED"


class NotReadyError(WeftError):
    """Missing step; do it first."""

    status = "FAILED_PRECONDITION"
    default_reason = "NOT_STAGED"


class BaseMismatchError(NotReadyError):
    """Weights made for another base model than the pool serves."""

    default_reason = "BASE_MISMATCH"


class StaleEpochError(WeftError):
    """Call of an older epoch, lease or coordinator; rejoin and start again."""

    status = "ABORTED"
    default_reason = "EPOCH_FENCED"


class LeaseFencedError(StaleEpochError):
    """Lease that expired or was taken over; acquire it again."""

    default_reason = "LEASE_FENCED"


class TransferAbortedError(StaleEpochError):
    """Push that was given up before its commit; nothing changed, push again."""

    default_reason = "TRANSFER_ABORTED"


class ModelChangedError(TransferAbortedError):
    """Change of what is pushed while it was read; metadata ``first`` says what. Push again."""

    default_reason = "MODEL_CHANGED"


class VersionChangedError(WeftError):
    """Change of the base before the answer that insists on one had ended; ask again."""

    status = "ABORTED"
    default_reason = "VERSION_CHANGED"


class CapacityError(WeftError):
    """Excess over a stated bound; free something or wait."""

    status = "RESOURCE_EXHAUSTED"
    default_reason = "STAGING_FULL"


class PeerUnavailableError(WeftError):
    """Absence of a process that is needed; metadata ``member`` says who. Retry."""

    status = "UNAVAILABLE"
    default_reason = "PEER_GONE"


class StalledError(PeerUnavailableError):
    """Lack of progress of a live process that is needed; metadata ``member`` says who. It takes no
    part until it answers again: push again."""

    default_reason = "STALLED"


class TransferTimeoutError(WeftError):
    """Deadline that passed; ask what happened before pushing again."""

    status = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE"


class DigestMismatchError(WeftError):
    """Arrival of bytes that were not sent; nothing was changed."""

    status = "DATA_LOSS"
    default_reason = "DIGEST_MISMATCH"


class UnsupportedError(WeftError):
    """Request that is not possible here; choose another way."""

    status = "UNIMPLEMENTED"
    default_reason = "UNSUPPORTED"


class NotAllowedError(WeftError):
    """Call that the credential does not authorise."""

    status = "PERMISSION_DENIED"
    default_reason = "BAD_TOKEN"


class UnauthenticatedError(NotAllowedError):
    """Caller that the server does not know."""

    status = "UNAUTHENTICATED"
    default_reason = "UNAUTHENTICATED"


class LoadFailedError(WeftError):
    """Failure of the engine to take the weights; metadata ``dirty`` says if it may hold mixed
    ones."""

    default_reason = "LOAD_FAILED"


#: The type that a reason is rebuilt as.
REASONS: dict[str, type[WeftError]] = {
    "INVALID_REQUEST": InvalidRequestError,
    "INVALID_MANIFEST": InvalidManifestError,
    "INVALID_ADAPTER": InvalidAdapterError,
    "INVALID_NAME": InvalidNameError,
    "INVALID_PAGE": InvalidRequestError,
    "NOT_FINITE": NotFiniteError,
    "PUBLISHER_CLOSED": InvalidRequestError,
    "PROTOCOL": InvalidRequestError,
    "VERSION_UNKNOWN": NotFoundError,
    "POLICY_UNKNOWN": NotFoundError,
    "TRANSFER_UNKNOWN": NotFoundError,
    "REPLICA_UNKNOWN": NotFoundError,
    "REQUEST_CONFLICT": RequestConflictError,
    "POLICY_OWNED": PolicyOwnedError,
    "NOT_STAGED": NotReadyError,
    "NOT_RETAINED": NotReadyError,
    "VERSION_IN_USE": NotReadyError,
    "TRANSFER_UNDER_WAY": NotReadyError,
    "NOT_TAKEN_OUT_OF_SERVICE": NotReadyError,
    "REPLICAS_IN_CONTACT": NotReadyError,
    "MANIFEST_UNKNOWN": NotReadyError,
    "ALREADY_COMMITTED": NotReadyError,
    "LORA_DISABLED": NotReadyError,
    "SLEEP_DISABLED": NotReadyError,
    "BACKEND_MISMATCH": NotReadyError,
    "DELTA_REFUSED": NotReadyError,
    "POOL_MISMATCH": NotReadyError,
    "REVISION_MISMATCH": NotReadyError,
    "ADDRESS_IN_USE": NotReadyError,
    "BASE_MISMATCH": BaseMismatchError,
    "EPOCH_FENCED": StaleEpochError,
    "LEASE_FENCED": LeaseFencedError,
    "TRANSFER_ABORTED": TransferAbortedError,
    "REPLACED": TransferAbortedError,
    "MODEL_CHANGED": ModelChangedError,
    "VERSION_CHANGED": VersionChangedError,
    "STAGING_FULL": CapacityError,
    "MANIFEST_TOO_LARGE": CapacityError,
    "STORE_FULL": CapacityError,
    "GROUP_TOO_LARGE": CapacityError,
    "TOO_SLOW": CapacityError,
    "TOO_MANY_CALLS": CapacityError,
    "TOO_MANY_POLICIES": CapacityError,
    "POOL_EMPTY": PeerUnavailableError,
    "POOL_RECOVERING": PeerUnavailableError,
    "PEER_GONE": PeerUnavailableError,
    "RANK_GONE": PeerUnavailableError,
    "STALLED": StalledError,
    "COORDINATOR_AWAY": PeerUnavailableError,
    "VERSION_AHEAD": PeerUnavailableError,
    "REFUSING": PeerUnavailableError,
    "COORDINATOR_UNREACHABLE": PeerUnavailableError,
    "DEADLINE": TransferTimeoutError,
    "DIGEST_MISMATCH": DigestMismatchError,
    "UNSUPPORTED": UnsupportedError,
    "BAD_TOKEN": NotAllowedError,
    "ROLE_MISSING": NotAllowedError,
    "POLICY_NOT_ALLOWED": NotAllowedError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "LOAD_FAILED": LoadFailedError,
    "INTERNAL": WeftError,
}


def error_from_reason(
    reason: str, message: str, metadata: dict[str, str] | None = None
) -> WeftError:
    """Return the typed error that ``reason`` stands for; a plain WeftError if unknown."""
    return REASONS.get(reason, WeftError)(message, reason=reason, metadata=metadata)


def with_lost_weights(error: WeftError, replicas: str) -> WeftError:
    """Return a push's failure that also names the replicas whose weights it has cost.

    Args:
        replicas: Names of those that had begun to load it in place, for messages.
    """
    return error_from_reason(
        error.reason,
        f"{error.message}; {lost_weights(replicas)}",
        {**error.metadata, "dirty": "true", "replicas": replicas},
    )


def lost_weights(replicas: str) -> str:
    """Describe the replicas whose in-place load was cut short, for error messages."""
    return f"{replicas} had begun to load it in place: out of service until repaired by a base"

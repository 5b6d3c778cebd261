"""Results of worker methods, none of which ever raises.

vLLM's ``collective_rpc`` raises on the first rank that fails and leaves the other
ranks' replies queued: at a tensor-parallel size above 1 the next call then gets
the previous call's answers (0.26 to 0.33). So every worker method is ``guarded``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypedDict

from weft_rl.contract.errors import LoadFailedError, WeftError, error_from_reason

#: Local rank that receives; the other ranks map what it has received.
RECEIVER_RANK = 0
#: Transfer id of a base that is loaded from the files that the engine was started with.
FROM_FILES: Final = ""

P = ParamSpec("P")
_log = logging.getLogger(__name__)


class RankResult(TypedDict):
    """Result of a worker method on one rank. Plain values only: it travels by msgpack."""

    ok: bool
    rank: int
    seconds: float
    error_reason: str
    """One of ``weft_rl.contract.errors.REASONS``; empty when ok."""
    error_message: str
    metadata: dict[str, str]
    """The error's metadata."""
    value: dict[str, Any]
    """Values that the method returned."""


def guarded(
    method: Callable[Concatenate[Any, P], Mapping[str, Any] | None],
) -> Callable[Concatenate[Any, P], RankResult]:
    """Turn a worker method's result or failure, of whatever kind, into a ``RankResult``."""

    @functools.wraps(method)
    def answer(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> RankResult:
        begin, rank = time.perf_counter(), int(getattr(self, "rank", -1))
        error, value = None, dict[str, Any]()
        try:
            value = dict(method(self, *args, **kwargs) or {})
        except WeftError as caught:
            error = caught
            _log.warning("%s failed on rank %d: %s", method.__name__, rank, error_text(error))
        except BaseException as caught:  # noqa: BLE001 - nothing may pass, see the module
            error = LoadFailedError(error_text(caught))
            _log.warning("%s failed on rank %d", method.__name__, rank, exc_info=caught)
        # Before the result is returned: its receiver may read the holdings at once.
        if (state := getattr(self, "weft_state", None)) is not None:
            state.notify_holdings()
        return RankResult(
            ok=error is None,
            rank=rank,
            seconds=time.perf_counter() - begin,
            error_reason=error.reason if error else "",
            error_message=error.message if error else "",
            metadata=dict(error.metadata) if error else {},
            value=value,
        )

    return answer


def error_text(error: BaseException) -> str:
    """Return type and text of an error: vLLM raises AssertionErrors without a text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_results(
    answers: Sequence[RankResult], *, mixed_is_dirty: bool = False
) -> list[dict[str, Any]]:
    """Return the values of all ranks, in order of rank; raise if any rank failed.

    Args:
        answers: One answer per rank.
        mixed_is_dirty: Whether ranks that succeeded beside ranks that failed leave
            the engine with mixed weights.

    Raises:
        WeftError: Of the type of the first rank that failed. Metadata ``rank`` names
            it; ``dirty`` is "true" if any rank reports it, or by ``mixed_is_dirty``.
    """
    failed = [answer for answer in answers if not answer["ok"]]
    if not failed:
        return [answer["value"] for answer in answers]
    first = failed[0]
    metadata = {**first["metadata"], "rank": str(first["rank"])}
    if len(answers) > 1:
        metadata["num_failed_ranks"] = str(len(failed))
    mixed = mixed_is_dirty and len(failed) < len(answers)
    if mixed or any(answer["metadata"].get("dirty") == "true" for answer in failed):
        metadata["dirty"] = "true"
    message = first["error_message"]
    if len(answers) > 1:
        message = f"rank {first['rank']} of {len(answers)}: {message}"
    raise error_from_reason(first["error_reason"], message, metadata)

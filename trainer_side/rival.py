"""Another process of the same trainer that holds a lease: wait for its end, take its lease
over, or give up.

A restarted trainer must wait for the lease of its former process, which nobody released.
Two trainers that were started with one name by mistake must be told at once. What tells
them apart is whether the holder shows a sign of life after the other one asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_side.processes import has_ended, is_this_process


@dataclass
class Rival:
    """What successive refusals of one acquisition tell of the lease's holder.

    Args:
        takeover: Whether the holder is to be displaced even if it lives.
    """

    takeover: bool
    _first: tuple[str, str] | None = None

    def displaced_token(self, holder: Mapping[str, str]) -> int:
        """The token of the lease to take over now; 0 to wait.

        Args:
            holder: Metadata of the refusal (POLICY_OWNED) that came last.
        """
        token = int(holder.get("fencing_token") or 0)
        return token if self.takeover or has_ended(holder) else 0

    def is_alive(self, holder: Mapping[str, str]) -> bool:
        """Whether the lease was renewed, or taken by yet another process, since the first
        refusal."""
        seen = holder.get("fencing_token", ""), holder.get("num_renewals", "")
        if self._first is None:
            self._first = seen
        return seen != self._first


def describe(trainer_id: str, policy: str, holder: Mapping[str, str], text: str) -> str:
    """Why a push is refused whose policy is held by a living process of this trainer.

    Args:
        text: The refusal's own message, which names the process.
    """
    own = is_this_process(holder)
    who = "another Publisher of this very process" if own else "another process"
    return (
        f"{who} runs as trainer {trainer_id!r} and renews its lease of {policy!r}: {text}. Give "
        "each trainer an id of its own, end the other one, or take its policies over with "
        "Publisher(takeover=True)"
    )

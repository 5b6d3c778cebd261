"""Whether pushes of many tenants at once took turns: pure, of what their trainers saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion

#: How often one tenant may complete a push while another waits for its own: of the one that
#: stood in the queue already, and of the one that began while this one's call was on its way.
MAX_OVERTAKEN = 2


@dataclass(frozen=True)
class Push:
    """One push, as its trainer saw it."""

    version: PolicyVersion
    began_at: float
    """``time.monotonic()`` of the call, and of its return."""
    ended_at: float

    @property
    def seconds(self) -> float:
        """From the call until the pool served it."""
        return self.ended_at - self.began_at


def most_overtaken(pushes: Collection[Push]) -> tuple[int, str]:
    """How often one tenant completed a push while one push of another waited, at most; and who
    overtook whom."""
    worst = (0, "")
    for push in pushes:
        others = Counter(
            other.version.policy
            for other in pushes
            if other.version.policy != push.version.policy
            and push.began_at < other.ended_at < push.ended_at
        )
        for policy, count in others.items():
            worst = max(worst, (count, f"{policy} while {push.version} waited"))
    return worst


def largest_lead(pushes: Collection[Push]) -> int:
    """By how many pushes the first tenant was ahead of the last, at most at any moment."""
    done = dict.fromkeys((push.version.policy for push in pushes), 0)
    lead = 0
    for push in sorted(pushes, key=lambda push: push.ended_at):
        done[push.version.policy] += 1
        lead = max(lead, max(done.values()) - min(done.values()))
    return lead


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of ``values`` that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

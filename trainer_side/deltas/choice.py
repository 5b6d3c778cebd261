"""Choice between a delta and all elements, by what the pool takes and what each would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

DeltaMode = Literal["auto", "always", "never"]

#: Bytes that are compared and coded a second, before any were: on a core, and on a GPU.
_HOST_RATE, _DEVICE_RATE = 2.0e9, 400.0e9
#: A delta has to make sending so many times as fast before a copy of the model is kept for it.
_MIN_GAIN = 1.25
#: Sending that takes less is left alone: most of it is messages.
_MIN_SECONDS = 0.05
#: Share of the bytes that a delta is thought to need before one was made: 1.5 % of bf16 elements
#: change by 10 bits each.
_EXPECTED_SHARE = 0.01
#: A delta of a larger share of the bytes is not sent.
_MOST_SHARE = 0.5
_LONGEST_PAUSE = 16
#: A mixed push takes longer than one of all elements, so that some replicas pause for less: at most
#: this, as a share of that, times the share of these replicas.
_MOST_MORE_TIME = 0.5


class Choice(NamedTuple):
    """Way in which a version is sent."""

    how: Literal["delta", "mixed", "keep", "whole"]
    """"mixed" sends a delta to those that can take it, and all elements to the others; "keep" sends
    all elements and keeps a copy of them, for a delta later."""
    why: str
    """Reason for which all elements are sent, for people; empty for a delta."""


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    """Facts of the pool, and of this trainer's copy, that the choice depends on."""

    served: bytes
    """Layout and content that the pool serves; empty where they are not known, as for base@0."""
    copied: bytes
    """Layout and content of this trainer's copy; empty without one."""
    refusal: str
    """Reason why the pool would refuse a delta now; see ``DescribeTargetResponse``."""
    takers_share: float = 0.0
    """Replicas that could take it beside others that are sent all elements, as a share of all; 0
    where none could, and where it is not refused."""
    on_device: bool
    """True if buckets are packed on an accelerator."""
    num_bytes: int
    """Bytes of the whole version."""


@dataclass
class DeltaHistory:
    """Measurements of former pushes over one backend, and what they say of the next."""

    send_rate: float = 0.0
    """Bytes that every receiver had a second, in the last push of all elements; 0 before one."""
    compare_rate: float = 0.0
    """Bytes that were compared and coded a second; 0 before any were."""
    share: float = _EXPECTED_SHARE
    """Bytes of the last delta, as a share of all bytes."""
    stage_seconds: float = 0.0
    """Time until every receiver had the last delta and what it makes: some make a copy of the
    model for it. 0 before one."""
    pause: int = 0
    """Pushes that are not compared after the last delta that was of no use."""
    num_paused: int = 0

    def was_useless(self) -> None:
        """Note that a delta was too large, too slow or refused: the next pushes are not compared,
        twice as many each time. What was measured of it is forgotten, for it may pass."""
        self.pause = min(_LONGEST_PAUSE, 2 * self.pause or 1)
        self.num_paused = self.pause
        self.compare_rate, self.share, self.stage_seconds = 0.0, _EXPECTED_SHARE, 0.0

    def was_useful(self) -> None:
        """Note that a delta was committed, and was worth it."""
        self.pause = self.num_paused = 0

    def pays(self, num_bytes: int, on_device: bool) -> bool:
        """Return whether a delta is thought to be so much faster that a copy is kept for it; True
        where it is not known how long all elements take."""
        return not self.send_rate or self.gain(num_bytes, on_device=on_device) >= _MIN_GAIN

    def gain(self, num_bytes: int, *, on_device: bool) -> float:
        """Return how many times as long all elements are thought to take as a delta."""
        compare = self.compare_rate or (_DEVICE_RATE if on_device else _HOST_RATE)
        whole = num_bytes / self.send_rate
        return whole / (num_bytes / compare + (self.stage_seconds or self.share * whole))


def why_not_mixed(mode: DeltaMode, facts: PoolFacts, history: DeltaHistory) -> str:
    """Return why a delta that some replicas cannot take is sent to none; empty if it is sent to
    those that can, and all elements to the others."""
    if not facts.takers_share:
        return facts.refusal
    if mode == "always":
        return ""
    more = 1 / history.gain(facts.num_bytes, on_device=facts.on_device)
    most = _MOST_MORE_TIME * facts.takers_share
    if more <= most:
        return ""
    return (
        f"{facts.refusal}; with a delta for the others, the push would take {more:.0%} longer, "
        f"{most:.0%} are taken"
    )


def choose(mode: DeltaMode, facts: PoolFacts, history: DeltaHistory) -> Choice:
    """Choose how to send a version of the base, before anything of it is compared."""
    if history.num_paused:
        how: Literal["keep", "whole"] = "whole" if history.num_paused > 1 else "keep"
        return Choice(how, "the last delta was of no use; another is tried soon")
    if mode == "auto":
        if not history.send_rate:
            return Choice("whole", "it is not measured yet how long all elements take")
        seconds = facts.num_bytes / history.send_rate
        if seconds < _MIN_SECONDS:
            return Choice("whole", f"all elements are sent in {seconds:.3f} s")
        if not history.pays(facts.num_bytes, facts.on_device):
            gain = history.gain(facts.num_bytes, on_device=facts.on_device)
            return Choice(
                "whole",
                f"a delta would take as long as all elements ({gain:.2f} times as fast, "
                f"{_MIN_GAIN} are wanted)",
            )
    if facts.served and facts.refusal and (why := why_not_mixed(mode, facts, history)):
        return Choice("whole", why)
    if not facts.copied:
        return Choice("keep", "there is no copy yet of what the pool committed")
    if facts.copied != facts.served:
        return Choice("keep", "the pool serves another version than this trainer committed last")
    return Choice("mixed", facts.refusal) if facts.refusal else Choice("delta", "")


def why_too_large(delta_bytes: int, whole_bytes: int) -> str:
    """Return why a delta of that size is not sent; empty if it is."""
    share = delta_bytes / whole_bytes
    if share <= _MOST_SHARE:
        return ""
    return f"the delta has {share:.0%} of all bytes; up to {_MOST_SHARE:.0%} are sent"

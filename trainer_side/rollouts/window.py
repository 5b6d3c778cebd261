"""Bound on how far generation runs ahead of training, so that no sample is too old when used.

Training consumes ``batch_size`` samples a step, and each step's version is served before its
samples are reported as consumed. So a prompt that is admitted after ``s`` whole steps is
answered by version ``s`` or a newer one, and version ``s + k`` trains on samples
``[(s + k) * batch_size, (s + k + 1) * batch_size)`` of all that are handed out. A group that is
admitted then is at most ``k`` versions old if it lies before the end of these: that is its due
position. Groups may be handed out of order as long as every other one can still meet its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft_rl.contract.errors import InvalidRequestError


@dataclass
class AdmittedGroup:
    """Group of samples that was admitted and not yet handed out."""

    index: int
    due: int
    """Most samples that may have been handed out when this group is, itself included."""
    is_ready: bool = False


@dataclass
class Window:
    """Counts of samples that are admitted, handed out and consumed.

    Args:
        batch_size: Samples that a step of training consumes.
        max_staleness: Most versions that a sample may be behind when it is used.
        group_size: Samples of a prompt.

    Raises:
        InvalidRequestError: The arguments do not fit together.
    """

    batch_size: int
    max_staleness: int
    group_size: int
    num_admitted: int = 0
    num_handed: int = 0
    num_consumed: int = 0
    waiting: list[AdmittedGroup] = field(default_factory=list)
    """Admitted groups that were not handed out, in the order of admission."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidRequestError(f"{name}={value!r}: give a number of at least 1")
        if type(self.max_staleness) is not int or self.max_staleness < 0:
            raise InvalidRequestError(
                f"max_staleness={self.max_staleness!r}: give a number of versions, 0 or more"
            )
        if self.batch_size % self.group_size:
            raise InvalidRequestError(
                f"batch_size={self.batch_size} is no multiple of n={self.group_size}: "
                "a step of training consumes whole groups"
            )

    @property
    def may_admit(self) -> bool:
        """True if another prompt may be sent now."""
        return self.num_admitted + self.group_size <= self._due

    @property
    def _due(self) -> int:
        """Due position of prompts that are admitted now. Samples of a step that is not consumed
        whole do not count: no version has been learnt from them yet."""
        steps = self.num_consumed // self.batch_size
        return (steps + self.max_staleness + 1) * self.batch_size

    def admit(self) -> AdmittedGroup:
        """Count a prompt that is sent now; return its group."""
        group = AdmittedGroup(self.num_admitted // self.group_size, self._due)
        self.num_admitted += self.group_size
        self.waiting.append(group)
        return group

    def next(self) -> AdmittedGroup | None:
        """Return the group to hand out now, counted as handed out; None if the caller must wait.

        It is the first that is ready and that makes no other group late.
        """
        end = self.num_handed + self.group_size
        for at, group in enumerate(self.waiting):
            if group.is_ready:
                del self.waiting[at]
                self.num_handed = end
                return group
            # It would come behind this one and those before it.
            if group.due < end + (at + 1) * self.group_size:
                return None
        return None

    def consume(self, count: int) -> None:
        """Note that so many samples were used, and that the version learnt from them is served.

        Raises:
            InvalidRequestError: More than were handed out.
        """
        if type(count) is not int or count < 0:
            raise InvalidRequestError(f"consumed({count!r}): give a number of samples")
        if self.num_consumed + count > self.num_handed:
            raise InvalidRequestError(
                f"consumed({count}): {self.num_handed - self.num_consumed} samples were handed "
                "out that had not been consumed"
            )
        self.num_consumed += count

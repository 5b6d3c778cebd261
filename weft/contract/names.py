"""Names that people choose, and ``policy@version``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.contract.errors import InvalidNameError

#: The policy whose bytes are the base model's weights.
BASE_POLICY = "base"

_SENDER_PREFIX = "replica:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may name a ``what`` ("policy", "trainer", "replica").

    Raises:
        InvalidNameError: The rule is 1 to 63 of ``[A-Za-z0-9._-]``, the first one
            a letter or digit, and no ``..``; so a name is safe in a URL, a path, a
            Kubernetes label and in ``policy@version``.
    """
    if not isinstance(name, str):  # handed over by a user's program
        raise InvalidNameError(f"{name!r:.80} cannot name a {what}: names are strings")
    if not _NAME.fullmatch(name) or ".." in name:
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise InvalidNameError(
            f"{shown!r} cannot name a {what}: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit, without '..'"
        )
    return name


def replica_sender(replica_id: str) -> str:
    """A replica as the sender of a clone; no trainer can be named so."""
    return f"{_SENDER_PREFIX}{replica_id}"


def is_replica_sender(trainer_id: str) -> bool:
    """Whether what sends is a replica, not a trainer."""
    return trainer_id.startswith(_SENDER_PREFIX)


def check_adapter_name(policy: str) -> str:
    """Like ``check_name`` for an adapter's policy, which cannot be ``base``."""
    if policy == BASE_POLICY:
        raise InvalidNameError("'base' names the base model's weights; choose another name")
    return check_name(policy, "policy")


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """One version of one policy; ``str()`` gives ``math@17``.

    Versions start at 1, grow, and are never reused; ``base@0`` is what an engine
    was started with.
    """

    policy: str
    version: int

    def __str__(self) -> str:
        return f"{self.policy}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``math@17``.

        Raises:
            InvalidNameError: Not of that form.
        """
        policy, at, number = text.rpartition("@")
        if not at or not number.isascii() or not number.isdigit():
            raise InvalidNameError(f"{text[:80]!r} is not of the form name@version")
        return cls(check_name(policy, "policy"), int(number))


def name_in_the_way(policy: str, served_names: Iterable[str]) -> str:
    """The name of a server's own that requests for an adapter would get instead of it:
    the policy's, or one of the form ``policy@N``. Empty when there is none.
    """
    for name in served_names:
        head, at, number = name.rpartition("@")
        if name == policy or (at and head == policy and number.isascii() and number.isdigit()):
            return name
    return ""


def provenance(trained_on: int | None, served_over: int) -> str:
    """Which base an adapter was trained on, and which it is served over, as it is said
    wherever these differ: ``trained on base@0, served over base@1``.

    Args:
        trained_on: Version of the base; None where nobody knows.
        served_over: Likewise.
    """
    known = "?" if trained_on is None else trained_on
    return f"trained on {BASE_POLICY}@{known}, served over {BASE_POLICY}@{served_over}"

"""Copy of what the pool committed last, that a rank of a trainer makes deltas from."""

from __future__ import annotations

from trainer_side import Publisher
from trainer_side.delta_selection import DeltaSelection


def deltas_of(publisher: Publisher) -> DeltaSelection:
    """Return the choice of deltas of a publisher, with its copy."""
    return publisher._pushing._deltas

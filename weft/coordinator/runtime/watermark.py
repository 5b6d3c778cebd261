"""How far all receivers of a transfer are: the hot path counts here, not in events."""

from __future__ import annotations

from collections.abc import Mapping

from weft.contract.errors import InvalidRequestError


class Watermark:
    """Counts, for one transfer, the buckets that every receiver has verified."""

    def __init__(
        self, transfer_id: str, num_receivers: int, num_buckets: int, first_bucket: int = 0
    ) -> None:
        self.transfer_id = transfer_id
        self.num_verified = self._first = first_bucket
        self._num_receivers = num_receivers
        self._reports = [0] * num_buckets
        self._next: dict[int, int] = {}

    @property
    def num_reported(self) -> Mapping[int, int]:
        """Buckets, from the first, that each receiver has reported, of those that did."""
        return self._next

    def report(self, rank: int, bucket: int) -> bool:
        """Count a report; whether the watermark advanced.

        Raises:
            InvalidRequestError: ``PROTOCOL``: not the receiver's next bucket.
        """
        expected = self._next.get(rank, self._first)
        if bucket != expected or bucket >= len(self._reports) or rank == 0:
            raise InvalidRequestError(
                f"rank {rank} reported bucket {bucket}, its next is {expected}", reason="PROTOCOL"
            )
        self._next[rank] = bucket + 1
        self._reports[bucket] += 1
        before = self.num_verified
        while (
            self.num_verified < len(self._reports)
            and self._reports[self.num_verified] == self._num_receivers
        ):
            self.num_verified += 1
        return self.num_verified > before

    def is_through(self, rank: int) -> bool:
        """Whether a receiver has reported every bucket."""
        return self._next.get(rank, self._first) == len(self._reports)

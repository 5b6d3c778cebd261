"""The sender of a trainer: packs buckets out of a source and sends them."""

from __future__ import annotations

import torch

from trainer_side.packer import Packer
from trainer_side.source import Source
from weft.contract.manifest import Manifest
from weft.transport.bucket_sender import BucketSender, Progress
from weft.transport.membership import GroupTicket

__all__ = ["Progress", "Sender"]


class Sender:
    """Rank 0 of one side group, kept across pushes while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        target: The coordinator, HOST:PORT.
        ticket: The sender's place.
    """

    def __init__(self, target: str, ticket: GroupTicket) -> None:
        self.ticket = ticket
        self._packer: Packer | None = None
        self._buckets = BucketSender(target, ticket)

    @property
    def usable(self) -> bool:
        """Whether the group can carry a further push."""
        return self._buckets.usable

    def send(
        self,
        source: Source,
        manifest: Manifest,
        *,
        transfer_id: str,
        nonce: int,
        deadline: float,
        progress: Progress | None = None,
    ) -> bytes:
        """Send every bucket, each kept until all receivers have verified it.

        Blocks until the last bucket was released. The source is read once, in
        order; extra memory is the packer's two buffers.

        Args:
            deadline: ``time.monotonic()`` at which to give up.

        Returns:
            The content digest.

        Raises:
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the source
                failed, and then the other ranks were told.
        """
        packer = self._packer_for(manifest)
        return self._buckets.send(
            manifest,
            lambda index: packer.pack(index, source, nonce),
            num_buffers=len(packer.buffers),
            transfer_id=transfer_id,
            deadline=deadline,
            progress=progress,
        )

    def close(self) -> None:
        """Leave the group; blocks at most 5 s."""
        self._buckets.close()
        self._packer = None

    def _packer_for(self, manifest: Manifest) -> Packer:
        """The packer of this layout; its buffers are handed on to another layout's."""
        if self._packer is None or self._packer.manifest.layout_digest != manifest.layout_digest:
            buffers: list[torch.Tensor] = self._packer.buffers if self._packer else []
            self._packer = Packer(manifest, buffers)
        return self._packer

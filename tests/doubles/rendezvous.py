"""A group's rendezvous store, in this process."""

from __future__ import annotations

import threading


class StoreDouble:
    """What members of a side group tell each other; ``close`` ends those who wait, as the
    coordinator does when it drops the group."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self.values[key] = value if isinstance(value, bytes) else value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or key in self.values, 60.0):
                raise RuntimeError(f"nobody has set {key}")
            if self._closed:
                raise RuntimeError("the group was dropped")
            return self.values[key]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

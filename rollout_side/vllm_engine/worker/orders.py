"""Special values in messages between a replica's process and its engine's workers."""

from __future__ import annotations

from typing import Final

#: Stands for a transfer where a base is loaded from the files that the engine was started with.
FROM_FILES: Final = ""

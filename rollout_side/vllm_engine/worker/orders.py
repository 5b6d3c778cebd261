"""What a replica's process and its engine's workers mean by the values between them."""

from __future__ import annotations

from typing import Final

#: Stands for a transfer where a base is loaded from the files that the engine was started with.
FROM_FILES: Final = ""

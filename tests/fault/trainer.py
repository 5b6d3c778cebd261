"""A trainer process for the kill matrix: pushes the base as often as it is told.

``python -m tests.fault.trainer COORDINATOR``: each line "push VALUE TIMEOUT" of its
standard input is one push; it answers one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.integration.test_reform import BUCKET_BYTES, model
from trainer_side import Publisher
from weft.contract.errors import WeftError


def push(publisher: Publisher, value: float, timeout_seconds: float) -> dict[str, Any]:
    """One push; how it ended."""
    began = time.time()
    try:
        version = publisher.push_base(model(value), timeout_seconds=timeout_seconds)
        outcome: dict[str, Any] = {"version": version.version}
    except WeftError as error:
        outcome = {"error": error.reason, "message": error.message}
    return {**outcome, "began": began, "ended": time.time()}


def main() -> None:
    """Serve until standard input closes."""
    with Publisher(
        sys.argv[1], trainer_id="trainer-a", require=2, bucket_bytes=BUCKET_BYTES, progress=None
    ) as publisher:
        print("ready", flush=True)
        for line in sys.stdin:
            _, value, timeout_seconds = line.split()
            print(json.dumps(push(publisher, float(value), float(timeout_seconds))), flush=True)


if __name__ == "__main__":
    main()

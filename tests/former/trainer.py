"""A trainer of the release before: ``python trainer.py COORDINATOR`` (see README.md).

It pushes a base and prints a line of JSON: the version, or the error as its user sees it.
"""

import json
import sys

import torch
from weft.contract.errors import WeftError

from trainer_side import Publisher

with Publisher(sys.argv[1], trainer_id="former", timeout_seconds=30) as publisher:
    try:
        said = {"version": str(publisher.push_base(torch.nn.Linear(2, 2)))}
    except WeftError as error:
        said = {"error": type(error).__name__, "reason": error.reason, "message": error.message,
                "metadata": dict(error.metadata)}  # fmt: skip
print(json.dumps(said))

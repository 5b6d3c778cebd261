"""``python -m tests.fault.victims MODULE ARGS``: runs a module's main, armed.

What strikes is named in the environment; see ``strikes``.
"""

from __future__ import annotations

import runpy
import sys

from tests.fault import strikes

_ROLES = {
    "weft_rl": "coordinator",
    "tests.doubles.replica_process": "replica",
    "tests.fault.trainer": "trainer sender",
}


def _role(module: str, arguments: list[str]) -> str:
    if "rollout" in arguments:
        return "vllm replica"
    if module == "tests.fault.trainer" and arguments[1:2] not in ([], ["0"]):
        return "trainer rank"
    return _ROLES[module]


if __name__ == "__main__":
    module = sys.argv.pop(1)
    strikes.install(_role(module, sys.argv[1:]))
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__")

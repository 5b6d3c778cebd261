"""``python -m tests.fault.victims replica|coordinator ARGS``: as the real ones, armed."""

from __future__ import annotations

import runpy
import sys

from tests.fault import strikes

if __name__ == "__main__":
    role = sys.argv.pop(1)
    if role == "replica":
        module = "tests.replica_process"
        import tests.pool  # noqa: F401 (what is wrapped must be the module that runs)
    else:
        module = "weft_cli"
    strikes.install(role)
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__")

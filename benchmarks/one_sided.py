"""``python -m benchmarks.one_sided``: one-sided reading within a host, against gloo.

512 MiB pushed to engine doubles in processes of their own, over one-sided and over gloo in turn,
each push beside a bare gloo broadcast of the same bytes; and to three replicas against one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks.bare_gloo import BareGloo
from benchmarks.machine import describe
from benchmarks.push import Rows, coordinator, doubles, model_of
from trainer_side import Publisher
from weft_rl.contract.backends import GLOO, ONE_SIDED
from weft_rl.contract.manifest import DEFAULT_BUCKET_BYTES

_BYTES = 512 * 2**20
_ELEMENTS = 2**20
_NUM_TENSORS = _BYTES // (4 * _ELEMENTS)
_WARM = 2


def measure(work: Path, num_replicas: int, num_pushes: int) -> dict[str, list[tuple[float, float]]]:
    """By backend: seconds of staging, and of the bare broadcast right after it."""
    model = model_of(_NUM_TENSORS, _ELEMENTS)
    bare = BareGloo(_BYTES, DEFAULT_BUCKET_BYTES)
    with (
        coordinator(work, f"one-sided-{num_replicas}") as target,
        doubles(work, target, num_replicas, _NUM_TENSORS, _ELEMENTS),
        Publisher(
            target, trainer_id="one-sided", progress=None, backend=ONE_SIDED, takeover=True
        ) as first,
        Publisher(target, trainer_id="gloo", progress=None, backend=GLOO, takeover=True) as second,
    ):
        pairs: dict[str, list[tuple[float, float]]] = {}
        for name, publisher in ((ONE_SIDED, first), (GLOO, second)):
            pairs[name] = []
            for number in range(_WARM + num_pushes):
                report = publisher.push_base(model).report
                assert report.backend == name
                if number >= _WARM:
                    pairs[name].append((report.staging_seconds, bare.run()))
            publisher.close()
    bare.close()
    return pairs


def shown(seconds: Sequence[float]) -> str:
    """A median as a rate, and the spread."""
    rates = sorted(_BYTES / 1e9 / one for one in seconds)
    return f"{statistics.median(rates):.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=9)
    pushes = parser.parse_args().pushes
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        one = measure(Path(folder), 1, pushes)
        three = measure(Path(folder), 3, pushes)
    bare = [floor for pairs in one.values() for _, floor in pairs]
    rows.add("bare gloo broadcast of 512 MiB to one process", shown(bare), "")
    for name in (ONE_SIDED, GLOO):
        first, more = ([staged for staged, _ in of[name]] for of in (one, three))
        ratio = statistics.median(floor / staged for staged, floor in one[name])
        aim = ">= 1.6 times bare gloo" if name == ONE_SIDED else ""
        rows.add(f"staged {name}, 1 replica", f"{shown(first)}, {ratio:.2f} times bare", aim)
        times = statistics.median(more) / statistics.median(first)
        aim = "<= 2.2 times one" if name == ONE_SIDED else ""
        rows.add(f"staged {name}, 3 replicas", f"{shown(more)}, {times:.2f} times one", aim)
    rows.show()
    Console().print(describe())


if __name__ == "__main__":
    main()

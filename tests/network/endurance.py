"""``python -m tests.network.endurance --seconds 600``: pushes without a pause while hosts are cut
off and put back; what was acknowledged must never be lost, nor other bytes served."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.machine import describe
from tests.network.hosts import lacking
from tests.network.pool import HostedPool, PoolPlan, hosted_pool

_PUSH_SECONDS = 20.0


@dataclass
class Tally:
    """Counts of an endurance run."""

    acknowledged: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """Pushes that ended with a reason."""
    cuts: int = 0
    lost: list[str] = field(default_factory=list)
    """Acknowledged versions after which the pool served an earlier one."""
    wrong: list[str] = field(default_factory=list)
    """Replicas that served other bytes under a version's name."""

    def note(self, pool: HostedPool) -> int:
        """Push once; return the version that is acknowledged, 0 for none."""
        push = pool.push(_PUSH_SECONDS)
        self.wrong += push.wrong
        if not push.is_committed:
            reason = str(push.answer["error"]).split()[0]
            self.failed[reason] = self.failed.get(reason, 0) + 1
            return 0
        self.acknowledged += 1
        return int(push.answer["version"])

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} pushes acknowledged, {sum(self.failed.values())} failed "
            f"({self.failed}), {self.cuts} cuts; lost {len(self.lost)}, wrong {len(self.wrong)}"
        )


def endure(pool: HostedPool, seconds: float, chance: random.Random, every: float) -> Tally:
    """Push for so many seconds; cut a host off every ``every`` seconds, for a third of that."""
    tally, last = Tally(), 0
    hosts = [*pool.plan.replicas, *pool.plan.replicas, *pool.plan.ranks, "coordinator"]
    end = time.monotonic() + seconds
    turn, cut_off = time.monotonic() + every, ""
    while time.monotonic() < end or cut_off:
        version = tally.note(pool)
        if version and version <= last:
            tally.lost.append(f"base@{version} came after base@{last}")
        last = max(last, version)
        if time.monotonic() < turn:
            continue
        if cut_off:
            pool.net[cut_off].restore()
            cut_off, turn = "", time.monotonic() + 2 * every / 3
        else:
            cut_off = chance.choice(hosts)
            pool.net[cut_off].cut()
            tally.cuts += 1
            turn = time.monotonic() + every / 3
            print(f"  {cut_off} is cut off after base@{last}", flush=True)
    version = tally.note(pool)
    assert version > last, "the network is whole again, and a push fails"
    tally.wrong += pool.await_served(version, 60.0)
    assert not pool.ended(), f"{pool.ended()} ended"
    return tally


def main() -> int:
    """Run it; 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.network.endurance", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds from cut to cut")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if reason := lacking():
        print(f"this machine lacks {reason}")
        return 2
    print(describe(), flush=True)
    plan = PoolPlan(backend=options.backend, num_ranks=2, mbit=100.0, bucket_bytes=2**18)
    with hosted_pool(plan) as pool:
        try:
            chance = random.Random(options.seed)
            tally = endure(pool, options.seconds, chance, options.every)
        except BaseException:
            print(pool.tails())
            raise
    print(tally)
    return 1 if tally.lost or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

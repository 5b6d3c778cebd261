"""Runs of a parameter are brought to the sender, whoever holds them and however they are cut."""

import pytest
import torch

from trainer_side.params.elements import HeldRun
from trainer_side.params.sharded import Sharded, ShardedParams

ROWS, COLUMNS = 24, 40

#: Of a parameter of ROWS x COLUMNS elements; ranks 0 to 2.
CUTS = {
    "rows": [HeldRun(r, r * 8 * COLUMNS, 8 * COLUMNS) for r in range(3)],
    "columns": [HeldRun(1, 0, 8, COLUMNS, ROWS), HeldRun(0, 8, 24, COLUMNS, ROWS),
                HeldRun(2, 32, 8, COLUMNS, ROWS)],
    "several of one rank": [HeldRun(0, 0, 4), HeldRun(2, 4, 16), HeldRun(0, 20, 20),
                            HeldRun(1, 40, 16, COLUMNS, ROWS - 1), HeldRun(0, 56, 24, COLUMNS, 9),
                            HeldRun(1, 416, 24, COLUMNS, ROWS - 10)],
    "only another's": [HeldRun(2, 0, ROWS * COLUMNS)],
}  # fmt: skip


class _Together:
    """Ranks of one process, of which the sender is asked last: messages wait for it."""

    size = 3

    def __init__(self, rank, sent):
        self.rank, self._sent = rank, sent

    def collect(self, mine, theirs):
        if self.rank:
            self._sent.setdefault(self.rank, []).append(mine.clone())
        for rank, buffer in theirs.items():
            buffer.copy_(self._sent[rank].pop(0))


def held(whole, runs, rank):
    """A rank's elements as the framework would hold them: its rows, one behind the other."""
    flat = whole.flatten()
    rows = [
        flat[run.begin + row * run.stride :][: run.numel]
        for run in runs
        if run.rank == rank
        for row in range(run.repeats)
    ]
    return torch.cat(rows) if rows else None


@pytest.mark.parametrize("chunk_bytes", [3 * 16, 3 * 200, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS)
def test_runs_of_any_form_make_the_whole(cut, dtype, chunk_bytes, monkeypatch):
    monkeypatch.setattr("trainer_side.params.sharded.CHUNK_BYTES", chunk_bytes)
    wholes = {name: torch.randn(ROWS, COLUMNS) for name in ("a", "b")}
    sent: dict[int, list[torch.Tensor]] = {}
    # not at the beginning of its storage, as in a bucket
    outs = [torch.zeros(3 + ROWS * COLUMNS, dtype=dtype)[3:].view(ROWS, COLUMNS) for _ in wholes]
    for rank in (2, 1, 0):
        placed = {
            name: Sharded(whole.shape, whole.dtype, tuple(CUTS[cut]), held(whole, CUTS[cut], rank))
            for name, whole in wholes.items()
        }
        params = ShardedParams(placed, "test", _Together(rank, sent))
        params.fetch(list(wholes), [dtype] * 2, None if rank else outs)
    assert all(torch.equal(o, w.to(dtype)) for o, w in zip(outs, wholes.values(), strict=True))
    longest = max((len(m) for messages in sent.values() for m in messages), default=0)
    assert longest <= chunk_bytes // 3
    assert not any(sent.values()), "all was collected"

"""What a reader passes who follows one push of an adapter, from call to commit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.traced_push import trace_push
from tests.unit.docs.walk import stops

#: Lower it as modules leave the way; only a new stage may raise it (the last: the log of events,
#: the one that is asked for spans, and has none for who does not trace, and the packer, of which
#: there are two since named tensors come in any order; the checks of users' arguments; and the
#: choice of a backend with the eight of the one-sided one, which does what gloo's library does; the
#: channels to replicas, which questions to them share with the orders; and eight that were parts
#: of others: what a push plans, what it reports, how the coordinator is called, which group it
#: takes, what a worker has room for, what stands behind a replica's numbers, and how a thread
#: speaks while it waits, the buckets of one push, apart from the groups that they are sent in;
#: digests' way from an accelerator to the host; and two for what a pool must notice: that the
#: catalog's file is still there as it is written, and which bare names a switch lets answer).
MAX_MODULES = 88
#: Where vLLM's own process begins: an engine double stands in its place here.
_IN_VLLM = "rollout_side/vllm_engine/"


def test_push_adapter_passes_few_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = trace_push(tmp_path, monkeypatch).modules()
    by_room: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        room, _, name = module.rpartition("/")
        by_room[room].append(name)
    shown = "\n".join(f"{len(names)} {room}: {' '.join(names)}" for room, names in by_room.items())
    assert len(modules) <= MAX_MODULES, f"{len(modules)} modules:\n{shown}"
    assert "weft_rl/transport/sender.py" in modules, "the trace is blind"


def test_push_adapter_takes_the_walk_of_contributing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = [(stop.file, stop.function) for stop in stops() if not stop.file.startswith(_IN_VLLM)]
    calls = iter(trace_push(tmp_path, monkeypatch).functions())
    passed = [stop for stop in walk if stop in calls]  # ``in`` continues after the call it found
    assert passed == walk
    assert len(walk) > len(stops()) / 2

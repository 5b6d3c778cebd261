"""What a reader passes who follows one push of an adapter, from call to commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.integration.traced_push import PROCESSES, Trace, trace_push
from tests.unit.docs.walk import stops

#: Modules that a push passes in each process. They only fall: wanted are 27, 22 and 18.
MAX_MODULES = {"trainer": 33, "coordinator": 31, "replica": 25}
#: Calls from ``push_adapter`` to the backend's, and the files that they lie in.
MAX_CALLS, MAX_FILES = 6, 5
#: Where vLLM's own process begins: an engine double stands in its place here.
_IN_VLLM = "rollout_side/vllm_engine/"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return trace_push(tmp_path_factory.mktemp("traced"), monkeypatch)


@pytest.mark.parametrize("process", PROCESSES)
def test_push_adapter_passes_few_modules(trace: Trace, process: str) -> None:
    modules = trace.modules(process)
    assert len(modules) <= MAX_MODULES[process], f"{len(modules)} modules:\n{_by_room(modules)}"


def test_each_call_is_counted_for_a_process(trace: Trace) -> None:
    assert not trace.strays()
    assert "weft_rl/transport/sender.py" in trace.modules("trainer")
    assert "weft_rl/coordinator/decisions/step.py" in trace.modules("coordinator")
    assert "rollout_side/receive/receiver.py" in trace.modules("replica")


def test_push_adapter_reaches_the_backend_in_few_calls(trace: Trace) -> None:
    first, *calls = trace.calls_to_the_backend()
    shown = "\n".join(f"{file}:{function}" for file, function in calls)
    assert first == ("trainer_side/publisher.py", "Publisher.push_adapter")
    assert len(calls) <= MAX_CALLS, shown
    assert len({file for file, _ in [first, *calls]}) <= MAX_FILES, shown


def test_push_adapter_takes_the_walk_of_contributing(trace: Trace) -> None:
    walk = [(stop.file, stop.function) for stop in stops() if not stop.file.startswith(_IN_VLLM)]
    calls = iter(trace.functions())
    passed = [stop for stop in walk if stop in calls]  # ``in`` continues after the call it found
    assert passed == walk
    assert len(walk) > len(stops()) / 2


def _by_room(modules: Iterable[str]) -> str:
    rooms: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        room, _, name = module.rpartition("/")
        rooms[room].append(name)
    return "\n".join(f"{len(names)} {room}: {' '.join(names)}" for room, names in rooms.items())

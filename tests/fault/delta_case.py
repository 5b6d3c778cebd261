"""One case of the kill matrix in which the base is pushed by deltas.

Each pushed model differs from the others at every 64th element, so its digest is known. Whoever
answers, at whatever time, must hold one of these models whole, and under the number that the
catalog gave it. What a trainer says that it has a copy of must be committed, and be in the copy.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.doubles.replica_weights import ELEMENTS, NUM_TENSORS, STRIDE, base_weights, model
from tests.fault.matrix import PUSH_SECONDS, SLACK_SECONDS, Case, Outcome
from tests.fault.pool import REPLICAS, STALL_SECONDS
from tests.fault.strikes import CLONE, UNDO, VICTIM, Strike
from weft_rl.cli.orders import rollback
from weft_rl.rpc.channel import open_channel
from weft_rl.transport.digests.wsum64 import content_digest, digests_of
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_SERVED_ONCE = (inspect_pb2.VERSION_STATE_COMMITTED, inspect_pb2.VERSION_STATE_RETIRED)
#: Pushes after the strike, of which one must be a delta: a refused delta pauses the next one.
_MOST_PUSHES = 4
_LOOK_SECONDS = 0.2


def case_of(strike: Strike, work: Path) -> Case:
    """Make the case of a strike, with its processes."""
    return (DeltaCase if strike.sends_deltas else Case)(strike, work)


@functools.cache
def digest_of(value: float) -> str:
    """Return the content digest of the model that is pushed for a value; 0 is the replicas' own."""
    if value:
        tensors = [p.detach() for p in model(value, STRIDE).parameters()]
    else:
        tensors = [t.contiguous() for t in base_weights(NUM_TENSORS, ELEMENTS).values()]
    return content_digest(digests_of(tensors)).hex()


class DeltaCase(Case):
    """Case whose trainer sends deltas; see ``Case``."""

    def run(self) -> Outcome:
        """Strike during a delta, in a rollback or in a clone; then show that the pool is right."""
        values = [1.0, 2.0]
        first = self._push(values[0])
        second = self._push(values[1])
        assert second["delta"], second["why"]
        if self.strike.point == UNDO:
            values.append(3.0)
            assert self._push(3.0)["delta"]
        outcome, seconds, struck_at = self._strike(first["version"], values)
        self._check_pool(values)
        recovered_at, is_delta = 0.0, False
        for value in range(11, 11 + _MOST_PUSHES):
            values.append(float(value))
            answer = self._push(float(value))
            recovered_at = recovered_at or answer["ended"]
            self._check_pool(values, of=answer)
            if is_delta := answer["delta"]:
                break
        assert is_delta, f"no push was a delta again: {answer}"
        return Outcome(self.strike, outcome, seconds, recovered_at - struck_at)

    def _strike(self, first: int, values: list[float]) -> tuple[str, float, float]:
        """Have it struck, and what was killed started again; return what became of what was under
        way, how long that took, and when it was struck."""
        if self.strike.point == CLONE:
            self.strike.armed.touch()
            self.processes[VICTIM].kill()
            self.armed = VICTIM
            self.start_replica(VICTIM)
            struck_at, pid = self.strike.await_struck(PUSH_SECONDS)
            self.armed = ""
            self._undo(struck_at, pid)
            return "caught up", 0.0, struck_at
        with ThreadPoolExecutor(1) as threads:
            self.strike.armed.touch()
            back: Future[str] | None = None
            if self.strike.point == UNDO:
                back = threads.submit(self._go_back, first)
            else:
                values.append(3.0)
                self._tell_push(3.0)
            struck_at, pid = self.strike.await_struck(PUSH_SECONDS)
            if self.is_stuck and "other" in self.processes:
                self.processes["other"].tell(f"push 9 {PUSH_SECONDS}")
            self._look(values, struck_at + STALL_SECONDS / 2)
            self._undo(struck_at, pid)
            if back is not None:
                outcome = back.result(timeout=PUSH_SECONDS + SLACK_SECONDS)
                return outcome, time.time() - struck_at, struck_at
            return *self._pushed(struck_at), struck_at

    def _pushed(self, struck_at: float) -> tuple[str, float]:
        """Return how the struck push ended, and how long after the strike."""
        died = self.strike.process if self.strike.signal == "SIGKILL" else ""
        outcome, seconds = "its trainer died", 0.0
        if alive := [name for name in self.trainer if name != died]:
            answer = self._told(alive)
            seconds = max(0.0, answer["ended"] - struck_at)
            outcome = answer.get("error") or f"base@{answer['version']}"
            if "version" in answer:
                outcome += ", a delta" if answer["delta"] else ", whole"
        if died in self.trainer:  # whoever runs a trainer starts all its ranks again
            self.start_trainer()
        if "other" in self.processes:
            other = self._answer(["other"])
            assert "version" in other, f"the other policy's push has failed: {other}"
        return outcome, seconds

    def _go_back(self, version: int) -> str:
        """Take deltas back; return how that ended."""
        try:
            rollback("base", version, coordinator=self.listen, timeout=PUSH_SECONDS)
        except BaseException as error:  # a command ends by what it raises
            return f"rollback: {type(error).__name__}"
        return f"base@{version} again"

    def _push(self, value: float) -> dict[str, Any]:
        """Push a model, which must succeed; return the last rank's answer."""
        self._tell_push(value)
        answer = self._told(self.trainer)
        assert "version" in answer, f"the push of {value} failed: {answer}"
        return answer

    def _told(self, names: list[str]) -> dict[str, Any]:
        """Return the last of the ranks' answers, with their copies checked."""
        answers = [self.processes[name].answer(PUSH_SECONDS + SLACK_SECONDS) for name in names]
        assert len({(a.get("version"), a.get("error")) for a in answers}) == 1, answers
        known = self._catalog()
        for answer in answers:
            if "copy" not in answer:
                continue
            assert answer["copied"] is not None, f"the copy is of several models: {answer}"
            assert digest_of(answer["copied"]) == answer["copy"], answer
            assert answer["copy"] in known.values(), f"a copy of what is not committed: {answer}"
            if "version" in answer:
                assert known[answer["version"]] == answer["copy"], answer
        return max(answers, key=lambda answer: float(answer["ended"]))

    def _catalog(self) -> dict[int, str]:
        """Return the digests of the versions that were committed, by number."""
        with open_channel(self.listen) as channel:
            request = inspect_pb2.ListVersionsRequest(policy="base")
            listed = InspectServiceStub(channel).ListVersions(
                request, timeout=PUSH_SECONDS, wait_for_ready=True
            )
        return {
            each.version.version: each.content_digest_hex
            for each in listed.versions
            if each.state in _SERVED_ONCE
        }

    def _look(self, values: list[float], until: float) -> None:
        """Ask who was not struck for what it serves, again and again."""
        while time.time() < until:
            for name in REPLICAS:
                if name != self.strike.process:
                    self._check_served(name, values)
            time.sleep(_LOOK_SECONDS)

    def _check_served(self, name: str, values: list[float]) -> dict[str, Any]:
        """Check that a replica holds one of the models that were pushed, whole."""
        served = self.processes[name].ask("?", PUSH_SECONDS)
        known = {digest_of(value): value for value in (0.0, *values)}
        assert served["digests"]["base"] in known, f"{name} serves a mix: {served}"
        return {**served, "value": known[served["digests"]["base"]]}

    def _check_pool(self, values: list[float], of: dict[str, Any] | None = None) -> None:
        """Check that all are ready in the end, late ones too, and serve what the catalog has."""
        with open_channel(self.listen) as channel:
            pool = self.settled(InspectServiceStub(channel))
        version, known = pool.version_vector.base, self._catalog()
        for name in REPLICAS:
            served = self._check_served(name, values)
            assert served["base"] == version, f"{name}, of a pool at base@{version}: {served}"
            assert served["digests"]["base"] == known[version], f"{name} serves {served}"
            if of is not None:
                assert (version, served["value"]) == (of["version"], values[-1])
            self._await_no_leftovers(name)

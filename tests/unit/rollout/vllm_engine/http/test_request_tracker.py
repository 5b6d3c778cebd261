"""Which requests are running, and what those get that are refused."""

from __future__ import annotations

import json
from typing import Any

from rollout_side.vllm_engine.http.middleware import RequestTracker


def test_a_mark_is_passed_once_the_requests_before_it_have_ended() -> None:
    tracker = RequestTracker()
    with tracker.running():
        mark = tracker.mark()
        assert not tracker.passed(mark)
        with tracker.running():
            assert tracker.num_running == 2
    with tracker.running():
        assert tracker.passed(mark)
    assert tracker.num_running == 0


async def test_refused_requests_get_an_openai_error() -> None:
    tracker, reached, sent = RequestTracker(), [], []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    tracked = tracker.wrap(app)
    tracker.refuse_reason = "weights are mixed"
    await tracked({"type": "http", "path": "/v1/completions"}, receive, send)
    await tracked({"type": "http", "path": "/health"}, receive, send)
    assert reached == ["/health"]
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["message"] == "weights are mixed"

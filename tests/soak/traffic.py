"""Clients of the OpenAI servers: what they ask, what they get, what they may not get."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.e2e.replicas import MODEL_NAME
from tests.soak.checks import Answer
from tests.soak.ledger import Ledger
from tests.soak.weights import RANKS
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

# Of an adapter's versions that are kept (`--retain-versions`, 4); clients ask for the newest.
RETAINED, ASKED_FOR = 4, 2
_PROMPTS = 40
_MAX_TOKENS = (4, 64)
_THINK_SECONDS = 0.2
_REQUEST_SECONDS = 60.0
_NOWHERE_SECONDS = 0.2


class Router:
    """Replicas that the coordinator calls ready at this moment."""

    def __init__(self, target: str) -> None:
        self._channel = open_channel(target)
        self._stub = InspectServiceStub(self._channel)

    def pool(self) -> pb.GetPoolResponse:
        """All that the coordinator says."""
        return self._stub.GetPool(pb.GetPoolRequest(), timeout=10)

    def replicas(self) -> Sequence[pb.Replica]:
        """The replicas, as the coordinator sees them."""
        return self._stub.ListReplicas(pb.ListReplicasRequest(), timeout=10).replicas

    def ready(self) -> list[str]:
        """Base URLs of those that a request may go to."""
        return [r.http_url for r in self.replicas() if r.state == pb.REPLICA_STATE_READY]

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class Clients:
    """Threads that ask any ready replica for any name until ``stop``.

    Args:
        is_going: Whether a replica's URL belongs to a process that is being ended.
        problems: Gets what may not happen.
        seed: Of what is asked; what is answered depends on what runs meanwhile.
    """

    def __init__(
        self,
        target: str,
        ledger: Ledger,
        is_going: Callable[[str], bool],
        problems: list[str],
        count: int,
        seed: int,
    ) -> None:
        self.answers: queue.Queue[Answer] = queue.Queue()
        #: Requests that ended without an answer, by why they may.
        self.excused: Counter[str] = Counter()
        self._target, self._ledger, self._is_going = target, ledger, is_going
        self._problems = problems
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{i}"),), daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the requests under way; blocks for them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_REQUEST_SECONDS + 10)

    def _run(self, rng: random.Random) -> None:
        router = Router(self._target)
        try:
            with httpx.Client(timeout=_REQUEST_SECONDS) as http:
                while not self._stopping.wait(_THINK_SECONDS * rng.random()):
                    self._ask(rng, router, http)
        except Exception as error:
            self._problems.append(f"a client ended: {error!r}")
        finally:
            router.close()

    def _ask(self, rng: random.Random, router: Router, http: httpx.Client) -> None:
        # In this order: a replica that is ready afterwards serves the floor at least.
        floor = self._ledger.floor()
        urls = router.ready()
        if not urls:
            self.excused["no replica was ready"] += 1
            self._stopping.wait(_NOWHERE_SECONDS)
            return
        url, asked = rng.choice(urls), self._choose(rng)
        prompt = [4 + (rng.randrange(_PROMPTS) * 7 + 13 * k) % 250 for k in range(1, 9)]
        tokens, names_base = rng.randint(*_MAX_TOKENS), rng.random() < 0.5
        try:
            path, body = request(asked, prompt, tokens, names_base=names_base)
            reply = http.post(f"{url}{path}", json=body)
        except httpx.TransportError as error:
            if self._is_going(url):
                self.excused["its replica was ended meanwhile"] += 1
            else:
                self._problems.append(f"{asked} at {url}: {error!r}")
            return
        ended_at = time.monotonic()
        if reply.status_code == 200:
            known = {"url": url, "asked": asked, "prompt": tuple(prompt), "floor": floor}
            self.answers.put(read_answer(reply.json(), ended_at=ended_at, **known))
        elif reply.status_code == 404 and self._is_retired(asked, ended_at):
            self.excused["its version was retired meanwhile"] += 1
        elif reply.headers.get("weft-reason") == "REFUSING" and url not in router.ready():
            self.excused["its replica fell behind meanwhile"] += 1
        elif reply.status_code >= 500 and self._is_going(url):
            self.excused["its replica was ended meanwhile"] += 1
        else:
            self._problems.append(f"{asked} at {url}: {reply.status_code} {reply.text[:300]}")

    def _choose(self, rng: random.Random) -> str:
        """The base, an adapter's bare name, or one of its newest versions."""
        policy = rng.choice((BASE_POLICY, *RANKS))
        versions = self._ledger.newest(policy, ASKED_FOR)
        if policy == BASE_POLICY or not versions:
            return MODEL_NAME
        return rng.choice((policy, f"{policy}@{rng.choice(versions)}"))

    def _is_retired(self, asked: str, ended_at: float) -> bool:
        if "@" not in asked:
            return False
        return self._ledger.num_newer(PolicyVersion.parse(asked), ended_at) >= RETAINED


def request(
    model: str, prompt: Sequence[int], max_tokens: int, *, names_base: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy request for log-probabilities.

    Args:
        names_base: Ask vLLM's token endpoint, whose answers name the base versions;
            OpenAI's have no place for them.
    """
    if names_base:
        sampling = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        body = {"model": model, "token_ids": list(prompt), "sampling_params": sampling}
        return "/inference/v1/generate", body
    return "/v1/completions", {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
        "logprobs": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def read_answer(reply: dict[str, Any], **known: Any) -> Answer:
    """An answer of either endpoint; ``known`` are the other fields of ``Answer``."""
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        log_probs = [token["logprob"] for token in logprobs["content"]]
        spans = tuple(
            (PolicyVersion.parse(s["version"]).version, s["start"], s["end"])
            for s in choice["weight_versions"]
        )
    else:
        log_probs, spans = logprobs["token_logprobs"], None
    return Answer(
        named=reply["model"],
        tokens=tuple(choice["token_ids"]),
        log_probs=tuple(log_probs),
        spans=spans,
        **known,
    )

"""Integration of TRL's AsyncGRPOTrainer (experimental): the pool serves and generates for it.

TRL generates in a process of its own, which it spawns, while it trains. The objects made there (the
loop, and in it the client) get arguments that can be pickled. The number of Weft's version is TRL's
``model_version``, by which it tells how stale a sample is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from accelerate.utils import broadcast_object_list
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker

from trainer_side.integrations.policies import push_policy
from trainer_side.publisher import Publisher
from trainer_side.rollouts.client import RolloutClient
from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_name
from weft_rl.contract.sampling import Sampling
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.pool_listing import list_policies
from weft_rl.rpc.security.credentials import Tls, credentials_of
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_ASK_SECONDS = 10.0


class PoolRolloutLoop(async_rollout_worker._AsyncRolloutLoop):  # type: ignore[misc]
    """Loop of TRL, in its own process, with the pool in the place of one vLLM server."""

    def __init__(self, *, policy: str, open_rollouts: partial[RolloutClient], **given: Any) -> None:
        super().__init__(**given)
        self._policy, self._is_base = policy, policy == BASE_POLICY
        self._open_rollouts = open_rollouts
        self._rollouts: RolloutClient | None = None
        self._sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k or 0),  # vLLM's -1 considers all tokens, too
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
        )

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        with self._open_rollouts() as self._rollouts:
            await super()._run_loops(stop_event)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """Return a completion's tokens and their log-probabilities.

        An adapter answers by exactly the version that TRL's count stands at. The base, of which a
        replica holds one version, answers by that one or a later one.
        """
        assert self._rollouts is not None
        version, is_base = PolicyVersion(self._policy, self.model_version), self._is_base
        (group,) = await self._rollouts.agenerate(
            [prompt_ids],
            model=BASE_POLICY if is_base else version,
            sampling=self._sampling,
            min_version=version if is_base else None,
        )
        (sample,) = group.samples
        return sample.token_ids.tolist(), sample.logprobs.tolist()


class PoolRolloutWorker(async_rollout_worker.AsyncRolloutWorker):  # type: ignore[misc]
    """Handle of TRL's for the process of the loop."""

    _loop_cls = PoolRolloutLoop


class PoolAsyncGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]  # trl is not read by mypy
    """Trainer (AsyncGRPOTrainer) whose weights are pushed to a pool that generates for it.

    Args:
        args: Configuration; ``token_budget`` must be set, which TRL would ask a vLLM server for.
        publisher: Publisher, made on every rank after ``args`` (which joins the ranks).
        coordinator: HOST:PORT, for the client that generates.
        policy: ``base`` pushes every weight (a PEFT model's adapter merged in); any other
            name, the PEFT model's adapter as versions of that policy, of which the pool must
            keep ``max_staleness + 2``: ``weft retain``.
        tls, token: Credentials of that client; see ``RolloutClient``.
        given: Arguments of AsyncGRPOTrainer, except ``rollout_worker`` and ``weight_transfer``.

    Raises:
        InvalidRequestError: An argument that cannot be right.
    """

    def __init__(
        self,
        *given: Any,
        publisher: Publisher,
        coordinator: str,
        policy: str,
        tls: Tls | None = None,
        token: str | None = None,
        **named: Any,
    ) -> None:
        check_name(policy, "policy")
        if taken := {"rollout_worker", "weight_transfer"} & named.keys():
            raise InvalidRequestError(f"the pool takes the place of {' and '.join(sorted(taken))}")
        self._publisher, self._policy = publisher, policy
        self._is_retention_known = False  # only a policy that was pushed has one
        self._coordinator, self._credentials = coordinator, credentials_of(tls, token)
        open_rollouts = partial(RolloutClient, coordinator, tls=tls, token=token)
        worker = partial(PoolRolloutWorker, policy=policy, open_rollouts=open_rollouts)
        with _worker_made_by(worker):
            super().__init__(*given, weight_transfer=_NoTransfer(), **named)
        if self.args.token_budget is None:
            raise InvalidRequestError(
                "give AsyncGRPOConfig(token_budget=): the most tokens of a row, at least those of "
                "the longest prompt and completion, or 0 for a fixed number of samples"
            )

    def _sync_weight(self) -> None:
        """Push the weights, and have the loop ask for them from now on; collective."""
        began = time.monotonic()
        version = push_policy(self._publisher, self.model_wrapped, self._policy).version
        if not self._is_retention_known and self._policy != BASE_POLICY:
            self._check_retention()
        self.model_version = version.version
        if self.rollout_worker is not None:
            self.rollout_worker.update_model_version(version.version)
        self._metrics["train"]["perf/weight_sync_s"].append(time.monotonic() - began)

    def _check_retention(self) -> None:
        """Refuse, on every rank, a pool that drops versions that samples may still ask for."""
        error: WeftError | None = None
        if self.accelerator.is_main_process:
            try:
                kept = self._num_retained()
                if kept < (needed := self.args.max_staleness + 2):
                    error = InvalidRequestError(
                        f"the pool keeps {kept} versions of {self._policy}, and max_staleness="
                        f"{self.args.max_staleness} needs {needed}: run `weft retain "
                        f"{self._policy} {needed}`, or lower max_staleness"
                    )
            except WeftError as failure:
                error = failure
        (error,) = broadcast_object_list([error])
        if error is not None:
            raise error
        self._is_retention_known = True

    def _num_retained(self) -> int:
        """Return the number of retained versions of the policy, as the coordinator says."""
        with open_channel(self._coordinator, self._credentials) as channel:
            try:
                policies = list_policies(InspectServiceStub(channel), _ASK_SECONDS)
                kept = (each.num_retained for each in policies if each.policy == self._policy)
                return int(next(kept, 0))
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error


class _NoTransfer:
    """Weight transfer that does nothing; without one TRL would look for a server."""

    def init_weight_transfer(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""


@contextmanager
def _worker_made_by(make: Any) -> Iterator[None]:
    """Have the trainer that is built in the ``with`` make its worker by ``make``, without vLLM
    too."""
    kept = async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available
    async_grpo_trainer.AsyncRolloutWorker = make
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    try:
        yield
    finally:
        async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available = kept

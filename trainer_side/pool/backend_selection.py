"""Selection of the backend for a push: the best that all can use, found by trying."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from weft_rl.contract.backends import BACKENDS, GLOO, NCCL, BackendChoice, best_first
from weft_rl.contract.errors import NotReadyError
from weft_rl.transport.backends import available_backends, gpu_uuid, why_unavailable
from weft_rl.transport.group import CPU
from weft_rl.transport.nccl_network import nccl_network
from weft_rl.transport.one_sided.trial import Trials
from weft_rl.v1 import publish_pb2 as pb


@dataclass(frozen=True)
class SelectedBackend:
    """Backend, and the reason for it."""

    name: str
    why: str


@dataclass(frozen=True)
class BackendSelection:
    """Backends that the sender may use, and the accelerator that they need.

    Args:
        choice: "auto" for the best that can be used, or one backend and no other.
        device: A CUDA device for NCCL; None is the current one when a push begins.
    """

    choice: BackendChoice = "auto"
    device: torch.device | None = None
    trials: Trials = field(default_factory=Trials, compare=False, repr=False)
    """Trials by the pool's replicas to read this process's memory."""

    def backend(
        self, target: pb.DescribeTargetResponse, without: Collection[str] = ()
    ) -> SelectedBackend:
        """Return the backend to use with a pool that offers some, best first.

        Blocks while each replica tries to read this process's memory, some milliseconds each, the
        first time that one-sided is offered.

        Args:
            without: Backends that have been found not to work.

        Raises:
            NotReadyError: No backend is shared, or not the one that was asked for.
        """
        offered = [*target.backends] or [GLOO]
        passed: list[str] = []
        if self.choice == "auto" and NCCL in offered and self.accelerator.type == "cuda":
            usual = offered
            offered = best_first(usual, {*target.nccl_networks, nccl_network()})
            if offered != usual:
                passed.append("not nccl: it would use plain sockets between these hosts")
        for name in offered:
            if self.choice not in ("auto", name):
                continue
            why_not = "this push has found that not all can" if name in without else ""
            if why_not or (why_not := self._why_not(name, target)):
                passed.append(f"not {name}: {why_not}")
                continue
            return SelectedBackend(name, "; ".join([_reason(name, self.choice), *passed]))
        raise NotReadyError(self._refusal(offered, passed), reason="BACKEND_MISMATCH")

    def _refusal(self, offered: Sequence[str], passed: Sequence[str]) -> str:
        offers = f"the pool offers {', '.join(offered)}"
        if self.choice == "auto":
            have = available_backends(self.accelerator)
            why = "".join(f"; {text}" for text in passed)
            return (
                f"no backend can carry a push: {offers}, this process has {', '.join(have)}{why}. "
                "Replicas offer gloo, too, unless `weft rollout --backend` says otherwise"
            )
        return (
            f"backend={self.choice!r} cannot carry a push: {'; '.join(passed) or offers}. "
            "backend='auto' takes the best that all can use"
        )

    @property
    def accelerator(self) -> torch.device:
        """The accelerator that is sent from; the CPU in a process without any."""
        if not torch.cuda.is_available():
            return CPU
        return self.device or torch.device("cuda", torch.cuda.current_device())

    def device_of(self, backend: str) -> torch.device:
        """Return the device that buckets of a backend are packed on."""
        return self.accelerator if BACKENDS[backend].on_gpu else CPU

    def _why_not(self, name: str, target: pb.DescribeTargetResponse) -> str:
        """Return the reason why an offered backend cannot be used; empty if it can."""
        device, facts = self.device_of(name), BACKENDS[name]
        if facts.on_gpu and device.type == "cpu" and target.gpu_uuids:
            return "replicas receive on GPUs, and this process has none"
        if why := why_unavailable(name, device):
            return why
        used = Counter([*target.gpu_uuids, gpu_uuid(device)])
        if facts.one_per_gpu and any(count > 1 for uuid, count in used.items() if uuid):
            return "two members share a GPU"
        if facts.within_host:
            return self.trials.why_not_readable(target.trial_names, device)
        return ""


def _reason(name: str, choice: BackendChoice) -> str:
    if choice != "auto":
        return "chosen by the trainer"
    if BACKENDS[name].within_host:
        return "every replica reads this process's memory"
    return "the best that all have"

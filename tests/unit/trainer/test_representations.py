"""What a notebook shows of a result: one short line, whatever it holds."""

from __future__ import annotations

import torch

from trainer_side import PolicyVersion, PushReport, PushResult, Sample, SampleGroup, pad
from weft_rl.contract.errors import PeerUnavailableError

MATH = PolicyVersion("math", 17)


def report(*remarks: str, num_replicas: int = 4) -> PushReport:
    return PushReport(
        total_bytes=174_600_000, num_replicas=num_replicas, seconds=0.0421, forming_seconds=0.0,
        staging_seconds=0.0, committing_seconds=0.0, pause_seconds=0.0, source="PEFT",
        backend="nccl", backend_reason="all can use it", remarks=remarks,
    )  # fmt: skip


def sample(number: int, adapter: PolicyVersion | None = MATH, **changes: object) -> Sample:
    base = torch.tensor([3] * (number - 1) + [4] * min(number, 1), dtype=torch.int64)
    values = {
        "token_ids": torch.zeros(number, dtype=torch.int64), "logprobs": torch.zeros(number),
        "versions": base, "base_versions": base, "adapter": adapter, "finish_reason": "stop",
        "older_cache": torch.zeros(number, dtype=torch.bool),
    }  # fmt: skip
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def group(*samples: Sample, remarks: tuple[str, ...] = ()) -> SampleGroup:
    return SampleGroup(
        index=7, prompt_token_ids=[1] * 500, samples=samples,
        replica_ids=("replica-0",) * len(samples), remarks=remarks,
    )  # fmt: skip


def test_a_push() -> None:
    cost = "174,600,000 bytes to 4 replicas in 0.042 s over nccl"
    assert repr(report()) == f"PushReport({cost})"
    result = PushResult(MATH, report("replica-3 does not serve it: it was lost", "another"))
    assert repr(result) == f"PushResult(math@17, {cost}, 2 remarks)"
    assert str(result) == "math@17"
    assert "to 1 replica in" in repr(report(num_replicas=1))


def test_samples() -> None:
    assert repr(sample(24)) == "Sample(24 tokens of math@17, stop)"
    assert repr(sample(24, None)) == "Sample(24 tokens of base@3, base@4, stop)"
    gone = PeerUnavailableError("replica-0 is gone")
    cut = sample(0, None, finish_reason="abort", error=gone)
    assert repr(cut) == "Sample(0 tokens of no version, abort, PEER_GONE)"
    made = group(sample(24), sample(1))
    assert repr(made) == "SampleGroup(prompt 7, 2 samples of 25 tokens)"
    assert repr(group(cut, remarks=("math@17 was trained on base@0",))) == (
        "SampleGroup(prompt 7, 1 sample of 0 tokens, 1 failed, math@17 was trained on base@0)"
    )
    batch = pad([made], pad_token_id=0)
    assert repr(batch) == "PaddedBatch(2 samples, prompts of 500 tokens, completions of 24)"

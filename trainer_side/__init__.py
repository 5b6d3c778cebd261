"""Trainer API: pushes of versioned weights to a pool of rollout replicas, and its completions.

Needs torch, grpcio and protobuf; never vLLM.
"""

from trainer_side.publisher import Publisher
from trainer_side.push_report import PushReport
from trainer_side.rollouts.client import RolloutClient
from trainer_side.rollouts.sample import Sample, SampleGroup
from trainer_side.rollouts.stream import RolloutStream
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling
from weft_rl.logs import leave_out_noise
from weft_rl.rpc.security.credentials import Tls

leave_out_noise()

__all__ = [
    "PolicyVersion",
    "Publisher",
    "PushReport",
    "RolloutClient",
    "RolloutStream",
    "Sample",
    "SampleGroup",
    "Sampling",
    "Tls",
]

"""Trainer API: pushes of versioned weights to a pool of rollout replicas, and its completions.

Needs torch, grpcio and protobuf; never vLLM.
"""

from trainer_side.publisher import Publisher
from trainer_side.push_request import PushOptions, PushReport, PushResult
from trainer_side.rollouts.client import RolloutClient
from trainer_side.rollouts.images import ImagePrompt
from trainer_side.rollouts.sample import PaddedBatch, Sample, SampleGroup, pad
from trainer_side.rollouts.stream import RolloutStream
from weft_rl.contract.errors import (
    BaseMismatchError,
    CapacityError,
    DigestMismatchError,
    InvalidAdapterError,
    InvalidManifestError,
    InvalidNameError,
    InvalidRequestError,
    LeaseFencedError,
    LoadFailedError,
    ModelChangedError,
    NotAllowedError,
    NotFiniteError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    PolicyOwnedError,
    RequestConflictError,
    StaleEpochError,
    StalledError,
    TransferAbortedError,
    TransferTimeoutError,
    UnauthenticatedError,
    UnsupportedError,
    VersionChangedError,
    WeftError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling
from weft_rl.logs import leave_out_noise
from weft_rl.rpc.security.credentials import Tls

leave_out_noise()

__all__ = [
    "Publisher",
    "PushOptions",
    "PushResult",
    "PushReport",
    "PolicyVersion",
    "Tls",
    "RolloutClient",
    "RolloutStream",
    "ImagePrompt",
    "Sampling",
    "SampleGroup",
    "Sample",
    "pad",
    "PaddedBatch",
    "WeftError",
    "InvalidRequestError",
    "InvalidManifestError",
    "InvalidAdapterError",
    "NotFiniteError",
    "InvalidNameError",
    "NotFoundError",
    "RequestConflictError",
    "PolicyOwnedError",
    "NotReadyError",
    "BaseMismatchError",
    "StaleEpochError",
    "LeaseFencedError",
    "TransferAbortedError",
    "ModelChangedError",
    "VersionChangedError",
    "CapacityError",
    "PeerUnavailableError",
    "StalledError",
    "TransferTimeoutError",
    "DigestMismatchError",
    "UnsupportedError",
    "NotAllowedError",
    "UnauthenticatedError",
    "LoadFailedError",
]

"""For trainers: push versioned weights to a pool of rollout replicas.

Needs torch, grpcio and protobuf; never vLLM.
"""

from trainer_side.publisher import Publisher
from trainer_side.pushing import PushReport
from weft.contract.names import PolicyVersion
from weft.rpc.security.credentials import Tls

__all__ = ["PolicyVersion", "Publisher", "PushReport", "Tls"]

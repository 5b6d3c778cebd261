"""Choice of a push by a policy's name, for all frameworks."""

from __future__ import annotations

import torch

from trainer_side.params.choose import unwrap
from trainer_side.publisher import Publisher
from weft_rl.contract.names import BASE_POLICY, PolicyVersion


def push_policy(publisher: Publisher, model: torch.nn.Module, policy: str) -> PolicyVersion:
    """Push a model as a version of a policy; collective over the publisher's ranks.

    Args:
        publisher: Publisher of this process.
        model: Model as its trainer holds it: plain or wrapped.
        policy: ``base`` has every weight pushed, a PEFT model's adapter merged into them;
            any other name, the PEFT model's adapter alone.

    Raises:
        WeftError: See ``Publisher.push_adapter``, ``push_merged`` and ``push_base``.
    """
    if policy != BASE_POLICY:
        return publisher.push_adapter(model, policy)
    module, _ = unwrap(model)
    if hasattr(module, "peft_config"):
        return publisher.push_merged(model)
    return publisher.push_base(model)

"""Publishers and pushes of framework integrations, as their users configure them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_side.params.choose import unwrap
from trainer_side.publisher import Publisher
from trainer_side.push_request import PushOptions, PushResult
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY


def open_publisher(coordinator: str, trainer_id: str, settings: Mapping[str, Any]) -> Publisher:
    """Make a Publisher from a framework's configuration; collective over its ranks.

    Args:
        settings: Further arguments of ``Publisher``; ``options`` may be a mapping of those of
            ``PushOptions``, too. Without ``progress`` it is silent.

    Raises:
        InvalidRequestError: An argument is unknown, or cannot be right.
    """
    given = {"progress": None, **settings}
    try:
        if isinstance(options := given.get("options"), Mapping):
            given["options"] = PushOptions(**options)
        return Publisher(coordinator, trainer_id=trainer_id, **given)
    except TypeError as error:
        raise InvalidRequestError(f"settings of the Publisher: {error}") from error


def push_policy(publisher: Publisher, model: torch.nn.Module, policy: str) -> PushResult:
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
    if isinstance(getattr(module, "peft_config", None), dict):
        return publisher.push_merged(model)
    return publisher.push_base(model)

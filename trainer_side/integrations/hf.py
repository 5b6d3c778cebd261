"""Callback for Hugging Face's Trainer that pushes the trained model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from trainer_side.integrations.policies import push_policy
from trainer_side.publisher import Publisher
from trainer_side.push_request import PushResult
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import check_name

_log = logging.getLogger(__name__)


class PushCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Callback that pushes every so many steps, at the end of training, and when asked to.

    The trainer waits for each push. One that fails ends the training with its error, on every
    rank alike.

    Args:
        publisher: Publisher, made after the Trainer, on every rank.
        policy: ``base`` pushes every weight (a PEFT model's adapter merged in); any other
            name, the PEFT model's adapter as a version of that policy.
        every_steps: Optimizer steps from push to push; None pushes at the end alone, and by
            ``push``.
        at_end: True if the end of training pushes what the last step's push did not.
        log: Function that logs numbers at rank 0, ``trainer.log`` say, called with
            ``PushResult.metrics`` after each push; None logs none.

    Raises:
        InvalidRequestError: ``every_steps`` is no number of steps.
        InvalidNameError: No policy can have that name.
    """

    def __init__(
        self,
        publisher: Publisher,
        policy: str,
        *,
        every_steps: int | None = None,
        at_end: bool = True,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        check_name(policy, "policy")
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise InvalidRequestError(f"every_steps={every_steps!r}: give 1 or more, or None")
        self._publisher, self._policy = publisher, policy
        self._every_steps, self._at_end, self._log_metrics = every_steps, at_end, log
        self._model: torch.nn.Module | None = None
        self._state: Any = None
        self._pushed_step = -1
        self.pushed: PushResult | None = None
        """Result of the last push; None before the first."""

    def push(self) -> PushResult:
        """Push now; collective.

        Called at the same point on every rank, between steps (from another callback, say).

        Raises:
            InvalidRequestError: Training has not begun, so that the model is not known.
            WeftError: See ``Publisher.push_adapter``.
        """
        if self._model is None:
            raise InvalidRequestError(
                "training has not begun: push through the publisher itself before it does"
            )
        self.pushed = push_policy(self._publisher, self._model, self._policy)
        self._pushed_step = self._state.global_step
        if self._state.is_world_process_zero:
            _log.info("step %s, pushed %s", self._pushed_step, self.pushed.version)
            if self._log_metrics is not None:
                self._log_metrics(self.pushed.metrics())
        return self.pushed

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any
    ) -> None:
        """Keep the model and the trainer's state; push nothing."""
        self._model, self._state = model, state
        self._pushed_step = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Push if so many steps have been taken."""
        if self._every_steps is not None and state.global_step % self._every_steps == 0:
            self.push()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Push weights that were not pushed: those of later steps, or the best ones, loaded
        again."""
        is_other = state.global_step != self._pushed_step or args.load_best_model_at_end
        if self._at_end and is_other:
            self.push()

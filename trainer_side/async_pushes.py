"""Pushes whose callers do not wait for them."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from trainer_side.background import Background, WhenBusy
from trainer_side.push_request import PushSettings
from trainer_side.pushes.content import Model
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.push_defaults import OnBaseChange, Require


class AsyncPushes:
    """Methods of a ``Publisher`` that push copies of the weights while training continues."""

    _settings: PushSettings
    _background: Background

    def push_adapter_async(
        self,
        model: Model,
        policy: str,
        *,
        adapter_name: str = "default",
        cast: bool = True,
        check_finite: bool | None = None,
        check_base: bool = True,
        base_version: int | None = None,
        on_base_change: OnBaseChange | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PolicyVersion]:
        """Copy an adapter's weights as they are now and push the copy; return once they are copied.

        The ranks wait for each other; then each copies what it holds to host memory that is
        used again, and training may continue at once. At most two pushes of a policy wait,
        each with such a copy: a further call blocks, alike on every rank and before it
        copies, until one of them has begun. If none does within this push's
        ``timeout_seconds``, it ends on every rank with ``TransferTimeoutError``, and nothing
        was copied.

        Args:
            when_busy: "replace" makes earlier pushes of this policy that have not begun
                fail with ``REPLACED``, and blocks for none of them; "queue" sends them all,
                in order.
            others: See ``push_adapter``.

        Returns:
            A future that ends as ``push_adapter`` would, the same on every rank. It
            cannot be cancelled.
        """
        request = self._settings.adapter(
            model, policy, adapter_name, cast, check_base, base_version, on_base_change
        ).with_options(check_finite, require, timeout_seconds)
        return self._background.submit(request, when_busy)

    def push_base_async(
        self,
        model: Model,
        *,
        cast: bool = True,
        check_finite: bool | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PolicyVersion]:
        """Copy the base's weights as they are now and push the copy; see ``push_adapter_async``."""
        request = self._settings.base(model, cast)
        request = request.with_options(check_finite, require, timeout_seconds)
        return self._background.submit(request, when_busy)

    def push_merged_async(
        self,
        model: torch.nn.Module,
        *,
        adapter_name: str = "default",
        cast: bool = True,
        check_finite: bool | None = None,
        require: Require | None = None,
        timeout_seconds: float | None = None,
        when_busy: WhenBusy = "queue",
    ) -> Future[PolicyVersion]:
        """Copy base and adapter as they are now and push them merged; see
        ``push_adapter_async``."""
        request = self._settings.base(model, cast, adapter_name)
        request = request.with_options(check_finite, require, timeout_seconds)
        return self._background.submit(request, when_busy)

"""Checks of the arguments that users give, made before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from weft_rl.contract.errors import InvalidRequestError


def check_data_host(host: object) -> str | None:
    """Return ``host`` if it may name an address of this machine.

    Raises:
        InvalidRequestError: It has a scheme or a port, or is no string.
    """
    if host is None:
        return None
    is_text = isinstance(host, str) and host.strip() == host != ""
    if not is_text or "/" in str(host) or str(host).count(":") == 1:
        raise InvalidRequestError(
            f"data_host={host!r}: give a name or address of this machine, without scheme or port"
        )
    return str(host)


def check_replicas(require: object) -> int:
    """Return the number of replicas that ``require`` asks for; 0 is all in contact.

    Raises:
        InvalidRequestError: Neither "all" nor a positive whole number.
    """
    if require == "all":
        return 0
    if isinstance(require, int) and not isinstance(require, bool) and require >= 1:
        return require
    raise InvalidRequestError(
        f"require={require!r}: use a number of replicas, at least 1, or 'all'"
    )


def check_callable(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a function.

    Raises:
        InvalidRequestError: It is not.
    """
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name}={value!r}: give a function, or None")


def check_ranks(ranks: object) -> None:
    """Refuse a value that cannot say which processes push together.

    Raises:
        InvalidRequestError: Neither "all", "this" nor a process group.
    """
    if isinstance(ranks, str) and ranks in ("all", "this"):
        return
    if not (dist.is_available() and isinstance(ranks, dist.ProcessGroup)):
        raise InvalidRequestError(
            f"ranks={ranks!r}: use 'all', 'this' or a torch.distributed process group"
        )


def check_device(device: object) -> torch.device | None:
    """Return the accelerator to send from; None if none was named.

    Raises:
        InvalidRequestError: No CUDA device of this process.
    """
    if device is None:
        return None
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidRequestError(f"device={device!r}: {error}".splitlines()[0]) from None
    if found.type != "cuda":
        raise InvalidRequestError(
            f"device={str(found)!r} is no CUDA device: to send from host memory, leave it out or "
            "say backend='gloo'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (found.index or 0) >= count:
        raise InvalidRequestError(
            f"device={str(found)!r}: this process has {count or 'no'} CUDA "
            f"device{'' if count == 1 else 's'}"
        )
    return found


def check_model(model: object, method: str, *, directories: bool = True) -> None:
    """Refuse a value that is not a model.

    Args:
        directories: Whether a path will do.

    Raises:
        InvalidRequestError: It is not; says what to give.
    """
    if isinstance(model, torch.nn.Module) or (directories and isinstance(model, str | Path)):
        return
    wanted = "a torch module" + (" or a directory" if directories else "")
    if isinstance(model, Mapping):
        raise InvalidRequestError(
            f"{method} takes {wanted}, not a state_dict: give the model that it was taken from"
            + (", or the directory that it was saved in" if directories else "")
        )
    raise InvalidRequestError(f"{method} takes {wanted}, not {type(model).__name__}")


def check_open(is_closed: bool) -> None:
    """Refuse a push of a Publisher that is closed.

    Raises:
        InvalidRequestError: ``PUBLISHER_CLOSED``.
    """
    if is_closed:
        raise InvalidRequestError(
            "this Publisher is closed: make another one, or push inside its `with` block",
            reason="PUBLISHER_CLOSED",
        )

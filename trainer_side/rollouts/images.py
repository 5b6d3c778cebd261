"""Prompts with images, and the messages that carry the images to replicas."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.bounds import MAX_IMAGES
from weft_rl.rpc.channel import MAX_PROMPT_BYTES
from weft_rl.v1 import generate_pb2 as pb

#: Most bytes of a prompt's images; the rest of a message is for its text or token ids.
MAX_BYTES = MAX_PROMPT_BYTES - 8 * 2**20


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt with images, for ``RolloutClient.generate`` and ``stream``."""

    prompt: str | Sequence[int]
    """Text, or token ids, with the model's placeholder once for each image: what its chat template
    makes of a message with images, before its processor repeats the placeholder for each image's
    tokens."""
    images: Sequence[Any]
    """Images in the order of the placeholders, each as the bytes of a PNG, JPEG or WebP file, as a
    uint8 tensor of RGB, (3, height, width), or as a ``PIL.Image``. They are copied."""


def image_messages(images: Sequence[Any]) -> tuple[pb.Image, ...]:
    """Return the messages of a prompt's images.

    Raises:
        InvalidRequestError: One is of another kind, or they are too many or too large.
    """
    if isinstance(images, str | bytes | torch.Tensor) or not isinstance(images, Sequence):
        raise InvalidRequestError("images: give a list, for a single one a list of one")
    if not 1 <= len(images) <= MAX_IMAGES:
        raise InvalidRequestError(
            f"a prompt has {len(images)} images: give 1 to {MAX_IMAGES}, or the prompt alone"
        )
    messages = tuple(_message(image, number) for number, image in enumerate(images))
    num_bytes = sum(message.ByteSize() for message in messages)
    if num_bytes > MAX_BYTES:
        raise InvalidRequestError(
            f"the images of a prompt have {num_bytes:,} bytes, and at most {MAX_BYTES:,} are "
            "sent: give JPEG files, or scale them down"
        )
    return messages


def _message(image: Any, number: int) -> pb.Image:
    if isinstance(image, bytes | bytearray) and image:
        return pb.Image(file=bytes(image))
    if isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3:
            raise InvalidRequestError(
                f"image {number} is a tensor of {image.dtype}, {tuple(image.shape)}: give uint8 "
                "RGB, (3, height, width)"
            )
        rows = image.detach().permute(1, 2, 0).cpu().contiguous()
        rgb = ctypes.string_at(rows.data_ptr(), rows.numel())
        return pb.Image(pixels=pb.Pixels(height=rows.shape[0], width=rows.shape[1], rgb=rgb))
    if hasattr(image, "convert") and hasattr(image, "tobytes"):  # PIL.Image, which is not imported
        if getattr(image, "has_transparency_data", False):  # a replica puts it on white
            file = io.BytesIO()
            image.convert("RGBA").save(file, "PNG", compress_level=1)
            return pb.Image(file=file.getvalue())
        width, height = image.size
        rgb = image.convert("RGB").tobytes()
        return pb.Image(pixels=pb.Pixels(height=height, width=width, rgb=rgb))
    raise InvalidRequestError(
        f"image {number} is {image!r:.60}: give the bytes of a file, a uint8 tensor (3, height, "
        "width) or a PIL.Image; replicas fetch no URLs"
    )

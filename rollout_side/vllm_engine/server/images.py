"""Images of prompts, decoded for vLLM as its OpenAI server decodes them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_side.engine import PromptImage
from weft_rl.contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL import Image

#: Most pixels of all images of a prompt: decoded, they are three bytes each.
MAX_PIXELS = 2**26
#: Decoders of fewer formats than Pillow has: the others are seldom used, and less well tested.
_FORMATS = ("JPEG", "PNG", "WEBP")


def decode_images(images: Sequence[PromptImage]) -> list[Image.Image]:
    """Return the images in RGB; takes some milliseconds each, so call it on a thread."""
    decoded, num_pixels = [], 0
    for number, image in enumerate(images):
        opened = _open_file(image.file, number) if image.file else _open_pixels(image, number)
        num_pixels += opened.width * opened.height
        if num_pixels > MAX_PIXELS:
            raise InvalidRequestError(
                f"the images of a prompt have more than {MAX_PIXELS:,} pixels: scale them down"
            )
        decoded.append(_in_rgb(opened, number))
    return decoded


def _open_pixels(image: PromptImage, number: int) -> Image.Image:
    from PIL import Image

    num_bytes = 3 * image.height * image.width
    if not num_bytes or len(image.rgb) != num_bytes:
        raise InvalidRequestError(
            f"image {number} has {len(image.rgb):,} bytes for {image.height} x {image.width} "
            f"pixels: give three bytes a pixel"
        )
    return Image.frombytes("RGB", (image.width, image.height), image.rgb)


def _open_file(file: bytes, number: int) -> Image.Image:
    """Read a file's header."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(file), formats=_FORMATS)
    except Exception as error:  # what a broken file raises is documented of no decoder
        raise _unreadable(number, error) from error


def _in_rgb(image: Image.Image, number: int) -> Image.Image:
    """Decode an image: turned upright, on white where it is transparent."""
    from PIL import Image, ImageOps

    if image.mode == "RGB" and image.format is None:
        return image
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        over = upright.convert("RGBA")
        white = Image.new("RGB", over.size, (255, 255, 255))
        white.paste(over, mask=over.getchannel("A"))
        return white
    except Exception as error:
        raise _unreadable(number, error) from error


def _unreadable(number: int, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        f"image {number} cannot be read ({type(error).__name__}: {error!s:.200}): give a PNG, JPEG "
        "or WebP file, or pixels"
    )

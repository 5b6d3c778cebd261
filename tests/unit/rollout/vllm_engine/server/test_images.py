"""Images of prompts are decoded as vLLM's OpenAI server decodes them, within bounds."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from rollout_side.engine import PromptImage
from rollout_side.vllm_engine.server import generations as images
from rollout_side.vllm_engine.server.generations import decode_images
from weft_rl.contract.errors import InvalidRequestError

RED, CLEAR, WHITE = (255, 0, 0), (255, 0, 0, 0), (255, 255, 255)


def file_of(image: Image.Image, form: str, **options: Any) -> PromptImage:
    file = io.BytesIO()
    image.save(file, form, **options)
    return PromptImage(file=file.getvalue())


def test_pixels_are_rows_from_the_top() -> None:
    (image,) = decode_images([PromptImage(height=2, width=1, rgb=bytes([255, 0, 0, 1, 2, 3]))])
    assert (image.size, image.getpixel((0, 0)), image.getpixel((0, 1))) == ((1, 2), RED, (1, 2, 3))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_files_are_decoded_in_rgb(form: str) -> None:
    (image,) = decode_images([file_of(Image.new("L", (5, 4), 255), form)])
    assert (image.mode, image.size, image.getpixel((2, 2))) == ("RGB", (5, 4), WHITE)


def test_a_file_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    (image,) = decode_images([file_of(Image.new("RGB", (5, 4)), "JPEG", exif=exif)])
    assert image.size == (4, 5)


@pytest.mark.parametrize(
    "given",
    [Image.new("RGBA", (2, 2), CLEAR), Image.new("LA", (2, 2), (9, 0))],
    ids=["RGBA", "LA"],
)
def test_what_is_transparent_is_white(given: Image.Image) -> None:
    (image,) = decode_images([file_of(given, "PNG")])
    assert image.getpixel((1, 1)) == WHITE


def test_a_transparent_palette_is_white() -> None:
    given = Image.new("P", (2, 2), 0)
    given.putpalette([255, 0, 0])
    (image,) = decode_images([file_of(given, "PNG", transparency=0)])
    assert image.getpixel((0, 0)) == WHITE


def cut(form: str) -> PromptImage:
    whole = file_of(Image.effect_noise((64, 64), 50), form).file
    return PromptImage(file=whole[: len(whole) // 2])


@pytest.mark.parametrize(
    "given",
    [
        PromptImage(file=b"%PDF-1.7"),
        file_of(Image.new("RGB", (4, 4)), "GIF"),
        file_of(Image.new("RGB", (4, 4)), "TIFF"),
        cut("PNG"),
        cut("JPEG"),
        cut("WEBP"),
        PromptImage(height=2, width=2, rgb=bytes(11)),
        PromptImage(height=0, width=0),
    ],
)
def test_what_is_no_image_is_refused_by_its_number(given: PromptImage) -> None:
    fine = PromptImage(height=1, width=1, rgb=bytes(3))
    with pytest.raises(InvalidRequestError, match="image 1 "):
        decode_images([fine, given])


def test_a_small_file_of_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    given = file_of(Image.new("L", (10, 10)), "PNG")
    assert len(decode_images([given])) == 1
    with pytest.raises(InvalidRequestError, match="scale them down"):
        decode_images([given, PromptImage(height=1, width=1, rgb=bytes(3))])

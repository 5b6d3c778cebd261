"""Images of prompts, as they are given and as they are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from rollout_side.engine import PromptImage
from rollout_side.vllm_engine.server.generations import decode_images
from trainer_side import ImagePrompt, InvalidRequestError, Sampling
from trainer_side.rollouts.images import MAX_BYTES
from trainer_side.rollouts.requests import PromptRequest, WantedVersions, checked_prompts
from weft_rl.v1 import generate_pb2 as pb

PIXELS = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(2, 3, 3)  # rows, columns, RGB
CHW = PIXELS.permute(2, 0, 1)
SENT = pb.Image(pixels=pb.Pixels(height=2, width=3, rgb=bytes(range(18))))


@pytest.mark.parametrize(
    "given",
    [
        PIXELS.permute(2, 0, 1),
        PIXELS.permute(2, 0, 1).contiguous(),
        Image.fromarray(PIXELS.numpy()),
    ],
    ids=["a view", "a tensor", "PIL"],
)
def test_pixels_are_sent_row_by_row(given: Any) -> None:
    ((prompt, images),) = checked_prompts([ImagePrompt("a <image>", [given, b"PNG"])])
    assert prompt == "a <image>"
    assert images == (SENT, pb.Image(file=b"PNG"))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_transparent_image_is_what_its_file_would_be(mode: str) -> None:
    """A replica puts files on white; colours behind full transparency are seen by nobody."""
    given = Image.new(mode, (2, 2))
    ((_, images),) = checked_prompts([ImagePrompt("a", [given])])
    (decoded,) = decode_images([PromptImage(file=images[0].file)])
    assert decoded.getpixel((0, 0)) == (255, 255, 255)


def test_a_request_carries_them_and_leaves_the_prompt_to_be_told() -> None:
    ((prompt, images),) = checked_prompts([ImagePrompt(torch.tensor([1, 10]), [b"PNG"])])
    ask = PromptRequest(
        index=0,
        prompt=prompt,
        images=images,
        wanted=WantedVersions("base"),
        num_samples=1,
        sampling=Sampling(),
        strict=False,
        timeout_seconds=1.0,
    )
    request = ask.request(ask.wanted, [0])
    assert list(request.token_ids.ids) == [1, 10]
    assert list(request.images) == [pb.Image(file=b"PNG")]
    assert ask.known_token_ids == []  # the model makes other tokens of the placeholder
    assert ask.cost_tokens > len(prompt) + 1_024


@pytest.mark.parametrize(
    ("images", "why"),
    [
        ([], "0 images"),
        ([b"PNG"] * 65, "65 images"),
        (b"PNG", "give a list"),
        (PIXELS, "give a list"),
        (["https://example.org/a.png"], "fetch no URLs"),
        ([b""], "give the bytes of a file"),
        ([PIXELS], "uint8"),
        ([PIXELS.permute(2, 0, 1).float()], r"torch\.float32"),
        ([None], "give the bytes of a file"),
        ([bytes(MAX_BYTES)], "scale them down"),
    ],
)
def test_images_of_other_kinds_are_refused(images: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        checked_prompts([ImagePrompt("a", images)])

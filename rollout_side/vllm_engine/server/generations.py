"""Generations for GenerateService, by vLLM, with the versions behind their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from rollout_side.engine import BaseSpan, FinishReason, GenerateOrder, PromptImage, SampleChunk
from rollout_side.vllm_engine.compat import bridges, requests
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.http.served_models import ServedModels
from weft_rl.contract.errors import (
    InvalidRequestError,
    PeerUnavailableError,
    VersionChangedError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

_REASONS = {reason.value: reason for reason in FinishReason}


class Generations:
    """Running generations of one engine; used on its event loop."""

    def __init__(
        self,
        engine: Any,
        generate: Callable[..., AsyncGenerator[Any, None]],
        tracker: RequestTracker,
        models: ServedModels,
    ) -> None:
        self._engine, self._tracker, self._models = engine, tracker, models
        self._generate = generate
        self._numbers = itertools.count(1)
        self._running: set[VllmGeneration] = set()
        self._aborts: set[asyncio.Future[None]] = set()

    async def read_images(self, images: Sequence[PromptImage]) -> Sequence[Any]:
        if not self._engine.model_config.is_multimodal_model:
            raise InvalidRequestError("this model takes no images")
        return await asyncio.to_thread(decode_images, images)

    def begin(self, order: GenerateOrder) -> VllmGeneration:
        """Begin to complete a prompt, as ``Engine.generate``."""
        if self._tracker.refuse_reason:
            raise PeerUnavailableError(self._tracker.refuse_reason, reason="REFUSING")
        lora = self._models.request_of(order.adapter) if order.adapter else None
        with bridges.typed_failures():
            params = bridges.sampling_params(order.sampling, order.num_samples, order.chunk_tokens)
        request_id = f"weft-{next(self._numbers)}"
        outputs = self._generate(_prompt(order), params, request_id, lora_request=lora)
        ended = contextlib.ExitStack()
        answer = VllmGeneration(request_id, order, self._models.base.version, outputs, ended)
        ended.enter_context(self._tracker.running())
        self._running.add(answer)
        ended.callback(self._running.discard, answer)
        ended.callback(self._abort, answer)
        return answer

    def _abort(self, answer: VllmGeneration) -> None:
        if not answer.is_over:
            abort = asyncio.ensure_future(self._engine.abort(answer.request_id))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborted)

    def _aborted(self, abort: asyncio.Future[None]) -> None:
        self._aborts.discard(abort)
        if not abort.cancelled():
            abort.exception()  # an engine that has died ends the process elsewhere

    def expect_aborts(self, version: PolicyVersion, aborted: Set[str]) -> None:
        """Mark the generations that are about to be ended because the base changes."""
        for answer in self._running:
            if answer.request_id in aborted:
                answer.changed_to = version.version

    async def switch_base(self, version: PolicyVersion, *, kept: bool) -> None:
        """Record that tokens are of another base from now on; call it while paused.

        Generations that need the former base are ended.

        Args:
            version: The new base.
            kept: Whether the other generations keep their cache.
        """
        before = await requests.tokens_before(self._engine)
        is_other = version != self._models.base
        self._models.set_base(version)
        ended = [
            answer.request_id
            for answer in self._running
            if answer.note_base(version.version, before, kept=kept)
        ]
        if ended and is_other:
            # Their last tokens still arrive, then their end.
            await self._engine.abort(ended)


def _prompt(order: GenerateOrder) -> str | dict[str, Any]:
    """Return a prompt in the form that vLLM takes."""
    if isinstance(order.prompt, str) and not order.images:
        return order.prompt
    key = "prompt" if isinstance(order.prompt, str) else "prompt_token_ids"
    prompt: dict[str, Any] = {key: order.prompt}
    if order.images:
        prompt["multi_modal_data"] = {"image": list(order.images)}
    return prompt


class VllmGeneration:
    """Answer of a vLLM engine, as ``rollout_side.engine.Generation``."""

    def __init__(
        self,
        request_id: str,
        order: GenerateOrder,
        base: int,
        outputs: AsyncGenerator[Any, None],
        ended: contextlib.ExitStack,
    ) -> None:
        self.request_id, self.base = request_id, base
        self._strict, self._is_exact = order.strict, order.exact_base
        self.prompt_token_ids: Sequence[int] = ()
        #: True if the engine is done with it.
        self.is_over = False
        #: Base that it is ended for.
        self.changed_to: int | None = None
        self._has_images = bool(order.images)
        self._has_new_tokens = self._has_images or isinstance(order.prompt, str)
        self._outputs, self._ended = outputs, ended
        self._num_tokens = [0] * order.num_samples
        #: By sample, the tokens at which a version of the base began, unless vLLM reports them.
        self._starts = [[(base, 0)] for _ in self._num_tokens]
        self._has_begun = False
        self._is_void = self._was_aborted = self._is_kept = False

    def note_base(self, version: int, before: Mapping[tuple[str, int], int], *, kept: bool) -> bool:
        """Record that tokens are of another base; return whether the generation must end.

        Args:
            before: See ``requests.tokens_before``.
            kept: Whether samples that have tokens keep their cache.
        """
        self._is_kept |= kept
        for index, starts in enumerate(self._starts):
            count = before.get((self.request_id, index))
            if count is not None or not self._has_begun:  # else the sample has ended
                starts.append((version, count or 0))
        must_end = self._must_end
        if must_end and version != self.base and not self.is_over:
            self.changed_to = version
            # vLLM may not have the request yet: then its tokens would be of the new base.
            self._is_void = not self._has_begun
        return must_end

    @property
    def _must_end(self) -> bool:
        """True if it must not have tokens of another base."""
        return self._strict or (self._is_exact and not self._has_begun)

    async def chunks(self) -> AsyncGenerator[Sequence[SampleChunk], None]:
        with bridges.typed_failures(has_images=self._has_images):
            async for output in self._outputs:
                if self._is_void:
                    break
                self._has_begun = True
                if self._has_new_tokens:
                    self.prompt_token_ids = output.prompt_token_ids
                self.is_over = output.finished
                yield [self._chunk(completion) for completion in output.outputs]
            else:
                self.is_over = True
        if self._is_void:
            yield [
                SampleChunk(index=i, token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)
                for i in range(len(self._num_tokens))
            ]
        if self._is_void or (self.changed_to is not None and self._was_aborted):
            raise VersionChangedError(
                f"the base changed from {BASE_POLICY}@{self.base} to "
                f"{BASE_POLICY}@{self.changed_to}, and this request wanted one only; ask again"
            )

    def _chunk(self, completion: Any) -> SampleChunk:
        tokens = tuple(completion.token_ids)
        index = completion.index
        self._num_tokens[index] += len(tokens)
        reason = None
        if completion.finish_reason:
            reason = _REASONS.get(completion.finish_reason, FinishReason.ABORT)
            self._was_aborted |= reason is FinishReason.ABORT
        return SampleChunk(
            index=index,
            token_ids=tokens,
            logprobs=tuple(bridges.sampled_logprobs(completion)),
            finish_reason=reason,
            base_spans=self._spans(completion) if reason else (),
        )

    def _spans(self, completion: Any) -> tuple[BaseSpan, ...]:
        """Return the base spans of an ended sample, from vLLM or as recorded at each switch."""
        starts = [
            (version, start, end) for version, start, end in self._named(completion) if end > start
        ]
        spans: list[BaseSpan] = []
        for version, start, end in starts:
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(BaseSpan(version, start, end, self._is_kept and start > 0))
        return tuple(spans)

    def _named(self, completion: Any) -> list[tuple[int, int, int]]:
        named = getattr(completion, "weight_versions", None)
        if named is not None:
            return [(PolicyVersion.parse(s.version).version, s.start, s.end) for s in named]
        starts = self._starts[completion.index]
        ends = [start for _, start in starts[1:]] + [self._num_tokens[completion.index]]
        return [(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]

    def end(self) -> None:
        self._ended.close()


# -- images ---------------------------------------------------------------------------


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

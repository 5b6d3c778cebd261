"""Cache blocks that running requests keep; the test stands in the place of vLLM's scheduler."""

from __future__ import annotations

import sys
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.compat import requests


class _Scheduler:
    """As far as it is used."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.is_encoder_decoder = False
        #: Of images whose outputs a request refers to, by its id.
        self.encoder_inputs: dict[str, set[int]] = {}
        self.encoder_cache_manager = SimpleNamespace(
            get_cached_input_ids=lambda r: self.encoder_inputs.get(r.request_id, set())
        )

    def add(self, name: str, num_output_tokens: int, *, runs: bool = True) -> None:
        request = SimpleNamespace(
            request_id=name, num_output_tokens=num_output_tokens, skip_reading_prefix_cache=False
        )
        self.requests[name] = request
        (self.running if runs else self.waiting).append(request)
        if runs:
            self.prev_step_scheduled_req_ids.add(name)

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request not in self.running
        self.waiting.insert(0, request)


def test_what_has_tokens_keeps_its_blocks_and_the_rest_begins_anew() -> None:
    scheduler = _Scheduler()
    for name, num_tokens in (("a", 5), ("b", 0), ("c", 1), ("d", 0)):
        scheduler.add(name, num_tokens)
    scheduler.add("e", 0, runs=False)
    scheduler.add("f", 9, runs=False)  # it was preempted before
    queue = scheduler.running
    requests.keep_held_blocks(SimpleNamespace(scheduler=scheduler))
    assert [request.request_id for request in scheduler.running] == ["a", "c"]
    assert scheduler.running is queue
    assert [request.request_id for request in scheduler.waiting] == ["b", "d", "e", "f"]
    assert scheduler.prev_step_scheduled_req_ids == {"a", "c"}
    assert all(request.skip_reading_prefix_cache for request in scheduler.requests.values())


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_what_is_still_to_read_of_an_image_begins_anew(is_encoder_decoder: bool) -> None:
    scheduler = _Scheduler()
    scheduler.is_encoder_decoder = is_encoder_decoder
    for name in ("a", "b"):
        scheduler.add(name, 5)
    scheduler.encoder_inputs["b"] = {0}
    requests.keep_held_blocks(SimpleNamespace(scheduler=scheduler))
    kept = ["a", "b"] if is_encoder_decoder else ["a"]
    assert [request.request_id for request in scheduler.running] == kept


@pytest.mark.parametrize("is_async", [False, True])
def test_the_scheduler_is_the_one_that_vllm_would_have_chosen(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    class Async(_Scheduler):
        """The other one."""

    class Config:
        """As vLLM's."""

        scheduler_cls: str | None = requests.SCHEDULER

        def get_scheduler_cls(self) -> type[_Scheduler]:
            assert self.scheduler_cls is None
            return Async if is_async else _Scheduler

    core: Any = ModuleType("vllm.v1.engine.core")
    core.EngineCore = type("EngineCore", (), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", core)
    config = SimpleNamespace(scheduler_config=Config())
    made = requests.make_scheduler(vllm_config=config, block_size=16)
    assert type(made) is (Async if is_async else _Scheduler)
    assert made.settings == {"vllm_config": config, "block_size": 16}
    assert config.scheduler_config.scheduler_cls == requests.SCHEDULER
    assert getattr(core.EngineCore, requests.KEEP_REQUESTS) is requests.keep_held_blocks


_KINDS = requests._FAILURES


class GenerationError(Exception):
    """As vLLM names it."""

    status_code = HTTPStatus.INTERNAL_SERVER_ERROR


@pytest.mark.parametrize("index", range(len(_KINDS)))
def test_the_newest_kind_that_there_is(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    for module, _ in _KINDS:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for module, name in _KINDS[index:]:
        setattr(sys.modules[module], name, type(name, (GenerationError,), {}))
    error: Any = requests.failure("again", 503)
    assert (str(error), error.status_code) == ("again", 503)
    assert type(error).__name__ == _KINDS[index][1]


def test_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _ in _KINDS:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, _KINDS[-1][0], None)  # as if it were not there
    assert isinstance(requests.failure("again", 503), RuntimeError)


class _Item:
    """What the cache keeps of an item."""


class LruKeyReplicatedSenderCache:
    """As vLLM's, with room for two items: an item is a pair of data and changes of the prompt."""

    def __init__(self) -> None:
        self._cache: dict[str, _Item] = {}

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._cache

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_hash in self._cache:
            return None, "changes"
        assert mm_item is not None
        self._cache[mm_hash] = _Item()
        while len(self._cache) > 2:
            del self._cache[next(iter(self._cache))]
        return mm_item


class _ItemEngine:
    """An engine whose process knows the items that requests have brought."""

    def __init__(self, cache: Any) -> None:
        self.renderer = SimpleNamespace(mm_processor_cache=cache)
        self.engine_core = self
        self.known: set[str] = set()
        self.is_cut_off = False

    async def add_request_async(self, request: Any) -> None:
        if self.is_cut_off:
            raise ConnectionError
        for feature in request.mm_features or ():
            if feature.data is not None:
                self.known.add(feature.identifier)
            assert feature.identifier in self.known, "vLLM answers 500"

    def render(self, mm_hash: str) -> Any:
        """Prepare a prompt with an item, as vLLM does: what seems cached is not computed."""
        cache = self.renderer.mm_processor_cache
        item = None if cache.is_cached_item(mm_hash) else ("data", "changes")
        data, changes = cache.get_and_update_item(item, mm_hash)
        assert changes == "changes"
        feature = SimpleNamespace(data=data, mm_hash=None, identifier=mm_hash)
        return SimpleNamespace(mm_features=[feature])


@pytest.fixture
def items() -> _ItemEngine:
    engine = _ItemEngine(LruKeyReplicatedSenderCache())
    requests.send_items_until_taken(engine)
    return engine


async def test_an_item_whose_request_never_came_is_sent_with_the_next(items: _ItemEngine) -> None:
    """Refused at its admission, found wrong after it was rendered, or its client has gone."""
    items.render("image")
    await items.engine_core.add_request_async(items.render("image"))
    later = items.render("image")
    assert later.mm_features[0].data is None  # its hash alone, as vLLM would
    await items.engine_core.add_request_async(later)


async def test_an_item_is_sent_by_all_that_were_rendered_before_it_was_taken(
    items: _ItemEngine,
) -> None:
    first, second = items.render("image"), items.render("image")
    await items.engine_core.add_request_async(second)  # the first one's client has gone
    await items.engine_core.add_request_async(items.render("image"))
    await items.engine_core.add_request_async(first)


async def test_an_item_that_could_not_be_sent_is_sent_again(items: _ItemEngine) -> None:
    items.is_cut_off = True
    with pytest.raises(ConnectionError):
        await items.engine_core.add_request_async(items.render("image"))
    items.is_cut_off = False
    await items.engine_core.add_request_async(items.render("image"))


async def test_evicted_items_are_not_kept_track_of(items: _ItemEngine) -> None:
    cache = items.renderer.mm_processor_cache
    for number in range(9):  # none of which is ever sent
        items.render(f"image {number}")
    unsent = cache.is_cached_item.__self__._unsent
    assert set(unsent) == set(cache._cache) == {"image 7", "image 8"}
    await items.engine_core.add_request_async(SimpleNamespace(mm_features=None))


@pytest.mark.parametrize("cache", [None, SimpleNamespace()], ids=["no items", "always sent"])
async def test_other_caches_stay_as_they_are(cache: Any) -> None:
    engine = _ItemEngine(cache)
    requests.send_items_until_taken(engine)
    assert "add_request_async" not in vars(engine)

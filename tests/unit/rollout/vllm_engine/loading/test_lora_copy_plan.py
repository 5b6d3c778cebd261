"""Filling an adapter's slot by learnt copies: the same bits as vLLM's way, or vLLM's way."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import AdapterEntry, StagedVersion
from rollout_side.vllm_engine.loading import lora_copy_plan, lora_hook
from rollout_side.vllm_engine.loading.lora_copy_plan import AdapterLoader
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

SLOTS, MAX_RANK, RANK, HIDDEN = 2, 8, 4, 6
#: The model's modules: which of an adapter's go into them, and their sizes.
MODULES = {"qkv": {"q": 8, "k": 4, "v": 4}, "o": {"o": HIDDEN}, "up": {"up": 10}}
SOME, ALL = ("q", "k", "v", "o"), ("q", "k", "v", "o", "up")
EXPERTS, WIDTH = 3, 10
MIXED = (*SOME, *(f"experts.{number}" for number in range(EXPERTS)))


class Weights:
    """vLLM's ``LoRALayerWeights``; of lists where it is packed."""

    def __init__(self, scaling: float, lora_a: Any = None, lora_b: Any = None) -> None:
        self.scaling, self.lora_a, self.lora_b = scaling, lora_a, lora_b
        self.factor = scaling

    def optimize(self) -> None:
        if self.scaling != 1:
            self.lora_b *= self.scaling
            self.scaling = 1


class LoRAModel:
    """vLLM's."""

    def __init__(self, lora_model_id: int, rank: int, loras: dict[str, Any]) -> None:
        self.id, self.rank, self.loras = lora_model_id, rank, loras

    def get_lora(self, module_name: str) -> Any:
        return self.loras.get(module_name)


class Module:
    """vLLM's linear layers with LoRA; ``stacks`` is for one that computes what it holds."""

    def __init__(self, sizes: dict[str, int], stacks: bool) -> None:
        zeros = partial(torch.zeros, dtype=torch.bfloat16)
        self.lora_a_stacked = tuple(zeros(SLOTS, 1, MAX_RANK, HIDDEN) for _ in sizes)
        self.lora_b_stacked = tuple(zeros(SLOTS, 1, n, MAX_RANK) for n in sizes.values())
        self.stacks, self.num_set = stacks, 0

    def reset_lora(self, index: int) -> None:
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.num_set += 1
        self.reset_lora(index)
        lists = isinstance(lora_a, list)
        for stacked, given in ((self.lora_a_stacked, lora_a), (self.lora_b_stacked, lora_b)):
            for slots, tensor in zip(stacked, given if lists else [given], strict=True):
                made = torch.stack([tensor, tensor])[0] if self.stacks else tensor
                rows, columns = made.shape
                slots[index, 0, :rows, :columns].copy_(made, non_blocking=True)


class Experts:
    """vLLM's layer of experts with LoRA, which computes with a slot once that is enabled.

    Args:
        rows: First row of B that this rank has, and how many.
    """

    def __init__(self, rows: tuple[int, int]) -> None:
        zeros = partial(torch.zeros, dtype=torch.bfloat16)
        self.rows, self.num_set = rows, 0
        self.w_lora_a_stacked = (zeros(SLOTS, EXPERTS, MAX_RANK, HIDDEN),)
        self.w_lora_b_stacked = (zeros(SLOTS, EXPERTS, rows[1], MAX_RANK),)
        # Views of each slot and expert, as vLLM's have.
        self.lora_a_stacked = [e for slot in self.w_lora_a_stacked[0] for e in slot]
        self.lora_b_stacked = [e for slot in self.w_lora_b_stacked[0] for e in slot]
        self.adapter_enabled = torch.zeros(SLOTS + 1, dtype=torch.int)

    def reset_lora(self, index: int) -> None:
        self.w_lora_a_stacked[0][index] = 0
        self.w_lora_b_stacked[0][index] = 0
        self.adapter_enabled[index] = 0

    def set_lora(self, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        self.num_set += 1
        self.reset_lora(index)
        self.adapter_enabled[index] = 1
        for stacked, given in (
            (self.w_lora_a_stacked[0], lora_a),
            (self.w_lora_b_stacked[0], lora_b.narrow(1, *self.rows)),
        ):
            stacked[index, :, : given.shape[1], : given.shape[2]].copy_(given, non_blocking=True)


class Adapters:
    """vLLM's ``LRUCacheLoRAModelManager``."""

    def __init__(self, stacks: bool, rows: tuple[int, int] | None = None) -> None:
        self.modules: dict[str, Any] = {
            name: Module(sizes, stacks) for name, sizes in MODULES.items()
        }
        if rows is not None:
            self.modules["experts"] = Experts(rows)
        self.lora_index_to_id: list[int | None] = [None] * SLOTS
        self.registered: dict[int, Any] = {}
        self.active: dict[int, None] = {}

    def _create_merged_loras_inplace(self, model: Any) -> None:
        packed = {name: model.loras.pop(name) for name in MODULES["qkv"]}
        for name, weights in (*packed.items(), *model.loras.items()):
            if not name.startswith("experts"):
                weights.optimize()
        a, b = ([getattr(w, x) for w in packed.values()] for x in ("lora_a", "lora_b"))
        model.loras["qkv"] = Weights(1, a, b)
        self._stack_experts(model)

    def _stack_experts(self, model: Any) -> None:
        if "experts" in model.loras:  # all at once, their ranks side by side in B
            whole = model.loras.pop("experts")
            a, b = (
                whole.lora_a.unflatten(0, (EXPERTS, -1)),
                whole.lora_b.unflatten(1, (-1, EXPERTS)),
            )
            for number in range(EXPERTS):
                own = Weights(whole.factor, a[number], b[..., number])
                model.loras[f"experts.{number}"] = own
        names = [name for name in model.loras if name.startswith("experts.")]
        if not names:
            return
        experts = [model.loras.pop(name) for name in names]
        a = torch.stack([expert.lora_a for expert in experts], dim=0)
        b = torch.stack([expert.lora_b for expert in experts], dim=0)
        b *= experts[0].factor
        model.loras["experts"] = Weights(1, a.clone(), b.clone())  # pinned, on a GPU's host

    def add_adapter(self, model: Any) -> None:
        self._create_merged_loras_inplace(model)
        self.registered[model.id] = model

    def activate_adapter(self, lora_id: int) -> None:
        if lora_id in self.active:
            return
        if len(self.active) >= SLOTS:
            self.deactivate(next(iter(self.active)))
        index = self.lora_index_to_id.index(None)
        self.active[lora_id], self.lora_index_to_id[index] = None, lora_id
        for name, module in self.modules.items():
            if weights := self.registered[lora_id].get_lora(name):
                module.set_lora(index, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(index)

    def deactivate(self, lora_id: int) -> None:
        del self.active[lora_id]
        self.lora_index_to_id[self.lora_index_to_id.index(lora_id)] = None


class Engine:
    """A worker with its managers, and the store that they load from; counts what they do."""

    def __init__(self, *, stacks: bool = False, rows: tuple[int, int] | None = None) -> None:
        self.adapters = Adapters(stacks, rows)
        self.lora_manager = SimpleNamespace(_adapter_manager=self.adapters, engine=self)
        self.model_runner = SimpleNamespace(lora_manager=self.lora_manager)
        self.entries: dict[str, AdapterEntry] = {}
        self.num_made = 0
        self.loader = AdapterLoader()

    def add_lora(self, request: Any) -> None:
        if request.lora_int_id not in self.adapters.registered:
            ready = lora_hook._instead.get(request.lora_path)
            model = ready or lora_hook.load_from_store(self.lora_manager, request)
            self.adapters.add_adapter(model)
        self.adapters.activate_adapter(request.lora_int_id)

    def make(self, request: Any) -> LoRAModel:
        self.num_made += 1
        entry = self.entries[request.lora_path]
        config, loras = json.loads(entry.config_json), {}
        for name, tensor in entry.staged.tensors(entry.staged.own_bytes()):
            module, _, which = name.rpartition(".")
            weights = loras.setdefault(module, Weights(config["lora_alpha"] / config["r"]))
            setattr(weights, which, tensor)
        return LoRAModel(request.lora_int_id, config["r"], loras)

    def load(self, number: int, entry: AdapterEntry, *, direct: bool) -> Any:
        path = f"weft://{entry.staged.version}"
        request = SimpleNamespace(lora_path=path, lora_int_id=number)
        self.entries[path] = entry
        self.loader.load(self, entry, request) if direct else self.add_lora(request)
        return request

    @property
    def num_set(self) -> int:
        return sum(module.num_set for module in self.adapters.modules.values())

    def slots(self) -> dict[str, list[int]]:
        return {
            f"{name} {which} {i}": stacked.view(torch.int16).flatten().tolist()
            for name, module in self.adapters.modules.items()
            for which in ("lora_a_stacked", "lora_b_stacked")
            for i, stacked in enumerate(getattr(module, which))
        }


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("vllm.lora.lora_model")
    stand_in.LoRAModel = LoRAModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(
        lora_hook, "load_from_store", lambda manager, request: manager.engine.make(request)
    )


def adapter(
    number: int, modules: tuple[str, ...] = SOME, rank: int = RANK, alpha: float = 7
) -> AdapterEntry:
    sizes = {name: size for parts in MODULES.values() for name, size in parts.items()}
    sizes |= dict.fromkeys((*MIXED[len(SOME) :], "experts"), WIDTH)
    metas = []
    for name in modules:
        size = rank * EXPERTS if name == "experts" else rank
        metas.append(TensorMeta(f"{name}.lora_a", DataType.BFLOAT16, (size, HIDDEN)))
        metas.append(TensorMeta(f"{name}.lora_b", DataType.BFLOAT16, (sizes[name], size)))
    manifest = plan_buckets(metas, 512)
    segment = HostSegment.allocate(manifest.wire_bytes)
    staged = StagedVersion(f"t{number}", PolicyVersion("math", number), manifest, segment, b"")
    generator = torch.Generator().manual_seed(number)
    for _, tensor in staged.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return AdapterEntry(json.dumps({"r": rank, "lora_alpha": alpha}), staged)


def large(number: int) -> AdapterEntry:
    """One that fills its slot to the last element."""
    return adapter(number, ALL, MAX_RANK)


@contextlib.contextmanager
def goes(engine: Engine, *, by_vllm: bool) -> Iterator[None]:
    num_made, num_set = engine.num_made, engine.num_set
    yield
    assert engine.num_made == num_made + by_vllm
    assert (engine.num_set > num_set) == by_vllm


def check_against_vllm(entries: list[AdapterEntry], *, num_learnt: int, **options: Any) -> None:
    """The same bits after each adapter, of which the first few go vLLM's way."""
    ours, theirs = Engine(**options), Engine(**options)
    for number, entry in enumerate(entries, 1):
        in_store = entry.staged.segment.data.clone()
        with goes(ours, by_vllm=number <= num_learnt):
            ours.load(number, entry, direct=True)
        theirs.load(number, entry, direct=False)
        assert ours.slots() == theirs.slots()
        assert ours.adapters.lora_index_to_id == theirs.adapters.lora_index_to_id
        assert torch.equal(entry.staged.segment.data, in_store)
    assert set(ours.adapters.registered) == set(theirs.adapters.registered)


def test_adapters_after_the_first_land_as_by_vllm() -> None:
    entries = [adapter(1), large(2), adapter(3), adapter(4), large(5), adapter(6)]
    check_against_vllm(entries, num_learnt=2)


@pytest.mark.parametrize("slot", range(SLOTS))
def test_what_a_slot_held_before_is_cleared(slot: int) -> None:
    ours, theirs = Engine(), Engine()
    for engine, direct in ((ours, True), (theirs, False)):
        for number, entry in enumerate((adapter(1), large(2), large(3)), 1):
            engine.load(number, entry, direct=direct)
        assert all(all(values) for values in engine.slots().values())
        engine.adapters.deactivate(engine.adapters.lora_index_to_id[slot])
    with goes(ours, by_vllm=False):
        ours.load(4, adapter(4), direct=True)
    theirs.load(4, adapter(4), direct=False)
    assert ours.adapters.lora_index_to_id[slot] == 4
    assert not ours.adapters.modules["up"].lora_b_stacked[0][slot].any()
    assert ours.slots() == theirs.slots()


@pytest.mark.parametrize("alpha", [RANK, 7, -2, 0.3])
def test_b_is_scaled_once(alpha: float) -> None:
    engine = Engine()
    engine.load(1, adapter(1, alpha=alpha), direct=True)
    second = adapter(2, alpha=alpha)
    engine.load(2, second, direct=True)
    tensors = dict(second.staged.tensors())
    o = engine.adapters.modules["o"]
    assert torch.equal(o.lora_a_stacked[0][1, 0, :RANK], tensors["o.lora_a"])
    assert torch.equal(o.lora_b_stacked[0][1, 0, :, :RANK], tensors["o.lora_b"] * (alpha / RANK))


def test_what_is_computed_goes_vllms_way_each_time() -> None:
    check_against_vllm([adapter(n) for n in (1, 2, 3)], num_learnt=3, stacks=True)


@pytest.mark.parametrize("rank", [RANK, MAX_RANK])
@pytest.mark.parametrize("rows", [(0, WIDTH), (4, 3)])
def test_experts_land_as_by_vllm(rank: int, rows: tuple[int, int]) -> None:
    """All of them, and a rank's own rows, which read what it leaves to others in part."""
    entries = [adapter(number, MIXED, rank) for number in (1, 2, 3)]
    by_vllm = 1 if rows == (0, WIDTH) else 3
    check_against_vllm(entries, num_learnt=by_vllm, rows=rows)


@pytest.mark.parametrize("rank", [RANK, MAX_RANK])
def test_experts_that_are_given_at_once_are_two_copies(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [adapter(number, (*SOME, "experts"), rank) for number in (1, 2, 3)]
    with caplog.at_level("DEBUG"):
        check_against_vllm(entries, num_learnt=1, rows=(0, WIDTH))
    assert f"by {2 * len(SOME) + 2} copies" in caplog.text


def test_experts_are_enabled_in_the_slots_that_have_some() -> None:
    engine = Engine(rows=(0, WIDTH))
    enabled = engine.adapters.modules["experts"].adapter_enabled
    for number, modules in enumerate((MIXED, SOME, MIXED, SOME, MIXED), 1):
        engine.load(number, adapter(number, modules), direct=True)
        slot = engine.adapters.lora_index_to_id.index(number)
        assert enabled[slot] == (modules is MIXED)
        assert enabled[SLOTS] == 0


def test_another_configuration_is_learnt_anew() -> None:
    entries = [adapter(n, alpha=a) for n, a in enumerate((7, 8, RANK, 7, 8, RANK, 7), 1)]
    check_against_vllm(entries, num_learnt=3)


def test_many_tenants_configurations_are_each_learnt_once() -> None:
    entries = [adapter(n, alpha=1 + (n - 1) % 32) for n in range(1, 65)]
    check_against_vllm(entries, num_learnt=32)


def test_plans_of_many_copies_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one stays, however large it is."""
    monkeypatch.setattr(lora_copy_plan, "_MAX_COPIES", 20)  # two of eight, and a half
    engine = Engine()
    for number, alpha in enumerate((1, 2, 3, 3, 2), 1):
        with goes(engine, by_vllm=number <= 3):
            engine.load(number, adapter(number, alpha=alpha), direct=True)
    with goes(engine, by_vllm=True):
        engine.load(6, adapter(6, alpha=1), direct=True)
    monkeypatch.setattr(lora_copy_plan, "_MAX_COPIES", 0)
    for number, by_vllm in ((7, True), (8, False)):
        with goes(engine, by_vllm=by_vllm):
            engine.load(number, adapter(number, alpha=9), direct=True)


def test_tensors_are_made_only_when_asked_for_after_it_was_taken_in() -> None:
    engine = Engine()
    engine.load(1, adapter(1), direct=True)
    with goes(engine, by_vllm=False):
        engine.load(2, adapter(2), direct=True)
    model, num_made = engine.adapters.registered[2], engine.num_made
    assert (model.id, model.rank) == (2, RANK)
    qkv = model.get_lora("qkv")
    assert [tuple(b.shape) for b in qkv.lora_b] == [(8, RANK), (4, RANK), (4, RANK)]
    assert model.get_lora("o") is model.loras["o"]
    assert model.get_lora("up") is None
    assert engine.num_made == num_made + 1


def test_vllm_puts_it_back_by_itself_after_it_lost_its_slot() -> None:
    ours, theirs = Engine(), Engine()
    for engine, direct in ((ours, True), (theirs, False)):
        requests = [engine.load(n, adapter(n), direct=direct) for n in (1, 2, 3, 4)]
        engine.adapters.deactivate(3)
        engine.load(5, large(5), direct=direct)
        engine.adapters.deactivate(5)
        engine.add_lora(requests[1])  # evicted, and never made
    assert ours.adapters.lora_index_to_id == theirs.adapters.lora_index_to_id == [2, 4]
    assert ours.slots() == theirs.slots()


def test_a_refusal_leaves_the_managers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_lora_id: int) -> None:
        raise ValueError("no room")

    engine = Engine()
    engine.load(1, adapter(1), direct=True)
    modules, before = engine.adapters.modules, engine.slots()
    monkeypatch.setattr(engine.adapters, "activate_adapter", refuse)
    with pytest.raises(ValueError, match="no room"):
        engine.load(2, adapter(2), direct=True)
    assert (engine.adapters.modules, engine.slots()) == (modules, before)
    assert "_create_merged_loras_inplace" not in vars(engine.adapters)
    assert lora_hook._instead == {}

"""Loading adapters from memory: ``LoRARequest.lora_path`` of ``weft://math@17``.

vLLM takes adapters from a directory only. One method is replaced,
``WorkerLoRAManager._load_adapter``, and for our own scheme only. vLLM calls it
again whenever an adapter was evicted, so a version stays in the store for as long
as a request may use it: a missing adapter at step time ends the engine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import AdapterEntry
from rollout_side.vllm_engine.compat import bridges
from weft_rl.contract.errors import InvalidNameError
from weft_rl.contract.names import PolicyVersion

_log = logging.getLogger(__name__)

SCHEME = "weft://"
_MARK = "_weft_adapter_hook"

# One worker a process: its store. vLLM gives the hook no way to reach the worker.
_stores: list[WorkerStore] = []
_instead: dict[str, Any] = {}
_renames: dict[str, str] = {}


def set_store(store: WorkerStore) -> None:
    """Let this process's loader read from ``store``."""
    _stores[:] = [store]


def set_renames(renames: Mapping[str, str]) -> None:
    """Let this process's loader take further names of modules; see ``ModuleTable.renames``."""
    _renames.clear()
    _renames.update(renames)


class _NameMapping:
    """Mapper of an adapter's names that knows more of them than vLLM's own."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def _map_name(self, key: str) -> str | None:
        """Return the name that vLLM's model has; vLLM calls this."""
        module, mark, side = key.partition(".lora_")
        if module in _renames:
            return _renames[module] + mark + side
        return self._own._map_name(key) if self._own is not None else key


def _name_mapper(model: Any) -> Any:
    own = bridges.rename_mapper(model)
    return _NameMapping(own) if _renames else own


def adapter_path(version: PolicyVersion) -> str:
    """Return the path that stands for an adapter in memory."""
    return f"{SCHEME}{version}"


def lora_request(version: PolicyVersion, lora_int_id: int) -> Any:
    """Make vLLM's ``LoRARequest`` for an adapter in memory."""
    return importlib.import_module("vllm.lora.request").LoRARequest(
        lora_name=str(version), lora_int_id=lora_int_id, lora_path=adapter_path(version)
    )


def install() -> None:
    """Replace vLLM's loader in this process. Idempotent."""
    manager = importlib.import_module("vllm.lora.worker_manager").WorkerLoRAManager
    native = manager._load_adapter
    if hasattr(native, _MARK):
        return

    def _load_adapter(self: Any, lora_request: Any) -> Any:
        if lora_request.lora_path in _instead:
            return _instead[lora_request.lora_path]
        if lora_request.lora_path.startswith(SCHEME):
            return load_from_store(self, lora_request)
        return native(self, lora_request)

    setattr(_load_adapter, _MARK, True)
    manager._load_adapter = _load_adapter


@contextlib.contextmanager
def instead(path: str, model: Any) -> Iterator[None]:
    """Let the loader return ``model`` for this path, inside the ``with``."""
    _instead[path] = model
    try:
        yield
    finally:
        _instead.pop(path, None)


def load_from_store(manager: Any, lora_request: Any) -> Any:
    """Load an adapter from the store, as ``_load_adapter`` does from a directory."""
    entry = _find(lora_request)
    _log.debug("%s is loaded from memory", entry.staged.version)
    adapters = manager._adapter_manager
    config = json.loads(entry.config_json)
    config["vllm_max_position_embeddings"] = manager.max_position_embeddings
    helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    _check_ranks(config, manager.lora_config.max_lora_rank)
    mapper = _name_mapper(adapters.model)
    skip_prefixes = getattr(adapters.model, "lora_skip_prefixes", None)
    names = [slot.meta.name for slot in entry.staged.manifest.tensors]
    _check_modules(names, adapters, mapper, skip_prefixes)
    lora = manager._lora_model_cls.from_lora_tensors(
        lora_request.lora_int_id,
        _own_tensors(entry, adapters.moe_ep_load_spec),
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=skip_prefixes,
    )
    if not bridges.helper_knows_patterns(helper):
        _apply_patterns(lora, names, config, mapper)
    _prepare_experts(lora, adapters)
    lora.is_3d_lora_weight = lora_request.is_3d_lora_weight
    bridges.validate_loaded(adapters, lora)
    return lora


def _find(lora_request: Any) -> AdapterEntry:
    entry = None
    try:
        version = PolicyVersion.parse(lora_request.lora_path.removeprefix(SCHEME))
        entry = _stores[0].adapter(version) if _stores else None
    except InvalidNameError:
        pass  # a path that nobody of ours made
    if entry is None:
        raise importlib.import_module("vllm.exceptions").LoRAAdapterNotFoundError(
            lora_request.lora_name, lora_request.lora_path
        )
    return entry


def _own_tensors(entry: AdapterEntry, ep_spec: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a new copy: vLLM multiplies ``lora_b`` by the scaling in place. Experts
    of other expert-parallel ranks are left out, as vLLM does for files."""
    remote = importlib.import_module("vllm.lora.lora_model")._is_remote_expert_key
    return {
        name: tensor
        for name, tensor in entry.staged.tensors(entry.staged.own_bytes())
        if ep_spec is None or not remote(name, ep_spec)
    }


def _prepare_experts(lora: Any, adapters: Any) -> None:
    """Give each expert its LoRA, where vLLM wants that and all are given at once, and multiply B by
    the scaling.

    Old versions of vLLM take one scaling for all experts of a layer: alpha / rank of the first.
    """
    for experts, modules in adapters.packed_modules.items():
        down, up = lora.loras.get(experts), lora.loras.get(f"{experts}.base_layer")
        if experts.endswith(".experts") and up is not None and torch.is_tensor(down.lora_a):
            del lora.loras[experts], lora.loras[f"{experts}.base_layer"]
            lora.loras.update(_by_expert(modules, up, down))
    for name, layer in lora.loras.items():
        if ".experts." in name and not name.endswith(".base_layer"):
            if layer.scaling != 1:
                layer.lora_b.mul_(layer.scaling)
            layer.scaling, layer.lora_alpha = 1, layer.rank


def _by_expert(modules: list[str], up: Any, down: Any) -> dict[str, Any]:
    """Split the LoRA of all experts of a layer; see ``weft_rl.contract.stacked_experts``.

    Args:
        modules: Names of the experts' modules, as vLLM orders them: gate, down and up of each.
        up: LoRA of gate and up projections together.
        down: LoRA of down projections.
    """
    weights = importlib.import_module("vllm.lora.lora_weights").LoRALayerWeights
    count, found = len(modules) // 3, {}
    inner = up.lora_b.shape[0] // 2
    for stacked, parts in ((up, ((0, 0, inner), (2, inner, inner))), (down, ((1, 0, None),))):
        rank = stacked.lora_a.shape[0] // count
        if stacked.scaling != 1:
            stacked.lora_b.mul_(stacked.scaling)
        a = stacked.lora_a.unflatten(0, (count, rank))
        b = stacked.lora_b.unflatten(1, (rank, count))
        for which, first, size in parts:
            rows = b if size is None else b.narrow(0, first, size)
            for expert in range(count):
                name = modules[3 * expert + which]
                own = rows[..., expert]
                found[name] = weights(name, rank, rank, a[expert], own, scaling=1)
    return found


def _check_ranks(config: Mapping[str, Any], max_lora_rank: int) -> None:
    largest = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if largest > max_lora_rank:
        raise ValueError(f"LoRA rank {largest} is greater than max_lora_rank {max_lora_rank}.")


def expected_modules(adapters: Any) -> set[str]:
    """Return the names, as vLLM's loader expects them, of modules that can carry a LoRA.

    Source: vllm.lora.worker_manager.WorkerLoRAManager._load_adapter.
    """
    expected: set[str] = set()
    for module in adapters.supported_lora_modules:
        expected.update(adapters.packed_modules_mapping.get(module, [module]))
        if module == "experts":
            expected.add(module)
    return expected


def applied_modules(adapters: Any) -> set[str]:
    """Return the names, as vLLM has them, of the modules that it applies a LoRA to.

    vLLM ignores a LoRA of any other module silently, even of one with the same last name component
    (in an encoder).

    Source: vllm.lora.model_manager.LoRAModelManager.activate_adapter.
    """
    applied = set(adapters.modules)
    for parts in adapters.packed_modules.values():
        applied.update(parts)
    if getattr(adapters, "is_pooling_model", False):  # its adapters may do without the prefix
        applied.update({name.removeprefix("model.") for name in applied})
    return applied


def lora_targets(adapters: Any, modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split modules of a base into those that vLLM applies a LoRA to, and those that it does not.

    Only modules whose last name component can carry a LoRA are listed. Names are the checkpoint's.
    Experts are left out.
    """
    parse = importlib.import_module("vllm.lora.utils").parse_fine_tuned_lora_name
    mapper = _name_mapper(adapters.model)
    expected, applied = expected_modules(adapters), applied_modules(adapters)
    carry: list[str] = []
    ignored: list[str] = []
    for module in modules:
        if ".experts" in module or module.rpartition(".")[2] not in expected:
            continue
        name, _ = parse(f"base_model.model.{module}.lora_A.weight", mapper)
        (carry if name in applied else ignored).append(module)
    return carry, ignored


def shortest_prefixes(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest prefixes, of whole parts, that cover ``names`` and none of ``others``.
    Parts are what dots separate. The result is sorted."""
    taken: set[str] = set()
    for name in others:
        parts = name.split(".")
        taken.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    found = set()
    for name in names:
        parts = name.split(".")
        begins = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        found.add(next((begin for begin in begins if begin not in taken), name))
    return sorted(found)


def _check_modules(
    names: Iterable[str], adapters: Any, mapper: Any, skip_prefixes: list[str] | None
) -> None:
    """Refuse a LoRA for a module that the model does not wrap.

    Source: vllm.lora.lora_model.LoRAModel.from_local_checkpoint.
    """
    utils = importlib.import_module("vllm.lora.utils")
    model_class = importlib.import_module("vllm.lora.lora_model").LoRAModel
    expected, applied = expected_modules(adapters), applied_modules(adapters)
    unexpected = []
    for name in names:
        if utils.is_base_embedding_weights(name) or "base_layer" in name:
            continue
        if skip_prefixes and model_class._should_skip_module(name, skip_prefixes):
            continue
        module, _ = utils.parse_fine_tuned_lora_name(name, mapper)
        begin = module.find(".experts")
        last = module[begin + 1 :] if begin >= 0 else module.rpartition(".")[2]
        if last not in expected or (begin < 0 and module not in applied):
            unexpected.append(module)
    if unexpected:
        raise ValueError(
            f"the adapter has weights for {unexpected[0]!r} and {len(set(unexpected)) - 1} more "
            f"modules that vLLM applies no LoRA to here; it serves {sorted(expected)}"
        )


def _apply_patterns(
    lora: Any, names: Iterable[str], config: Mapping[str, Any], mapper: Any
) -> None:
    """Set rank and scaling of each module, which old versions take from ``r`` alone."""
    if not config.get("rank_pattern") and not config.get("alpha_pattern"):
        return
    parse = importlib.import_module("vllm.lora.utils").parse_fine_tuned_lora_name
    for name in names:
        module, _ = parse(name, mapper)
        layer = lora.loras.get(module)
        if layer is not None:
            layer.rank, layer.scaling = bridges.pattern_scaling(config, parse(name)[0])

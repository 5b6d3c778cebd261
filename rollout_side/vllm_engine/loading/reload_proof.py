"""Proof that vLLM's reload gives a model the bits that its start gave it.

A reload that fills every parameter may still leave other values. Of two tensors of a checkpoint
that share a parameter another one may come last, and what processes a layer may not do the same
twice. So a worker loads a part of the files once more at its start: one layer of each kind, and all
that is in no layer. vLLM builds and processes each layer beside the model; where vLLM would copy
the result into the model, the two are compared. The model stays as it is, and about one layer is
held twice: one that has no room beside the model is left out, and then nothing is known. Where a
part shows other values, all is loaded, a layer at a time, before it is believed.

Nothing is compared, and nothing is known, where that would take long (files that vLLM reads whole,
or too many of them) or where ranks could wait for each other for ever.

Packed weights that only a CPU's kernels can read are compared by their product with fixed inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import itertools
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollout_side.vllm_engine.compat import bridges, cpu_fixes
from rollout_side.vllm_engine.loading.copy_plan import bits, can_learn, processed_modules
from rollout_side.vllm_engine.loading.layerwise import (
    LAYERWISE,
    DirectWriteRecord,
    facts_of,
    followed,
    is_attention,
    padded_with_zeros,
)
from rollout_side.vllm_engine.loading.plan_proof import plan_for
from rollout_side.vllm_engine.loading.processed_modules import storage_of
from rollout_side.vllm_engine.loading.rehearsal import WriteBlocker, tensors_of, unchanged
from rollout_side.vllm_engine.loading.reload import quiet_about_idle_layers
from weft_rl import __version__
from weft_rl.checkpoints.digest_cache import CacheFolder, FileState, user_folder
from weft_rl.contract.tensors import Reference

_log = logging.getLogger(__name__)

#: Number of a layer in a name, and the name of the list that has it.
_LAYER = re.compile(r"(?:^|\.)([^.]+)\.(\d+)\.")
#: Rows of what packed weights are multiplied with.
_NUM_ROWS = 2
#: Parameters that no kernel reads. Of a fused compressed-tensors layer's parts, each brings its
#: shape: the last one's stays at a start, the first one's at a reload.
_NOT_COMPUTED_WITH = frozenset({"weight_shape"})
#: Files of more bytes are not read as a whole at a start; nor, as a part of them, layers of more.
_MAX_BYTES = _MAX_PART_BYTES = 8 * 2**30
#: Times its own bytes that building a layer may take: as it is loaded, what is made of that, and as
#: much again on the way.
_NUM_COPIES = 4
#: Largest layer, as loaded, that is built in a host's memory, of which other processes take, too.
_MAX_HOST_BYTES = 2 * 2**30
#: How vLLM names what ranks agree on a scale by.
_SHARED_AMAX = "amax_for_"


def why_not_repeated(worker: Any, reference: Reference) -> str | None:
    """Return why a reload would not repeat a worker's start; empty if it would, None if unknown.

    Unknown for files of which no part can be read again, for many of them where a part was not
    enough, for ranks that quantise together, and where this load fails. The reason is a sentence
    without its full stop. Never raises; nothing that the model computes with changes. Blocks on the
    thread of the engine.
    """
    begin = time.perf_counter()
    model = worker.model_runner.get_model()
    why: str | None = None
    try:
        with bridges.vllm_config_context(worker.vllm_config), torch.no_grad():
            why = _why_not(worker, model, reference)
    except Exception as error:  # noqa: BLE001 - of any kind, from the model's own code
        _log.warning(
            "a reload of what the engine was started with was not compared with it: %s: %s",
            type(error).__name__,
            error,
        )
    finally:
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()  # the rest of the GPU is for bases that are staged
    _log.debug("compared a reload in %.3f s: %r", time.perf_counter() - begin, why)
    return why


def _why_not(worker: Any, model: torch.nn.Module, reference: Reference) -> str | None:
    if can_learn(worker) and _is_as_loaded(model, reference):
        return ""
    if why := bridges.why_read_whole(worker) or _why_ranks_wait(worker, model):
        _log.info("a reload is not compared with what the engine was started with: %s", why)
        return None
    unlike, left_out = _compare(worker, model, _one_of_each_kind(model))
    if unlike:
        # Of a layer that another one's tensors went to, since files number them otherwise, that
        # proves nothing.
        num_bytes = sum(path.stat().st_size for path in bridges.model_files(worker))
        if num_bytes > _MAX_BYTES:
            _log.warning(
                "a reload may give %r other values than the start did: comparing all of the "
                "model's files (%.1f GiB) would take too long",
                unlike[0],
                num_bytes / 2**30,
            )
            return None
        unlike, left_out = _compare(worker, model, lambda name: True)
    if not unlike:
        return None if left_out else ""
    more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    return (
        f"vLLM's reload of {type(model).__name__} gives {unlike[0]!r}{more} other values than "
        "vLLM's start does from the same files"
    )


def _is_as_loaded(model: torch.nn.Module, reference: Reference) -> bool:
    """Return whether a model on a GPU computes with what was loaded, each tensor in its own place.
    Two tensors that go to one parameter, as they may in LFM2, are no such case."""
    if "UnquantizedFusedMoEMethod" in {kind.__name__ for kind in _methods(model)}:
        return False
    try:
        if any(processed_modules(model)):
            return False
    except ValueError:
        return False
    plan, _ = plan_for(model, reference)
    return plan is not None


def _why_ranks_wait(worker: Any, model: torch.nn.Module) -> str:
    """Return what of a load ranks do together, where there are several; empty if nothing. Each rank
    fails, or loads all, on its own: another one would wait for it for ever."""
    config = worker.vllm_config.parallel_config
    if config.world_size * config.data_parallel_size == 1:
        return ""
    for kind in _methods(model):
        modules = (vars(sys.modules[base.__module__]) for base in kind.__mro__)
        if any(name.startswith(_SHARED_AMAX) for names in modules for name in names):
            return f"the ranks agree on scales in {kind.__name__}"
    return ""


def _methods(model: torch.nn.Module) -> set[type]:
    """Return the classes by which layers hold weights, without those that LoRA puts around them."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    return {type(getattr(method, "old_quant_method", method)) for method in methods}


def _one_of_each_kind(model: torch.nn.Module) -> Callable[[str], bool]:
    """Return a choice among checkpoint names that leaves out layers like one that it takes.

    Layers are alike if they have the same modules, of the same classes, with the same tensors.
    Lists of layers are told apart by the last part of their names, since files may have other ones
    before it.
    """
    layers: dict[tuple[str, str], list[object]] = {}
    for name, module in model.named_modules():
        if found := _LAYER.search(f"{name}."):
            tensors = [
                (key, t.shape, t.dtype) for key, t in module._parameters.items() if t is not None
            ]
            kinds = type(module), type(getattr(module, "quant_method", None))
            described = (name[found.end() :], *kinds, tuple(tensors))
            layers.setdefault((name[: found.end(1)], found[2]), []).append(described)
    taken: dict[str, set[str]] = {}
    seen = set()
    for (path, number), modules in layers.items():
        if (kind := (path, tuple(modules))) not in seen:
            seen.add(kind)
            taken.setdefault(path.rpartition(".")[2], set()).add(number)

    def is_taken(name: str) -> bool:
        found = _LAYER.search(name)
        return found is None or found[2] in taken.get(found[1], {found[2]})

    return is_taken


def _without_room(
    worker: Any, model: torch.nn.Module, is_taken: Callable[[str], bool]
) -> frozenset[torch.nn.Module]:
    """Return the layers, among those with such names, that are too large to be built beside a
    model, and the largest of those that are too many; log them."""
    layerwise = importlib.import_module(LAYERWISE)
    room_bytes = _MAX_HOST_BYTES
    if worker.device.type == "cuda":
        room_bytes = torch.cuda.mem_get_info(worker.device)[0] // _NUM_COPIES
    sizes = []
    for name, layer in model.named_modules():
        if is_taken(f"{name}.") and not is_attention(layer):
            parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
            num_bytes = sum(t.nbytes for t in (*parameters.values(), *buffers.values()))
            sizes.append((num_bytes, name, layer))
    sizes.sort(key=lambda size: size[0])
    totals = itertools.accumulate(num_bytes for num_bytes, _, _ in sizes)
    found = [
        size
        for size, total in zip(sizes, totals, strict=True)
        if size[0] > room_bytes or total > _MAX_PART_BYTES
    ]
    if found:
        num_bytes, name, _ = found[-1]
        _log.info(
            "a reload is not compared with all that the engine was started with: no room beside "
            "the model, or no time, for %r (%.1f GiB)%s",
            name,
            num_bytes / 2**30,
            f" and {len(found) - 1} more" if len(found) > 1 else "",
        )
    return frozenset(layer for _, _, layer in found)


def _compare(
    worker: Any, model: torch.nn.Module, is_taken: Callable[[str], bool]
) -> tuple[list[str], frozenset[torch.nn.Module]]:
    """Load the tensors with such names beside a model.

    Returns:
        Names of what would change, and the layers that were left out.
    """
    layerwise = importlib.import_module(LAYERWISE)
    facts = facts_of(model)
    with unchanged(model), bridges.without_lora(model):
        left_out = _without_room(worker, model, is_taken)
        proof = _ReloadProof(model, layerwise, worker, left_out)
        if worker.device.type == "cpu":
            cpu_fixes.rebuild_moe_kernels(model)
            cpu_fixes.refill_released(model)
        tensors = (
            (name, tensor.clone() if name in facts.overwritten else tensor)
            for name, tensor in bridges.checkpoint_tensors(worker, lazily=True)
            if is_taken(name)
        )
        try:
            layerwise.initialize_layerwise_reload(model)
            follow = followed(model) if facts.writes_directly else contextlib.nullcontext()
            with proof.blocker(), padded_with_zeros(), follow as writes, proof.compares(writes):
                model.load_weights(tensors)  # type: ignore[operator]
                with quiet_about_idle_layers():
                    layerwise.finalize_layerwise_reload(model, worker.model_config)
            proof.compare_derived()
        finally:
            for layer in model.modules():
                layerwise.get_layerwise_info(layer).reset()
            layerwise.LOADING_LAYERS.clear()
    if proof.unknown:
        raise ValueError(proof.unknown)
    return sorted(proof.unlike), left_out


class _ReloadProof:
    """Proof of a model against what a reload would make of it."""

    def __init__(
        self,
        model: torch.nn.Module,
        layerwise: Any,
        worker: Any,
        left_out: Collection[torch.nn.Module],
    ) -> None:
        self.unlike: set[str] = set()
        self.unknown = ""
        """Reason why the proof has failed; empty if it has not."""
        self._model, self._layerwise, self._left_out = model, layerwise, left_out
        self._is_packed, self._dtype = worker.device.type == "cpu", worker.model_config.dtype
        self._names = {layer: name for name, layer in model.named_modules()}
        self._products = {layer: self._product(layer) for layer in self._names}
        self._derived = {layer: _derived_tensors(layer) for layer in self._names}

    def blocker(self) -> WriteBlocker:
        """Return what compares, and holds back, copies that are made to the model itself."""
        owners: dict[int, str] = {}
        ignored: set[int] = set()
        for layer, name in self._names.items():
            tensors = dict(self._layerwise.get_layer_tensors(layer))
            for kept in self._layerwise.get_layerwise_info(layer).kernel_tensors or ():
                tensors |= kept
            owners |= {storage_of(t): f"{name}.{k}".lstrip(".") for k, t in tensors.items()}
            if layer in self._left_out:
                ignored |= {storage_of(tensor) for tensor in tensors.values()}

        def on_copy(target: torch.Tensor, source: torch.Tensor) -> None:
            if storage_of(target) in ignored:
                return
            new = source.to(target.device, target.dtype).expand(target.shape)
            if not _is_same(target, new):
                self.unlike.add(owners.get(storage_of(target), "a tensor"))

        def on_other_write(target: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
            if storage_of(target) in ignored:
                return
            new = target.clone()
            write(new)
            if not _is_same(target, new):  # which more writes may undo, or not
                name = owners.get(storage_of(target), "a tensor")
                self.unknown = self.unknown or f"{name!r} is changed by more than copies"

        return WriteBlocker(tensors_of(self._model), on_copy, on_other_write)

    @contextlib.contextmanager
    def compares(self, writes: DirectWriteRecord | None) -> Iterator[None]:
        """Have vLLM compare each layer that it has built with the model's, and copy nothing.

        Args:
            writes: What is written to layers directly, if that is followed.
        """
        layerwise = self._layerwise
        copy, process = layerwise._copy_and_restore_kernel_tensors, layerwise._layerwise_process

        def process_or_leave(layer: torch.nn.Module, info: Any) -> None:
            if layer not in self._left_out:
                process(layer, info)
                return
            if writes is not None:
                writes.by_layer.pop(layer, None)
            layerwise._place_kernel_tensors(layer, info)
            info.reset()

        layerwise._copy_and_restore_kernel_tensors = self._compare
        layerwise._layerwise_process = process_or_leave
        try:
            yield
        finally:
            layerwise._copy_and_restore_kernel_tensors = copy
            layerwise._layerwise_process = process

    def compare_derived(self) -> None:
        """Compare what attention layers keep beside their parameters."""
        for layer, tensors in self._derived.items():
            self._note(layer, tensors, _derived_tensors(layer))

    def _compare(self, layer: torch.nn.Module, info: Any) -> None:
        parameters, buffers = info.kernel_tensors
        loaded = {name for name, _ in info.loaded_weights}
        skipped = set(getattr(info, "kernel_non_persistent_buffers", ())) - loaded
        copied = {k: b for k, b in buffers.items() if k in layer._buffers and k not in skipped}
        new = {key: getattr(layer, key, None) for key in (*parameters, *copied)}
        self._note(layer, {**parameters, **copied}, new)
        if (product := self._products[layer]) is not None:
            again = self._product(layer)
            if again is not None and not _is_same(product, again):
                self.unlike.add(self._names[layer])
        self._layerwise._place_kernel_tensors(layer, info)

    def _note(self, layer: torch.nn.Module, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        for key, tensor in old.items():
            other = new.get(key)
            if key in _NOT_COMPUTED_WITH:
                continue
            if other is None or not _is_same(tensor.data, other.data):
                self.unlike.add(f"{self._names[layer]}.{key}".lstrip("."))

    def _product(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Return what a layer's own kernel makes of fixed inputs; None if it has none."""
        apply = getattr(getattr(layer, "quant_method", None), "apply", None)
        width = getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", 0))
        if not self._is_packed or apply is None or not width:
            return None
        inputs = torch.randn(
            _NUM_ROWS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        )
        try:
            product: torch.Tensor = apply(layer, inputs.to(self._dtype), None)
        except Exception:  # noqa: BLE001 - a convolution, say, has none
            return None
        return product


def _derived_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that an attention layer keeps as plain attributes: MLA's, say."""
    if not is_attention(layer):
        return {}
    return {
        key: value
        for key, value in vars(layer).items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    }


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        bits(one), bits(other)
    )


# -- verdicts, kept for later starts ---------------------------------------------------
#
# One holds for starts of the same: the model's files and code, vLLM, this package and the others
# that load weights, the machine's kind of device, and all settings of vLLM that change how weights
# are held.


#: Changes with what is compared, or how.
_FORMAT = 2
#: Packages that load or process weights, beside vLLM and torch.
_PACKAGES = ("transformers", "compressed-tensors", "flashinfer-python")


class ReloadVerdict:
    """Verdict of ``loading.reload_proof`` on one engine, in a cache folder."""

    def __init__(self, engine: str, folder: Path | None = None) -> None:
        self._engine = engine
        self._folder = CacheFolder(folder or user_folder("reloads"))

    def get(self) -> str | None:
        """Return the kept reason why a reload does not repeat a start ("": it does), or None."""
        if not self._engine:
            return None
        kept = self._folder.get(self._engine.encode(), [self._engine], format=_FORMAT)
        return kept if isinstance(kept, str) else None

    def put(self, of_ranks: Sequence[str | None]) -> None:
        """Keep the first reason that a rank found; nothing if one could not tell."""
        found = [verdict for verdict in of_ranks if verdict is not None]
        if self._engine and len(found) == len(of_ranks):
            verdict = next(filter(None, found), "")
            self._folder.put(self._engine.encode(), [self._engine], verdict, format=_FORMAT)


def engine_identity(vllm_config: Any, version: str, model_dir: Path | None) -> str:
    """Return a digest of what tells an engine from others; empty if that is not known."""
    try:
        # All of them: which ones vLLM takes depends on its version, and on the model.
        files = sorted(model_dir.glob("*.safetensors")) if model_dir is not None else []
        platform: Any = importlib.import_module("vllm.platforms").current_platform
        envs: Any = importlib.import_module("vllm.envs")
        settings = envs.compile_factors() if hasattr(envs, "compile_factors") else {}
        if not files or model_dir is None:
            return ""
        files += sorted(model_dir.glob("*.py"))
        parts = [
            __version__,
            version,
            torch.__version__,
            *map(_installed, _PACKAGES),
            f"{platform.get_device_name()} {torch.backends.cpu.get_cpu_capability()}",
            vllm_config.compute_hash(),
            str(vllm_config.load_config.load_format),
            str(sorted(settings.items())),
            vllm_config.model_config.hf_config.to_json_string(),
            *(str(FileState.of(path).fields()) for path in files),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    except Exception as error:  # noqa: BLE001 - from vLLM's own code, or the disk
        _log.info("the verdict on a reload is not kept: %s: %s", type(error).__name__, error)
        return ""


def _installed(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package

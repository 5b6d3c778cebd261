"""Loading of a base into a running model, in a worker: staged, or in place as it arrives.

vLLM's layerwise reload moves parameters to the meta device. It rebuilds each layer once its last
weight has come, and copies the values into the old storage, so that captured graphs stay valid. It
is not atomic: a failure midway leaves mixed weights, which is reported as *dirty*.

A base is loaded in place if a replica has no room for a second copy of its model. Each bucket is
loaded as soon as it is verified, and its memory is used again for the next one. The old weights are
lost from the first bucket on.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rollout_side.memory.handoff import Handoff
from rollout_side.memory.versions import StagedVersion, tensor_in
from rollout_side.vllm_engine.compat import bridges, cpu_fixes
from rollout_side.vllm_engine.loading.copy_plan import (
    CopyPlan,
    can_learn,
    plan_of_layout,
    wait_for_copies,
    with_others,
)
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.layerwise import (
    LAYERWISE,
    ReloadFacts,
    facts_of,
    followed,
    is_attention,
    padded_with_zeros,
)
from rollout_side.vllm_engine.loading.plan_proof import PlanProof, learn
from rollout_side.vllm_engine.loading.prepared_load import prepare_load
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import STARTED_WITH, PolicyVersion
from weft_rl.contract.tensors import Reference, check_base

_log = logging.getLogger(__name__)
#: Modules that wrap others: of LoRA, and of experts (which 0.26 reports without it).
_UNMENTIONED = frozenset({"base_layer", "routed_experts"})


def apply_base(
    worker: Any,
    staged: StagedVersion,
    reference: Reference,
    plans: Sequence[CopyPlan] = (),
    on_progress: Callable[[], None] = lambda: None,
    drafted: DraftedModel | None = None,
    write: Callable[[], None] | None = None,
) -> tuple[CopyPlan, ...]:
    """Replace the model's weights by a staged version. Call it while paused.

    Adapters that were loaded come back at their next use. The staged memory is not
    referenced afterwards, so it may be overwritten once every rank is done.

    Args:
        drafted: The model with the one that drafts for it, which is replaced, too, if the version
            has all of it; else it stays.
        plans: The copies that loading amounts to, of whatever layouts, where they are known.
        on_progress: Called at each tensor, or bucket, that is loaded.
        write: See ``prepare_base``; in place of the plan's copies.

    Returns:
        The plans for the next one: one for each set of names.

    Raises:
        InvalidManifestError: It is not exactly what the model consists of; nothing
            changed.
        LoadFailedError: Metadata ``dirty`` is "true": the weights are mixed. The
            next base that loads repairs it.
    """
    model, ignored = _loaded_model(worker, staged.manifest, reference, drafted)
    plan = plan_of_layout(plans, staged.manifest, ignored)
    if plan is not None:
        with mixing(staged.version, "copying"), _config_of(worker, plan):
            if write is None:
                plan.load(staged.segment.data, on_progress)
            else:
                write()
        return with_others(plan, plans)
    with bridges.vllm_config_context(worker.vllm_config):
        given = ((name, tensor) for name, tensor in staged.tensors() if name not in ignored)
        num_tensors = len(staged.manifest.tensors) - len(ignored)
        reload_layers(worker, model, staged.version, _reporting(given, on_progress), num_tensors)
        if can_learn(worker):
            plan = learn(model, staged, ignored)
        return with_others(plan, _still_filling(plans, drafted or model))


def prepare_base(
    worker: Any,
    staged: StagedVersion,
    reference: Reference,
    plans: Sequence[CopyPlan],
    on_progress: Callable[[], None],
    drafted: DraftedModel | None,
    most_bytes: int,
) -> Callable[[], None] | None:
    """Find what a staged version changes of the model's weights, which are only read. Blocks;
    generation goes on.

    Args:
        most_bytes: Most memory that it may take afterwards.
        others: See ``apply_base``.

    Returns:
        A function that writes it, to be called while paused, and in vLLM's config context; None
        where loading is more than copies, or too much has changed.

    Raises:
        torch.OutOfMemoryError: There is no memory to make a layer's tensors in.
    """
    _, ignored = _loaded_model(worker, staged.manifest, reference, drafted)
    plan = plan_of_layout(plans, staged.manifest, ignored)
    if plan is None:
        return None
    with _config_of(worker, plan):
        prepared = prepare_load(plan, staged.segment.data, most_bytes, on_progress)
    return None if prepared is None else prepared.write


def _still_filling(plans: Iterable[CopyPlan], model: torch.nn.Module) -> list[CopyPlan]:
    """Return the plans that fill a model after a reload, which may have moved parameters."""
    return [plan for plan in plans if plan.fills(model)]


def _config_of(worker: Any, plan: CopyPlan) -> AbstractContextManager[object]:
    """Return vLLM's config context for a plan that calls methods of layers; they may read it."""
    if plan.num_processed:
        return bridges.vllm_config_context(worker.vllm_config)
    return contextlib.nullcontext()


def _loaded_model(
    worker: Any, manifest: Manifest, reference: Reference, drafted: DraftedModel | None
) -> tuple[torch.nn.Module, frozenset[str]]:
    """Return the model that a layout is loaded into, and the tensors that have no place there."""
    metas = [slot.meta for slot in manifest.tensors]
    check_base(metas, reference)
    model: torch.nn.Module = worker.model_runner.get_model()
    if drafted is not None and drafted.reference.brings_draft(metas):
        model, reference = drafted, drafted.reference
    return model, reference.passed_over({meta.name for meta in metas})


def reload_files(
    worker: Any,
    on_progress: Callable[[], None] = lambda: None,
    drafted: DraftedModel | None = None,
) -> None:
    """Load what the engine was started with, from its files. Call it while paused."""
    model = worker.model_runner.get_model() if drafted is None else drafted
    tensors = bridges.checkpoint_tensors(worker)
    if drafted is not None:
        tensors = itertools.chain(tensors, bridges.draft_checkpoint_tensors(worker))
    with bridges.vllm_config_context(worker.vllm_config):
        reload_layers(worker, model, STARTED_WITH, _reporting(tensors, on_progress), None)


def _reporting(
    tensors: Iterable[tuple[str, torch.Tensor]], on_progress: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; call ``on_progress`` once the model has taken each."""
    for named in tensors:
        yield named
        on_progress()


@contextlib.contextmanager
def mixing(version: PolicyVersion, verb: str = "loading") -> Iterator[None]:
    """Report any failure inside the ``with`` as one that has left mixed weights."""
    try:
        yield
    except BaseException as error:
        raise LoadFailedError(
            f"{verb} {version} failed midway, the weights are mixed: "
            f"{type(error).__name__}: {error}",
            metadata={"dirty": "true"},
        ) from error


def reload_layers(
    worker: Any,
    model: torch.nn.Module,
    version: PolicyVersion,
    tensors: Iterable[tuple[str, torch.Tensor]],
    num_tensors: int | None,
) -> None:
    """Load a base by vLLM's layerwise reload; call it in vLLM's config context.

    Returns when it is done (on CUDA, what the calling thread's current stream was given).

    Args:
        model: vLLM's model, or a ``DraftedModel`` that has it.
        tensors: Checkpoint names and full tensors, on any device; asked for one after the other.
            vLLM refers to a tensor until its layer is complete.
        num_tensors: Number of tensors that there must be, where that is known.
    """
    with mixing(version):
        try:
            _reload(worker, model, tensors, num_tensors)
            bridges.reset_lora_state(worker.model_runner)
            wait_for_copies(worker.device)
        except BaseException:
            _close(worker, model)
            raise


def _reload(
    worker: Any,
    model: torch.nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    num_tensors: int | None,
) -> None:
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    if worker.device.type == "cpu":
        cpu_fixes.rebuild_moe_kernels(model)
        cpu_fixes.refill_released(model)
    facts, num_given = facts_of(model), 0

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_given
        for name, tensor in tensors:
            num_given += 1
            yield name, tensor.clone() if name in facts.overwritten else tensor

    with bridges.without_lora(model):
        reload.initialize_layerwise_reload(model)
        follow = followed(model) if facts.writes_directly else contextlib.nullcontext()
        with padded_with_zeros(), follow:
            loaded = model.load_weights(given())  # type: ignore[operator]
            if num_tensors is not None and num_given != num_tensors:
                raise LoadFailedError(f"the model took {num_given} of {num_tensors} tensors")
            idle, tied = layers_without_weights(model)
            if idle:
                raise LoadFailedError(f"{idle[0]!r} and {len(idle) - 1} more layers got no weights")
            with quiet_about_idle_layers():
                reload.finalize_layerwise_reload(model, worker.model_config)
        if worker.device.type == "cpu":
            cpu_fixes.repack_tied([model.get_submodule(name) for name in tied])
    quantised = worker.model_config.quantization is not None
    if why := why_incomplete(model, loaded, facts, quantised=quantised):
        raise LoadFailedError(why)


@contextlib.contextmanager
def quiet_about_idle_layers() -> Iterator[None]:
    """Keep vLLM's "Failed to load weights" out of the log. vLLM logs it for every layer without
    weights of its own. Layers that should have got weights are refused before."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).endswith("Failed to load weights")

    logger = logging.getLogger(LAYERWISE)
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def layers_without_weights(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Find layers with parameters of their own that no weight has come for.

    vLLM will put their old values back.

    Returns:
        Names of the layers that should have got weights; and of those that share every parameter
        with a layer that did (a tied lm_head).
    """
    layerwise = importlib.import_module(LAYERWISE)
    waiting: dict[str, set[int]] = {}
    loaded: set[int] = set()
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        parameters = dict(layer._parameters)
        if info.kernel_tensors is not None:
            parameters.update(info.kernel_tensors[0])
        idle = info.can_load() and info.load_numel <= 0 and (info.load_numel_total or 0) > 0
        if not idle:
            loaded.update(id(p) for p in parameters.values() if p is not None)
        elif info.kernel_tensors is not None and info.kernel_tensors[0]:
            waiting[name] = {id(p) for p in info.kernel_tensors[0].values()}
    tied = [name for name, parameters in waiting.items() if parameters <= loaded]
    idle_names = [
        name for name in waiting if name not in tied and not is_attention(model.get_submodule(name))
    ]
    return idle_names, tied


def why_incomplete(
    model: torch.nn.Module, loaded: object, facts: ReloadFacts, *, quantised: bool
) -> str:
    """Return the parameters that have got no value; empty if all have.

    These stayed on meta, or were neither reported as loaded nor are derived. Like vLLM's own
    loader: models that report nothing, and quantised ones (whose processing adds parameters), are
    only checked for meta.
    """
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    if not missing and isinstance(loaded, set | frozenset | list | tuple) and not quantised:
        names = {_reported_name(str(name)) for name in loaded}
        every = (name for name, _ in model.named_parameters() if name not in facts.derived)
        missing = [name for name in every if _reported_name(name) not in names]
    return f"parameter {missing[0]!r} and {len(missing) - 1} more get no value" if missing else ""


def _reported_name(name: str) -> str:
    """Return a parameter's name without the modules that a loader does not mention."""
    return ".".join(part for part in name.split(".") if part not in _UNMENTIONED)


def _close(worker: Any, model: torch.nn.Module) -> None:
    """End a reload that failed, so that the engine lives and another one can open. The weights are
    mixed afterwards; nothing may be generated until then."""
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    with contextlib.suppress(Exception):
        reload.finalize_layerwise_reload(model, worker.model_config)
    layerwise = importlib.import_module(LAYERWISE)
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            with contextlib.suppress(Exception):
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    with contextlib.suppress(Exception):
        bridges.reset_lora_state(worker.model_runner)
    with contextlib.suppress(Exception):  # what comes next may use another stream
        wait_for_copies(worker.device)
    _log.error("a load of a base failed midway: the weights are mixed until another base is loaded")


_Bucket = tuple[int, torch.Tensor]


def load_in_place(
    worker: Any,
    arriving: Handoff,
    reference: Reference,
    plans: Sequence[CopyPlan] = (),
    drafted: DraftedModel | None = None,
) -> tuple[CopyPlan, ...]:
    """Replace the model's weights by a base that arrives meanwhile. Call it while paused.

    May run on another thread than the engine's. On CUDA that thread's current device is
    the engine's, and its current stream waits for what the engine began before: all work
    is given to that stream, and is done when this returns. Blocks for the transfer.
    Adapters that were loaded come back at their next use.

    Raises:
        InvalidManifestError: It is not exactly what the model consists of; nothing
            changed, and no bucket was asked for.
        WeftError: From ``arriving.buckets()``, before the first bucket; nothing changed.
        LoadFailedError: If metadata ``dirty`` is "true", the weights are mixed, and the
            next base that loads repairs it; else nothing changed.
    """
    manifest = arriving.manifest
    model, ignored = _loaded_model(worker, manifest, reference, drafted)
    plan = plan_of_layout(plans, manifest, ignored)
    arrived = _begun(arriving)
    # Set here, since it is the thread's own: another than the engine's has gradients on.
    with torch.no_grad():
        if plan is not None:
            with mixing(arriving.version), _config_of(worker, plan):
                for index, wire in arrived:
                    plan.load_bucket(index, wire)
            return with_others(plan, plans)
        with bridges.vllm_config_context(worker.vllm_config):
            proof: PlanProof | None = None
            if can_learn(worker):
                proof = PlanProof(model, manifest, ignored)
                arrived = _passing(proof, arrived)
            given = _tensors(manifest, arrived, ignored, arriving.report_progress, worker.device)
            num_tensors = len(manifest.tensors) - len(ignored)
            reload_layers(worker, model, arriving.version, given, num_tensors)
            plan = proof.plan() if proof is not None else None
            return with_others(plan, _still_filling(plans, drafted or model))


def _passing(proof: PlanProof, arrived: Iterator[_Bucket]) -> Iterator[_Bucket]:
    for index, wire in arrived:
        proof.pass_bucket(index, wire)
        yield index, wire


def _begun(arriving: Handoff) -> Iterator[_Bucket]:
    """Wait for the first bucket, and return all: until then a failure changes nothing."""
    buckets = arriving.buckets()
    first = next(buckets, None)
    if first is None:
        raise LoadFailedError(f"no bucket of {arriving.version} arrived")
    return _checked(itertools.chain([first], buckets), len(arriving.manifest.buckets))


def _checked(buckets: Iterator[_Bucket], num_buckets: int) -> Iterator[_Bucket]:
    """Yield the buckets; fail if one is missing, since its old weights would stay."""
    due = 0
    for index, wire in buckets:
        if index != due:
            raise LoadFailedError(f"bucket {index} arrived in place of bucket {due}")
        yield index, wire
        due += 1
    if due != num_buckets:
        raise LoadFailedError(f"only {due} of {num_buckets} buckets arrived")


def _tensors(
    manifest: Manifest,
    arrived: Iterator[_Bucket],
    ignored: frozenset[str],
    on_progress: Callable[[], None],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and copy of every tensor that is loaded, by bucket; report each that the model
    has taken.

    They are copies since vLLM keeps what it is given until a layer is complete. A layer may
    continue in the next bucket, which comes into the memory of this one. Each copy is freed with
    its layer, so about one layer is held at a time. Copies lie on this rank's own accelerator, if
    the bucket lies on another's.
    """
    for index, wire in arrived:
        place = device if wire.is_cuda else wire.device
        for slot in (manifest.tensors[i] for i in manifest.tensors_by_bucket[index]):
            if slot.meta.name not in ignored:
                yield slot.meta.name, tensor_in(slot, wire).to(place, copy=True)
            on_progress()
        wait_for_copies(wire.device)

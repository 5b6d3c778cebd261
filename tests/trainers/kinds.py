"""Real trainers of each kind, around a given model, on this process's ranks.

Each kind wraps a module as its framework does, trains it for real, and can say what
its whole weights are by the framework's own, slow way: the reference.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Loss of a model on the batch of one step.
Loss = Callable[[Any, int], torch.Tensor]

#: Kinds whose ranks share the work on one batch.
ONE_BATCH = ("tp", "ep")
#: Linear layers that tensor parallelism cuts by their inputs, the columns of their weights.
_CUT_BY_INPUT = ("v_proj", "o_proj", "down_proj", "lora_A")


@dataclass
class Trainer:
    """A wrapped model; every method is collective."""

    kind: str
    model: Any
    """What a user would hand to the publisher."""
    loss: Loss
    optimizer: torch.optim.Optimizer | None

    def train(self, first: int, steps: int) -> None:
        """Optimise on the batches ``first`` and following."""
        for step in range(first, first + steps):
            loss = self.loss(self.model, step)
            if self.optimizer is None:
                self.model.backward(loss)
                self.model.step()
            else:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters, whole, by the framework's own names and way."""
        if self.kind.startswith("fsdp1"):
            from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

            with Fsdp.summon_full_params(self.model, writeback=False):
                return {
                    name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for name, p in self.model.module.named_parameters()
                }
        if self.kind in ("fsdp2", "hsdp2", *ONE_BATCH):
            for module in self.model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            return {n: _full(p).detach().clone() for n, p in self.model.named_parameters()}
        if self.kind.startswith("zero"):
            import deepspeed

            module = self.model.module
            gather = (
                deepspeed.zero.GatheredParameters(list(module.parameters()))
                if self.kind == "zero3"
                else contextlib.nullcontext()
            )
            with gather:
                return {n: p.detach().clone() for n, p in module.named_parameters()}
        module = self.model.module if self.kind == "ddp" else self.model
        return {n: p.detach().clone() for n, p in module.named_parameters()}


def _full(param: Any) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def wrap(kind: str, module: nn.Module, layers: list[nn.Module], loss: Loss) -> Trainer:
    """A trainer around ``module``; ``layers`` are its units of sharding."""
    if kind == "plain":
        return Trainer(kind, module, loss, _adam(module))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(module)
        return Trainer(kind, model, loss, _adam(model))
    if kind in ("fsdp2", "hsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = dist.get_world_size()
        shape, names = ((size,), ("s",)) if kind == "fsdp2" else ((2, size // 2), ("r", "s"))
        mesh = init_device_mesh(next(module.parameters()).device.type, shape, mesh_dim_names=names)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return Trainer(kind, module, loss, _adam(module))
    if kind == "tp":
        return Trainer(kind, _tensor_parallel(module), loss, _adam(module))
    if kind == "ep":
        return Trainer(kind, _expert_parallel(module), _on_whole(loss), _adam(module))
    if kind in ("fsdp1", "fsdp1_flat"):
        return Trainer(kind, *_fsdp1(kind, module, layers, loss))
    if kind in ("zero1", "zero2", "zero3"):
        return Trainer(kind, _deepspeed(int(kind[-1]), module), loss, None)
    raise ValueError(f"no trainer of kind {kind!r}")


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def _tensor_parallel(module: nn.Module) -> nn.Module:
    """Cut every linear layer and embedding; between layers, activations are whole."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = _mesh(module)
    for name, part in [*module.named_modules()]:
        style = None
        if type(part) is nn.Embedding:
            style = ColwiseParallel(output_layouts=Replicate())
        elif type(part) is nn.Linear:
            style = (
                RowwiseParallel(input_layouts=Replicate())
                if _is_cut_by_input(name.split("."))
                else ColwiseParallel(output_layouts=Replicate())
            )
        if style is not None:
            parallelize_module(part, mesh, style)
    return module


def _is_cut_by_input(path: list[str]) -> bool:
    return "lora_B" not in path and not set(path).isdisjoint(_CUT_BY_INPUT)


def _expert_parallel(module: nn.Module) -> nn.Module:
    """Every stacked expert at one rank."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh(module)
    for part in module.modules():
        for name, param in [*part.named_parameters(recurse=False)]:
            if param.dim() == 3:
                held = distribute_tensor(param.detach(), mesh, [Shard(0)])
                setattr(part, name, nn.Parameter(held, requires_grad=param.requires_grad))
    return module


def _on_whole(loss: Loss) -> Loss:
    """A loss that computes with whole parameters, for models that know of no DTensors."""

    def of(model: nn.Module, step: int) -> torch.Tensor:
        whole = {name: _full(param) for name, param in model.named_parameters()}
        return loss(lambda *a, **k: torch.func.functional_call(model, whole, a, k), step)

    return of


def _mesh(module: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))


def _fsdp1(kind: str, module: nn.Module, layers: list[nn.Module], loss: Loss) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    units = {type(layer) for layer in layers}
    model = Fsdp(
        module,
        auto_wrap_policy=ModuleWrapPolicy(units),
        device_id=torch.device("cpu"),
        use_orig_params=kind == "fsdp1",
    )
    return model, loss, _adam(model)


def _deepspeed(stage: int, module: nn.Module) -> Any:
    os.environ.update(
        DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
    )  # fmt: skip
    import deepspeed
    import deepspeed.ops

    # Building it takes over a minute, and gloo does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    trained = [p for p in module.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 200,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=config
    )
    return engine

"""Wrappers are told by their classes, and what is not theirs stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

from trainer_side.params.choose import unwrap
from trainer_side.params.names import saved_names
from trainer_side.params.params import check_readable, own_class, walk
from weft_rl.contract.errors import InvalidManifestError


class Holder(nn.Module):
    """A user's module with attributes that wrappers have."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self._orig_mod = nn.Linear(2, 2), nn.Linear(2, 2)


def test_a_users_module_is_its_own() -> None:
    model = Holder()
    assert unwrap(model) == (model, "")
    assert [*walk(model).named] == [name for name, _ in model.named_parameters()]


def test_wrappers_are_taken_off_from_outside_in() -> None:
    model = Holder()
    wrapped = DataParallel(checkpoint_wrapper(model))
    assert unwrap(wrapped) == (model, "DataParallel")
    assert unwrap(AveragedModel(model))[1] == "averaged"


def test_a_walk_names_parts_without_their_wrappers() -> None:
    """And finds the part itself by its path."""
    inner = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": checkpoint_wrapper(DataParallel(inner)), "b": Holder()})
    found = walk(model)
    assert [*found.named] == [
        "a.weight", "a.bias", "b.module.weight", "b.module.bias", "b._orig_mod.weight",
        "b._orig_mod.bias",
    ]  # fmt: skip
    assert found.at("a") is inner
    assert found.at("") is model


def test_a_class_that_torch_derives_is_not_the_modules_own() -> None:
    derived: Any = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    module = nn.Linear(2, 2)
    module.__class__ = derived
    assert own_class(module) is nn.Linear
    users: Any = type("FastLinear", (FSDPModule, nn.Linear), {})
    module.__class__ = users
    assert own_class(module) is users


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        (["module.a", "module.b.module.c"], ["a", "b.module.c"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["_orig_mod.module.a"], ["a"]),
        (["a._checkpoint_wrapped_module.b", "a._fsdp_wrapped_module.c"], ["a.b", "a.c"]),
        (["base_model.model.module.a"], ["base_model.model.a"]),
        ([], []),
    ],
)
def test_names_in_files_are_those_of_the_model(saved: list[str], names: list[str]) -> None:
    assert [*saved_names(saved).values()] == names


def test_a_tensor_of_torchs_own_is_readable_wherever_it_comes_from() -> None:
    class Own(torch.Tensor):
        """Of a class that changes nothing of how elements are held."""

    for tensor in (
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        torch.ones(2).as_subclass(Own),
        torch.ones(4)[::2],
        torch.tensor(1, dtype=torch.uint8),
    ):
        check_readable("a", tensor)
    with pytest.raises(InvalidManifestError, match="'a' has no elements yet"):
        check_readable("a", nn.UninitializedParameter())

"""What a watcher tells of tensors that changed since it was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainer_side.params.params import ModelWatcher, TensorWatcher
from weft_rl.contract.errors import ModelChangedError


def _in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.add_(1)


def _by_data(param: nn.Parameter) -> None:
    param.data.add_(1)


def _by_fused_optimizer(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    torch.optim.AdamW([param], lr=0.1, fused=True).step()


def _in_inference(param: nn.Parameter) -> None:
    with torch.inference_mode():
        param.add_(1)


def _swapped(param: nn.Parameter) -> None:
    param.data = param.data.clone()


def _narrowed(param: nn.Parameter) -> None:
    param.data = param.data.to(torch.bfloat16)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("change", "how"),
    [(_in_place, "changed in place"), (_by_data, "changed in place"),
     (_by_fused_optimizer, "changed in place"), (_in_inference, "changed in place"),
     (_swapped, "replaced")],
)  # fmt: skip
def test_what_changed_is_named(
    kind: torch.dtype, change: Callable[[nn.Parameter], None], how: str
) -> None:
    params = {name: nn.Parameter(torch.ones(40, 3, dtype=kind)) for name in "abcde"}
    params["scalar"] = nn.Parameter(torch.ones((), dtype=torch.float32))
    params["empty"] = nn.Parameter(torch.ones(0))
    params["sideways"] = nn.Parameter(torch.ones(4, 6).t())
    watcher = ModelWatcher(TensorWatcher(params))
    watcher.check()
    change(params["b"])
    with pytest.raises(ModelChangedError, match=f"'b' was {how}") as caught:
        watcher.check()
    assert caught.value.metadata == {"first": f"'b' was {how}", "num_changed": "1"}
    assert caught.value.status == "ABORTED"
    ModelWatcher(TensorWatcher(params)).check()


def test_another_dtype_is_another_tensor() -> None:
    param = nn.Parameter(torch.ones(3))
    watcher = ModelWatcher(TensorWatcher({"a": param}))
    _narrowed(param)
    with pytest.raises(ModelChangedError, match="replaced"):
        watcher.check()


def test_tensors_without_memory_of_their_own_are_told_by_their_shapes() -> None:
    class Wrapped(torch.Tensor):
        """A tensor of another library."""

    tensors = {"meta": torch.empty(4, device="meta"), "other": torch.ones(3).as_subclass(Wrapped)}
    tensors["inference"] = torch.inference_mode()(torch.ones)(3)
    tensors["bytes"] = torch.ones(3, dtype=torch.uint8)
    tensors["float8"] = torch.ones(3).to(torch.float8_e4m3fn)
    ModelWatcher(TensorWatcher(tensors)).check()


def test_settings_are_said_as_they_were_and_are() -> None:
    settings: dict[str, object] = {"scale": 1.0, "merged": ()}
    watcher = ModelWatcher(TensorWatcher({}), lambda: settings)
    watcher.check()
    settings["merged"] = ("default",)
    with pytest.raises(ModelChangedError, match=r"merged was \(\), is \('default',\)"):
        watcher.check()
    settings.clear()
    with pytest.raises(ModelChangedError, match=r"scale was 1\.0, is None"):
        watcher.check()


def test_a_model_that_cannot_be_looked_at_any_more_has_changed() -> None:
    answers = iter([{"a": 1}])
    watcher = ModelWatcher(TensorWatcher({}), lambda: next(answers))
    with pytest.raises(ModelChangedError, match="cannot be looked at any more"):
        watcher.check()

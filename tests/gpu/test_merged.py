"""A weight that is merged on a GPU is what exact numbers round to, within one unit in the last
place, whatever shortcuts the application allows its own products."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.conftest import Note
from trainer_side.params.elements import HeldRun
from trainer_side.params.merged_elements import LoraFactors, MergedElements, WeightAddition
from trainer_side.params.sharded import Sharded, held_by
from trainer_side.ranks.ranks import OneRank

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on the CPU: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not DRY, reason="needs an NVIDIA GPU"),
]
_OUT, _IN, _R, _SCALING = 1536, 1024, 64, 0.7
_MATMUL = torch.backends.cuda.matmul
_SHORTCUTS = (
    "allow_tf32",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)
#: Of the float32 in which sums are formed, relative to what is added up.
_SUM_ERROR = 2.0**-20


@pytest.fixture
def allowed() -> Iterator[None]:
    """An application that allows its products every shortcut."""
    before = {name: getattr(_MATMUL, name) for name in _SHORTCUTS}
    for name in _SHORTCUTS:
        setattr(_MATMUL, name, True)
    yield
    for name, value in before.items():
        setattr(_MATMUL, name, value)


#: Which elements each of two ranks holds: rows, anything, columns.
_HALF = _OUT * _IN // 2
_CUTS = {
    "rows": (HeldRun(0, 0, _HALF), HeldRun(1, _HALF, _HALF)),
    "in a row": (HeldRun(0, 0, _HALF + 100), HeldRun(1, _HALF + 100, _HALF - 100)),
    "columns": (HeldRun(0, 0, 600, _IN, _OUT), HeldRun(1, 600, _IN - 600, _IN, _OUT)),
}


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("held", "served"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_a_merge_rounds_once(held: torch.dtype, served: torch.dtype, note: Note) -> None:
    device = torch.device("cpu" if DRY else "cuda")
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, held)

    weight, a, b = draw(_OUT, _IN), draw(_R, _IN), draw(_OUT, _R)
    held_by_one = {name: _whole(tensor) for name, tensor in {"a": a, "b": b}.items()}
    factors = LoraFactors(
        {name: held_by(held_by_one[name], 0) for name in "ab"},
        {"a": a.to("meta"), "b": b.to("meta")},
        OneRank(),
    )
    factors.bring()
    delta = WeightAddition(weight.shape, factors, "a", "b", _SCALING)
    before = weight.clone()
    elements = MergedElements(held_by(_whole(weight), 0), delta, 0)
    merged = torch.empty(_OUT * _IN, dtype=served, device=device)
    elements.fill(0, merged)
    on_host = torch.empty(_OUT * _IN, dtype=served)
    elements.fill(0, on_host)  # as for gloo
    assert torch.equal(on_host, merged.cpu())
    found = {"whole": merged.view_as(weight)}
    for name, runs in _CUTS.items():
        found[name] = torch.empty_like(found["whole"])
        for run in runs:
            own = Sharded(weight.shape, held, runs, run.of(weight).contiguous())
            part = torch.empty(run.size, dtype=served, device=device)
            MergedElements(held_by(own, run.rank), delta, run.rank).fill(0, part)
            run.of(found[name]).copy_(part.view(run.shape))
    assert all(getattr(_MATMUL, name) for name in _SHORTCUTS)
    assert torch.equal(weight, before)

    exact = weight.double() + _SCALING * (b.double() @ a.double())
    added = weight.double().abs() + _SCALING * (b.double().abs() @ a.double().abs())
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.full_like(exact, torch.finfo(served).eps / 2), exponent)
    for name, each in found.items():
        error = (each.double() - exact).abs()
        assert bool((error <= unit + _SUM_ERROR * added).all()), name
        away = (error / (unit + _SUM_ERROR * added)).max().item()
        same = "" if name == "whole" else (
            f", {int((each != found['whole']).sum())} of {each.numel():,} other than whole's"
        )  # fmt: skip
        note(f"{held} to {served}", f"one weight merged, {name}",
             f"at most {away:.2f} of a unit from exact{same}")  # fmt: skip


def _whole(tensor: torch.Tensor) -> Sharded:
    return Sharded(tensor.shape, tensor.dtype, (HeldRun(0, 0, tensor.numel()),), tensor)

"""Products of factors are float32's, whatever the application lets its own be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer_side.params.merged_elements import are_exact, product

_ROWS, _RANK, _COLUMNS = 33, 8, 65


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    b = torch.randn(_ROWS, _RANK, generator=generator)
    return b, torch.randn(_RANK, _COLUMNS, generator=generator)


@pytest.fixture
def rounding() -> Iterator[None]:
    """An application that lets float32 products be rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_by_default_it_is_the_plain_product() -> None:
    b, a = drawn()
    assert torch.equal(product(b, a, is_exact=False), b @ a)
    wide = product(b.double(), a.double(), is_exact=False)
    assert torch.equal(wide, b.double() @ a.double())


@pytest.mark.usefixtures("rounding")
def test_what_the_application_allows_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    b, a = drawn()
    given: list[torch.dtype] = []
    plain = torch.Tensor.__matmul__

    def noted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        given.append(left.dtype)
        return plain(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    found = product(b, a, is_exact=False)
    product(b, a, is_exact=True)
    assert given == [torch.float64, torch.float32]
    assert torch.equal(found, plain(b.double(), a.double()).float())
    assert torch.get_float32_matmul_precision() == "medium"


def test_autocast_does_not_reach_it() -> None:
    b, a = drawn()
    expected = b @ a
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (b @ a).dtype is torch.bfloat16
        assert torch.equal(product(b, a, is_exact=False), expected)


def test_what_bfloat16_holds_is_exact() -> None:
    b, a = drawn()
    assert are_exact(b.bfloat16(), a.bfloat16())
    assert not are_exact(b.bfloat16(), a)
    assert not are_exact(b.half(), a.bfloat16())


def test_what_the_newer_switch_says_is_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    b, a = drawn()
    exact = b.double() @ a.double()
    assert torch.allclose(product(b, a, is_exact=False).double(), exact, rtol=0, atol=1e-5)

"""What a model consists of is found once, and found out when it changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainer_side.params.params import walk


class Tied(nn.Module):
    """Two layers of one weight, and a list of further ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.more = nn.ModuleList([nn.Linear(2, 3), nn.Identity()])
        self.register_parameter("nothing", None)


def _expected(model: nn.Module) -> dict[str, int]:
    return {name: id(param) for name, param in model.named_parameters()}


def _found(model: nn.Module) -> dict[str, int]:
    return {name: id(param) for name, param in walk(model).named.items()}


def test_names_are_torchs_in_its_order() -> None:
    model = Tied()
    assert list(_found(model).items()) == list(_expected(model).items())
    assert walk(model).modules == list(model.modules())
    assert walk(model) is walk(model)


def _replace_parameter(model: Tied) -> None:
    model.first.bias = nn.Parameter(torch.zeros(2))


def _replace_behind_its_back(model: Tied) -> None:
    model.more[0]._parameters["bias"] = nn.Parameter(torch.zeros(3))


def _rename(model: Tied) -> None:
    model.third = model.second
    del model.second


@pytest.mark.parametrize(
    "change",
    [
        _replace_parameter,
        _replace_behind_its_back,
        _rename,
        lambda model: model.more.append(nn.Linear(1, 1)),
        lambda model: setattr(model, "nothing", nn.Parameter(torch.ones(1))),
        lambda model: setattr(model.first, "bias", None),
        lambda model: setattr(model.second, "weight", nn.Parameter(torch.ones(2, 2))),
    ],
)
def test_what_has_changed_is_found_anew(change: Callable[[Tied], object]) -> None:
    model = Tied()
    before = walk(model)
    change(model)
    assert walk(model) is not before
    assert list(_found(model).items()) == list(_expected(model).items())


def test_a_tied_weight_has_the_embeddings_name_whichever_comes_first() -> None:
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    for parts in ({"lm_head": head, "embed": embedding}, {"embed": embedding, "lm_head": head}):
        assert [*walk(nn.ModuleDict(parts)).named] == ["embed.weight"]


def test_buffers_that_a_checkpoint_holds() -> None:
    model = Tied()
    model.first.register_buffer("bias_of_router", torch.zeros(2))
    model.first.register_buffer("passing", torch.zeros(2), persistent=False)
    model.second.register_buffer("inv_freq", torch.zeros(2), persistent=False)
    found = walk(model)
    assert [*found.buffers] == ["first.bias_of_router"]
    model.second.inv_freq = torch.ones(2)  # which transformers does in a forward
    assert walk(model) is found
    model.first.bias_of_router = torch.ones(2)
    assert walk(model).buffers["first.bias_of_router"].tolist() == [1, 1]


def test_copies_and_pickles_are_without_it() -> None:
    model = Tied()
    assert walk(model).named
    again = copy.deepcopy(model)
    assert _found(again) == _expected(again) != _expected(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"trainer_side" not in file.getvalue().replace(b"test_walk", b"")
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert _found(loaded) == _expected(loaded)
    assert set(model.state_dict()) == set(_expected(model)) | {"second.weight"}


def test_a_models_own_word_counts() -> None:
    class Fewer(nn.Linear):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def, override]
            yield "only", self.weight

    model = Fewer(2, 2)
    assert _found(model) == {"only": id(model.weight)}

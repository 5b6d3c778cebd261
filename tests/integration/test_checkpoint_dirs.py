"""Which files and tensors of a directory are pushed, and in which dtype: what a loader would take,
or a refusal that names what is wrong."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import HIDDEN, Model, lora, peft_of, same, weights
from trainer_side import Publisher, PushOptions
from trainer_side.packing.packer import Packer
from weft_rl.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    ModelChangedError,
    WeftError,
)
from weft_rl.contract.tensors import DataType

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


class Headed(Model):
    """The model with an output layer, which is a parameter of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.lm_head = nn.Linear(HIDDEN, 50, bias=False)


def copied(seed: int) -> Headed:
    """A model whose output layer equals its embedding, and is another parameter."""
    model = Headed(seed)
    model.lm_head.weight.data.copy_(model.embed.weight.data)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineDouble, Publisher]]:
    """A pool of the model without an output layer, as where it is tied to the embedding."""
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db") as pool:
        pool.add_replica("replica-0", engine := EngineDouble(weights(Model())))
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20) as publisher:
            yield engine, publisher


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineDouble, Publisher]]:
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db") as pool:
        pool.add_replica("replica-0", engine := EngineDouble(weights(Headed())))
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20) as publisher:
            yield engine, publisher


def save(path: Path, files: dict[str, Tensors], index: dict[str, str] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return path


def halves(tensors: Tensors) -> tuple[dict[str, Tensors], dict[str, str]]:
    """Two files with all tensors, and their index."""
    names = list(tensors)
    parts = {
        f"model-0000{i}-of-00002.safetensors": {name: tensors[name] for name in some}
        for i, some in enumerate((names[::2], names[1::2]), 1)
    }
    return parts, {name: file for file, some in parts.items() for name in some}


def refused(publisher: Publisher, engine: EngineDouble, path: Path, words: str) -> None:
    """The push is refused, nothing has changed, and the next push works."""
    before = {name: tensor.clone() for name, tensor in engine.base.items()}
    with pytest.raises(InvalidRequestError, match=words):
        publisher.push_base(path)
    assert same(engine.base, before)


# -- files -------------------------------------------------------------------------------------


def _beside(path: Path, tensors: Tensors) -> Path:
    return save(path, {"model.safetensors": tensors, "consolidated.safetensors": {"tok": ONE}})


ONE = torch.ones(3)
_LEFT_OVER = {"embed.weight": torch.zeros(50, HIDDEN)}


def _indexed(path: Path, tensors: Tensors) -> Path:
    parts, index = halves(tensors)
    return save(path, {**parts, "model.safetensors": _LEFT_OVER, "other.safetensors": {"o": ONE}},
                index)  # fmt: skip


def _stale_within(path: Path, tensors: Tensors) -> Path:
    """A tensor in both files of the index, which says which one counts."""
    parts, index = halves(tensors)
    holder = index["embed.weight"]
    other = next(name for name in parts if name != holder)
    return save(path, {**parts, other: {**parts[other], **_LEFT_OVER}}, index)


def _two_indices(path: Path, tensors: Tensors) -> Path:
    parts, index = halves(tensors)
    save(path, {**parts, "consolidated-00001.safetensors": {"tok": ONE}}, index)
    text = json.dumps({"weight_map": {"tok": "consolidated-00001.safetensors"}})
    (path / "consolidated.safetensors.index.json").write_text(text)
    return path


def _links(path: Path, tensors: Tensors) -> Path:
    """Links as in the Hugging Face cache, and one to a file under another name."""
    blobs = save(path / "blobs", {"abc": tensors}) / "abc"
    found = path / "snapshot"
    found.mkdir()
    (found / "model.safetensors").symlink_to(blobs)
    (found / "weights.safetensors").symlink_to("model.safetensors")
    return found


def _hidden(path: Path, tensors: Tensors) -> Path:
    save(path, {"model.safetensors": tensors})
    (path / "._model.safetensors").write_bytes(b"of another system")
    return path


def _adapter_beside(path: Path, tensors: Tensors) -> Path:
    return save(path, {"model.safetensors": tensors, "adapter_model.safetensors": {"a": ONE}})


@pytest.mark.parametrize(
    "made",
    [_beside, _indexed, _stale_within, _two_indices, _links, _hidden, _adapter_beside],
)
def test_a_directory_is_read_as_a_loader_reads_it(
    served: tuple[EngineDouble, Publisher], tmp_path: Path, made: Callable[..., Path]
) -> None:
    engine, publisher = served
    path, tensors = tmp_path / "model", weights(Model(seed := len(made.__name__)))
    path.mkdir()
    publisher.push_base(made(path, tensors))
    assert same(engine.base, tensors), seed


def _missing_file(path: Path, tensors: Tensors) -> None:
    parts, index = halves(tensors)
    save(path, parts, index)
    (path / min(parts)).unlink()


def _dangling(path: Path, tensors: Tensors) -> None:
    (path / "model.safetensors").symlink_to("nowhere")


def _lacks_tensor(path: Path, tensors: Tensors) -> None:
    parts, index = halves(tensors)
    first = next(iter(index))
    save(path, parts, {**index, first: max(parts) if index[first] == min(parts) else min(parts)})


def _no_index(path: Path, tensors: Tensors) -> None:
    parts, _ = halves(tensors)
    save(path, {**parts, "model.safetensors": tensors})


def _pickled(path: Path, tensors: Tensors) -> None:
    torch.save(tensors, path / "pytorch_model.bin")


def _adapter_only(path: Path, tensors: Tensors) -> None:
    peft_of(Model()).save_pretrained(path)


def _outside(path: Path, tensors: Tensors) -> None:
    save(path, {}, {"embed.weight": "../model.safetensors"})


def _odd_index(path: Path, tensors: Tensors) -> None:
    save(path, {"model.safetensors": tensors})
    (path / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": 7}}))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (_missing_file, r"index\.json names model-00001-of-00002\.safetensors, which is not there"),
        (_dangling, "no regular file"),
        (_lacks_tensor, "says that 'embed.weight' is in model-00002.*holds no such tensor"),
        (_no_index, "two files hold a tensor 'embed.weight', .*no index says which one counts"),
        (_pickled, r"no \.safetensors file, but pytorch_model.bin: .*safe_serialization=True"),
        (_adapter_only, "is a PEFT adapter, not a whole model: push it by push_adapter"),
        (_outside, "names no files that lie beside it"),
        (_odd_index, "names no files that lie beside it"),
        (lambda path, _: None, r"holds no \*\.safetensors"),
        (lambda path, _: path.rmdir(), "does not exist"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(
    served: tuple[EngineDouble, Publisher],
    tmp_path: Path,
    made: Callable[[Path, Tensors], object],
    words: str,
) -> None:
    engine, publisher = served
    path = tmp_path / "model"
    path.mkdir()
    made(path, weights(Model(1)))
    refused(publisher, engine, path, words)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, Path("/dev/null"), "/nowhere/at/all"])
def test_a_path_that_no_file_has_is_refused(
    served: tuple[EngineDouble, Publisher], path: Any
) -> None:
    publisher = served[1]
    pushes: list[Callable[[], object]] = [
        lambda: publisher.push_base(path),
        lambda: publisher.push_adapter(path, "math"),
        lambda: publisher.push_base(Model(), draft=path),
    ]
    for push in pushes:
        with pytest.raises(WeftError):
            push()


# -- names of wrappers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
@pytest.mark.parametrize("way", ["directory", "tensors", "metadata"])
def test_names_of_wrappers_are_taken_off(
    untied: tuple[EngineDouble, Publisher], tmp_path: Path, prefix: str, way: str
) -> None:
    engine, publisher = untied
    tensors = weights(Headed(seed := len(prefix) + len(way)))
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if way == "directory":
        publisher.push_base(save(tmp_path / "m", {"model.safetensors": named}))
    else:
        publisher.push_tensors(named, metadata=named if way == "metadata" else None)
    assert same(engine.base, tensors), seed


def test_nobody_is_told_that_the_head_of_another_name_is_tied(
    served: tuple[EngineDouble, Publisher], tmp_path: Path
) -> None:
    engine, publisher = served
    tensors = {f"base_model.model.{name}": t for name, t in weights(Headed(2)).items()}
    path = save(tmp_path / "m", {"model.safetensors": tensors})
    refused(publisher, engine, path, "'base_model.model.embed.weight' is not a tensor of Model"
            "|'base_model.model.lm_head.weight' is not a tensor of Model")  # fmt: skip


def test_one_tensor_under_two_names_is_refused(
    served: tuple[EngineDouble, Publisher], tmp_path: Path
) -> None:
    engine, publisher = served
    tensors = {**weights(Model(2)), "_orig_mod.embed.weight": torch.ones(50, HIDDEN)}
    path = save(tmp_path / "m", {"model.safetensors": tensors})
    refused(publisher, engine, path, "holds 'embed.weight' twice")


def test_an_adapter_of_a_compiled_model_is_read(
    served: tuple[EngineDouble, Publisher], tmp_path: Path
) -> None:
    engine, publisher = served
    model = peft_of(Model(), seed=4)
    model.save_pretrained(tmp_path)
    names = {
        name.replace("base_model.model.", "base_model.model._orig_mod."): tensor
        for name, tensor in lora(model).items()
    }
    save_file(names, tmp_path / "adapter_model.safetensors")
    version = publisher.push_adapter(tmp_path, "compiled").version
    assert same(engine.adapter(str(version)), lora(model))


# -- a head that is a copy -----------------------------------------------------------------------


def _saved(model: nn.Module, path: Path, **config: Any) -> Path:
    save(path, {"model.safetensors": weights(model)})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("way", ["live", "directory", "said", "merged"])
def test_a_head_that_is_a_copy_is_left_out_where_the_pool_ties_it(
    served: tuple[EngineDouble, Publisher], tmp_path: Path, way: str
) -> None:
    engine, publisher = served
    model = copied(len(way))
    held = weights(model)
    if way == "live":
        publisher.push_base(model)
        publisher.push_base_async(model).result(20)
    elif way == "merged":
        tuned = peft_of(model)
        publisher.push_merged(tuned)
        held = weights(tuned.merge_and_unload())
    else:
        publisher.push_base(_saved(model, tmp_path / "m", tie_word_embeddings=way == "said"))
    del held["lm_head.weight"]
    assert held.keys() == engine.base.keys()
    assert all(torch.allclose(held[name], engine.base[name], atol=1e-6) for name in held)


@pytest.mark.parametrize("way", ["live", "later", "async", "directory", "said", "merged"])
def test_a_head_of_its_own_is_refused_by_name_where_the_pool_ties_it(
    served: tuple[EngineDouble, Publisher], tmp_path: Path, way: str
) -> None:
    engine, publisher = served
    model = copied(1)
    publisher.push_base(model)
    before = {name: tensor.clone() for name, tensor in engine.base.items()}
    model.lm_head.weight.data[3, 3] += 1  # as training moves it
    pushes: dict[str, Callable[[], object]] = {
        "live": lambda: publisher.push_base(Headed(3)),
        "later": lambda: publisher.push_base(model),
        "async": lambda: publisher.push_base_async(model).result(20),
        "merged": lambda: publisher.push_merged(
            peft_of(copied(1), target_modules=["embed", "q_proj"])
        ),
    }
    path = _saved(model, tmp_path / "m", tie_word_embeddings=way == "said")
    push = pushes.get(way, lambda: publisher.push_base(path))
    with pytest.raises(InvalidManifestError, match=r"'lm_head\.weight' .* does not equal 'embed"):
        push()
    assert same(engine.base, before)


def test_an_async_push_compares_the_head_that_it_froze(
    served: tuple[EngineDouble, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the model: what was a copy at the call is sent, and only that."""
    engine, publisher = served
    gate, pack = threading.Event(), Packer.pack

    def late(*given: Any, **more: Any) -> Any:
        assert gate.wait(20)
        return pack(*given, **more)

    monkeypatch.setattr(Packer, "pack", late)
    first = publisher.push_base_async(Model(1))  # so that the others are asked about later
    trained, tied_again = copied(2), Headed(3)
    held = weights(trained)
    is_a_copy, is_none = map(publisher.push_base_async, (trained, tied_again))
    trained.lm_head.weight.data.add_(1)
    tied_again.lm_head.weight.data.copy_(tied_again.embed.weight.data)
    gate.set()
    first.result(20)
    is_a_copy.result(20)
    with pytest.raises(InvalidManifestError, match="does not equal 'embed"):
        is_none.result(20)
    del held["lm_head.weight"]
    assert same(engine.base, held)


def test_a_head_in_the_files_is_sent_where_the_pool_has_one(
    untied: tuple[EngineDouble, Publisher], tmp_path: Path
) -> None:
    """Whatever the config says: what is served counts."""
    engine, publisher = untied
    model = Headed(7)
    publisher.push_base(_saved(model, tmp_path / "m", tie_word_embeddings=True))
    assert same(engine.base, weights(model))


def test_one_model_is_pushed_to_both_kinds_of_pools(
    served: tuple[EngineDouble, Publisher], untied: tuple[EngineDouble, Publisher]
) -> None:
    model = copied(5)
    for engine, publisher in (served, untied, served):
        publisher.push_base(model)
        held = weights(model)
        assert same(engine.base, {name: held[name] for name in engine.base})
    assert "lm_head.weight" in untied[0].base


def test_a_head_that_the_pool_has_and_the_model_has_not_is_missed_by_name(
    untied: tuple[EngineDouble, Publisher],
) -> None:
    with pytest.raises(InvalidManifestError, match=r"'lm_head\.weight' is missing"):
        untied[1].push_base(Model(1))


# -- files that change during a push -------------------------------------------------------------


@pytest.mark.parametrize("stray", ["model.safetensors", "adapter_model.safetensors", "state.json"])
def test_a_file_that_is_not_read_may_be_written_during_the_push(
    served: tuple[EngineDouble, Publisher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stray: str,
) -> None:
    engine, publisher = served
    path, pack = _indexed(tmp_path / "m", weights(Model(8))), Packer.pack
    (path / stray).unlink(missing_ok=True)

    def beside(*given: Any, **more: Any) -> Any:
        save(path, {stray: _LEFT_OVER})
        return pack(*given, **more)

    monkeypatch.setattr(Packer, "pack", beside)
    publisher.push_base(path)
    assert same(engine.base, weights(Model(8)))


@pytest.mark.parametrize("written", [INDEX, "config.json"])
def test_a_file_that_is_read_may_not(
    served: tuple[EngineDouble, Publisher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: str,
) -> None:
    engine, publisher = served
    before = {name: tensor.clone() for name, tensor in engine.base.items()}
    path, pack = _indexed(tmp_path / "m", weights(Model(9))), Packer.pack

    def inside(*given: Any, **more: Any) -> Any:
        (path / written).write_text("{}")
        return pack(*given, **more)

    monkeypatch.setattr(Packer, "pack", inside)
    with pytest.raises(ModelChangedError, match=f"file '{written}' of"):
        publisher.push_base(path)
    assert same(engine.base, before)


# -- dtypes --------------------------------------------------------------------------------------

FLOATS = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)


@pytest.mark.parametrize(("own", "other"), [*itertools.permutations(FLOATS, 2)])
def test_without_a_cast_no_other_dtype_is_taken(
    own: DataType, other: DataType, tmp_path: Path
) -> None:
    torch_dtype = getattr(torch, own.torch_name)
    model, keep = Model(1).to(torch_dtype), PushOptions(cast=False)
    path = save(tmp_path / "m", {"model.safetensors": weights(model)})
    tuned = peft_of(Model(1)).to(torch_dtype)
    tuned.save_pretrained(tmp_path / "a")
    words = f"is {own.torch_name}, the (pool|served model) takes {other.torch_name}: push with cast"
    with running_pool(tmp_path / "weft.db") as pool:
        held = weights(Model().to(getattr(torch, other.torch_name)))
        pool.add_replica(
            "replica-0", engine := EngineDouble(held, base_dtype=other, adapter_dtype=other)
        )
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20) as publisher:
            pushes: list[Callable[..., object]] = [
                lambda **how: publisher.push_base(model, **how),
                lambda **how: publisher.push_base_async(model, **how).result(20),
                lambda **how: publisher.push_base(path, **how),
                lambda **how: publisher.push_merged(tuned, **how),
                lambda **how: publisher.push_tensors(weights(model), **how),
                lambda **how: publisher.push_tensors(
                    weights(model), metadata=weights(model), **how
                ),
                lambda **how: publisher.push_adapter(tuned, "math", **how),
                lambda **how: publisher.push_adapter(tmp_path / "a", "math", **how),
            ]
            for push in pushes:
                with pytest.raises(InvalidManifestError, match=words):
                    push(options=keep)
            assert same(engine.base, held)
            for push in pushes:
                push()

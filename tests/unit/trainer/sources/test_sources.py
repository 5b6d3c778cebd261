"""What a source says it will send, and that it sends just that."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from tests import models
from tests.doubles.packing import SourcePacker
from tests.doubles.wire import put_tail
from trainer_side.params.choose import open_model
from trainer_side.params.names import base_name_in_peft, plan_conversions, unwrapped_name
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import CheckpointSource, adapter_of_dir
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule, ParamsSource, tensor_source
from weft_rl.contract.errors import InvalidAdapterError, InvalidManifestError, InvalidRequestError
from weft_rl.contract.manifest import ALIGN_BYTES, plan_buckets
from weft_rl.contract.tensors import DataType
from weft_rl.transport.wire.buckets import verify_bucket

KEEP = CastRule(enabled=False)


def module_source(model):
    opened = open_model(model, OneRank())
    return ModuleSource(opened.module, opened.params, KEEP)


def packed(source, bucket_bytes):
    """Everything a source sends, through the packer, as a dict of copies."""
    manifest = plan_buckets(source.metas, bucket_bytes)
    packer = SourcePacker(source, manifest)
    out, position = {}, 0
    for index, bucket in enumerate(manifest.buckets):
        found = packer.pack(index, nonce=7)
        wire = packer.wire(index)
        put_tail(wire, found.sealed)
        assert verify_bucket(wire, manifest, index, 7) == found.digests
        for slot in manifest.tensors[position : position + bucket.num_tensors]:
            raw = wire[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
            tensor = raw.view(getattr(torch, slot.meta.dtype.torch_name)).view(slot.meta.shape)
            out[slot.meta.name] = tensor.clone()
        position += bucket.num_tensors
    return out


def test_a_checkpoint_leaves_out_layers_for_drafts(tmp_path):
    names = ["model.layers.0.up.weight", "model.layers.1.up.weight", "mtp.fc.weight", "a.weight"]
    safetensors.torch.save_file(
        {name: torch.ones(2) for name in names}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 1}}')
    source = CheckpointSource(tmp_path, KEEP)
    assert [meta.name for meta in source.metas] == ["a.weight", "model.layers.0.up.weight"]
    assert source.description.endswith("2 tensors, without 2 of layers for drafts")
    kept = CheckpointSource(tmp_path, KEEP, {"mtp.fc.weight"})
    assert [meta.name for meta in kept.metas] == sorted({*names} - {"model.layers.1.up.weight"})


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("bucket_bytes", [20_000, 2**25])
def test_a_module_travels_as_its_checkpoint(kind, bucket_bytes, tmp_path):
    path = models.make_model(kind, tmp_path / kind)
    model = models.load_hf(path)
    sent = packed(module_source(model), bucket_bytes)
    saved = packed(CheckpointSource(path, KEEP), bucket_bytes)
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, sent[name]), name


def test_floats_are_cast_but_for_exceptions_and_integers():
    tensors = {"a": torch.randn(5, 3), "router": torch.randn(4), "steps": torch.arange(6)}
    rule = CastRule(True, DataType.BFLOAT16, {"router": DataType.FLOAT32})
    sent = packed(tensor_source(tensors, rule, "test"), 2**20)
    assert torch.equal(sent["a"], tensors["a"].bfloat16())
    assert torch.equal(sent["router"], tensors["router"])
    assert torch.equal(sent["steps"], tensors["steps"])


def test_large_parameters_that_lie_here_are_copied_from_where_they_are(monkeypatch):
    """As they travel; what is not so is read as before."""
    tensors = {"large": torch.randn(300, 500), "odd": torch.randn(7), "more": torch.randn(2**17)}
    source = tensor_source(tensors, KEEP, "test")
    cast = tensor_source(tensors, CastRule(True, DataType.BFLOAT16, {}), "test")
    want = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert all(torch.equal(sent, want[name]) for name, sent in packed(cast, 2**22).items())
    monkeypatch.setattr(ParamsSource, "read", lambda *args: pytest.fail("it was read"))
    sent = packed(source, 2**22)
    assert all(torch.equal(sent[name], tensor) for name, tensor in tensors.items())


def test_non_contiguous_parameters_travel_row_major():
    tensors = {"t": torch.randn(6, 4).t(), "s": torch.tensor(3.0)}
    sent = packed(tensor_source(tensors, KEEP, "test"), 2**20)
    assert torch.equal(sent["t"], tensors["t"])
    assert torch.equal(sent["s"], tensors["s"])


def test_reused_buffers_do_not_leak_into_the_padding():
    """Equal weights digest equally whatever the buffer held before."""
    source = tensor_source({"a": torch.ones(3)}, KEEP, "test")
    manifest = plan_buckets(source.metas)
    clean, dirty = SourcePacker(source, manifest), SourcePacker(source, manifest)
    dirty.packer.buffers[0].fill_(255)
    assert clean.pack(0).digests == dirty.pack(0).digests


def test_two_buffers_are_enough_and_are_handed_on():
    source = tensor_source({f"l.{i}.w": torch.randn(64) for i in range(9)}, KEEP, "test")
    manifest = plan_buckets(source.metas, ALIGN_BYTES)
    packer = SourcePacker(source, manifest).packer
    assert len(packer.buffers) == 2
    again = SourcePacker(source, manifest, buffers=packer.buffers).packer
    assert [b.data_ptr() for b in again.buffers] == [b.data_ptr() for b in packer.buffers]


def test_emptied_parameters_are_refused():
    class Emptied(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(0))

    with pytest.raises(InvalidManifestError, match=r"'w' has shape \(0\)"):
        plan_buckets(module_source(Emptied()).metas)
    with pytest.raises(InvalidManifestError, match="meta device"):
        module_source(nn.Linear(2, 2, device="meta"))


def test_dtype_that_cannot_travel():
    with pytest.raises(InvalidManifestError, match="complex64"):
        tensor_source({"c": torch.zeros(2, dtype=torch.complex64)}, KEEP, "test")


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("module.model.layers.0.w", "model.layers.0.w"),
        ("_orig_mod.model._fsdp_wrapped_module.w", "model.w"),
        ("model._checkpoint_wrapped_module.module.w", "model.module.w"),
        ("my_module.w", "my_module.w"),
    ],
)
def test_wrapper_components_go_as_whole_components(wrapped, name):
    assert unwrapped_name(wrapped) == name


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("base_model.model.model.q_proj.base_layer.weight", "model.q_proj.weight"),
        ("base_model.model.model.q_proj.lora_A.default.weight", None),
        ("base_model.model.my_base_layer_norm.weight", "my_base_layer_norm.weight"),
        ("base_model.model.head.original_module.weight", "head.weight"),
        ("base_model.model.head.modules_to_save.default.weight", None),
    ],
)
def test_base_names_inside_peft(wrapped, name):
    assert base_name_in_peft(wrapped) == name


def test_conversions_that_need_several_parameters_are_grouped_by_layer():
    """A many-to-one conversion, as some types have: q and k of a layer make one."""

    def revert(tensors):
        out = dict(tensors)
        for layer in ("l.0", "l.1"):
            q, k = out.pop(f"{layer}.q", None), out.pop(f"{layer}.k", None)
            if q is not None or k is not None:
                out[f"{layer}.qk"] = torch.cat([t for t in (q, k) if t is not None])
        return out

    params = {f"l.{i}.{n}": torch.ones(4, 2) for i in range(2) for n in ("q", "o", "k")}
    groups, outputs = plan_conversions(params, revert)
    assert {(g.sources, g.targets) for g in groups} == {
        (("l.0.o",), ("l.0.o",)),
        (("l.0.q", "l.0.k"), ("l.0.qk",)),
        (("l.1.o",), ("l.1.o",)),
        (("l.1.q", "l.1.k"), ("l.1.qk",)),
    }
    assert outputs["l.1.qk"].shape == (8, 2)


def test_what_comes_out_as_it_went_in_is_asked_for_once():
    calls = []

    def revert(tensors):
        calls.append([*tensors])
        out = {}
        for name, tensor in tensors.items():
            if name.endswith("scaled"):  # in its own place: another content under its name
                out[name] = tensor.mul_(2)
            elif name.endswith("split"):
                out[name + ".a"], out[name + ".b"] = tensor[:2], tensor[2:]
            else:
                out["model." + name] = tensor
        return out

    params = {f"l.{i}.{n}": torch.ones(4, 2) for i in range(3) for n in ("q", "scaled", "split")}
    groups, _ = plan_conversions(params, revert)
    assert calls == [[*params], *[[f"l.{i}.{n}"] for i in range(3) for n in ("scaled", "split")]]
    found = {group.sources[0]: (group.targets, group.is_identity) for group in groups}
    assert found["l.1.q"] == (("model.l.1.q",), True)
    assert found["l.1.scaled"] == (("l.1.scaled",), False)
    assert found["l.1.split"] == (("l.1.split.a", "l.1.split.b"), False)


def test_adapter_of_a_model_and_of_its_directory_are_the_same(tmp_path):
    path = models.make_model("qwen2", tmp_path / "base")
    saved = models.make_adapter(path, tmp_path / "adapter", seed=1)
    peft_model = models.load_peft(path, saved)
    live = adapter_of_model(open_model(peft_model, OneRank()), "default", KEEP, check_base=True)
    read = adapter_of_dir(saved, KEEP)
    assert packed(live.source, 2**20).keys() == packed(read.source, 2**20).keys()
    for name, tensor in packed(read.source, 2**20).items():
        assert torch.equal(tensor, packed(live.source, 2**20)[name])
    mine, theirs = json.loads(live.config_json), json.loads(read.config_json)
    for key in ("r", "lora_alpha", "peft_type", "bias", "use_dora", "rank_pattern"):
        assert mine[key] == theirs[key], key
    assert sorted(mine["target_modules"]) == sorted(theirs["target_modules"])
    assert live.base.architecture == "Qwen2ForCausalLM"
    assert read.base is None


def test_adapter_requests_that_make_no_sense(tmp_path):
    with pytest.raises(InvalidAdapterError, match="not a PEFT model"):
        adapter_of_model(open_model(nn.Linear(2, 2), OneRank()), "default", KEEP, check_base=True)
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json"):
        adapter_of_dir(tmp_path, KEEP)
    with pytest.raises(InvalidRequestError, match=r"no \.safetensors file"):
        CheckpointSource(tmp_path, KEEP)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_the_kind_of_trainer_is_told_by_looking_and_may_be_named():
    model = nn.Linear(2, 2)
    assert open_model(model, OneRank(), "whole").params.kind == "plain"
    assert open_model(torch.compile(model), OneRank()).params.kind == "compiled"
    assert list(open_model(torch.compile(model), OneRank()).params.metas) == ["weight", "bias"]
    with pytest.raises(InvalidRequestError, match="held as 'plain', not as 'fsdp2'"):
        open_model(model, OneRank(), "fsdp2")


@pytest.mark.parametrize("dtype", list(DataType), ids=lambda dtype: dtype.name)
def test_element_types_are_named_as_safetensors_names_them(dtype):
    tensor = torch.zeros(2, dtype=getattr(torch, dtype.torch_name))
    saved = safetensors.torch.save({"a": tensor})
    header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
    assert header["a"]["dtype"] == dtype.safetensors_name
    assert DataType.of_safetensors(dtype.safetensors_name) is dtype

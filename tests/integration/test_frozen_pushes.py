"""A push sends what the model was at the call, whatever becomes of the model before it is read."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialize

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, lora, peft_of, same, weights
from trainer_side import Publisher
from trainer_side.packing.packer import Packer
from trainer_side.params.snapshot import HostMemory
from trainer_side.pool.client import PoolClient
from trainer_side.pushes.content import base_content
from trainer_side.ranks.ranks import OneRank
from weft_rl import host_memory
from weft_rl.contract.errors import ModelChangedError, PeerUnavailableError
from weft_rl.contract.names import PolicyVersion

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db") as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool):
    engine = EngineDouble(weights(Model(9)))
    pool.add_replica("replica-0", engine)
    return engine


@pytest.fixture
def publisher(pool, engine):
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=30) as publisher:
        yield publisher


@pytest.fixture
def gate(monkeypatch):
    """Holds every push before its first bucket until it is set."""
    gate, original = threading.Event(), Packer.pack
    gate.packing = threading.Event()

    def pack(packer, index, *rest, **more):
        gate.packing.set()
        assert gate.wait(20)
        return original(packer, index, *rest, **more)

    monkeypatch.setattr(Packer, "pack", pack)
    yield gate
    gate.set()


def _add(model, which=lambda name: True):
    with torch.no_grad():
        for name, param in model.named_parameters():
            if which(name):
                param.add_(1.0)


def _add_to_data(model):
    for param in model.parameters():
        param.data.mul_(3.0)


def _swap_data(model):
    for param in model.parameters():
        param.data = torch.zeros_like(param)


def _replace_parameters(model):
    for module in list(model.modules()):
        for name, param in list(module._parameters.items()):
            if param is not None:
                setattr(module, name, torch.nn.Parameter(torch.zeros_like(param)))


def _optimizer_step(model, **options):
    params = [p.requires_grad_() for p in model.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(params, lr=0.5, **options).step()


def _resize(model):
    base = getattr(model, "get_base_model", lambda: model)()
    base.embed = torch.nn.Embedding(60, 32)


def _merge_twice(model):
    for _ in range(2):
        model.merge_adapter()
        model.unmerge_adapter()
    model.merge_adapter()


def _scale(model):
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling["default"] *= 5


def _other_adapter(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")


def _configure(model):
    config = model.peft_config["default"]
    config.lora_alpha, config.r, config.target_modules = 99, 1, {"k_proj"}
    config.use_rslora, config.peft_type = True, "IA3"


def _save(path):
    def save(model):
        model.merge_adapter()
        model.save_pretrained(path)

    return save


def _delete(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.delete_adapter("default")


def _load(model):
    model.load_state_dict({name: t * 0 + 7 for name, t in model.state_dict().items()})


def _to(model):
    model.to(torch.float64)
    model.to(torch.bfloat16)


def _to_empty(model):
    model.to_empty(device="meta")


def _children(model):
    base = getattr(model, "get_base_model", lambda: model)()
    del base.layers[2]
    base.extra = torch.nn.Linear(2, 2)


OF_ANY = {
    "added in place": _add,
    "changed by .data": _add_to_data,
    "swapped by .data": _swap_data,
    "replaced": _replace_parameters,
    "optimizer": _optimizer_step,
    "fused optimizer": lambda model: _optimizer_step(model, fused=True),
    "resized": _resize,
    "loaded": _load,
    "another dtype": _to,
    "on meta": _to_empty,
    "other children": _children,
}
OF_PEFT = {
    "merged": lambda model: model.merge_adapter(),
    "merged and unmerged": _merge_twice,
    "scaled": _scale,
    "frozen weights": lambda model: _add(model, lambda name: "lora_" not in name),
    "adapter": lambda model: _add(model, lambda name: "lora_" in name),
    "another adapter": _other_adapter,
    "configured": _configure,
    "merged and unloaded": lambda model: model.merge_and_unload(),
    "unloaded": lambda model: model.unload(),
    "deleted": _delete,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "trains everything": lambda model: [p.requires_grad_(True) for p in model.parameters()],
    "config is gone": lambda model: model.peft_config.clear(),
}


@pytest.mark.parametrize("what", ["base", "adapter", "merged"])
def test_an_async_push_sends_what_the_model_was_whatever_becomes_of_it(
    what, engine, publisher, gate, tmp_path
):
    """Each of two pushes that wait: the second is of the changed model, or refused."""
    changes = OF_ANY if what == "base" else {**OF_ANY, **OF_PEFT, "saved": _save(tmp_path)}
    wrong = []
    for name, change in changes.items():
        gate.clear()
        model = Model(3) if what == "base" else peft_of(Model(3))
        if what == "base":
            expected, future = weights(model), publisher.push_base_async(model)
        elif what == "adapter":
            expected, future = lora(model), publisher.push_adapter_async(model, "math")
        else:
            expected = weights(peft_of(Model(3)).merge_and_unload())
            future = publisher.push_merged_async(model)
        change(model)
        gate.set()
        try:
            version = future.result(20).version
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
            continue
        served = engine.adapter(str(version)) if what == "adapter" else engine.base
        is_right = served.keys() == expected.keys() and all(
            torch.allclose(served[n], expected[n], rtol=0, atol=1e-6) for n in expected
        )
        if not is_right:
            wrong.append(f"{name}: other weights")
    assert not wrong, "\n".join(wrong)


def test_what_a_copy_costs_is_in_the_report(engine, publisher, gate):
    gate.set()
    model = peft_of(Model(3))
    report = publisher.push_merged_async(model).result(20).report
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert report.copied_bytes == num_bytes
    assert report.copying_seconds > 0
    assert report.copies_memory_bytes >= num_bytes
    assert publisher.push_merged(model).report.copied_bytes == 0


class TestWithoutRoom:
    """On a host that has no room for a copy."""

    @pytest.fixture(autouse=True)
    def no_room(self, monkeypatch):
        monkeypatch.setattr(host_memory, "available_memory", lambda: (0, "memory of this machine"))

    def test_frozen_weights_are_read_in_place(self, engine, publisher, gate):
        model = peft_of(Model(3))
        future = publisher.push_merged_async(model)
        _add(model, lambda name: "lora_" in name)
        gate.set()
        report = future.result(20).report
        (remark,) = [remark for remark in report.remarks if "read in place" in remark]
        assert "memory of this machine" in remark
        expected = weights(peft_of(Model(3)).merge_and_unload())
        assert all(torch.allclose(engine.base[n], t, atol=1e-6) for n, t in expected.items())

    @pytest.mark.parametrize("change", ["merged", "frozen weights", "changed by .data"])
    def test_and_refused_if_they_changed_meanwhile(self, change, engine, publisher, gate):
        served, model = engine.base, peft_of(Model(3))
        future = publisher.push_merged_async(model)
        {**OF_ANY, **OF_PEFT}[change](model)
        gate.set()
        with pytest.raises(ModelChangedError, match="was changed in place") as caught:
            future.result(20)
        assert caught.value.reason == "MODEL_CHANGED"
        assert engine.base is served or same(engine.base, served)


SYNC = {
    "base": ["added in place", "changed by .data", "swapped by .data", "fused optimizer"],
    "adapter": ["adapter", "changed by .data", "configured", "fused optimizer"],
    "merged": ["merged", "scaled", "frozen weights", "adapter", "optimizer"],
}


@pytest.mark.parametrize(("what", "change"), [(w, c) for w, cs in SYNC.items() for c in cs])
def test_a_push_that_blocks_looks_again_before_anything_is_committed(
    what, change, engine, publisher, gate
):
    model = Model(3) if what == "base" else peft_of(Model(3))
    before = {name: tensor.clone() for name, tensor in engine.base.items()}
    push = {
        "base": lambda: publisher.push_base(model),
        "adapter": lambda: publisher.push_adapter(model, "looked"),
        "merged": lambda: publisher.push_merged(model),
    }[what]
    gate.clear()
    with ThreadPoolExecutor(1) as beside:
        pushed = beside.submit(push)
        assert gate.packing.wait(20)
        {**OF_ANY, **OF_PEFT}[change](model)
        gate.set()
        with pytest.raises(ModelChangedError) as caught:
            pushed.result(20)
    assert "Nothing was committed" in str(caught.value)
    assert same(engine.base, before)
    if what == "adapter":
        assert engine.store.adapter(PolicyVersion("looked", 1)) is None


@pytest.fixture
def interrupted(monkeypatch):
    """Has the first attempt of the next push end for a reason that passes; calls what is set."""
    original, between = PoolClient.outcome, []

    def outcome(client, *rest):
        if between:
            between.pop()()
            client.end(error := PeerUnavailableError("the last replica is lost"))
            raise error
        return original(client, *rest)

    def begin_sending(client, *rest):
        if between:
            raise PeerUnavailableError("the last replica is lost")
        return sending(client, *rest)

    sending = PoolClient.begin_sending
    monkeypatch.setattr(PoolClient, "begin_sending", begin_sending)
    monkeypatch.setattr(PoolClient, "outcome", outcome)
    return between


def test_a_further_attempt_sends_what_the_first_one_would_have(
    engine, publisher, gate, interrupted
):
    gate.set()
    model = peft_of(Model(3))
    interrupted.append(lambda: [model.merge_adapter(), _add(model)])
    result = publisher.push_merged_async(model).result(20)
    expected = weights(peft_of(Model(3)).merge_and_unload())
    assert all(torch.allclose(engine.base[n], t, atol=1e-6) for n, t in expected.items())
    assert any("begun again" in remark for remark in result.report.remarks)


def test_a_further_attempt_of_a_push_that_blocks_is_of_the_same_model(
    engine, publisher, gate, interrupted
):
    gate.set()
    model = Model(3)
    interrupted.append(lambda: _add(model))
    with pytest.raises(ModelChangedError, match=r"'embed\.weight' was changed in place"):
        publisher.push_base(model)
    interrupted.append(lambda: None)
    publisher.push_base(model)
    assert same(engine.base, weights(model))


def test_the_files_of_an_adapter_are_read_within_the_call(engine, publisher, gate, tmp_path):
    model = peft_of(Model(3))
    expected = lora(model)
    model.save_pretrained(tmp_path)
    future = publisher.push_adapter_async(tmp_path, "files")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    weights_file = tmp_path / "adapter_model.safetensors"
    written = {name: torch.zeros_like(tensor) for name, tensor in load_file(weights_file).items()}
    with weights_file.open("r+b") as file:  # in place: what maps the file sees it
        file.write(serialize(written))
    (tmp_path / "adapter_config.json").unlink()
    gate.set()
    served = engine.adapter(str(future.result(20).version))
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("is_async", [True, False])
def test_the_files_of_a_base_are_refused_if_they_were_written_meanwhile(
    is_async, engine, publisher, gate, tmp_path
):
    file = tmp_path / "model.safetensors"
    save_file(weights(Model(3)), file)
    before = {name: tensor.clone() for name, tensor in engine.base.items()}
    with ThreadPoolExecutor(1) as beside:
        push = publisher.push_base_async if is_async else publisher.push_base
        pushed = push(tmp_path) if is_async else beside.submit(push, tmp_path)
        assert gate.packing.wait(20)
        save_file(weights(Model(4)), file)
        gate.set()
        with pytest.raises(ModelChangedError, match=r"model\.safetensors"):
            pushed.result(20)
    assert same(engine.base, before)


@pytest.mark.parametrize("make", [dict, lambda tensors: list(tensors.items())])
def test_named_tensors_of_a_collection_are_looked_at_again(make, engine, publisher, gate):
    model = Model(3)
    with ThreadPoolExecutor(1) as beside:
        pushed = beside.submit(publisher.push_tensors, make(dict(model.named_parameters())))
        assert gate.packing.wait(20)
        _add(model)
        gate.set()
        with pytest.raises(ModelChangedError, match="changed in place"):
            pushed.result(20)


def test_a_copied_draft_is_that_of_the_call_too(engine, publisher, gate):
    model, draft = Model(3), torch.nn.Linear(2, 2)
    kept = base_content(model, OneRank(), True, draft=draft).kept(HostMemory(OneRank()).lend(0))
    _add(draft)
    assert not torch.equal(kept.draft.weights.params.whole("weight"), draft.weight)
    kept.check_unchanged()

"""Trainers of several ranks, with their real frameworks, push what they hold.

The engine is a double; the same with real vLLM is in tests/e2e/test_trainers.py.
One file: every case is a push of such a trainer's processes, which take seconds to start.
"""

import os
import signal
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, peft_of, same, until, weights
from tests.integration.test_named_tensors import content_digest
from tests.models import load_hf, make_model
from tests.trainers.launch import running_ranks
from trainer_side import Publisher
from weft_rl.contract.errors import CapacityError, TransferTimeoutError
from weft_rl.contract.tensors import DataType, TensorMeta


def is_merged(engine, whole):
    """Whether the base is what PEFT's own merge makes of a PEFT model's whole weights, but for the
    order that a processor sums in: it is another for a part of a row, and by processor."""
    return is_merge_of(peft_of(Model(0), use_rslora=True), engine, whole)


def is_merge_of(reference, engine, whole):
    """``is_merged``, of a PEFT model that is made so."""
    reference.load_state_dict(whole, strict=True)
    expected = weights(reference.merge_and_unload())
    return engine.base.keys() == expected.keys() and all(
        torch.allclose(
            engine.base[name], tensor, rtol=0, atol=4 * _UNIT * float(tensor.abs().max())
        )
        for name, tensor in expected.items()
    )


_UNIT = torch.finfo(torch.float32).eps

DRAFT = {"draft_model.fc.weight": torch.rand(6, 5), "draft_model.norm": torch.rand(3)}
KINDS = ("ddp", "fsdp1", "fsdp1_flat", "fsdp2", "tp", "zero1", "zero2", "zero3")

#: What the report says was found.
FOUND = {
    "ddp": "DDP", "fsdp1": "FSDP1", "fsdp1_flat": "FSDP1", "fsdp2": "FSDP2", "tp": "FSDP2",
    "zero1": "DeepSpeed", "zero2": "DeepSpeed", "zero3": "DeepSpeed ZeRO-3",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    # Nobody is lost here for being slow: some frameworks keep both cores busy.
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db", lost_after_seconds=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool):
    engine = EngineDouble(weights(Model(9)))
    engine.describe_draft(
        [TensorMeta(n, DataType.FLOAT32, tuple(t.shape)) for n, t in DRAFT.items()]
    )
    pool.add_replica("replica-0", engine)
    return engine


@pytest.fixture(scope="module")
def trainer(pool, tmp_path_factory):
    with running_ranks(tmp_path_factory.mktemp("ranks"), pool.target, 2) as trainer:
        yield trainer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_trainer_pushes_its_own_weights_bit_by_bit(kind, engine, trainer, tmp_path):
    trainer.do("make", kind=kind)
    for _ in range(2):
        trainer.do("train", steps=1)
        answers = trainer.do("push", what="base")
        assert all(answer["source"].startswith(f"{FOUND[kind]} ") for answer in answers), answers
        trainer.do("save", path=str(tmp_path / "whole.pt"))
        whole = torch.load(tmp_path / "whole.pt")
        assert same(engine.base, {name: tensor.float() for name, tensor in whole.items()})
    assert not same(engine.base, weights(Model(0)))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_draft_in_files_is_sent_beside_what_the_ranks_hold(kind, engine, trainer, tmp_path):
    files = {name.removeprefix("draft_model."): tensor for name, tensor in DRAFT.items()}
    save_file(files, tmp_path / "model.safetensors")
    trainer.do("make", kind=kind)
    trainer.do("train", steps=1)
    answers = trainer.do("push", what="base", draft=str(tmp_path))
    assert not any("error" in answer for answer in answers), answers
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert same(engine.base, {**torch.load(tmp_path / "whole.pt"), **DRAFT})
    trainer.do("make", kind=kind, peft={"seed": 1, "use_rslora": True})
    answers = trainer.do("push", what="merged", draft=str(tmp_path))
    assert not any("error" in answer for answer in answers), answers
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert same({name: engine.base.pop(name) for name in DRAFT}, DRAFT)
    assert is_merged(engine, torch.load(tmp_path / "whole.pt"))


# FSDP1 without use_orig_params takes no model that is trained in part.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fsdp1_flat"])
def test_every_kind_of_trainer_pushes_its_adapter_without_its_base(kind, engine, trainer, tmp_path):
    trainer.do("make", kind=kind, peft={"seed": 1})
    trainer.do("train", steps=1)
    version = trainer.push("adapter", policy=f"math-{kind}".replace("_", "-"))
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt")
    expected = {
        name.replace(".default", ""): tensor.float()
        for name, tensor in whole.items()
        if "lora_" in name
    }
    assert same(engine.adapter(f"math-{kind}@{version}".replace("_", "-")), expected)


def test_columns_are_sent_as_the_ranks_hold_them(engine, trainer, tmp_path):
    """Of a tensor parallel model: slices of the base, of adapters, and of what is merged, for
    which both factors are cut, too."""
    trainer.do("make", kind="tp")
    trainer.do("train", steps=1)
    _check_slices(trainer.do("push", what="base"), at_least=4)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert same(engine.base, torch.load(tmp_path / "whole.pt"))
    trainer.do("make", kind="tp", peft={"seed": 1, "use_rslora": True})
    trainer.do("train", steps=1)
    _check_slices(trainer.do("push", what="adapter", policy="columns"), at_least=6)
    _check_slices(trainer.do("push", what="merged"), at_least=4)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert is_merged(engine, torch.load(tmp_path / "whole.pt"))


def _check_slices(answers, at_least):
    """Each rank packed as many runs of several pieces, and nothing was brought together."""
    assert all(answer.get("slices", 0) >= at_least for answer in answers), answers
    remarks = " ".join(remark for answer in answers for remark in answer["remarks"])
    assert "brought together" not in remarks, answers


def test_a_forward_without_gradients_leaves_nothing_unsharded(engine, trainer, tmp_path):
    """FSDP2's root stays whole after it: plain tensors beside DTensors."""
    trainer.do("make", kind="fsdp2")
    trainer.do("forward")
    trainer.push("base")
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert same(engine.base, torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_one_adapter_of_several_in_unlike_dtypes(kind, engine, trainer, tmp_path):
    trainer.do("make", kind=kind, peft={"seed": 1}, second=True)
    trainer.do("train", steps=1)
    name = f"second-{kind}"
    version = trainer.push("adapter", policy=name, adapter_name="second")
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    expected = {
        raw.replace(".second", ""): tensor.float()
        for raw, tensor in torch.load(tmp_path / "whole.pt").items()
        if ".second." in raw
    }
    assert expected
    assert same(engine.adapter(f"{name}@{version}"), expected)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "zero3"])
def test_training_goes_on_while_its_weights_are_pushed(kind, engine, trainer, tmp_path):
    trainer.do("make", kind=kind)
    trainer.push("base")
    trainer.do("train", steps=1)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    answers = trainer.do("push_beside", what="base", steps=3)
    assert len({answer.get("version") for answer in answers}) == 1, answers
    assert same(engine.base, torch.load(tmp_path / "whole.pt"))
    trainer.do("save", path=str(tmp_path / "later.pt"))
    assert not same(engine.base, torch.load(tmp_path / "later.pt"))


def test_merged_weights_are_pushed_as_they_were_while_training_goes_on(engine, trainer, tmp_path):
    trainer.do("make", kind="fsdp2", peft={"seed": 1, "use_rslora": True})
    trainer.push("merged")
    trainer.do("train", steps=1)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    trainer.do("push_beside", what="merged", steps=3)
    assert is_merged(engine, torch.load(tmp_path / "whole.pt"))
    trainer.do("save", path=str(tmp_path / "later.pt"))
    assert not is_merged(engine, torch.load(tmp_path / "later.pt"))


@pytest.mark.parametrize("what", ["base", "merged"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2", "zero1", "zero3"])
def test_what_changes_behind_an_async_push_is_not_sent(kind, what, engine, trainer, tmp_path):
    peft = None if what == "base" else {"seed": 1, "use_rslora": True}
    trainer.do("make", kind=kind, peft=peft)
    trainer.do("train", steps=1)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt")
    answers = trainer.do("push_changed", what=what)
    if what == "base":
        assert same(engine.base, {name: tensor.float() for name, tensor in whole.items()})
    else:
        assert is_merged(engine, whole)
    copied = [answer["copied"] for answer in answers]
    assert copied[0] > 0
    assert (copied[1] == 0) == (kind in ("ddp", "zero1"))  # rank 0 sends all that is whole there


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "max_senders"), [("fsdp2", None), ("zero3", 1)])
def test_a_rank_whose_weights_change_while_they_are_read_ends_the_push_for_all(
    kind, max_senders, rank, engine, trainer
):
    trainer.do("make", kind=kind)
    trainer.do("close")
    trainer.do("open", max_senders=max_senders)
    try:
        served = {name: tensor.clone() for name, tensor in engine.base.items()}
        trainer.do("change_at_end", rank=rank)
        answers = trainer.do("push", what="base")
        assert {answer["error"] for answer in answers} == {"MODEL_CHANGED"}, answers
        assert same(engine.base, served)
        answers = trainer.do("push", what="base")
        assert not any("error" in answer for answer in answers), answers
    finally:
        trainer.do("close")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fsdp1_flat"])
def test_every_kind_of_trainer_pushes_its_base_with_the_adapter_merged(
    kind, engine, trainer, tmp_path
):
    trainer.do("make", kind=kind, peft={"seed": 1, "use_rslora": True})
    trainer.do("train", steps=1)
    trainer.do("save", path=str(tmp_path / "before.pt"))
    trainer.push("merged")
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt")
    assert same(whole, torch.load(tmp_path / "before.pt"))  # only read
    assert is_merged(engine, whole)


# Of most layers: rank 0 gathers all. Of one: it gathers that one, and each rank sends the others.
@pytest.mark.parametrize(
    ("targets", "remark"),
    [
        (
            ["q_proj", "v_proj"],
            "rank 0 gathered all: 6 of 13 tensors could not be sent by the ranks that hold them, "
            "'layers.0.q_proj.weight' first: DoRA needs whole rows, and is merged at rank 0",
        ),
        (
            ["layers.1.v_proj"],
            "layers.1.v_proj.weight could not be sent as the ranks hold them, and were brought "
            "together at rank 0 first",
        ),
    ],
)
def test_dora_is_gathered_and_merged_with_a_remark(targets, remark, engine, trainer, tmp_path):
    settings = {"use_dora": True, "target_modules": targets}
    trainer.do("make", kind="fsdp2", peft={"seed": 1, **settings})
    for _ in range(2):
        trainer.do("train", steps=1)
        answers = trainer.do("push", what="merged")
        assert [answer.get("remarks") for answer in answers] == [[remark]] * 2, answers
        trainer.do("save", path=str(tmp_path / "whole.pt"))
        reference = peft_of(Model(0), **settings)
        assert is_merge_of(reference, engine, torch.load(tmp_path / "whole.pt"))


def test_persistent_buffers_are_sent_where_the_checkpoint_has_them(tmp_path):
    """They are no parameters, and no framework shards them."""
    seen = {"layers.1.seen": torch.zeros(3)}
    with running_pool(tmp_path / "weft.db", lost_after_seconds=60) as pool:
        engine = EngineDouble({**weights(Model(9)), **seen})
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            for kind in KINDS:
                trainer.do("make", kind=kind, counting=True)
                trainer.do("train", steps=2)
                trainer.push("base")
                trainer.do("save", path=str(tmp_path / "whole.pt"))
                whole = torch.load(tmp_path / "whole.pt")
                assert engine.base.pop("layers.1.seen").tolist() == [0, 2, 4], kind
                assert same(engine.base, {name: t.float() for name, t in whole.items()}), kind
            for kind in ("ddp", "fsdp2", "zero3"):
                trainer.do("make", kind=kind, counting=True, peft={"seed": 1, "use_rslora": True})
                trainer.do("train", steps=3)
                trainer.push("merged")
                assert engine.base.pop("layers.1.seen").tolist() == [0, 3, 6], kind
                trainer.do("save", path=str(tmp_path / "whole.pt"))
                assert is_merged(engine, torch.load(tmp_path / "whole.pt")), kind
                trainer.do("push_beside", what="merged", steps=2)  # which count further
                assert engine.base["layers.1.seen"].tolist() == [0, 3, 6], kind
                trainer.push("adapter", policy=f"math-{kind}")


def test_replicated_shards_and_uneven_rows(pool, engine, trainer, tmp_path):
    """HSDP of 2 x 2 ranks, and rows that do not divide by the ranks."""
    trainer.do("close")  # gives its lease of the base back
    with running_ranks(tmp_path, pool.target, 4) as four:
        for kind in ("hsdp2", "fsdp2", "zero3"):
            four.do("make", kind=kind)
            four.do("train", steps=1)
            four.push("base")
            four.do("save", path=str(tmp_path / "whole.pt"))
            assert same(engine.base, torch.load(tmp_path / "whole.pt"))
        four.do("close")
        four.do("open", max_senders=3)
        four.do("make", kind="fsdp1")
        four.do("train", steps=1)
        answers = four.do("push", what="base")
        remark = "rank 0 gathered all: 4 ranks hold parts of it, and at most 3 may send"
        assert [answer["remarks"] for answer in answers] == [[remark]] * 4
        four.do("save", path=str(tmp_path / "whole.pt"))
        assert same(engine.base, torch.load(tmp_path / "whole.pt"))
        four.do("close")
        four.do("open")
        four.do("make", kind="fsdp2", peft={"seed": 1, "use_rslora": True})
        four.do("train", steps=1)
        four.push("merged")
        four.do("save", path=str(tmp_path / "whole.pt"))
        assert is_merged(engine, torch.load(tmp_path / "whole.pt"))
        four.do("make", kind="fsdp2")
        four.do("spoil", rank=3)
        found = errors(four.do("push", what="base", check_finite=True))
        assert [reason for _, reason, _ in found] == ["NOT_FINITE"], found
        four.do("make", kind="fsdp2")
        four.push("base")
        four.do("hold_at", bucket=1)
        four.tell("push", what="base", timeout=20.0)
        until(lambda: (tmp_path / "held").exists())
        four.processes.pop().kill()
        (tmp_path / "held").unlink()
        found = errors([process.answer(20) for process in four.processes])
        assert {kind for kind, _, _ in found} == {"PeerUnavailableError"}, found


@pytest.mark.parametrize("kind", ["fsdp2", "ep"])
def test_stacked_experts_are_sent_as_the_ranks_hold_them(kind, tmp_path):
    path = make_model("qwen3_moe", tmp_path / "moe")
    saved = load_file(path / "model.safetensors")
    engine = EngineDouble({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    with running_pool(tmp_path / "weft.db", lost_after_seconds=60) as pool:
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind=kind, model=str(path))
            answers = trainer.do("push", what="base")
            assert [answer["remarks"] for answer in answers] == [[], []], answers
            assert any(".experts.3." in name for name in saved)
            assert same(engine.base, saved)
            trainer.do("train", steps=1)
            trainer.push("base")
            trainer.do("save", path=str(tmp_path / "whole.pt"))
            assert not same(engine.base, saved)
            assert same(engine.base, _as_checkpoint(path, tmp_path))
            merged = _with_experts_merged(path, tmp_path)
            trainer.do("make", kind=kind, model=str(path), adapter=str(tmp_path / "adapter"))
            answers = trainer.do("push", what="merged")
            assert [answer["remarks"] for answer in answers] == [[], []], answers
            assert engine.base.keys() == merged.keys()
            for name, tensor in merged.items():
                assert torch.allclose(engine.base[name], tensor, rtol=1e-5, atol=1e-6), name
            assert not same(engine.base, saved)


def _as_checkpoint(path, work):
    """What was saved as "whole.pt", as transformers saves it."""
    model = load_hf(path)
    model.load_state_dict(torch.load(work / "whole.pt"), strict=False)
    model.save_pretrained(work / "trained")
    return load_file(work / "trained" / "model.safetensors")


def _with_experts_merged(path, work):
    """A checkpoint's tensors with an adapter of its experts merged in by PEFT; it is saved."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts)
    model = get_peft_model(load_hf(path), settings)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn_like(param) * 0.1)
    model.save_pretrained(work / "adapter")
    model.merge_and_unload().save_pretrained(work / "merged")
    return load_file(work / "merged" / "model.safetensors")


# -- failures: the same typed error on every rank, and nobody waits -------------------


def errors(answers):
    return {(answer.get("type"), answer.get("error"), answer.get("message")) for answer in answers}


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_what_preflight_refuses_is_refused_on_every_rank(kind, engine, trainer):
    trainer.do("make", kind=kind, peft={"seed": 1, "use_dora": True})
    found = errors(trainer.do("push", what="adapter", policy="refused"))
    assert [(kind, reason) for kind, reason, _ in found] == [
        ("InvalidAdapterError", "INVALID_ADAPTER")
    ]
    trainer.do("make", kind=kind)
    trainer.push("base")  # and the next push is none the worse


def test_a_failing_rank_fails_all_with_its_reason(engine, trainer):
    trainer.do("make", kind="fsdp2")
    trainer.do("spoil", rank=1)  # NaN in a shard of rank 1 alone
    found = errors(trainer.do("push", what="base", check_finite=True))
    assert [(kind, reason) for kind, reason, _ in found] == [("NotFiniteError", "NOT_FINITE")]
    assert "NaN" in next(iter(found))[2]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("targets", [["layers.1.v_proj"], ["q_proj", "v_proj"]])
def test_a_gather_that_fails_fails_all_and_frees_the_version(rank, targets, engine, trainer):
    """Of one tensor, before each rank sends the others; and of all, bucket by bucket."""
    trainer.do("make", kind="fsdp2", peft={"use_dora": True, "target_modules": targets})
    version = trainer.push("merged")
    trainer.do("fail_gather", rank=rank)
    answers = trainer.do("push", what="merged", timeout=30.0)
    assert errors(answers) == {("CapacityError", CapacityError("").reason, "no room")}
    assert all(answer["ended"] - answer["began"] < 10 for answer in answers)
    assert trainer.push("merged", timeout=10.0) > version


def test_ranks_that_push_unlike_models_are_refused(engine, trainer):
    trainer.do("make_unlike")
    found = errors(trainer.do("push", what="base"))
    assert [reason for _, reason, _ in found] == ["INVALID_MANIFEST"]


def test_a_coordinator_that_is_away_is_so_for_every_rank(tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            pool.stop_coordinator()
            found = errors(trainer.do("push", what="base", timeout=2.0))
            assert len(found) == 1, found
            assert next(iter(found))[1] in ("DEADLINE", "COORDINATOR_AWAY")
            pool.start_coordinator()
            trainer.push("base")


@pytest.mark.parametrize("lost", ["the only replica", "the coordinator"])
def test_a_push_that_ends_at_a_bucket_is_begun_again_by_all_ranks_together(lost, tmp_path):
    """Both ranks send: they learn of it in mid-push, and neither is left behind."""
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model(9)))
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            trainer.do("train", steps=1)
            trainer.do("save", path=str(tmp_path / "whole.pt"))
            trainer.do("hold_at", bucket=1)
            trainer.tell("push", what="base", timeout=40.0)
            until(lambda: (tmp_path / "held").exists())
            if lost == "the coordinator":
                pool.stop_coordinator()
                pool.start_coordinator()
            else:
                pool.remove_replica("replica-0")
                engine = EngineDouble(weights(Model(9)))
                pool.add_replica("replica-0", engine)
            (tmp_path / "held").unlink()
            answers = [process.answer(60) for process in trainer.processes]
            assert {answer.get("version") for answer in answers} == {3}, answers
            assert same(engine.base, torch.load(tmp_path / "whole.pt"))
            trainer.push("base")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_rank_ends_the_push_for_all_and_holds_up_nobody(rank, tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
        with (
            running_ranks(tmp_path, pool.target, 2) as trainer,
            Publisher(pool.target, trainer_id="another", timeout_seconds=20) as others,
        ):
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            trainer.do("hold_at", bucket=1)
            trainer.tell("push", what="base", timeout=40.0)
            until(lambda: (tmp_path / "held").exists())
            os.kill(trainer.processes[rank].pid, signal.SIGINT)
            assert trainer.processes[rank].answer(10)["type"] == "KeyboardInterrupt"
            (tmp_path / "held").unlink()
            (answer,) = (p.answer(10) for i, p in enumerate(trainer.processes) if i != rank)
            assert answer.get("type"), answer
            began = time.monotonic()
            others.push_adapter(peft_of(Model()), "math")
            assert time.monotonic() - began < 5
            trainer.push("base")


def test_a_send_that_fails_at_a_bucket_ends_every_ranks_gather(tmp_path):
    """The only replica goes away in the middle, and all are required: ranks learn of it."""
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model(9)))
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            trainer.do("hold_at", bucket=1)
            trainer.tell("push", what="base", timeout=20.0, require="all")
            until(lambda: (tmp_path / "held").exists())
            pool.remove_replica("replica-0")
            (tmp_path / "held").unlink()
            found = errors([process.answer(30) for process in trainer.processes])
            assert len(found) == 1, found
            assert next(iter(found))[1] == "PEER_GONE"
            pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
            trainer.push("base")


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_two_pushes_wait_and_every_rank_holds_or_refuses_the_next(kind, tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model(9)))
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind=kind)
            trainer.push("base")
            trainer.do("hold_at", bucket=1)
            trainer.do("push_async", what="base")
            until(lambda: (tmp_path / "held").exists())
            for _ in range(2):
                trainer.do("train", steps=1)
                assert all(a["seconds"] < 5 for a in trainer.do("push_async", what="base"))
            blocked = trainer.do("push_async", what="base", timeout=1.0)
            assert all(answer["seconds"] >= 1 for answer in blocked)
            trainer.do("train", steps=1)
            trainer.do("save", path=str(tmp_path / "whole.pt"))
            trainer.tell("push_async", what="base")
            with pytest.raises(TransferTimeoutError):
                trainer.processes[0].answer(1)
            (tmp_path / "held").unlink()
            for process in trainer.processes:
                assert process.answer(30)["seconds"] > 0.5
            trainer.do("train", steps=1)  # not what was pushed
            found = {tuple(answer["outcomes"]) for answer in trainer.do("outcomes")}
            assert len(found) == 1, found
            *early, refused, last = next(iter(found))
            assert [*early, last] == ["base@2", "base@3", "base@4", "base@5"]
            assert refused.startswith("TransferTimeoutError 2 pushes of 'base' wait already")
            assert same(engine.base, torch.load(tmp_path / "whole.pt"))


def test_a_rank_that_dies_is_told_of_to_the_others(tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            trainer.processes[1].kill()
            trainer.processes.pop()
            (answer,) = trainer.do("push", what="base", timeout=3.0)
            assert (answer["type"], answer["error"]) == ("PeerUnavailableError", "RANK_GONE")


def test_senders_go_on_together_when_a_replica_is_lost(tmp_path):
    """Rank 0 waits in mid-push while a replica leaves: both ranks come to the next group, and
    nothing is sent twice that the survivors have, one of which loads in place."""
    with running_pool(tmp_path / "weft.db") as pool:
        kept = EngineDouble(weights(Model(9))), EngineDouble(weights(Model(9)), in_place=True)
        pool.add_replica("replica-0", kept[0])
        pool.add_replica("replica-1", EngineDouble(weights(Model(9))))
        pool.add_replica("replica-2", kept[1])
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            trainer.do("train", steps=1)
            trainer.do("save", path=str(tmp_path / "whole.pt"))
            trainer.do("hold_at", bucket=1)
            trainer.tell("push", what="base", require=1)
            until(lambda: (tmp_path / "held").exists())
            pool.remove_replica("replica-1")
            (tmp_path / "held").unlink()
            answers = [process.answer(60) for process in trainer.processes]
            assert len({answer.get("version") for answer in answers}) == 1, answers
            whole = torch.load(tmp_path / "whole.pt")
            assert all(same(engine.base, whole) for engine in kept)
            trainer.push("base")


@pytest.mark.parametrize("backend", ["gloo", "one-sided"])
def test_a_version_has_one_digest_whoever_sends_it(backend, tmp_path):
    """Replicas stage it, or load each bucket from all senders in place."""
    with running_pool(tmp_path / "weft.db") as pool:
        engines = [EngineDouble(weights(Model(9)), in_place=is_so) for is_so in (False, True)]
        for number, engine in enumerate(engines):
            pool.add_replica(f"replica-{number}", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.do("save", path=str(tmp_path / "whole.pt"))
            whole, digests = torch.load(tmp_path / "whole.pt"), set()
            for max_senders in (1, 2):
                trainer.do("open", max_senders=max_senders, backend=backend)
                digests.add(content_digest(pool, trainer.push("base")))
                assert all(same(engine.base, whole) for engine in engines)
                trainer.do("close")
        assert len(digests) == 1


def test_a_rank_that_dies_while_it_sends_ends_the_push_for_the_others(tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model(9)))
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            trainer.push("base")
            before = {name: tensor.clone() for name, tensor in engine.base.items()}
            trainer.do("train", steps=1)
            trainer.do("hold_at", bucket=1)
            trainer.tell("push", what="base", timeout=20.0)
            until(lambda: (tmp_path / "held").exists())
            trainer.processes.pop().kill()
            (tmp_path / "held").unlink()
            answer = trainer.processes[0].answer(15)
            assert answer["type"] == "PeerUnavailableError", answer
            assert same(engine.base, before)


# -- named tensors: a gather inside the iterator, which all ranks must be in, or none --------

ALL = {"stop": [-1, -1], "fail": [-1, -1], "give": [1, 1]}


def test_named_tensors_that_gather_are_pushed_in_step(engine, trainer, tmp_path):
    trainer.do("make", kind="fsdp2")
    for seed in (1, 2):
        trainer.do("train", steps=1)
        answers = trainer.do("push_named", seed=seed, **ALL)
        assert len({answer.get("version") for answer in answers}) == 1, answers
        assert {answer["source"] for answer in answers} == {"named tensors"}
        trainer.do("save", path=str(tmp_path / "whole.pt"))
        assert same(engine.base, torch.load(tmp_path / "whole.pt"))


def test_rank_0_alone_may_give_named_tensors(engine, trainer, tmp_path):
    trainer.do("make", kind="ddp")
    trainer.do("train", steps=1)
    answers = trainer.do("push_named", seed=1, **ALL | {"give": [1, 0]})
    assert [answer["gathered"] > 0 for answer in answers] == [True, False]
    assert len({answer.get("version") for answer in answers}) == 1, answers
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt")
    assert same(engine.base, whole)
    found = trainer.do("push_named", seed=1, **ALL | {"give": [0, 1]})
    assert {answer["error"] for answer in found} == {"INVALID_REQUEST"}, found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"stop": [5, -1]}, "push_tensors ended on one rank of this trainer and not on another"),
        ({"stop": [-1, 5]}, "push_tensors ended on one rank of this trainer and not on another"),
        ({"stop": [5, 5]}, "is missing"),
        ({"fail": [-1, 5]}, "out of memory"),
        ({"fail": [5, -1]}, "out of memory"),
    ],
    ids=["rank 0 ends", "rank 1 ends", "both end", "rank 1 fails", "rank 0 fails"],
)
def test_ranks_stop_at_the_same_tensor(how, message, engine, trainer):
    """A rank that does not go on is not waited for in a gather: DDP's tensors lie whole."""
    trainer.do("make", kind="ddp")
    before = trainer.push("base")
    answers = trainer.do("push_named", seed=1, timeout=20.0, **ALL | how)
    assert all(message in answer["message"] for answer in answers), answers
    assert all(answer["ended"] - answer["began"] < 10 for answer in answers)
    assert max(answer["gathered"] for answer in answers) <= 6
    assert trainer.push("base") > before  # and the next push is none the worse


def test_a_push_that_fails_leaves_nobody_in_a_gather(tmp_path):
    """The only replica goes away in the middle; the gathers are FSDP2's own."""
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", EngineDouble(weights(Model(9)), staging_capacity_bytes=10))
        with running_ranks(tmp_path, pool.target, 2) as trainer:
            trainer.do("make", kind="fsdp2")
            answers = trainer.do("push_named", seed=1, **ALL)
            assert {answer["error"] for answer in answers} == {"STAGING_FULL"}
            assert [answer["gathered"] for answer in answers] == [0, 0]
            pool.remove_replica("replica-0")
            pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
            trainer.do("hold_at", bucket=1)
            trainer.tell("push_named", seed=1, timeout=8.0, **ALL)
            until(lambda: (tmp_path / "held").exists())
            pool.remove_replica("replica-0")
            (tmp_path / "held").unlink()
            answers = [process.answer(30) for process in trainer.processes]
            assert len(errors(answers)) == 1, answers
            assert answers[0]["error"], answers
            assert len({answer["gathered"] for answer in answers}) == 1, answers
            pool.add_replica("replica-0", EngineDouble(weights(Model(9))))
            trainer.do("push_named", seed=2, **ALL)

"""When the callback pushes, by a real Trainer of Hugging Face, and which of the three pushes."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainer_side.integrations.hf import PushCallback
from trainer_side.push_request import DeltaUsage, PushReport, PushResult
from weft_rl.contract.errors import InvalidNameError, InvalidRequestError
from weft_rl.contract.names import PolicyVersion


class Model(nn.Module):
    """One weight; its loss is the mean of it and the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"loss": (self.weight * x).mean()}


class Peft(Model):
    """Looks like a PEFT model."""

    peft_config = {}  # noqa: RUF012


class Publisher:
    """Takes note of what is pushed: which push, and the weight of then."""

    def __init__(self):
        self.pushed = []

    def push_base(self, model):
        return self._push("base", model, "base")

    def push_merged(self, model):
        return self._push("merged", model, "base")

    def push_adapter(self, model, policy):
        return self._push("adapter", model, policy)

    def _push(self, kind, model, policy):
        self.pushed.append((kind, round(model.weight.item(), 4)))
        return PushResult(PolicyVersion(policy, len(self.pushed)), REPORT)


REPORT = PushReport(
    total_bytes=4000,
    sent_bytes=40,
    num_replicas=2,
    seconds=0.5,
    forming_seconds=0.125,
    staging_seconds=0.25,
    committing_seconds=0.0625,
    pause_seconds=0.03125,
    source="test",
    backend="gloo",
    backend_reason="",
    delta=DeltaUsage(is_delta=True, changed_share=0.25, comparing_seconds=0.75),
)


def train(work: Path, callbacks, *, steps=5, model=None, is_logged=False, **settings):
    """The weight is 1 and loses 0.1 a step."""
    trainer = Trainer(
        model=model or Model(),
        args=TrainingArguments(
            output_dir=str(work),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            optim="sgd",
            use_cpu=True,
            save_strategy="no",
            report_to="tensorboard" if is_logged else "none",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=[{"x": torch.ones(1)}] * 64,
        callbacks=callbacks,
    )
    if is_logged:
        trainer.add_callback(PushCallback(Publisher(), "base", every_steps=2, log=trainer.log))
    trainer.train()


@pytest.mark.parametrize(
    ("every", "at_end", "weights"),
    [
        (2, True, [0.8, 0.6, 0.5]),
        (2, False, [0.8, 0.6]),
        (5, True, [0.5]),  # the end sends nothing twice
        (1, False, [0.9, 0.8, 0.7, 0.6, 0.5]),
        (None, True, [0.5]),
        (None, False, []),
    ],
)
def test_it_pushes_after_steps_and_at_the_end(tmp_path, every, at_end, weights):
    publisher = Publisher()
    callback = PushCallback(publisher, "base", every_steps=every, at_end=at_end)
    train(tmp_path, [callback])
    assert publisher.pushed == [("base", weight) for weight in weights]
    assert (callback.pushed and callback.pushed.version.version) == (len(weights) or None)


def test_it_pushes_once_an_optimizer_step_however_many_batches_make_it(tmp_path):
    publisher = Publisher()
    callback = PushCallback(publisher, "base", every_steps=1)
    train(tmp_path, [callback], steps=2, gradient_accumulation_steps=3)
    assert publisher.pushed == [("base", 0.9), ("base", 0.8)]


def test_what_pushes_cost_is_in_the_trainers_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    train(tmp_path, [], is_logged=True)
    log = EventAccumulator(str(tmp_path / "log")).Reload()
    seen = {
        tag.rpartition("weft/")[2]: [(each.step, each.value) for each in log.Scalars(tag)]
        for tag in log.Tags()["scalars"]
        if "weft/" in tag
    }
    assert seen["version"] == [(2, 1.0), (4, 2.0), (5, 3.0)]
    expected = PushResult(PolicyVersion("base", 1), REPORT).metrics("")
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert name == "version" or [each for _, each in seen[name]] == [value] * 3, name
    assert (expected["is_delta"], expected["sent_bytes"]) == (1.0, 40.0)


def test_it_pushes_when_another_callback_says_so(tmp_path):
    publisher = Publisher()
    callback = PushCallback(publisher, "base", at_end=False)

    class AtThird(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                assert str(callback.push().version) == "base@1"

    train(tmp_path, [callback, AtThird()])
    assert publisher.pushed == [("base", 0.7)]


def test_the_best_model_is_pushed_though_the_last_step_was(tmp_path):
    publisher = Publisher()
    callback = PushCallback(publisher, "base", every_steps=1)
    state = type("State", (), {"global_step": 1, "is_world_process_zero": True})()
    for is_best_loaded, num_pushes in ((False, 1), (True, 2)):
        args = type("Args", (), {"load_best_model_at_end": is_best_loaded})()
        publisher.pushed.clear()
        callback.on_train_begin(args, state, None, model=Model())
        callback.on_step_end(args, state, None)
        callback.on_train_end(args, state, None)
        assert len(publisher.pushed) == num_pushes


@pytest.mark.parametrize(
    ("model", "policy", "kind"),
    [(Model, "base", "base"), (Peft, "base", "merged"), (Peft, "math", "adapter")],
)
def test_the_policy_says_which_push(tmp_path, model, policy, kind):
    publisher = Publisher()
    callback = PushCallback(publisher, policy)
    train(tmp_path, [callback], steps=1, model=model())
    assert publisher.pushed == [(kind, 0.9)]
    assert callback.pushed.version == PolicyVersion(policy, 1)


def test_what_cannot_be_right_is_refused():
    with pytest.raises(InvalidRequestError, match="every_steps=0"):
        PushCallback(Publisher(), "base", every_steps=0)
    with pytest.raises(InvalidNameError):
        PushCallback(Publisher(), "a/b")
    with pytest.raises(InvalidRequestError, match="training has not begun"):
        PushCallback(Publisher(), "base").push()

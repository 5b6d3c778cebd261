"""What a push of a PEFT model sends is what the model computes, or it is refused: every method and
setting of the installed PEFT, and what people do with a live model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from tests.unit.trainer.sources import peft_cases, peft_page
from tests.unit.trainer.sources.peft_cases import Case, Verdict, base, layers, lora_config, verdict
from trainer_side.params.choose import open_model
from trainer_side.params.merged import MergedParams
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.source import Adapter, CastRule
from weft_rl.contract.errors import InvalidAdapterError

pytestmark = pytest.mark.filterwarnings("ignore")
_REFUSED = ("INVALID_ADAPTER: ", "UNSUPPORTED: ", "not run")
_CASES = {
    "methods": list(peft_cases.methods()),
    "settings": list(peft_cases.settings()),
    "states": list(peft_cases.states()),
}
_found: dict[str, dict[str, Verdict]] = {section: {} for section in _CASES}


@pytest.mark.parametrize(
    ("section", "case"),
    [pytest.param(s, case, id=case.name) for s, cases in _CASES.items() for case in cases],
)
def test_a_push_is_the_models_own_forward_or_is_refused(section: str, case: Case) -> None:
    found = _found[section][case.name] = verdict(case)
    for said in (found.adapter, found.merged):
        assert said == "equal" or said.startswith(_REFUSED), said
    if case.saved:
        assert (found.adapter == "equal") is (found.directory == "equal"), found


def test_the_page_shows_what_was_found() -> None:
    text = peft_page.PAGE.read_text()
    if peft_page.version(text) != peft.__version__:
        pytest.skip(f"the page is of PEFT {peft_page.version(text)}")
    found = {
        section: {case.name: _found[section].get(case.name) or verdict(case) for case in cases}
        for section, cases in _CASES.items()
    }
    assert peft_page.page(text, found) == text, f"run `python -m {peft_page.__name__}`"


def test_every_setting_of_the_installed_peft_has_a_row_of_its_own() -> None:
    """One that has none is refused where it is on; somebody should look at what it does."""
    assert peft_cases.unseen() == []


# -- a PEFT that is newer than Weft ------------------------------------------------------------


@dataclasses.dataclass
class NewerConfig(peft.LoraConfig):
    """A LoraConfig with settings that nobody knows."""

    use_new: bool = False
    new_size: int = 16
    new_config: peft.LoraRuntimeConfig = dataclasses.field(default_factory=peft.LoraRuntimeConfig)


def _newer(**settings: Any) -> Any:
    return peft.get_peft_model(base(), NewerConfig(r=2, target_modules=["q_proj"], **settings))


@pytest.mark.parametrize("settings", [{"use_new": True}, {"new_size": 8}])
def test_a_setting_that_is_on_and_unknown_is_refused_by_name(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _newer(**settings)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(peft, "LoraConfig", NewerConfig)
    name = next(iter(settings))
    with pytest.raises(InvalidAdapterError, match=name) as caught:
        adapter_of_model(open_model(model, OneRank()), "default", CastRule(), check_base=True)
    assert caught.value.metadata["setting"] == name
    with pytest.raises(InvalidAdapterError, match=name):
        adapter_of_dir(tmp_path, CastRule())


def test_an_unknown_setting_at_its_default_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _newer()
    adapter = adapter_of_model(open_model(model, OneRank()), "default", CastRule(), check_base=True)
    assert not {"new_size", "new_config"} & json.loads(adapter.config_json).keys()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(peft, "LoraConfig", NewerConfig)
    read = json.loads(adapter_of_dir(tmp_path, CastRule()).config_json)
    assert not {"new_size", "new_config"} & read.keys()


# -- messages ------------------------------------------------------------------------------------


def _adapter(model: Any) -> Adapter:
    return adapter_of_model(open_model(model, OneRank()), "default", CastRule(), check_base=True)


def _refusal(model: Any) -> InvalidAdapterError:
    with pytest.raises(InvalidAdapterError) as caught:
        _adapter(model)
    return caught.value


def test_a_base_that_is_not_frozen_is_refused_with_few_names_and_a_number() -> None:
    model: Any = peft.get_peft_model(base(), lora_config()())
    trained = [p for n, p in model.named_parameters() if "lora_" not in n]
    for param in trained:
        param.requires_grad_(True)
    error = _refusal(model)
    assert f"and {len(trained) - 3} more" in error.message
    assert "push_merged" in error.message
    assert "requires_grad_(False)" in error.message
    assert len(error.message) < 600
    assert error.metadata["num_problems"] == str(len(trained))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_hide_nothing_that_is_trained() -> None:
    model: Any = peft.get_peft_model(base(), lora_config()())
    model.base_model.model.model.norm.weight.requires_grad_(True)
    for wrapped in (torch.compile(model), torch.nn.DataParallel(model)):
        assert "'base_model.model.model.norm.weight'" in _refusal(wrapped).message
    model.base_model.model.model.layers[0] = torch.compile(model.base_model.model.model.layers[0])
    model.base_model.model.model.norm.weight.requires_grad_(False)
    model.base_model.model.model.layers[0].post_attention_layernorm.weight.requires_grad_(True)
    assert "layers.0.post_attention_layernorm.weight" in _refusal(model).message


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(model: Any) -> Any:
    for layer in layers(model):
        for part in (layer.lora_A["default"], layer.lora_B["default"], layer):
            fully_shard(part)
    return fully_shard(model)


def _flat(model: Any) -> Any:
    """FSDP1, with each part that is trained in a unit of its own, as PEFT advises."""
    policy = partial(lambda_auto_wrap_policy, lambda_fn=_is_trained_leaf)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu
    )


def _is_trained_leaf(part: torch.nn.Module) -> bool:
    return not part._modules and any(param.requires_grad for param in part.parameters())


@pytest.mark.parametrize("wrap", [DistributedDataParallel, _sharded, _flat])
def test_wrappers_of_several_ranks_hide_nothing_either(one_rank: None, wrap: Any) -> None:
    assert len(_adapter(wrap(peft.get_peft_model(base(), lora_config()()))).source.metas) == 8
    model: Any = peft.get_peft_model(base(), lora_config()())
    model.base_model.model.model.norm.weight.requires_grad_(True)
    assert "'base_model.model.model.norm.weight'" in _refusal(wrap(model)).message


def test_hooks_of_frameworks_are_no_reason_to_refuse() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model: Any = peft.get_peft_model(base(), lora_config()())
    for layer in layers(model):
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    _adapter(model)


def test_a_kept_adapter_is_looked_at_again_for_each_push() -> None:
    model: Any = peft.get_peft_model(base(), lora_config()())
    opened = open_model(model, OneRank())
    first = adapter_of_model(opened, "default", CastRule(), check_base=True)
    assert adapter_of_model(opened, "default", CastRule(), check_base=True) is first
    layers(model)[0].scaling["default"] *= 3
    other = adapter_of_model(opened, "default", CastRule(), check_base=True)
    assert json.loads(other.config_json)["alpha_pattern"]
    layers(model)[0].register_forward_hook(lambda module, given, out: out * 2)
    with pytest.raises(InvalidAdapterError, match="hook"):
        adapter_of_model(opened, "default", CastRule(), check_base=True)


def test_a_trained_copy_of_one_of_two_tied_modules_is_refused_by_both_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = peft.get_peft_model(
            base("tied"), lora_config(modules_to_save=["embed_tokens"])()
        )
    with pytest.raises(Exception, match=r"lm_head\.weight and model\.embed_tokens\.weight"):
        MergedParams(model, open_model(model, OneRank()).params, "default")

"""Preflight of adapters: each trap that vLLM or PEFT sets, refused by name."""

import dataclasses
import json

import pytest

from weft_rl.contract.adapter import TrainedBase, check_adapter
from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES, named_value
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import BaseMismatchError, InvalidAdapterError, NotReadyError
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta

F32 = DataType.FLOAT32
HIDDEN, KV, RANK = 64, 32, 8
MODULES = {"q_proj": (HIDDEN, HIDDEN), "v_proj": (KV, HIDDEN)}
NAMES = [f"model.layers.{i}.self_attn.{m}" for i in range(2) for m in MODULES]
REFERENCE = Reference(
    "Qwen2ForCausalLM",
    (
        TensorMeta("model.embed_tokens.weight", F32, (256, HIDDEN)),
        *(TensorMeta(f"{n}.weight", F32, MODULES[n.rsplit(".", 1)[1]]) for n in NAMES),
        *(
            TensorMeta(f"model.layers.0.mlp.experts.{e}.{p}.weight", F32, (48, HIDDEN))
            for e in range(2)
            for p in ("gate_proj", "up_proj")
        ),
    ),
)
CAPABILITIES = Capabilities(
    engine_version="0.32.0",
    base_fingerprint=REFERENCE.fingerprint,
    architecture="Qwen2ForCausalLM",
    base_dtype=F32,
    adapter_dtype=F32,
    lora_enabled=True,
    max_lora_rank=16,
    lora_modules=("q_proj", "v_proj"),
)


def config(**changes):
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    return json.dumps(settings | changes)


def pair(module, rank=RANK, shape=None):
    out, in_ = shape or MODULES[module.rsplit(".", 1)[1]]
    prefix = f"base_model.model.{module}"
    return [
        TensorMeta(f"{prefix}.lora_A.weight", F32, (rank, in_)),
        TensorMeta(f"{prefix}.lora_B.weight", F32, (out, rank)),
    ]


METAS = [meta for name in NAMES for meta in pair(name)]


def check(metas=METAS, capabilities=CAPABILITIES, **changes):
    check_adapter(config(**changes), metas, REFERENCE, capabilities)


def replace(**changes):
    return Capabilities(**{**CAPABILITIES.__dict__, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"target_modules": [*NAMES]},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"modules_to_save": None, "trainable_token_indices": None, "layer_replication": None},
    ],
)
def test_what_vllm_serves_is_accepted(changes):
    check(**changes)


def test_rank_pattern_is_accepted_when_the_tensors_have_those_ranks():
    metas = [m for n in NAMES for m in pair(n, 4 if n.endswith("q_proj") else RANK)]
    check(metas, rank_pattern={"q_proj": 4})
    with pytest.raises(InvalidAdapterError, match="has rank 4, the config says 8"):
        check(metas)


def test_modules_that_vllm_ignores_are_refused_by_name():
    """Of an encoder, say, whose last components are those of the language model."""
    ignoring = replace(lora_unapplied=("model.layers.1", "visual"))
    with pytest.raises(InvalidAdapterError, match="enable-tower-connector-lora") as refused:
        check(capabilities=ignoring)
    assert "'model.layers.1.self_attn.q_proj' and 1 more" in refused.value.message
    assert refused.value.metadata == {"parameter": "model.layers.1.self_attn.q_proj"}
    check(METAS[:4], ignoring, layers_to_transform=[0])
    check(capabilities=replace(lora_unapplied=("model.layers.1.self", "model.layer")))
    with pytest.raises(InvalidAdapterError, match=r"for 'model\.layers\.0\.self_attn\.v_proj', to"):
        check(capabilities=replace(lora_unapplied=("model.layers.0.self_attn.v_proj",)))


def test_layers_to_transform_need_only_those_layers():
    check(METAS[:4], layers_to_transform=[0])
    with pytest.raises(InvalidAdapterError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        check(METAS[:4])


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"alora_invocation_tokens": [5]},
        {"layer_replication": [[0, 2]]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"use_qalora": True},
        {"megatron_config": {"tensor_model_parallel_size": 2}},
        {"arrow_config": {"top_k": 2}},
        {"velora_config": {"num_groups": 8}},
        {"monteclora_config": {"num_samples": 4}},
        {"kasa_config": {"beta": 0.1}},
        {"of_a_newer_peft": True},
        {"of_a_newer_peft": {"size": 4}},
    ],
)
def test_variants_that_vllm_cannot_serve_are_refused_by_setting(setting):
    (name,) = setting
    with pytest.raises(InvalidAdapterError, match=name) as caught:
        check(**setting)
    assert caught.value.metadata["setting"] == name


@pytest.mark.parametrize("value", [None, False, {}, [], "", 0])
def test_an_unknown_setting_that_is_off_does_not_matter(value):
    check(of_a_newer_peft=value)


@pytest.mark.parametrize(
    ("metas", "words"),
    [
        (METAS[:-1], "has no lora_B"),
        (METAS[:-2], "config targets 'model.layers.1.self_attn.v_proj'"),
        ([*METAS, *pair("model.layers.2.self_attn.q_proj")], "does not have"),
        ([*METAS, *pair("model.layers.0.mlp.up_proj", shape=(48, 64))], "cannot carry a LoRA"),
        ([*METAS[:-2], *pair(NAMES[-1], shape=(KV, 32))], r"the base needs \(rank,64\)"),
        ([*METAS[:-2], *pair(NAMES[-1], shape=(48, HIDDEN))], r"the base needs \(32,8\)"),
        ([*METAS, TensorMeta("model.layers.0.q_proj.lora_A.weight", F32, (8, 64))], "expected"),
        (
            [
                *METAS,
                TensorMeta("base_model.model.model.embed_tokens.lora_embedding_A", F32, (8, 9)),
            ],
            "is not a LoRA weight",
        ),
        (
            [
                *METAS,
                TensorMeta("base_model.model.x.q_proj.lora_magnitude_vector", F32, (64,)),
            ],
            "is not a LoRA weight",
        ),
        (
            [TensorMeta(METAS[0].name, DataType.INT8, METAS[0].shape), *METAS[1:]],
            "adapters are floating point",
        ),
        (
            [*METAS, *pair("model.layers.0.mlp.experts.0.gate_proj", shape=(48, HIDDEN))],
            "LoRA on experts is not served",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_parameter(metas, words):
    with pytest.raises(InvalidAdapterError, match=words) as caught:
        check(metas)
    assert caught.value.metadata["parameter"]


def test_the_output_layer_of_a_tied_model_is_said_to_be_tied():
    metas = [*METAS, *pair("lm_head", shape=(256, HIDDEN))]
    with pytest.raises(InvalidAdapterError, match="tied to the embedding's in the served Qwen2"):
        check(metas, replace(lora_modules=("q_proj", "v_proj", "lm_head")))


def test_half_given_experts_are_refused_where_experts_are_served():
    experts = [
        m
        for e in range(2)
        for p in ("gate_proj", "up_proj")
        for m in pair(f"model.layers.0.mlp.experts.{e}.{p}", shape=(48, HIDDEN))
    ]
    capable = replace(lora_on_experts=True)
    check([*METAS, *experts], capable)
    with pytest.raises(InvalidAdapterError, match="give all experts"):
        check([*METAS, *experts[:-2]], capable)


EXPERTS = "model.layers.0.mlp.experts"


def stacked(rank=RANK, *, inner=48, experts=2):
    """LoRA of both matrices of all experts, as PEFT saves it."""
    shapes = {f"{EXPERTS}.base_layer": (2 * inner, HIDDEN), EXPERTS: (HIDDEN, inner)}
    return [
        m
        for name, (out, width) in shapes.items()
        for m in (
            TensorMeta(f"base_model.model.{name}.lora_A.weight", F32, (rank * experts, width)),
            TensorMeta(f"base_model.model.{name}.lora_B.weight", F32, (out, rank * experts)),
        )
    ]


def test_experts_that_are_given_at_once_fit_experts_however_they_are_stored():
    capable = replace(lora_on_experts=True)
    one_by_one = [
        TensorMeta(f"{EXPERTS}.{e}.{name}.weight", F32, shape)
        for e in range(2)
        for name, shape in (
            ("gate_proj", (48, HIDDEN)), ("up_proj", (48, HIDDEN)), ("down_proj", (HIDDEN, 48)),
        )
    ]  # fmt: skip
    others = [m for m in REFERENCE.tensors if ".experts." not in m.name]
    stacks = {
        "(experts, out, in)": ((2, 96, HIDDEN), (2, HIDDEN, 48)),
        "(experts, in, out)": ((2, HIDDEN, 96), (2, 48, HIDDEN)),
    }
    stored = [one_by_one] + [
        [TensorMeta(f"{EXPERTS}.gate_up_proj", F32, up), TensorMeta(f"{EXPERTS}.down_proj", F32, d)]
        for up, d in stacks.values()
    ]
    for tensors in stored:
        reference = Reference(REFERENCE.architecture, (*others, *tensors))

        def given(metas, capabilities=capable, reference=reference, **more):
            check_adapter(config(**more), [*METAS, *metas], reference, capabilities)

        given(stacked())
        given(stacked(2 * RANK), rank_pattern={"base_layer": 2 * RANK, "experts": 2 * RANK})
        with pytest.raises(InvalidAdapterError, match=f"rank {2 * RANK}, the config says {RANK}"):
            given(stacked(2 * RANK))
        with pytest.raises(InvalidAdapterError, match="LoRA on experts is not served"):
            given(stacked(), CAPABILITIES)
        with pytest.raises(InvalidAdapterError, match="give A and B of both"):
            given(stacked()[:2])
        with pytest.raises(InvalidAdapterError, match="give A and B of both"):
            given(stacked()[:3])
        with pytest.raises(
            InvalidAdapterError, match=r"has shape \(100,16\), the base needs \(96,"
        ):
            given(stacked(inner=50))
        with pytest.raises(InvalidAdapterError, match=r"2 experts need \(rank x 2,64\)"):
            given(stacked(3, experts=3))


def test_experts_that_are_given_in_both_ways_are_refused():
    one = pair(f"{EXPERTS}.0.gate_proj", shape=(48, HIDDEN))
    tensors = [TensorMeta(f"{EXPERTS}.{e}.down_proj.weight", F32, (HIDDEN, 48)) for e in range(2)]
    reference = Reference(REFERENCE.architecture, (*REFERENCE.tensors, *tensors))
    with pytest.raises(InvalidAdapterError, match=r"stacked .* single .*experts\.0\.gate_proj"):
        check_adapter(
            config(), [*METAS, *stacked(), *one], reference, replace(lora_on_experts=True)
        )


def test_experts_of_a_base_without_any_are_refused():
    others = tuple(m for m in REFERENCE.tensors if ".experts." not in m.name)
    reference, capable = Reference(REFERENCE.architecture, others), replace(lora_on_experts=True)
    with pytest.raises(InvalidAdapterError, match=r"is for experts, which Qwen2\w+ does not have"):
        check_adapter(config(), [*METAS, *stacked()], reference, capable)


def test_rank_above_the_engines_is_refused():
    metas = [m for n in NAMES for m in pair(n, 32)]
    with pytest.raises(InvalidAdapterError, match="rank 32 is above"):
        check(metas, r=32)


def test_engine_without_lora():
    with pytest.raises(NotReadyError, match="--enable-lora") as caught:
        check(capabilities=replace(lora_enabled=False))
    assert caught.value.reason == "LORA_DISABLED"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"peft_type": "IA3"}', "only LORA"),
        ('{"peft_type": "LORA", "r": 0, "lora_alpha": 1}', "positive integer"),
        ('{"peft_type": "LORA", "r": true, "lora_alpha": 1}', "positive integer"),
        ('{"peft_type": "LORA", "r": 8}', "lora_alpha"),
        ('"' + "x" * MAX_CONFIG_BYTES + '"', "longer than"),
    ],
)
def test_configs_that_cannot_be_read(text, words):
    with pytest.raises(InvalidAdapterError, match=words):
        check_adapter(text, METAS, REFERENCE, CAPABILITIES)


@pytest.mark.parametrize(
    "setting",
    [
        {"target_modules": "(.*.*)*x"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"exclude_modules": "(.*.*)*x"},
        {"rank_pattern": {"(.*.*)*x": 8}},
        {"rank_pattern": {"q_proj": 8, ".*v_proj": 8}},
        {"alpha_pattern": {"^q_proj": 4}},
        {"alpha_pattern": ["q_proj"]},
    ],
)
def test_patterns_are_refused_and_never_matched(setting):
    (name,) = setting
    with pytest.raises(InvalidAdapterError, match=f"^{name} (has|is) ") as caught:
        check(**setting)
    assert caught.value.metadata["setting"] == name


def test_names_are_compared_literally():
    with pytest.raises(InvalidAdapterError, match=r"config targets 'model\.layers\.1"):
        check(METAS[:4], target_modules=["self_attn.q_proj", "v_proj"])
    check(METAS[:4], target_modules=[name.replace(".", "_") for name in NAMES])
    metas = [m for n in NAMES for m in pair(n, 4 if "1.self_attn.q" in n else RANK)]
    check(metas, rank_pattern={"1.self_attn.q_proj": 4})
    with pytest.raises(InvalidAdapterError, match="has rank 4, the config says 8"):
        check(metas, rank_pattern={"1_self_attn.q_proj": 4, "proj": 4})


def test_of_two_names_the_first_counts():
    values = {"q_proj": 1, "1.q_proj": 2, "x": 3}
    assert named_value(values, "layers.1.q_proj", 0) == 1
    assert named_value({"1.q_proj": 2, **values}, "layers.1.q_proj", 0) == 2
    assert [named_value(values, name, 0) for name in ("x", "y.x", "yx", "")] == [3, 3, 0, 0]


# -- modules by their names and full shapes


def module(name, *others, shape=(HIDDEN, HIDDEN)):
    return LinearModule(name, shape, others)


MEMORY, ENGINE = "model.language_model.", "language_model.model."
#: As Qwen2.5-VL's: in files, in a trainer's memory, in vLLM.
NAMED = dataclasses.replace(
    REFERENCE,
    untold_modules=tuple(
        LinearModule(
            name,
            REFERENCE.by_name[f"{name}.weight"].shape,
            (name.replace("model.", MEMORY), name.replace("model.", ENGINE)),
        )
        for name in NAMES
    ),
)


@pytest.mark.parametrize("prefix", ["model.", MEMORY, ENGINE])
def test_an_adapter_may_have_any_name_of_a_module(prefix):
    names = [name.replace("model.", prefix) for name in NAMES]
    metas = [meta for name in names for meta in pair(name)]
    check_adapter(config(), metas, NAMED, CAPABILITIES)
    check_adapter(config(target_modules=names), metas, NAMED, CAPABILITIES)
    with pytest.raises(InvalidAdapterError, match="config targets"):
        check_adapter(config(), metas[:-2], NAMED, CAPABILITIES)
    ignoring = replace(lora_unapplied=("model.layers.1",))
    with pytest.raises(InvalidAdapterError, match="applies no LoRA") as refused:
        check_adapter(config(), metas, NAMED, ignoring)
    assert refused.value.metadata == {"parameter": names[2]}
    check_adapter(config(), metas[:4], NAMED, ignoring)  # PEFT's targets there are out of reach
    if prefix != "model.":
        with pytest.raises(InvalidAdapterError, match="does not have"):
            check(metas)


def test_two_names_of_one_module_are_refused_with_both():
    metas = [*METAS, *pair(NAMES[0].replace("model.", MEMORY))]
    with pytest.raises(InvalidAdapterError, match="names of one module") as refused:
        check_adapter(config(), metas, NAMED, CAPABILITIES)
    assert NAMES[0] in refused.value.message
    assert NAMES[0].replace("model.", MEMORY) in refused.value.message


def test_a_name_of_two_modules_is_refused_with_both():
    twice = dataclasses.replace(
        REFERENCE,
        untold_modules=(module("text.q_proj", "x.q_proj"), module("visual.q_proj", "x.q_proj")),
    )
    with pytest.raises(InvalidAdapterError, match=r"'text\.q_proj' and of 'visual\.q_proj'"):
        check_adapter(config(), [*METAS, *pair("x.q_proj")], twice, CAPABILITIES)


def test_modules_with_quantised_weights_have_their_full_shapes():
    packed = Reference(
        "Qwen2ForCausalLM",
        tuple(
            TensorMeta(f"{name}.{part}", DataType.INT32, (8, 4))
            for name in NAMES
            for part in ("qweight", "qzeros", "scales")
        ),
        tuple(module(name, shape=MODULES[name.rsplit(".", 1)[1]]) for name in NAMES),
    )
    check_adapter(config(), METAS, packed, CAPABILITIES)
    wrong = [*METAS[:-2], *pair(NAMES[-1], shape=(KV, 32))]
    with pytest.raises(InvalidAdapterError, match=r"the base needs \(rank,64\)"):
        check_adapter(config(), wrong, packed, CAPABILITIES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"head": (3, 3), "model.layers.0.scale": (1, 1)}, ""),
        ({NAMES[0].replace("model.", MEMORY): (HIDDEN, HIDDEN)}, ""),
        ({NAMES[0].replace("model.", MEMORY): (HIDDEN, 8)}, r"shape \(64,8\), .* with \(64,64\)"),
        ({"model.embed_tokens": (257, HIDDEN)}, r"'model\.embed_tokens' has the shape \(257,64\)"),
        ({"model.layers.2.self_attn.q_proj": (HIDDEN, HIDDEN)}, r"that has 'model\.layers\.2'"),
        ({MEMORY + "layers.2.mlp.up_proj": (4, 4)}, "that has 'model.language_model.layers.2'"),
    ],
)
def test_a_base_is_compared_by_its_modules(changes, words):
    shapes = {name: MODULES[name.rsplit(".", 1)[1]] for name in NAMES}
    trained = TrainedBase("Qwen2ForCausalLM", {**shapes, **changes})
    if not words:
        trained.check(NAMED)
        return
    with pytest.raises(BaseMismatchError, match=words):
        trained.check(NAMED)


def test_another_architecture_is_another_base():
    with pytest.raises(BaseMismatchError, match="fits a Llama, the pool serves a Qwen2ForCausalLM"):
        TrainedBase("Llama", {}).check(NAMED)

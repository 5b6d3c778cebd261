"""Files of a model whose weights were quantised before, made of the files of a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Elements of a row that have one scale.
GROUP = 32
_FP8_MAX, _BLOCK = 448.0, 128
#: By code of four bits without its sign: E2M1.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Made = dict[str, torch.Tensor]


def quantise(method: str, path: Path) -> Path:
    """Replace the plain weights in a directory by quantised ones; returns the directory.

    Args:
        method: A key of ``QUANTIZATION``.
        path: Has ``model.safetensors`` and ``config.json``.
    """
    make = _MAKERS[method]
    file = path / "model.safetensors"
    tensors: Made = {}
    for name, weight in load_file(file).items():
        tensors.update(make(name, weight))
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION[method]
    (path / "config.json").write_text(json.dumps(config))
    return path


def _linear(make: Callable[[torch.Tensor], Made]) -> Callable[[str, torch.Tensor], Made]:
    """Apply to the weights of linear layers, and keep the others."""

    def each(name: str, weight: torch.Tensor) -> Made:
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in _LINEAR:
            return {name: weight}
        return {f"{module}.{part}": tensor for part, tensor in make(weight.float()).items()}

    return each


def _fp8(weight: torch.Tensor) -> Made:
    scale = weight.abs().amax() / _FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.view(1)}


def _fp8_block(weight: torch.Tensor) -> Made:
    out, width = (size // _BLOCK for size in weight.shape)
    blocks = weight.view(out, _BLOCK, width, _BLOCK)
    scale = blocks.abs().amax((1, 3)) / _FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scale}


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes, two to a byte, the first one in the lower half."""
    codes = (values.abs()[..., None] - _FP4).abs().argmin(-1) + 8 * (values < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _nvfp4(weight: torch.Tensor) -> Made:
    whole = _FP8_MAX * 6 / weight.abs().amax()
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    codes = _fp4_codes(groups * whole / scale.float()[..., None])
    return {"weight_packed": codes.flatten(1), "weight_scale": scale,
            "weight_global_scale": whole.view(1)}  # fmt: skip


def _mxfp4(name: str, weight: torch.Tensor) -> Made:
    """Quantise the experts of gpt-oss, which transformers holds as (experts, in, out)."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    groups = weight.float().transpose(1, 2).unflatten(2, (-1, GROUP))
    exponent = (groups.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
    codes = _fp4_codes(groups / exponent.exp2()[..., None])
    return {f"{name}_blocks": codes.contiguous(), f"{name}_scales": (exponent + 127).byte()}


def four_bit_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes 0 to 15, whose zero is 8, and the scale of each group of a row."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).half().float()
    codes = (groups / scales[..., None]).round().clamp(-8, 7) + 8
    return codes.flatten(1).int(), scales


def pack_four_bits(
    method: str, codes: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what a format holds in place of a weight (out, in) of these codes, 0 to 15."""
    out, width = codes.shape
    if method == "awq":
        order = torch.arange(out).view(-1, 8)[:, list(_AWQ_ORDER)].flatten()
        zeros = torch.full((width // GROUP, out), 8)
        return {
            "qweight": _words(codes.T[:, order]),
            "qzeros": _words(zeros),
            "scales": scales.T.half().contiguous(),
        }
    if method == "gptq":  # which stores a zero less one
        return {
            "qweight": _words(codes).T.contiguous(),
            "qzeros": _words(torch.full((width // GROUP, out), 7)),
            "scales": scales.T.half().contiguous(),
            "g_idx": (torch.arange(width) // GROUP).int(),
        }
    return {
        "weight_packed": _words(codes),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor([out, width]),
    }


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Pack eight codes of a row into each word, the first one lowest."""
    eights = codes.long().unflatten(1, (-1, 8))
    words = (eights << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


QUANTIZATION: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    },
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

_MAKERS: dict[str, Callable[[str, torch.Tensor], Made]] = {
    "fp8": _linear(_fp8),
    "fp8_block": _linear(_fp8_block),
    "nvfp4": _linear(_nvfp4),
    "mxfp4": _mxfp4,
    **{
        method: _linear(
            lambda weight, method=method: pack_four_bits(method, *four_bit_codes(weight))
        )
        for method in ("awq", "gptq", "compressed-tensors")
    },
}

"""Writes tests/quant/fixtures: one small random model as other people's tools quantize it on a CPU.

    python -m venv tools && tools/bin/pip install torch transformers accelerate compressed-tensors bitsandbytes \
        torchao nvidia-modelopt
    tools/bin/python lab/quantized_fixtures.py tests/quant/fixtures [NAME ...]

Beside a tool's config.json and model.safetensors, expected.json has the SHA-256 of each matrix as the tool itself
dequantizes it, its type and first numbers. The versions of the tools are in expected.json too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Dequantized = dict[str, Tensor]  # module -> its matrix as the tool has it


def small_model() -> LlamaForCausalLM:
    """Of random weights in bfloat16, some of them large."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.05).mul_(torch.rand(parameter.shape[0], 1, dtype=torch.bfloat16) + 0.5)
    return model.eval()


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The matrices of the layers by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def compressed(scheme: str, kv_cache: bool = False) -> Callable[[Path], Dequantized]:
    """A preset scheme of compressed-tensors, scales from the weights alone."""

    def make(folder: Path) -> Dequantized:
        from compressed_tensors.compressors import ModelCompressor, decompress_module
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )

        model = small_model()
        config = QuantizationConfig(
            config_groups={"group_0": preset_name_to_scheme(scheme, ["Linear"])}, ignore=["lm_head"],
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
            if kv_cache else None,
        )  # fmt: skip
        apply_quantization_config(model, config)
        for module in linears(model).values():
            observe(module)
            module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        for module in linears(model).values():
            decompress_module(module)
        return {name: module.weight.detach() for name, module in linears(model).items()}

    return make


def observe(module: nn.Module) -> None:
    """Scales from the largest weight of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, weight = module.quantization_scheme.weights, module.weight.detach().float()
    if args.strategy == "block":
        height, width = args.block_structure
        rows, columns = weight.shape
        padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        blocks = weight.unflatten(1, (-1, args.group_size))
    else:
        blocks = weight[:, None] if args.strategy == "channel" else weight.flatten()[None, None]
    more: dict[str, Tensor] = {}
    if args.strategy == "tensor_group":
        more["global_scale"] = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(more["global_scale"])
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **more)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))


def through_transformers(settings: Callable[[], Any], dequantize: Callable[[nn.Module], Tensor]) -> Any:
    """A configuration of transformers, applied while a saved model is loaded."""

    def make(folder: Path) -> Dequantized:
        plain = folder.parent / "plain"
        small_model().save_pretrained(plain)
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=settings(), device_map="cpu", dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        return {name: dequantize(module).detach() for name, module in linears(model).items()}

    return make


def bits_and_bytes(**options: Any) -> Any:
    """BitsAndBytesConfig of these options."""

    def settings() -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**options)

    def dequantize(module: nn.Module) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

        if options.get("load_in_8bit"):
            return int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        return dequantize_4bit(module.weight.data, module.weight.quant_state)

    return through_transformers(settings, dequantize)


def torchao(name: str, **options: Any) -> Any:
    """TorchAoConfig of this class of torchao's."""

    def settings() -> Any:
        import torchao.quantization
        from transformers import TorchAoConfig

        if "group_size" in options:
            options["granularity"] = torchao.quantization.PerGroup(options.pop("group_size"))
        return TorchAoConfig(getattr(torchao.quantization, name)(**options))

    return through_transformers(settings, lambda module: module.weight.dequantize())


def modelopt(config: str) -> Callable[[Path], Dequantized]:
    """A configuration of ModelOpt's by name."""

    def make(folder: Path) -> Dequantized:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        model = small_model()
        ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))
        mtq.quantize(model, getattr(mtq, config), lambda each: each(ids))
        found = {name: module.weight_quantizer(module.weight).detach() for name, module in linears(model).items()}
        export_hf_checkpoint(model, export_dir=folder)
        return found

    return make


FIXTURES: dict[str, Callable[[Path], Dequantized]] = {
    "fp8-dynamic": compressed("FP8_DYNAMIC"),
    "fp8-tensor": compressed("FP8", kv_cache=True),
    "fp8-block": compressed("FP8_BLOCK"),
    "nvfp4": compressed("NVFP4A16"),
    "mxfp4": compressed("MXFP4A16"),
    "mxfp8": compressed("MXFP8A16"),
    "nf4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "nf4-nested": bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "fp4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16),
    "bnb-int8": bits_and_bytes(load_in_8bit=True),
    "modelopt-fp8": modelopt("FP8_DEFAULT_CFG"),  # NVFP4 it quantizes on GPUs only
    "ao-int8": torchao("Int8WeightOnlyConfig", version=2),
    "ao-int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, group_size=64),
}  # fmt: skip
TOOLS = ("compressed-tensors", "bitsandbytes", "torchao", "nvidia-modelopt", "transformers", "torch")


def digest(matrix: Tensor) -> str:
    """Of its bytes, zeros without their signs."""
    return hashlib.sha256((matrix + 0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(out: Path, names: list[str]) -> None:
    """Write the fixtures of these names, or all."""
    for name in names or FIXTURES:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            matrices = FIXTURES[name](folder)
        except Exception as error:  # the others are wanted all the same
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        versions = {tool: importlib.metadata.version(tool) for tool in TOOLS}
        expected = {
            key: {"dtype": str(matrix.dtype), "hash": digest(matrix), "first": matrix.flatten()[:32].tolist()}
            for key, matrix in matrices.items()
        }
        (folder / "expected.json").write_text(json.dumps({"tools": versions, "matrices": expected}, indent=1) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

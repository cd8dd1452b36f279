"""Writes tests/quant/fixtures: one small random model as other people's tools quantize it on a CPU.

    python -m venv tools && tools/bin/pip install torch transformers accelerate compressed-tensors bitsandbytes \
        torchao nvidia-modelopt
    tools/bin/python lab/quantized_fixtures.py tests/quant/fixtures [NAME ...]

llmcompressor, gptqmodel and auto-round ask for versions of their own of the other packages: each wants an environment
to itself, and the names of its fixtures (`llmc-...`, `gptqmodel-...`, `auto-round-...`).

Beside a tool's config.json and model.safetensors, expected.json has the SHA-256 of each matrix as the tool itself
dequantizes it, its type and first numbers. The versions of the tools are in expected.json too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
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
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
Dequantized = dict[str, Tensor]  # module -> its matrix as the tool has it


def small_model(**fields: Any) -> LlamaForCausalLM:
    """Of random weights in bfloat16, some of them large."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], **fields)).to(torch.bfloat16)
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
            kv_cache_scheme=FP8_CACHE if kv_cache else None,
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


def texts() -> list[list[int]]:
    """Token ids to calibrate on."""
    return torch.randint(3, 96, (16, 32), generator=torch.Generator().manual_seed(0)).tolist()


def plain_folder() -> Path:
    """The small model with its output layer tied, and a tokenizer of 96 words, where tools can read them."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp()) / "plain"
    small_model(tie_word_embeddings=True).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    roles = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **roles).save_pretrained(folder)
    return folder


def keep(source: Path, folder: Path) -> None:
    """The files of a checkpoint that loading needs, from wherever a tool put them below `source`."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(next(source.rglob(name)), folder / name)


def llm_compressor(modifier: str, scheme: str, **options: Any) -> Callable[[Path], Dequantized]:
    """A preset scheme, calibrated: by "QuantizationModifier" or by "GPTQModifier"."""

    def make(folder: Path) -> Dequantized:
        from compressed_tensors.compressors import decompress_module
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers import gptq, quantization
        from transformers import AutoTokenizer

        plain = plain_folder()
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        recipe = getattr(gptq if modifier == "GPTQModifier" else quantization, modifier)
        data = Dataset.from_dict({"input_ids": texts(), "attention_mask": [[1] * len(row) for row in texts()]})
        oneshot(
            model=model, processor=AutoTokenizer.from_pretrained(plain), dataset=data, num_calibration_samples=16,
            max_seq_length=32, recipe=recipe(targets="Linear", scheme=scheme, ignore=["lm_head"], **options),
        )  # fmt: skip
        model.save_pretrained(plain.parent / "saved")
        keep(plain.parent / "saved", folder)
        for module in linears(model).values():
            decompress_module(module)
        return {name: module.weight.detach() for name, module in linears(model).items()}

    return make


def gptqmodel(**options: Any) -> Callable[[Path], Dequantized]:
    """A QuantizeConfig of GPTQModel's."""

    def make(folder: Path) -> Dequantized:
        os.environ["GPTQMODEL_CPU_WORKERS"] = "4"  # fewer than 2 it refuses
        os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"  # which it would compile, for minutes
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        plain = plain_folder()
        saved = str(plain.parent / "saved")
        quantizer = GPTQModel.load(str(plain), QuantizeConfig(offload_to_disk=False, **options))
        quantizer.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in texts()], batch_size=1)
        quantizer.save(saved)
        keep(Path(saved), folder)
        found = linears(GPTQModel.load(saved, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model)
        return {name: module.dequantize_weight().T.detach() for name, module in found.items()}

    return make


def auto_round(form: str, exceptions: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], Dequantized]:
    """A scheme of AutoRound's in a format of its own, with exceptions by module."""

    def make(folder: Path) -> Dequantized:
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        plain = plain_folder()
        data = torch.utils.data.DataLoader(torch.tensor(texts()), batch_size=4)
        rounding = AutoRound(
            str(plain), tokenizer=AutoTokenizer.from_pretrained(plain), dataset=data, iters=4, nsamples=16, seqlen=32,
            device_map="cpu", layer_config=exceptions, **options,
        )  # fmt: skip
        rounding.quantize_and_save(str(plain.parent / "saved"), format=form)
        keep(plain.parent / "saved", folder)
        saved = next((plain.parent / "saved").rglob("config.json")).parent
        if options.get("sym") is False:  # AWQ's layout, which AutoRound loads on other devices only
            return awq_matrices(folder / "model.safetensors", group_size=128)
        found = linears(AutoModelForCausalLM.from_pretrained(saved, device_map="cpu", dtype=torch.float32))
        kept = {name: module for name, module in found.items() if not isinstance(module, nn.Linear)}
        return {name: whole(name, module).detach() for name, module in kept.items()}

    return make


def awq_matrices(path: Path, group_size: int) -> Dequantized:
    """Every matrix in AWQ's layout, dequantized by AutoRound."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from safetensors.torch import load_file

    tensors = load_file(path)
    names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    parts = {name: [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")] for name in names}
    return {name: dequantize_gemm(*part, 4, group_size).T.contiguous() for name, part in parts.items()}


@torch.no_grad()
def whole(name: str, module: nn.Module) -> Tensor:
    """A module's matrix: as it dequantizes it, else what it makes of the unit vectors."""
    if hasattr(module, "dequant_weight_online"):
        return module.dequant_weight_online()
    columns = SIZES["intermediate_size" if "down" in name else "hidden_size"]
    return module(torch.eye(columns)).T.half()  # in which it multiplies scales out


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
    "llmc-w4a16": llm_compressor("GPTQModifier", "W4A16_ASYM"),
    "llmc-w3a16": llm_compressor("QuantizationModifier", "W3A16"),
    "llmc-w8a8": llm_compressor("GPTQModifier", "W8A8"),
    "llmc-w4afp8": llm_compressor("QuantizationModifier", "W4AFP8"),
    "llmc-fp8-block": llm_compressor("QuantizationModifier", "FP8_BLOCK", kv_cache_scheme=FP8_CACHE),
    "llmc-nvfp4": llm_compressor("QuantizationModifier", "NVFP4"),
    "llmc-mxfp4": llm_compressor("QuantizationModifier", "MXFP4"),
    "gptqmodel-act-order": gptqmodel(bits=4, group_size=32, desc_act=True),
    "gptqmodel-w3": gptqmodel(bits=3, group_size=64, sym=False, desc_act=False),
    "gptqmodel-dynamic": gptqmodel(bits=4, group_size=64, dynamic={".*down_proj": {"bits": 8, "group_size": 32}}),
    # Its AWQ asks for a GPU.
    "auto-round": auto_round(
        "auto_round", {"model.layers.0.mlp.down_proj": {"bits": 8}, "model.layers.0.self_attn.k_proj": {"bits": 16}},
        scheme="W4A16", group_size=32,
    ),
    "auto-round-awq": auto_round("auto_round", scheme="W4A16", sym=False),
    "auto-round-fp8": auto_round("auto_round", scheme="FP8_STATIC"),
    "auto-round-mxfp4": auto_round(
        "auto_round", {"model.layers.0.mlp.down_proj": {"bits": 8, "act_bits": 8}}, scheme="MXFP4"
    ),
    "auto-round-nvfp4": auto_round("auto_round", scheme="NVFP4"),
}  # fmt: skip
TOOLS = (
    "compressed-tensors", "bitsandbytes", "torchao", "nvidia-modelopt", "llmcompressor", "gptqmodel", "auto-round",
    "transformers", "torch",
)  # fmt: skip


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
        installed = {found.name for found in importlib.metadata.distributions()}
        versions = {tool: importlib.metadata.version(tool) for tool in TOOLS if tool in installed}
        expected = {
            key: {"dtype": str(matrix.dtype), "hash": digest(matrix), "first": matrix.flatten()[:32].tolist()}
            for key, matrix in matrices.items()
        }
        (folder / "expected.json").write_text(json.dumps({"tools": versions, "matrices": expected}, indent=1) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

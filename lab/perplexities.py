"""Whether forerun reads each GGUF block type as llama.cpp does: the perplexity of one file by both, and in float32; and
whose log-probabilities are nearer those of the file's exact weights.

    python lab/perplexities.py MODEL TEXT [--types Q4_0,Q4_K] [--length 256] [--limit 8]

MODEL is an unquantized folder; blocks of 256 need rows of whole blocks, which `mini` has after `python lab/widen.py
mini ./mini768 --hidden-size 768 --heads 12 --kv-heads 4`. For every type a file is written whose matrices all have
it, by forerun's own encoder or, where it has none, by llama.cpp's. Both engines predict the same tokens of the same
sequences from it. The third figure is the oracle: the values that the `gguf` package reads from that file, kept in
float32, run by forerun (`likelihoods.py` shows how far that is from transformers in float32). Quantized products
round their activations to 8 bits, each engine in its own groups, so both may differ from the oracle, by about as
much.

llama.cpp's side needs `pip install llama-cpp-python`, and so do the types that forerun cannot write; without it they
are left out, and said to be.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from forerun.bench.machine import describe_machine
from forerun.errors import ConfigError
from forerun.kernels.select import select_kernels
from forerun.models.gguf_export import export_gguf
from forerun.models.loader import load_model
from forerun.quant.gguf_decode import BLOCK_TYPES
from forerun.quant.gguf_encode import encode_rows
from forerun.quantize.text import cut, read_texts
from forerun.weights.resolve import resolve_model
from likelihoods import Apart, Engine, apart, by_forerun
from peer_engines import LlamaCpp

Encoder = Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]  # block type, floats [N, K] -> bytes [N, row]
FLOATS = ("F16", "BF16")
COLUMNS = (
    "type",
    "forerun",
    "llama.cpp",
    "float32",
    "forerun to llama.cpp",
    "forerun to float32",
    "llama.cpp to float32",
    "error of a token, nats: forerun",
    "llama.cpp",
    "times",
)
LLAMA = importlib.util.find_spec("llama_cpp") is not None


def main() -> None:
    """Print a row a type as it is measured."""
    given = options()
    kernels = select_kernels("auto", given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = export_gguf(resolve_model(given.model), folder / "F32.gguf", "F32")
        sequences = cut(read_texts(given.text), load_model(plain, kernels).tokenizer, given.length, given.limit)
        print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n")
        for kind in given.types.split(","):
            file, exact = folder / f"{kind}.gguf", folder / "exact.gguf"
            try:
                rewrite(plain, file, kind, encode)
            except ModuleNotFoundError:
                print(f"| {kind} | left out: only llama-cpp-python, which is not installed, can write it |", flush=True)
                continue
            rewrite(file, exact, "F32", lambda _, values: values)
            engines = {"forerun": by_forerun(file, kernels), "float32": (oracle := by_forerun(exact, kernels))}
            if LLAMA:
                engines["llama.cpp"] = by_llama(file, given.threads)
            print(row(kind, apart(engines, oracle, sequences)), flush=True)
            file.unlink()
    tokens = sum(len(ids) - 1 for ids in sequences)
    machine = describe_machine(kernels)
    print(f"\n{tokens} tokens of {given.text.name}; {machine['cpu']}, {kernels.name}, commit {machine['commit']}")
    if not LLAMA:
        print("llama.cpp was not measured: llama-cpp-python is not installed")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Perplexity of each GGUF block type by forerun and by llama.cpp.")
    parser.add_argument("model", help="a folder or the name of an embedded model")
    parser.add_argument("text", type=Path, help=".txt or .jsonl, as for `forerun perplexity`")
    parser.add_argument("--types", default=",".join((*FLOATS, *BLOCK_TYPES)))
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--limit", type=int, default=8, help="sequences")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def row(kind: str, found: Mapping[str, Apart]) -> str:
    """A line of the table; without llama.cpp its cells are empty."""
    own, other, oracle = (found.get(name) for name in ("forerun", "llama.cpp", "float32"))
    pairs = ((own, other), (own, oracle), (other, oracle))
    cells = [kind, *(_cell(one and one.perplexity, ".4f") for one in (own, other, oracle))]
    cells += [_cell(one and two and one.perplexity / two.perplexity - 1, "+.3%") for one, two in pairs]
    cells += [_cell(one and one.mean, ".2e") for one in (own, other)]
    times = other.mean / own.mean if own and other and own.mean else None
    return f"| {' | '.join([*cells, _cell(times, '.1f')])} |"


def _cell(figure: float | None, form: str) -> str:
    return "-" if figure is None else f"{figure:{form}}"


# -- files --------------------------------------------------------------------------------------------------------


def rewrite(source: Path, target: Path, kind: str, encode: Encoder) -> None:
    """Write `source` again with every matrix in blocks of type `kind`; the vectors stay as they are.

    Raises what `encode` raises.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            part = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], part)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)  # as torch has it: [N, K] or [n]
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, encode(kind, values), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(kind: str, values: Any) -> Any:
    """Rows [N, K] as blocks -> [N, bytes of a row] uint8, by forerun's encoder or else by llama.cpp's.

    Raises ConfigError for rows that are not whole blocks.
    """
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    if values.shape[1] % size:
        raise ConfigError(
            f"{kind} needs rows that are a multiple of {size}, not {values.shape[1]}; widen the model first"
        )
    if kind in FLOATS:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    try:
        return encode_rows(kind, torch.tensor(values)).numpy()
    except ConfigError:  # forerun cannot write this type
        return encode_by_llama(kind, values)


def encode_by_llama(kind: str, values: Any) -> Any:
    """Likewise by llama.cpp; where it asks for the importance of inputs, all have the same."""
    import llama_cpp

    ggml = llama_cpp.llama_cpp._lib  # the library under it is linked to it
    code, (num_rows, columns) = gguf.GGMLQuantizationType[kind], values.shape
    size, num_bytes = gguf.GGML_QUANT_SIZES[code]
    ggml.ggml_quantize_requires_imatrix.restype, ggml.ggml_quantize_chunk.restype = ctypes.c_bool, ctypes.c_size_t
    importance = np.ones(columns, np.float32) if ggml.ggml_quantize_requires_imatrix(int(code)) else None
    blocks = np.empty((num_rows, columns // size * num_bytes), np.uint8)
    source, sizes = np.ascontiguousarray(values, np.float32), map(ctypes.c_int64, (0, num_rows, columns))
    written = ggml.ggml_quantize_chunk(int(code), address(source), address(blocks), *sizes, address(importance))
    assert written == blocks.nbytes
    return blocks


def address(array: Any) -> ctypes.c_void_p:
    """Where its first entry lies; NULL for None."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


# -- engines ------------------------------------------------------------------------------------------------------


def by_llama(file: Path, threads: int) -> Engine:
    """llama.cpp's logits; see `likelihoods.Engine`."""
    engine = LlamaCpp({"file": str(file), "type": "", "threads": threads, "vocab_size": 0})
    return lambda ids: torch.from_numpy(engine.all_logits(ids[:-1]))


if __name__ == "__main__":
    main()

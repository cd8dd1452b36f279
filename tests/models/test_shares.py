"""Models that several ranks compute together: the bits are those of one process, whatever is shared out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.cpu.packed import CpuLinear
from forerun.kernels.ops import HeadLayout
from forerun.kernels.ranks import ALONE, Ranks
from forerun.models.base import CommittedPath, Model, passes_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.loader import load_adapter, load_model
from forerun.models.shares import share_heads
from forerun.quant.rows import packs_part
from forerun.weights import checkpoint
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.safetensors_header import TensorEntry
from tests.models import factory
from tests.quant import test_tools
from tests.quant.test_quantized_models import quantized_copy
from tests.support.adapters import write_adapter
from tests.support.ranks import on_ranks
from tests.weights.gguf_makers import write_model
from tests.weights.test_gguf_recurrent import FIXTURES as GGUF

KNOWN = [5, 9, 40, 7, 71, 8, 33, 90, 12, 12, 6, 50, 61]
TREE, PARENTS, ACCEPTED = [11, 42, 17, 80, 3, 28], [-1, 0, 1, 0, 3, 1], (0, 1, 2)
# What is shared out in another way in each, with fields that make it divide.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {},
    "phi3": {},  # q, k and v in one module, gate and up too
    "olmo2": {},  # norms over all heads
    "gemma4": {},  # keys and values of other layers, norms of values, per-layer inputs
    "qwen3-moe": {},
    "qwen2-moe": {},  # an expert for every row, which is weighed
    "gpt-oss": {},  # sinks; experts with biases, whose gate and up rows alternate
    "deepseek": {},  # latents
    "qwen3-next": {},  # gated delta nets, stored by heads of keys
    "qwen3.5": {},
    "kimi-linear": {"linear_num_heads": 4},
    "granite-hybrid": {"mamba_n_groups": 1},  # a norm over the heads of all
    "falcon-h1-norm": {},  # one of each rank's own heads
    "lfm2": {},
    "mimo-v2": {},  # narrow values
    "step3.5": {},  # a number that weighs each head's output
}
GGUF_FILES = ["qwen35", "qwen35moe", "qwen3next", "granitehybrid-moe", "nemotron_h_moe", "lfm2moe", "gemma4-experts"]
METHODS = ["gptq", "awq", "compressed-tensors", "fp8"]


def outputs(model: Model) -> list[Tensor]:
    """Logits of a prefill, of a tree, and of plain decoding behind what was accepted of it; hidden states."""
    runner = factory.Runner(model, 48)
    assert isinstance(model, Decoder)
    prefill = runner.span(KNOWN[:6], hidden=[0, len(model.parts.layers)])
    tree = runner.tree(TREE, PARENTS, len(KNOWN), KNOWN[6:])
    runner.model.commit([CommittedPath(runner.request_id, ACCEPTED)])
    last = runner.root(77, len(KNOWN) + len(ACCEPTED))
    return [prefill.logits, tree, last, *prefill.hidden.values()]


def load(path: Path, ranks: Ranks, kernels: str = "auto", dtype: str = "auto") -> Decoder:
    model = load_model(path, factory.make_kernels(kernels), dtype, ranks=ranks).model
    assert isinstance(model, Decoder)
    assert passes_of(model).exchanges == (ranks.size > 1)
    return model


def check(path: Path, sizes: list[int], dtype: str = "auto") -> None:
    """The same bits for all of these numbers of ranks as for one."""
    expected = outputs(load(path, ALONE, dtype=dtype))
    for size in sizes:
        for found in on_ranks(size, lambda ranks: outputs(load(path, ranks, dtype=dtype))):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), size


def save(case: str, folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    model_type, own = factory.CASES[case]
    return factory.save_checkpoint(factory.random_hf_model(model_type, {**own, **fields}), folder, dtype)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_bits_of_one(case: str, tmp_path: Path) -> None:
    check(save(case, tmp_path, **CASES[case]), [2])


def test_more_ranks_than_key_heads_and_sizes_that_do_not_divide(tmp_path: Path) -> None:
    check(save("llama", tmp_path, torch.bfloat16, intermediate_size=50, vocab_size=97), [2, 4])


@pytest.mark.parametrize("method", METHODS)
def test_quantized_matrices(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save("llama", tmp_path / "dense", intermediate_size=64)
    quantized_copy(folder, tmp_path / "stored", method)
    check(tmp_path / "stored", [2, 4])


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_of_a_gguf_file(tied: bool, tmp_path: Path) -> None:
    fields = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": tied}
    hf = factory.random_hf_model("llama", fields)
    folder = factory.save_checkpoint(hf, tmp_path / "hf")
    types = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K", "": "Q4_K"}
    write_model(tmp_path / "model.gguf", folder, hf, "llama", types)
    check(tmp_path / "model.gguf", [2, 4])


@pytest.mark.parametrize("name", test_tools.NAMES)
def test_formats_of_other_tools(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(test_tools.FIXTURES / name, tmp_path / "model")
    factory.write_tokenizer(folder)
    check(folder, [2])


@pytest.mark.parametrize("name", GGUF_FILES)
def test_layers_of_gguf_files(name: str) -> None:
    """Recurrent layers whose heads lie in another order than in safetensors, and experts stacked in blocks."""
    check(GGUF / f"{name}.gguf", [2])


@pytest.mark.parametrize("case", ["llama-tied-biased", "phi3", "qwen2-moe"])
def test_adapters(case: str, tmp_path: Path) -> None:
    """Of every kind of matrix; of phi3's joined ones too, of which a rank has two pieces."""
    folder = save(case, tmp_path / "base")
    ends = ["q_proj", "v_proj", "qkv_proj", "o_proj", "gate_up_proj", "embed_tokens"]
    ends += (
        ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
        if "moe" in case
        else ["down_proj"]
    )
    ends += [] if "tied" in case else ["lm_head"]
    adapter = write_adapter(tmp_path / "adapter", folder, ends)

    def adapted(ranks: Ranks) -> list[Tensor]:
        kernels = factory.make_kernels()
        loaded = load_model(folder, kernels, adapters=[adapter], ranks=ranks)
        found = load_adapter("a", adapter, loaded, kernels)
        runner = factory.Runner(loaded.model, 48)
        table = runner.table[:6], runner.table[6:]
        rows = [SequenceRows(f"{own}", own, 0, KNOWN, len(KNOWN), span_logits=True) for own in table]
        batch = ForwardBatch.build(rows, runner.block_size, adapters=[None, found])
        logits = loaded.model.forward(batch, runner.kvs).logits
        return [logits[: len(KNOWN)], logits[len(KNOWN) :]]

    plain, changed = adapted(ALONE)
    assert not torch.equal(plain, changed)
    for found in on_ranks(2, adapted):
        assert torch.equal(found[0], plain)
        assert torch.equal(found[1], changed)


def test_each_rank_holds_its_part_of_the_weights_and_of_the_cache(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    alone = load(folder, ALONE)
    for model in on_ranks(4, lambda ranks: load(folder, ranks)):
        assert model.weight_bytes < 0.3 * alone.weight_bytes
        assert [spec.num_kv_heads for spec in model.kv_specs] == [1, 1]


def test_a_rank_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("llama", tmp_path, torch.bfloat16, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    read, original = list[int](), checkpoint.read_bytes

    def counted(path: Path, entry: TensorEntry) -> Tensor:
        read.append(entry.nbytes)
        return original(path, entry)

    monkeypatch.setattr(checkpoint, "read_bytes", counted)
    load(folder, Ranks(1, 4))
    assert sum(read) < 0.3 * Checkpoint.open(folder).nbytes


def test_what_is_sent_a_pass(tmp_path: Path) -> None:
    """4 gathers a layer (heads, o, inner entries, down), the embedding, the logits: a row's numbers by arithmetic."""
    folder = save("llama", tmp_path)

    def sent(ranks: Ranks) -> tuple[int, int]:
        model = load(folder, ranks)
        before = ranks.sent_bytes, ranks.messages
        factory.Runner(model, 48).span(KNOWN)
        return ranks.sent_bytes - before[0], ranks.messages - before[1]

    (first, messages), (second, _) = on_ranks(2, sent)
    hidden, ffn, layers, vocab = 32, 48, 2, factory.VOCAB_SIZE
    floats = len(KNOWN) * (layers * (hidden + hidden + ffn + hidden) + hidden + 2 * vocab // 2)
    assert first + second == 4 * floats
    assert messages == 4 * layers + 2


@pytest.mark.parametrize("size", [3, 8])
def test_degrees_that_do_not_divide_are_refused_with_those_that_do(size: int, tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    with pytest.raises(ConfigError, match=rf"tensor parallel {size} .* 4 query heads .*degrees that do: 1, 2, 4$"):
        load_model(folder, factory.make_kernels(), ranks=Ranks(0, size))


def test_kernels_for_cpus_know_the_whole_matrix() -> None:
    """AMX's tiles are chosen by it; on other CPUs nothing depends on it, so that the number itself is looked at."""
    kernels = factory.make_kernels("cpu")
    part = packs_part(kernels, 100).pack_linear(torch.ones(40, 32))
    assert isinstance(part, CpuLinear) and part.whole_outputs == 100
    for own in (kernels, packs_part(kernels, None)):
        packed = own.pack_linear(torch.ones(40, 32))
        assert isinstance(packed, CpuLinear) and packed.whole_outputs == 40


@pytest.mark.parametrize(("case", "field"), [("llama", "intermediate_size"), ("qwen3-moe", "moe_intermediate_size")])
def test_large_matrices_of_which_each_rank_has_few_rows(case: str, field: str, tmp_path: Path) -> None:
    """AMX multiplies matrices of more than 2^20 bfloat16 weights in an order of its own: the whole ones count."""
    inner, hidden = 24576, factory.SIZES["hidden_size"]
    assert inner * hidden < 1 << 20 < 2 * inner * hidden  # gate and up are one matrix
    check(save(case, tmp_path, torch.bfloat16, **{field: inner}), [2, 4])


def test_models_of_transformers_are_refused(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    with pytest.raises(UnsupportedError, match="several ranks cannot share"):
        load_model(folder, factory.make_kernels(), implementation="transformers", ranks=Ranks(0, 2))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_every_query_head_is_computed_once_beside_its_keys(size: int) -> None:
    shares = [share_heads(Ranks(rank, size), HeadLayout(32, 8, 64, 64)) for rank in range(size)]
    assert [head for share in shares for head in range(share.queries.start, share.queries.stop)] == list(range(32))
    for share in shares:
        heads = range(share.queries.start, share.queries.stop)
        read = [share.keys.start + own * share.heads.num_kv // share.heads.num_q for own in range(len(heads))]
        assert read == [head // 4 for head in heads]

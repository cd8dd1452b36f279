"""How a transformers model is judged: whether kernels stand in for its matrices, and whether it runs over the pool."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ResourceError, UnsupportedError
from forerun.models import hf_fitting, hf_loading
from forerun.models.hf import HFModel
from forerun.models.hf_fitting import fit, probe
from forerun.models.hf_matrices import KernelLinear, stand_in
from forerun.models.hf_pooled import PooledHFModel
from tests.models import factory
from tests.models.factory import Runner

KNOWN = [5, 9, 40, 33, 7, 61, 62, 8, 90]


def mixing(x: torch.Tensor) -> torch.Tensor:
    """Adds up in an order that depends on the number of rows."""
    return x @ torch.eye(x.shape[-1])


def ahead(x: torch.Tensor) -> torch.Tensor:
    """A row reads its neighbour's entries."""
    return torch.cat([x[:, 1:], x[:, -1:]], dim=1)


def norm_of_columns(x: torch.Tensor) -> torch.Tensor:
    """The order of the norm, 2, is the number of the last dimension; the dimension reduced is the rows'."""
    return x / torch.linalg.vector_norm(x, 2, 1, keepdim=True)


def norm_of_all(x: torch.Tensor) -> torch.Tensor:
    """Rows are normalised together."""
    return torch.nn.functional.layer_norm(x, x.shape[1:])


def asking(x: torch.Tensor) -> torch.Tensor:
    """What any row holds decides about all."""
    return 2 * x if bool((x > 1).any()) else x


def otherwise_if_many(x: torch.Tensor) -> torch.Tensor:
    """Rows of long passes are computed otherwise."""
    return x if x.shape[1] < 40 else 2 * x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mixing, "it computes eye, mm, which may mix"),
        (ahead, "logits would differ"),
        (norm_of_columns, "it computes linalg_vector_norm,"),
        (norm_of_all, "it computes native_layer_norm,"),
        (asking, "it computes _local_scalar_dense, any,"),
        (otherwise_if_many, "depend on the other rows of its pass"),
        (torch.tanh, None),
    ],
    ids=["product", "neighbour", "norm of columns", "norm of all", "asking", "many", "alone"],
)
def test_a_model_that_computes_rows_together_is_found_out(function: Any, reason: str | None) -> None:
    class Activation(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    module = factory.random_hf_model("gpt_neox")
    module.gpt_neox.layers[1].mlp.act = Activation()
    stand_in(module, factory.make_kernels())
    if reason is None:
        assert isinstance(fit(module, factory.make_kernels(), torch.float32), PooledHFModel)
        return
    with pytest.raises(UnsupportedError, match=reason):
        fit(module, factory.make_kernels(), torch.float32)
    assert module.config._attn_implementation == "eager"


def test_attention_that_is_not_what_it_says_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own function computes something else than softmax attention of that scale."""
    from transformers.models.gpt_neox import modeling_gpt_neox

    own = modeling_gpt_neox.eager_attention_forward
    monkeypatch.setattr(
        modeling_gpt_neox, "eager_attention_forward", lambda *rows, scaling, **given: own(*rows, scaling=2.0, **given)
    )
    module = factory.random_hf_model("gpt_neox")
    stand_in(module, factory.make_kernels())
    with pytest.raises(UnsupportedError, match="logits would differ from transformers'"):
        fit(module, factory.make_kernels(), torch.float32)


class Doubled(torch.nn.Linear):
    """Twice what its class computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubled(*given: Any) -> Any:
    """A hook's answer: twice the output."""
    return 2 * given[-1]


def changed_forward(part: Any) -> None:
    part.forward = lambda x: 2 * torch.nn.functional.linear(x, part.weight, part.bias)


def changed_weight(part: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(part)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.register_forward_hook(doubled),
        lambda part: part.register_forward_pre_hook(lambda _, rows: (2 * rows[0],)),
        lambda part: setattr(part, "__class__", Doubled),
        changed_forward,
        changed_weight,
    ],
    ids=["hook", "hook before", "class", "function", "computed weight"],
)
def test_what_computes_something_else_than_a_linear_layer_stays(change: Any) -> None:
    module = factory.random_hf_model("gpt_neox")
    part = module.gpt_neox.layers[1].mlp.dense_h_to_4h
    change(part)
    stand_in(module, factory.make_kernels())
    assert module.gpt_neox.layers[1].mlp.dense_h_to_4h is part
    assert isinstance(module.gpt_neox.layers[1].mlp.dense_4h_to_h, KernelLinear)


def test_quantized_modules_stay_as_they_are() -> None:
    module = factory.random_hf_model("gpt_neox")
    module.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UnsupportedError, match="its weights are quantized"):
        stand_in(module, factory.make_kernels())
    assert not any(isinstance(part, KernelLinear) for part in module.modules())


def test_a_layer_with_two_names_is_replaced_at_both() -> None:
    module = factory.random_hf_model("gpt_neox")
    first, second = (layer.mlp for layer in module.gpt_neox.layers)
    second.dense_h_to_4h = first.dense_h_to_4h
    stand_in(module, factory.make_kernels())
    assert isinstance(second.dense_h_to_4h, KernelLinear) and second.dense_h_to_4h is first.dense_h_to_4h


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_computes_otherwise_with_stand_ins_is_found_out(dtype: torch.dtype) -> None:
    class Activation(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if isinstance(module.gpt_neox.layers[1].mlp.dense_h_to_4h, torch.nn.Linear) else 2 * x

    module = factory.random_hf_model("gpt_neox").to(dtype)
    module.gpt_neox.layers[1].mlp.act = Activation()
    with pytest.raises(UnsupportedError, match="the kernels' logits differ from the module's"):
        stand_in(module, factory.make_kernels())


@pytest.fixture
def fake_loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Loads give random modules; references to them, which must be dead when the next is loaded."""
    loaded: list[Any] = []

    def load(*_: Any) -> Any:
        assert all(reference() is None for reference in loaded)
        module = factory.random_hf_model("gpt_neox")
        loaded.append(weakref.ref(module))
        return module

    monkeypatch.setattr(hf_loading, "_load", load)
    return loaded


def test_two_copies_are_never_in_memory(fake_loads: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(module: Any, _: Any) -> None:
        raise ValueError(type(module).__name__)

    monkeypatch.setattr(hf_loading, "_with_kernels", fails)
    assert isinstance(hf_loading.load_hf_model(tmp_path, None, None, factory.make_kernels()), HFModel)
    assert len(fake_loads) == 2


def test_what_keeps_its_matrices_is_loaded_once(
    fake_loads: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hf_loading, "why_not", lambda _: "its weights are quantized")
    assert isinstance(hf_loading.load_hf_model(tmp_path, None, None, factory.make_kernels()), HFModel)
    assert len(fake_loads) == 1


def test_out_of_memory_is_not_taken_for_an_unfit_model(
    fake_loads: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(hf_loading, "fit", fails)
    with pytest.raises(ResourceError, match="free memory"):
        hf_loading.load_hf_model(tmp_path, None, None, factory.make_kernels())
    assert len(fake_loads) == 1


def test_an_output_layer_of_another_kind_is_found_out() -> None:
    module = factory.random_hf_model("gpt_neox")
    changed_forward(module.get_output_embeddings())
    stand_in(module, factory.make_kernels())
    with pytest.raises(UnsupportedError, match="its output layer is no linear layer"):
        fit(module, factory.make_kernels(), torch.float32)


def test_logits_that_depend_on_which_are_wanted_are_found_out() -> None:
    module = factory.random_hf_model("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32})  # needs no filling up
    own = module.forward

    @functools.wraps(own)
    def forward(**given: Any) -> Any:
        out = own(**given)
        out.logits = out.logits * (1 if out.logits.shape[1] == given["input_ids"].shape[1] else 2)
        return out

    module.forward = forward
    stand_in(module, factory.make_kernels())
    with pytest.raises(UnsupportedError, match="one row are not those asked for"):
        fit(module, factory.make_kernels(), torch.float32)


@pytest.mark.parametrize(
    ("asked", "is_fit"),
    [({"block_sizes": 4}, False), ({"is_causal": False}, False), ({"is_causal": True, "block_sizes": None}, True)],
    ids=["unknown", "both ways", "known"],
)
def test_attention_that_asks_for_more_is_found_out(
    asked: dict[str, Any], is_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = hf_fitting._look_at_attention
    monkeypatch.setitem(
        hf_fitting.AttentionInterface._global_mapping,
        hf_fitting._ASKING,
        lambda *rows, **given: look(*rows, **given, **asked),
    )
    module = factory.random_hf_model("gpt_neox")
    stand_in(module, None)
    if is_fit:
        assert len(probe(module)[0]) == 2
        return
    with pytest.raises(UnsupportedError, match=f"its attention asks for {next(iter(asked))}"):
        probe(module)


def test_positions_behind_that_of_padding_are_what_a_table_holds() -> None:
    """A table of 10 positions, of which RoBERTa uses those after padding's, 1."""
    fields = {"max_position_embeddings": 10, "pad_token_id": 1, "is_decoder": True}
    model = HFModel(factory.random_hf_model("roberta", fields))
    assert model.max_position == 8
    Runner(model, 20, request_id="fits").span(KNOWN[:8])
    with pytest.raises(RuntimeError, match="out of bounds"):
        Runner(model, 20, request_id="too long").span(KNOWN[:9])


def test_a_table_without_the_last_position_is_found_out() -> None:
    module = factory.random_hf_model("gpt2")
    module.transformer.wpe = torch.nn.Embedding.from_pretrained(module.transformer.wpe.weight[:-1])
    stand_in(module, factory.make_kernels())
    with pytest.raises(IndexError, match="63 is outside 0"):
        fit(module, factory.make_kernels(), torch.float32)


def test_other_logits_at_the_last_positions_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = factory.random_hf_model("gpt_neox")
    last = hf_fitting.max_position(module.config) - 1
    stand_in(module, factory.make_kernels())
    call = PooledHFModel._call

    def wrong_at_the_end(self: Any, run: Any, used: Any, batch: Any, hidden: bool) -> Any:
        batch.positions = batch.positions.where(batch.positions < last, 0)
        return call(self, run, used, batch, hidden)

    monkeypatch.setattr(PooledHFModel, "_call", wrong_at_the_end)
    with pytest.raises(UnsupportedError, match="at the last positions"):
        fit(module, factory.make_kernels(), torch.float32)


def test_passes_are_filled_up_where_a_vector_would_not_end_with_a_row() -> None:
    """Rotations of 12 entries, activations of 36: 8 rows are the fewest that fill whole vectors of 32 entries."""
    sizes = {"hidden_size": 48, "intermediate_size": 36, "rotary_pct": 1.0}
    module = factory.random_hf_model("gpt_neox", sizes)
    stand_in(module, None)
    sites, multiple = probe(module)
    assert multiple == 8 and [site.layer for site in sites] == [0, 1]


@pytest.mark.parametrize("window", [5, 200_000])
def test_windows_are_those_of_the_masks(window: int) -> None:
    fields = {"sliding_window": window, "max_position_embeddings": 300_000}
    module = factory.random_hf_model("starcoder2", fields)
    stand_in(module, None)
    assert [site.window for site in probe(module)[0]] == [window, window]


def test_no_more_positions_are_run_than_masks_are_tried_at() -> None:
    fields = {"sliding_window": 2 << 20, "max_position_embeddings": 4 << 20}
    model = HFModel(factory.random_hf_model("starcoder2", fields))
    assert model.max_position == 1 << 20

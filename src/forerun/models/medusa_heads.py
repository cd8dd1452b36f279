"""Medusa heads: what a checkpoint holds of them, and the logits they give.

Knows: the two published layouts, FasterDecoding's and vLLM's, and the arithmetic of a head. Does not know: trees,
requests, which states it is given.

Head k maps the state after the target's final norm at position t to logits of the token at t + 2 + k:
x <- x + SiLU(W x + b), once a layer, then an output matrix of its own or one for all.
Source: Medusa, arXiv 2401.10774, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.config import HeadWeights
from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.linear import GatheredLinear, Linear
from forerun.models.base import RowPasses
from forerun.models.build import aligned
from forerun.models.decoder import Decoder
from forerun.models.medusa_files import HeadTensors, open_heads
from forerun.quant.rounded import Pack, pack_as
from forerun.weights.resolve import resolve_model

_SAME = 1e-4  # relative difference up to which an output layer counts as a copy of the target's


@dataclass(frozen=True, slots=True)
class Layout:
    """How a published layout names its tensors and what its config.json says of them."""

    name: str
    block: str
    output: str
    num_heads: str  # field of config.json
    num_layers: str
    more_heads: bool  # files hold more heads than config.json says


VLLM = Layout("vLLM", "blocks.{head}.layers.{layer}", "lm_heads.{head}", "num_heads", "num_hidden_layers", False)
# The config.json published with the first Vicuna heads says 2 heads where the file holds 5, as its own reader knows.
FASTER_DECODING = Layout(
    "FasterDecoding", "{head}.{layer}.linear", "{head}.{num_layers}", "medusa_num_heads", "medusa_num_layers", True
)
SHARED_OUTPUT = "lm_head"


class MedusaTarget(NamedTuple):
    """What heads must fit: widths, and the output layer they may share."""

    hidden_size: int
    vocab_size: int
    lm_head: Linear


class MedusaHeads:
    """Heads ready to run."""

    def __init__(
        self, kernels: Kernels, blocks: Sequence[Sequence[Linear]], outputs: Sequence[Linear],
        token_ids: Tensor | None, vocab_size: int, logit_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """`blocks`: the layers of each head; `outputs`: one, or one a head; `token_ids`: of an output's rows."""
        assert len(outputs) in (1, len(blocks))
        self.num_heads = len(blocks)
        self.vocab_size = vocab_size
        self._kernels = kernels
        self._blocks = tuple(tuple(layers) for layers in blocks)
        self._outputs = tuple(outputs)
        self._token_ids = token_ids
        self._logit_scale = logit_scale

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix the heads use."""
        return (*(linear for layers in self._blocks for linear in layers), *self._outputs)

    @property
    def passes(self) -> RowPasses:
        """What `runtime.bind` executes."""
        exchanges = any(isinstance(output, GatheredLinear) for output in self._outputs)
        return RowPasses(self.compute, self.num_heads, self.vocab_size, self._blocks[0][0].weight.shape[1], exchanges)

    def compute(self, x: Tensor, num_heads: int) -> Tensor:
        """States x [R, H] -> logits of the first heads [R * num_heads, V], state by state; a straight line of ops."""
        states = [self._state(layers, x) for layers in self._blocks[:num_heads]]  # each [R, H]
        logits = self._read_out(states)  # [R * heads, outputs' rows]
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._token_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)  # [R * heads, V]
        return whole.index_copy_(1, self._token_ids, logits)

    def _state(self, layers: Sequence[Linear], x: Tensor) -> Tensor:
        ones = torch.ones_like(x)  # [R, H]: gated_act(x, 1) is silu(x)
        for layer in layers:
            x = x + self._kernels.gated_act(torch.cat([layer(x), ones], dim=1), "silu")  # [R, H]
        return x

    def _read_out(self, states: Sequence[Tensor]) -> Tensor:
        """One product for all heads if they share the matrix, since reading it is what costs time."""
        if len(self._outputs) == 1:
            return self._outputs[0](torch.stack(list(states), dim=1).flatten(0, 1))  # [R * heads, V]
        return torch.stack([out(x) for out, x in zip(self._outputs, states, strict=False)], dim=1).flatten(0, 1)


def load_medusa(
    name_or_path: str | Path, model: Decoder, kernels: Kernels, weights: HeadWeights = "stored"
) -> MedusaHeads:
    """Read the heads in a folder, given like a model's, for `model`, their matrices as `weights` says.

    Raises ModelNotFoundError, CheckpointError for tensors that are missing, misshapen, superfluous or made for another
    target, and UnsupportedError for layouts and storage formats that are not known.
    """
    source = open_heads(resolve_model(name_or_path))
    if source.config.get("quantization_config"):
        raise UnsupportedError(
            f"{source.path} holds quantized Medusa heads; only float32, bfloat16 and float16 are read"
        )
    fits = MedusaTarget(model.hidden_size, model.vocab_size, model.parts.lm_head)
    reader = _Reader(source, _layout(source), fits, kernels, pack_as(weights))
    heads = reader.heads()
    if source.unread:
        raise CheckpointError(
            f"{source.path} holds {len(source.unread)} tensors that Medusa heads of this layout do not use, e.g. "
            f"{', '.join(source.unread[:3])}; weights and config.json do not belong together"
        )
    return heads


def _layout(source: HeadTensors) -> Layout:
    for layout in (VLLM, FASTER_DECODING):
        if source.has(layout.block.format(head=0, layer=0) + ".weight"):
            return layout
    found = ", ".join(source.names[:4]) or "nothing"
    raise UnsupportedError(
        f"{source.path} is in no known layout of Medusa heads: it has neither blocks.0.layers.0.weight (vLLM) nor "
        f"0.0.linear.weight (FasterDecoding), but {found}; give the folder of Medusa heads"
    )


class _Reader:
    """Reads the heads of one checkpoint."""

    def __init__(self, source: HeadTensors, layout: Layout, target: MedusaTarget, kernels: Kernels, pack: Pack) -> None:
        self._source = source
        self._layout = layout
        self._target = target
        self._kernels = kernels
        self._pack = pack
        self._check("hidden_size", target.hidden_size)
        self._check("vocab_size", target.vocab_size)
        self._num_layers = self._count_layers()

    def heads(self) -> MedusaHeads:
        """All heads the file holds."""
        num_heads, token_ids = self._count_heads(), self._token_ids()
        return MedusaHeads(
            self._kernels,
            [[self._layer(head, layer) for layer in range(self._num_layers)] for head in range(num_heads)],
            self._outputs(num_heads, token_ids),
            token_ids,
            self._target.vocab_size,
            float(self._source.config.get("logit_scale", 1.0)),
        )

    # -- how many ---------------------------------------------------------------------------------------------------

    def _count_heads(self) -> int:
        found, field = self._count(lambda head: {"head": head, "layer": 0}), self._layout.num_heads
        stated = self._source.config.get(field, found)
        if stated != found and not (self._layout.more_heads and stated < found):
            raise CheckpointError(
                f"{self._source.path} has tensors of {found} Medusa heads, config.json says {field} {stated}; weights "
                "and config.json do not belong together"
            )
        return found

    def _count_layers(self) -> int:
        found, field = self._count(lambda layer: {"head": 0, "layer": layer}), self._layout.num_layers
        stated = self._source.config.get(field, found)
        if stated != found:
            raise CheckpointError(
                f"{self._source.path} has {found} layers in its first Medusa head, config.json says {field} {stated}; "
                "weights and config.json do not belong together"
            )
        return found

    def _count(self, place: Any) -> int:
        count = 0
        while self._source.has(self._layout.block.format(**place(count)) + ".weight"):
            count += 1
        return count

    def _check(self, field: str, wanted: int) -> None:
        found = self._source.config.get(field, wanted)
        if found != wanted:
            raise CheckpointError(
                f"the Medusa heads in {self._source.path} were made for a target with {field} {found}, this one has "
                f"{wanted}; give heads that were trained for this target"
            )

    # -- tensors ----------------------------------------------------------------------------------------------------

    def _layer(self, head: int, layer: int) -> Linear:
        name, size = self._layout.block.format(head=head, layer=layer), self._target.hidden_size
        bias = self._tensor(f"{name}.bias", (size,)).float() if self._has_bias else None
        return self._linear(self._tensor(f"{name}.weight", (size, size)), bias)

    @property
    def _has_bias(self) -> bool:
        """FasterDecoding's layers always have one, vLLM's if config.json says so."""
        return self._layout is FASTER_DECODING or bool(self._source.config.get("medusa_fc_bias", False))

    def _linear(self, matrix: Tensor, bias: Tensor | None = None) -> Linear:
        shift = None if bias is None else aligned(bias).to(self._kernels.device)
        return Linear(self._pack(self._kernels, aligned(matrix)), shift)

    def _tensor(self, name: str, shape: tuple[int, int] | tuple[int]) -> Tensor:
        found = self._source.tensor(name)
        if found.shape != shape:
            raise CheckpointError(
                f"tensor {name} of {self._source.path} has shape {list(found.shape)}, for this target it must be "
                f"{list(shape)}; give heads that were trained for this target"
            )
        return found

    # -- output layers ----------------------------------------------------------------------------------------------

    def _token_ids(self) -> Tensor | None:
        """The token every row of a truncated output layer stands for -> [rows] int64; None: rows are tokens."""
        vocab_size = self._target.vocab_size
        size = self._source.config.get("truncated_vocab_size") or vocab_size
        if self._source.has("token_map"):
            token_ids = aligned(self._checked_map(self._source.integers("token_map").long(), size))
            return token_ids.to(self._kernels.device)
        if size != vocab_size:
            raise CheckpointError(
                f"{self._source.path} has no token_map, which truncated_vocab_size {size} asks for (the target has "
                f"{vocab_size} tokens); the checkpoint is incomplete"
            )
        return None

    def _checked_map(self, found: Tensor, size: int) -> Tensor:
        inside = found[(found >= 0) & (found < self._target.vocab_size)]
        if found.shape != (size,) or len(set(inside.tolist())) != size:
            raise CheckpointError(
                f"token_map of {self._source.path} must hold {size} different tokens (truncated_vocab_size) from 0 to "
                f"{self._target.vocab_size - 1}; got {len(set(inside.tolist()))} in shape {list(found.shape)}"
            )
        return found

    def _outputs(self, num_heads: int, token_ids: Tensor | None) -> list[Linear]:
        if self._layout is VLLM and self._source.config.get("original_lm_head", False):
            for head in range(1, num_heads):  # copies of the one, in files that have a matrix for every head
                self._source.leave(f"{self._layout.output.format(head=head)}.weight")
            return [self._shared_output(token_ids)]
        names = [self._layout.output.format(head=head, num_layers=self._num_layers) for head in range(num_heads)]
        return [self._linear(self._output_rows(f"{name}.weight", token_ids)) for name in names]

    def _shared_output(self, token_ids: Tensor | None) -> Linear:
        """The target's output layer: its own object where all of it is used, else a copy of some rows."""
        names = [f"{name}.weight" for name in (SHARED_OUTPUT, self._layout.output.format(head=0))]
        name = next(filter(self._source.has, names), None)
        own = self._target.lm_head
        if name is None:
            return own if token_ids is None else self._linear(own.weight.dequantize()[token_ids])
        rows = self._output_rows(name, token_ids)
        return own if token_ids is None and _is_same(rows, own, self._kernels.device) else self._linear(rows)

    def _output_rows(self, name: str, token_ids: Tensor | None) -> Tensor:
        """An output matrix -> [rows, H]; a whole one where tokens were chosen is cut, as vLLM does."""
        vocab_size, size = self._target.vocab_size, self._target.hidden_size
        if token_ids is None:
            return self._tensor(name, (vocab_size, size))
        if self._source.tensor(name).shape[0] == vocab_size:
            return self._tensor(name, (vocab_size, size))[token_ids.cpu()]
        return self._tensor(name, (len(token_ids), size))


def _is_same(matrix: Tensor, own: Linear, device: torch.device) -> bool:
    """Whether `own` multiplies by `matrix` [V, H], tried on a few random rows."""
    x = torch.randn(4, matrix.shape[1], generator=torch.Generator().manual_seed(0))  # [4, H]
    theirs, ours = x @ matrix.float().T, own(x.to(device)).cpu()  # [4, V]
    return bool((theirs - ours).abs().max() <= _SAME * theirs.abs().max())

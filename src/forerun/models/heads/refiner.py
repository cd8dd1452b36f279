"""xPress's refiner: how a slot's logits change with all tokens of its block so far.

Knows: the tensors' names, the arithmetic. Does not know: the layers below, trees.

Slot k, behind token x: u_k = I [D h_k, G mean(h), W1[x]], of hidden states h of all the block's slots; each channel is
mixed with those of the slots before, m_k = u_k + sum over j <= k of L_kj u_j; logits_k + W2 (m_k + swiglu(m_k)).
The published programs refine whole blocks a number of times (`num_jacobi_passes`), each time from the tokens chosen
last. A slot sees no later one, so this ends where drawing slot by slot begins, which is done here.
Sources: xPress (arXiv 2608.02438); vllm-project/speculators models/xpress; Supercomputing-System-AI-Lab/xPress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from forerun.errors import CheckpointError
from forerun.layers.linear import Linear
from forerun.models.base import GuessedBlocks, PassOutput, SlotLogits
from forerun.models.fields import Fields
from forerun.models.heads.markov import widener
from forerun.models.heads.reading import HeadReader
from forerun.models.heads.vocabulary import DraftVocabulary

# W1, L, the matrices of swiglu, W2: by the module they are in
NAMES: Mapping[str, tuple[str, str, str, str, str, str]] = {
    "xpress_head": ("w1.weight", "mix.L", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "w2"),
    "refiner_head": ("token_embed.weight", "mix_l", "mlp_gate", "mlp_up", "mlp_down", "readout"),  # speculators
}


@dataclass(frozen=True, slots=True)
class Refiner:
    """Implements `models.base.SlotOrder`."""

    tokens: Tensor  # W1 [V, rank]
    down: Linear  # D [rank, H]
    down_mean: Linear  # G [rank, H]
    join: Linear  # I [rank, 3 rank]
    mixer: Tensor  # L [rank, slots, slots] float32
    mlp: tuple[Linear, Linear, Linear]  # gate and up [F, rank], down [rank, F]
    readout: Linear  # W2 [drafted tokens, rank]
    widen: Callable[[Tensor], Tensor]  # what is added to logits of drafted tokens [n, D] -> of all [n, V]

    reads_before: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        """Bytes of tables and matrices."""
        linears = (self.down, self.down_mean, self.join, *self.mlp, self.readout)
        return self.tokens.nbytes + self.mixer.nbytes + sum(linear.nbytes for linear in linears)

    @torch.no_grad()
    def __call__(self, blocks: GuessedBlocks) -> SlotLogits:
        """See `models.base.SlotOrder`; what slots hand on are u of all slots so far [n, slots * rank]."""
        num, slots, _ = blocks.states.shape
        own = self.down(blocks.states.flatten(0, 1)).view(num, slots, -1)
        mean = self.down_mean(blocks.states.mean(1))  # [R, rank]
        hidden = torch.cat([own, mean[:, None].expand_as(own)], dim=2)  # [R, slots, 2 rank]
        first, begun = blocks.first_slot, None
        if first:
            assert blocks.before is not None
            begun = self._entered(hidden[:, 0], blocks.before)

        @torch.no_grad()
        def logits_of(chosen: Tensor, depth: int, above: Tensor, given: Tensor | None) -> PassOutput:
            slot, given = depth + first, begun if given is None else given
            entered = self._entered(hidden[chosen, slot], above)
            known = entered if given is None else torch.cat([given, entered], dim=1)
            latent = self._latent(entered, known.view(len(known), slot + 1, -1), slot)
            return PassOutput(blocks.logits[chosen, depth] + self.widen(self.readout(latent)), features=known)

        return logits_of

    def _entered(self, hidden: Tensor, before: Tensor) -> Tensor:
        """u [n, rank] of slots [n, 2 rank] behind tokens [n]."""
        return self.join(torch.cat([hidden, self.tokens[before].float()], dim=1))

    def _latent(self, entered: Tensor, known: Tensor, slot: int) -> Tensor:
        """What the readout reads [n, rank], of u [n, rank] and those up to it [n, slot + 1, rank]."""
        mixed = entered + torch.einsum("njc,cj->nc", known, self.mixer[:, slot, : slot + 1])
        gate, up, down = self.mlp
        return mixed + down(silu(gate(mixed)) * up(mixed))


def read_refiner(
    reader: HeadReader, fields: Fields, num_drafted: int, vocabulary: DraftVocabulary | None
) -> Refiner:  # fmt: skip
    """The refiner in a checkpoint with logits of `num_drafted` tokens; raises CheckpointError."""
    source, size, device = reader.source, reader.hidden_size, reader.target.device
    module = next(name for name in NAMES if source.has(f"{name}.down_h.weight"))
    table, mixer, gate, up, down, readout = (f"{module}.{name}" for name in NAMES[module])
    rank, slots = fields.integer("xpress_rank", default=256), fields.integer("block_size")
    width = fields.integer("xpress_mlp_hidden", default=rank * fields.integer("xpress_mlp_ratio", default=2))
    if fields.integer("xpress_block_size", default=slots) != slots:
        raise CheckpointError(
            f"{source.folder}: block_size {slots} and xpress_block_size {fields.get('xpress_block_size')} in "
            "config.json differ; copy the file again"
        )
    return Refiner(
        tokens=source.tensor(table, (reader.target.vocab_size, rank)).to(device),
        down=reader.linear(f"{module}.down_h", rank, size),
        down_mean=reader.linear(f"{module}.down_g", rank, size),
        join=reader.linear(f"{module}.in_proj", rank, 3 * rank),
        mixer=source.tensor(mixer, (rank, slots, slots)).float().to(device),
        mlp=(
            reader.linear(gate, width, rank),
            reader.linear(up, width, rank),
            reader.linear(down, rank, width),
        ),
        readout=reader.linear(readout, num_drafted, rank),
        widen=widener(vocabulary),
    )

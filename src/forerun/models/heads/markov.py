"""DSpark's Markov head: how a slot's logits change with the token before it, or with all of its block's so far.

Knows: the tensors' names, the arithmetic. Does not know: the layers below, trees.

logits + W2 f, with e = W1[token before] and the slot's hidden state z:
vanilla: f = e; gated: f = sigmoid(G [z, e] + g) * e; rnn: [a, c, o] = J [s, e, z] + j, f = tanh(o), and the next slot's
s = sigmoid(a) * s + (1 - sigmoid(a)) * tanh(c), which is 0 in the block's first slot.
Sources: DSpark (arXiv 2607.05147); deepseek-ai/DeepSpec modeling/dspark; vllm-project/speculators models/dspark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.layers.linear import Linear
from forerun.models.base import GuessedBlocks, PassOutput, SlotLogits
from forerun.models.fields import Fields
from forerun.models.heads.reading import HeadReader
from forerun.models.heads.vocabulary import DraftVocabulary

MODULE = "markov_head"
KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Implements `models.base.SlotOrder`."""

    kind: str  # one of KINDS
    predecessors: Tensor  # W1 [V, rank]
    successors: Linear  # W2 [drafted tokens, rank]
    inner: Linear | None  # G [rank, H + rank] or J [3 rank, 2 rank + H]
    widen: Callable[[Tensor], Tensor]  # what is added to logits of drafted tokens [n, D] -> of all [n, V]

    reads_before: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        """Bytes of tables and matrix."""
        own = 0 if self.inner is None else self.inner.nbytes
        return self.predecessors.nbytes + self.successors.nbytes + own

    def __call__(self, blocks: GuessedBlocks) -> SlotLogits:
        """See `models.base.SlotOrder`."""
        first = blocks.first_slot
        begun = self._begun(blocks) if self.kind == "rnn" else None

        @torch.no_grad()
        def logits_of(chosen: Tensor, depth: int, above: Tensor, given: Tensor | None) -> PassOutput:
            given = begun if given is None else given
            latent, state = self._step(blocks.states[chosen, depth + first], self.predecessors[above].float(), given)
            return PassOutput(blocks.logits[chosen, depth] + self.widen(self.successors(latent)), features=state)

        return logits_of

    def _begun(self, blocks: GuessedBlocks) -> Tensor:
        """s in the slot of the first draft [R, rank]: the root's slot comes before it unless that is the same."""
        state = blocks.states.new_zeros(len(blocks.roots), self.predecessors.shape[1])
        for slot in range(blocks.first_slot):
            made = self._step(blocks.states[:, slot], self.predecessors[blocks.roots].float(), state)[1]
            assert made is not None
            state = made
        return state

    def _step(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """z [n, H], e [n, rank] and s [n, rank] -> f [n, rank], and the next slot's s."""
        if self.inner is None:
            return before, None
        if state is None:
            return torch.sigmoid(self.inner(torch.cat([hidden, before], dim=1))) * before, None
        keep, candidate, made = self.inner(torch.cat([state, before, hidden], dim=1)).chunk(3, dim=1)
        kept = torch.sigmoid(keep)
        return torch.tanh(made), kept * state + (1.0 - kept) * torch.tanh(candidate)


def read_markov(
    reader: HeadReader, fields: Fields, num_drafted: int, vocabulary: DraftVocabulary | None
) -> MarkovHead:  # fmt: skip
    """The head in a checkpoint with logits of `num_drafted` tokens; raises CheckpointError and UnsupportedError."""
    rank, kind = fields.integer("markov_rank", default=256), fields.text("markov_head_type", default=KINDS[0])
    if kind not in KINDS:
        raise UnsupportedError(
            f"{reader.source.folder}: markov_head_type {kind!r} in config.json; supported are {', '.join(KINDS)}"
        )
    size, source, inner = reader.hidden_size, reader.source, None
    if kind == "gated":
        inner = reader.linear(f"{MODULE}.gate_proj", rank, size + rank)
    elif kind == "rnn":
        inner = reader.linear(f"{MODULE}.joint_proj", 3 * rank, 2 * rank + size)
    table = source.tensor(f"{MODULE}.markov_w1.weight", (reader.target.vocab_size, rank))
    successors = reader.linear(f"{MODULE}.markov_w2", num_drafted, rank)
    return MarkovHead(kind, table.to(reader.target.device), successors, inner, widener(vocabulary))


def widener(vocabulary: DraftVocabulary | None) -> Callable[[Tensor], Tensor]:
    """Additions to logits of a draft vocabulary [n, D] -> to those of all tokens [n, V]; None: all are drafted."""
    return _as_it_is if vocabulary is None else lambda added: vocabulary.widen(added, 0.0)


def _as_it_is(added: Tensor) -> Tensor:
    return added

"""Clustered output layers: a head gives logits for the tokens of a few clusters alone.

Knows: how clusters are chosen by the scores of their centroids. Does not know: the head.

Reading a table of 262,144 rows takes longer than the rest of a small head; 32 of 2048 clusters are a 64th of it.
Source: transformers modeling_gemma4_assistant.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.layers.linear import Linear


class ClusteredOutput:
    """x -> logits of the tokens in the clusters whose centroids score best; -inf for all others."""

    def __init__(self, kernels: Kernels, centroids: Linear, table: Tensor, token_ids: Tensor, top_k: int) -> None:
        """`centroids` [C, H]; table [V, H]; token_ids [C, V / C] int64: those of each cluster."""
        self._kernels, self._centroids, self._token_ids, self._top_k = kernels, centroids, token_ids, top_k
        self.weight = table

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the centroids and the ids."""
        return self.weight.nbytes + self._centroids.nbytes + self._token_ids.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, H] -> [R, V]. Row by row: products of one size round alike, however many rows there are."""
        logits = x.new_full((x.shape[0], self.weight.shape[0]), -torch.inf)
        for row, best in enumerate(self._centroids(x).topk(self._top_k, dim=1).indices):
            token_ids = self._token_ids[best].flatten()
            logits[row, token_ids] = self._kernels.embedding(token_ids, self.weight) @ x[row]
        return logits

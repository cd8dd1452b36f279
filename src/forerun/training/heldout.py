"""Held-out loss: bits per byte of text that was never trained on, for each domain.

Knows how to measure a network on fixed windows. Knows nothing of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.training.data import Tokens
from forerun.training.net import Net
from forerun.training.sources import DOMAINS, SOURCES

EVAL_BATCH = 8


@dataclass(frozen=True)
class Heldout:
    """Fixed windows per domain [windows, seq + 1] and the bytes of text behind each token id [vocab]."""

    windows: Mapping[str, Tensor]
    lens_bytes: Tensor

    @classmethod
    def build(cls, tokens: Mapping[str, Tokens], lens_bytes: list[int], seq_len: int, num_windows: int) -> Heldout:
        """Takes `num_windows` windows of each domain, the same number from each of its sources while they last."""
        windows = {}
        for domain in DOMAINS:
            sources = [tokens[name] for name in sorted(tokens) if SOURCES[name].domain == domain]
            chosen = choose_windows(sources, seq_len, num_windows)
            if chosen:
                windows[domain] = torch.from_numpy(np.stack(chosen).astype(np.int64))
        return cls(windows, torch.tensor(lens_bytes))


def choose_windows(sources: list[Tokens], seq_len: int, num_windows: int) -> list[Tokens]:
    """Takes windows of the sources in turns."""
    chosen: list[Tokens] = []
    longest = max((len(tokens) for tokens in sources), default=0)
    for start in range(0, longest - seq_len, seq_len):
        for tokens in sources:
            if start + seq_len < len(tokens) and len(chosen) < num_windows:
                chosen.append(tokens[start : start + seq_len + 1])
    return chosen


@torch.no_grad()
def bits_per_byte(net: Net, heldout: Heldout) -> dict[str, float]:
    """Measures bits per byte for each domain of `heldout`."""
    return {domain: domain_bits(net, windows, heldout.lens_bytes) for domain, windows in heldout.windows.items()}


def domain_bits(net: Net, windows: Tensor, lens_bytes: Tensor) -> float:
    """Measures bits per byte on windows [windows, seq + 1]."""
    nats = 0.0
    device = next(net.parameters()).device
    for batch in torch.split(windows.to(device), EVAL_BATCH):
        logits = net(batch[:, :-1])
        nats += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / int(lens_bytes[windows[:, 1:]].sum())


@torch.no_grad()
def acceptance_rate(draft: Net, target: Net, heldout: Heldout) -> dict[str, float]:
    """Measures, per domain, how often a drafted token would be accepted at temperature 1: mean of sum min(p, q)."""
    rates = {}
    device = next(target.parameters()).device
    for domain, windows in heldout.windows.items():
        overlaps = [
            torch.minimum(target(batch[:, :-1]).softmax(-1), draft(batch[:, :-1]).softmax(-1)).sum(-1)
            for batch in torch.split(windows.to(device), EVAL_BATCH)
        ]  # each [windows of the batch, seq]
        rates[domain] = torch.cat(overlaps).mean().item()
    return rates

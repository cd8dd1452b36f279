"""The teacher's own text: continuations of training text sampled from it, stored as one more source.

Knows batched sampling with a KV cache in torch. Knows nothing of losses or steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import TrainingError
from forerun.training.data import Tokens, load_tokens, token_path
from forerun.training.export import write_json
from forerun.training.mixture import Mixture
from forerun.training.net import Net
from forerun.training.prepare import Report
from forerun.training.recipe import Recipe

OWN_TEXT = "own_text"
PROMPT_SEED_OFFSET = 1  # so that the prompts are not the first windows of the training order
REPORT_EVERY = 10


@torch.no_grad()
def continue_text(net: Net, prompts: Tensor, num_tokens: int, greedy: Tensor, generator: torch.Generator) -> Tensor:
    """Continues prompts [batch, seq] by `num_tokens`: rows where `greedy` [batch] at T = 0, the others at T = 1.

    Returns prompts and continuations, [batch, seq + num_tokens].
    """
    caches = net.new_caches(len(prompts), prompts.shape[1] + num_tokens)
    rows, new_ids = [prompts], prompts
    for _ in range(num_tokens):
        logits = net.head(net.hidden(new_ids, caches)[:, -1])  # [batch, vocab]
        drawn = draw_ids(logits.softmax(-1), generator)
        new_ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
        rows.append(new_ids)
    return torch.cat(rows, dim=1)


def draw_ids(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one id from each row of `probabilities` [batch, vocab], as [batch, 1].

    `torch.multinomial` draws a random number for every entry of the vocabulary; this draws one per row.
    """
    sums = probabilities.cumsum(-1)
    marks = torch.rand(len(sums), 1, generator=generator).to(sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, marks, right=True).clamp(max=sums.shape[-1] - 1)


def sample_own_text(
    recipe: Recipe, teacher: Net, sources: Mapping[str, Tokens], folder: Path, report: Report
) -> Tokens:
    """Samples `distill.sample_tokens` tokens from the teacher, or takes those an earlier call left in `folder`.

    Raises TrainingError if those were sampled with other settings than the recipe's.
    """
    path = token_path(folder, OWN_TEXT, "train")
    note = path.with_suffix(".json")  # what the text depends on
    if not path.is_file():
        write_json(note, about_text(recipe))
        tokens = draw(recipe, teacher, sources, report)
        temporary = path.with_suffix(".tmp")
        tokens.tofile(temporary)
        temporary.replace(path)
    elif note.is_file() and (found := json.loads(note.read_text(encoding="utf-8"))) != about_text(recipe):
        raise TrainingError(
            f"{path} was sampled for {found}, now it is {about_text(recipe)}; use another --out, or --fresh"
        )
    return load_tokens(folder, OWN_TEXT, "train")


def about_text(recipe: Recipe) -> dict[str, Any]:
    """What the teacher's text depends on, which `sample_share` is not part of."""
    assert recipe.distill is not None  # the caller distills
    options = {name: value for name, value in asdict(recipe.distill).items() if name != "sample_share"}
    return {**options, "seed": recipe.seed, "mix": recipe.mix}


def draw(recipe: Recipe, teacher: Net, sources: Mapping[str, Tokens], report: Report) -> Tokens:
    """Continues windows of the training mix; the first rows of each batch greedily."""
    options = recipe.distill
    assert options is not None  # the caller distills
    prompts = Mixture(sources, recipe.mix, options.prompt_tokens, recipe.seed + PROMPT_SEED_OFFSET)
    generator = torch.Generator().manual_seed(recipe.seed)
    device = recipe.run.device
    greedy = torch.arange(options.sample_batch, device=device) < round(options.greedy_share * options.sample_batch)
    parts: list[Tokens] = []
    row_tokens = options.prompt_tokens + options.continuation_tokens
    num_batches = -(-options.sample_tokens // (options.sample_batch * row_tokens))
    for number in range(num_batches):
        start = prompts.next_batch(options.sample_batch)[:, :-1]
        text = continue_text(teacher, start.to(device), options.continuation_tokens, greedy, generator)
        parts.append(text.flatten().cpu().numpy().astype(np.uint16))
        if (number + 1) % REPORT_EVERY == 0:
            report(f"sampled {number + 1} of {num_batches} batches of the teacher's text")
    return np.concatenate(parts)

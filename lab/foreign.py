"""A draft model with another tokenizer than the target's: what `forerun train lm` needs to train one on its answers.

    forerun train answers --target mini --data runs/chat/prompts.jsonl --out runs/chat      # if there are none yet
    python lab/foreign.py runs/foreign --target mini --tokenizer ../shared/data/tokenizers/gpt2 \
        --answers runs/chat/turn1.answers --answers runs/chat/turn2.answers
    forerun train lm recipes/mini-foreign.toml

OUT gets `start/`, a model with GPT-2's tokenizer (vocab.json and merges.txt), to which the target's special tokens
are added, and `small_world.jsonl.xz`, the target's prompts and answers as text. The model begins as `--start` (a
draft model of the target), with another table: a token's row is that of the same text in the old tokenizer, or the
mean of its tokens' rows.

Knows: files, and how a table is carried over. Does not know: training, nor how such a model drafts
(`weights.translation`).
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError
from forerun.models.loader import load_tokenizer
from forerun.training.export import export_model, load_model
from forerun.training.heads.answers import answer_file_rows
from forerun.training.net import Net
from forerun.training.tokenizer import save_tokenizer
from forerun.weights.corpus import fingerprint
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer

TEXT = "small_world.jsonl.xz"  # the one generated source of `forerun train lm`
TABLE = "model.embed_tokens.weight"
GPT2_FILES = ("vocab.json", "merges.txt")


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="mini")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--answers", type=Path, action="append", required=True, help="of `forerun train answers`")
    parser.add_argument("--start", default="mini-draft", help="a draft model of the target, trained by forerun")
    given = parser.parse_args()
    target = load_tokenizer(given.target)
    texts = list(answers_as_text(given.answers, target))
    given.out.mkdir(parents=True, exist_ok=True)
    write_start(given.out / "start", resolve_model(given.start), read_gpt2(given.tokenizer, target))
    with lzma.open(given.out / TEXT, "wt", encoding="utf-8", preset=1) as file:
        file.writelines(json.dumps({"kind": "answer", "text": text}, ensure_ascii=False) + "\n" for text in texts)
    print(f"{len(texts)} prompts with answers, {sum(map(len, texts)) / 1e6:.1f} M characters; {given.out / 'start'}")


def read_gpt2(folder: Path, target: Tokenizer) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer, with the target's special tokens behind its own. Raises ConfigError for another folder."""
    missing = [name for name in GPT2_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} has no {' and no '.join(missing)}: give a folder with GPT-2's tokenizer")
    made = tokenizers.Tokenizer(models.BPE.from_file(*(str(folder / name) for name in GPT2_FILES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(target.special_text(token), special=True, normalized=False) for token in sorted(target.special_ids)]
    )
    return made


def answers_as_text(files: Sequence[Path], target: Tokenizer) -> Iterator[str]:
    """Every prompt with its answer, special tokens written out."""
    for path in files:
        rows = answer_file_rows(path, target.vocab_size, vocabulary=fingerprint(target))
        for number in range(len(rows)):
            yield target.decode(rows.sequence(number).tolist(), skip_special_tokens=False)


def write_start(folder: Path, source: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """A model as `forerun train lm` starts from: the network of `source` with another tokenizer and its table."""
    old, own = load_model(source), load_tokenizer(source)
    weights = old.state_dict()
    table = carried_over(weights[TABLE], own, tokenizer)
    net = Net(replace(old.config, vocab_size=len(table)))
    net.load_state_dict({**weights, TABLE: table})
    folder.mkdir(parents=True, exist_ok=True)
    parts = folder.with_name(f".{folder.name}.tokenizer")
    parts.mkdir(exist_ok=True)
    try:
        save_tokenizer(tokenizer, parts, old.config.max_positions)
        export_model(net, parts, folder)
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def carried_over(table: Tensor, own: Tokenizer, tokenizer: tokenizers.Tokenizer) -> Tensor:
    """Rows for every token of `tokenizer`, from those of `own` [V, H] -> [its tokens, H].

    A text's row is the mean of the rows of its tokens in `own`; texts that are no whole characters get the mean of all.
    """
    specials = own.special_ids
    named = {own.special_text(token): token for token in specials}
    rows = table.mean(0, keepdim=True).repeat(tokenizer.get_vocab_size(), 1)
    for name, token in tokenizer.get_vocab().items():
        if name in named:
            rows[token] = table[named[name]]
            continue
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text and (ids := own.encode(text, add_special_tokens=False)):
            rows[token] = table[ids].mean(0)
    if not torch.isfinite(rows).all():
        raise CheckpointError("the table of the starting model holds NaN or infinity: choose another --start")
    return rows


if __name__ == "__main__":
    main()

"""Writes tests/drafters/fixtures: a small random target, and heads for it as vLLM's speculators saves them.

Knows: speculators. Does not know: forerun, whose tests read what is written here. Beside each head `expected.json`
holds the logits that the library's own model gives every slot of a block behind known tokens, in float32, and the chain
that follows from them where slots look at those before; of EAGLE-3 a greedy chain and its logits, behind known tokens
of which the target chose the last. Run in an environment with torch, transformers and speculators 0.9.0:

    tools/bin/python lab/head_fixtures.py tests/drafters/fixtures
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

VOCAB, HIDDEN, BLOCK, MASK = 64, 32, 5, 60
DRAFTED = [token for token in range(VOCAB) if token % 3]  # the draft vocabulary of one head
TOKENS = [(7 * index + index * index) % VOCAB for index in range(30)]
NUM_KNOWN = (4, 11, 20)
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOSS = resolve_loss_config("kl_div", "eager")  # asked for, though nothing is trained
SLIDING = ["sliding_attention", "full_attention"]
SHARED = {"mask_token_id": MASK, "block_size": BLOCK, "aux_hidden_state_layer_ids": [1, 3]}


def random_weights(model: Any, spread: float, seed: int, kept: tuple[str, ...] = ()) -> None:
    """Fill the parameters but those whose names hold one of `kept`; norms are around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(part in name for part in kept):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name))


def speculators_config(algorithm: str, num_drafts: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_drafts)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained("target"),
    )


def layers(kind: str, num_layers: int = 2, **fields: Any) -> Any:
    made = transformers.AutoConfig.for_model(kind, num_hidden_layers=num_layers, **SIZES, **fields)
    made._attn_implementation = "eager"
    return made


def block_logits(model: Any, states: torch.Tensor, final: torch.Tensor, num_known: int) -> torch.Tensor:
    """Of every slot of one block that gives a draft."""
    root = num_known - 1
    mask, zeros = torch.zeros(1, len(TOKENS)), torch.zeros(1, len(TOKENS), dtype=torch.long)
    mask[0, root] = 1
    ids = torch.tensor([TOKENS])
    _, logits, *_ = model._backbone_forward(states, ids, mask, final, zeros, max_anchors=1)
    return logits[0, 0 if model.config.sample_from_anchor else 1 :]


def parallel_logits(model: Any, states: torch.Tensor, final: torch.Tensor, num_known: int) -> torch.Tensor:
    """Of the root's row and the empty slots behind it."""
    rows, last = len(TOKENS) - 1, num_known - 2
    anchors = torch.tensor([*range(rows), *[last] * (BLOCK - 1)])
    depths = torch.tensor([0] * rows + list(range(1, BLOCK)))
    peagle.generate_cod_sample_indices = lambda **_: (anchors, depths)
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: found.append(out))
    ids, zeros = torch.tensor([TOKENS[1:]]), torch.zeros(1, rows, dtype=torch.long)
    model(states[:, :-1], ids, zeros, verifier_last_hidden_states=final[:, 1:], num_depths=BLOCK, loss_config=LOSS)
    hook.remove()
    return found[0][0, [last, *range(rows, rows + BLOCK - 1)]]


def keep_hidden(model: Any) -> None:
    """Let the model remember what its output layer read of the last block [slots, H]."""
    model.norm.register_forward_hook(lambda _, __, out: setattr(model, "last_hidden", out[0]))


def write(name: str, model: Any, layer_ids: list[int], logits_of: Callable[..., torch.Tensor], hidden: Any) -> None:
    """Save a head that drafts blocks, and what it drafts."""
    model.eval()
    cases = []
    with torch.no_grad():
        for num_known in NUM_KNOWN:
            logits = logits_of(model, torch.cat([hidden[i] for i in layer_ids], -1), hidden[-1], num_known)
            case = {"known": TOKENS[:num_known], "logits": [[round(x, 6) for x in row] for row in logits.tolist()]}
            for part, chain in CHAINS.items():
                if hasattr(model, part):
                    case["chain"] = chain(model, logits, TOKENS[:num_known])
            cases.append(case)
    save(name, model, cases)


def write_chains(name: str, model: Any, layer_ids: list[int], target: Any) -> None:
    """Save a head that drafts token by token, and its greedy chains."""
    model.eval()
    cases = []
    with torch.no_grad():
        for num_known in NUM_KNOWN:
            known = TOKENS[: num_known - 1]
            known = [*known, int(target(torch.tensor([known])).logits[0, -1].argmax())]
            hidden = target(torch.tensor([known]), output_hidden_states=True).hidden_states
            states, rows, chain = torch.cat([hidden[i] for i in layer_ids], -1)[:, :-1], len(known) - 1, list[int]()
            found: list[torch.Tensor] = []
            hook = model.lm_head.register_forward_hook(
                lambda _, __, out, found=found, row=rows - 1: found.append(out[0, row])
            )
            for depth in range(BLOCK - 1):
                # A step of its training reads the next token of each row: of the last one, what was drafted before.
                ids = torch.tensor([[*known[1:], *chain]])
                filled = torch.cat([states, states.new_zeros(1, len(chain), states.shape[2])], 1)
                documents = torch.tensor([[0] * rows + [-1] * len(chain)])
                found.clear()
                model(filled, ids, documents, ttt_steps=depth + 1)
                best = int(found[depth].argmax())
                chain.append(best + int(model.d2t[best]))
            hook.remove()
            logits = [[round(x, 6) for x in row.tolist()] for row in found]
            cases.append({"known": known, "logits": logits, "chain": chain})
    save(name, model, cases)


def save(name: str, model: Any, cases: list[dict[str, Any]]) -> None:
    model.save_pretrained(name)
    Path(name, "config.py").unlink()  # the library's own code
    Path(name, "expected.json").write_text(json.dumps(cases) + "\n")


def selected(model: Any, logits: torch.Tensor, known: list[int]) -> list[int]:
    """The selector's own choice, slot by slot."""
    above, chosen = torch.tensor(known[-1:]), []
    for row, hidden in zip(logits, model.last_hidden[1:], strict=True):
        ids, scores = model.candidate_selector.select(row[None], hidden[None], above)
        above = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        chosen.append(int(above))
    return chosen


def followed(model: Any, logits: torch.Tensor, known: list[int]) -> list[int]:
    """What the Markov head's own additions make the best token, slot by slot."""
    before = known[-1:]
    for slot, row in enumerate(logits):
        hidden, tokens = model.last_hidden[None, : slot + 1], torch.tensor([before])
        best = (row + model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden)[0, slot]).argmax()
        before.append(int(best + model.d2t[best]))
    return before[1:]


def refined(model: Any, logits: torch.Tensor, known: list[int]) -> list[int]:
    """Where refining the whole block ends: as the library trains it, from its own best tokens."""
    block = [known[-1], *logits.argmax(-1).tolist()]
    while True:
        before = torch.tensor([[known[-2], *block[:-1]]])
        bias = model.refiner_head.block_bias(before, hidden_states=model.last_hidden[None])[0, 1:]
        made = [known[-1], *(logits + bias).argmax(-1).tolist()]
        if made == block:
            return block[1:]
        block = made


CHAINS = {"candidate_selector": selected, "markov_head": followed, "refiner_head": refined}


def main(folder: Path) -> None:
    """Write everything anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)  # files say where the target was
    target = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", num_hidden_layers=4, **SIZES, pad_token_id=0)
    )
    random_weights(target, 0.15, 0)
    target.eval().save_pretrained("target")
    with torch.no_grad():
        hidden = target(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    t2d = torch.isin(torch.arange(VOCAB), torch.tensor(DRAFTED))
    d2t = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))

    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers("qwen3"), draft_vocab_size=len(DRAFTED),
        speculators_config=speculators_config("dflash", BLOCK - 1), **SHARED,
    )  # fmt: skip
    first = DFlashDraftModel(config)
    first.load_vocab_mappings(t2d, d2t)
    first.load_verifier_weights()
    random_weights(first, 0.3, 1, kept=("embed_tokens", "lm_head", "verifier"))
    write("dflash", first, [1, 3], block_logits, hidden)

    windows = layers(
        "qwen3", use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    second = DFlash2DraftModel(
        DFlash2SpeculatorConfig(
            transformer_layer_config=windows, draft_vocab_size=VOCAB, selector_rank=8, selector_top_k=6,
            conv_group_size=8, speculators_config=speculators_config("dflash2", BLOCK - 1), **SHARED,
        )
    )  # fmt: skip
    second.load_verifier_weights()
    random_weights(second, 0.3, 2, kept=("embed_tokens", "lm_head", "verifier"))
    keep_hidden(second)
    write("dflash2", second, [1, 3], block_logits, hidden)

    markov = DSparkDraftModel(
        DSparkSpeculatorConfig(
            transformer_layer_config=layers("qwen3"), draft_vocab_size=len(DRAFTED), markov_rank=8,
            markov_head_type="rnn", speculators_config=speculators_config("dspark", BLOCK), **SHARED,
        )
    )  # fmt: skip
    markov.load_vocab_mappings(t2d, d2t)
    markov.load_verifier_weights()
    random_weights(markov, 0.3, 4, kept=("embed_tokens", "lm_head", "verifier"))
    keep_hidden(markov)
    write("dspark", markov, [1, 3], block_logits, hidden)

    refining = XPressDraftModel(
        XPressSpeculatorConfig(
            transformer_layer_config=layers("qwen3"), draft_vocab_size=VOCAB, xpress_rank=8,
            speculators_config=speculators_config("xpress", BLOCK - 1), **SHARED,
        )
    )  # fmt: skip
    refining.load_verifier_weights()
    random_weights(refining, 0.3, 5, kept=("embed_tokens", "lm_head", "verifier"))
    keep_hidden(refining)
    write("xpress", refining, [1, 3], block_logits, hidden)

    parallel = peagle.PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=layers("llama"), draft_vocab_size=len(DRAFTED), mask_token_id=MASK,
            eagle_aux_hidden_state_layer_ids=[0, 2, 3], norm_before_residual=True,
            speculators_config=speculators_config("peagle", BLOCK),
        )
    )  # fmt: skip
    parallel.load_vocab_mappings(t2d, d2t)
    parallel.load_verifier_weights()
    random_weights(parallel, 0.3, 3, kept=("verifier",))
    write("peagle", parallel, [0, 2, 3], parallel_logits, hidden)

    chained = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layers("llama", num_layers=1), draft_vocab_size=len(DRAFTED),
            norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=speculators_config("eagle3", BLOCK - 1),
        )
    )  # fmt: skip
    chained.load_vocab_mappings(t2d, d2t)
    chained.load_verifier_weights()
    random_weights(chained, 0.3, 6, kept=("verifier",))
    write_chains("eagle3", chained, [1, 2, 3], target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

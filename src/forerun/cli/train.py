"""`forerun train`: training the embedded models, and draft heads for any target.

Knows the options. The work is in `forerun.training`, imported only when a command runs, since it pulls in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train language models and draft heads, and make corpora to copy from.", no_args_is_help=True)

Target = Annotated[str, typer.Option(help="The model the head drafts for: an embedded name, a folder or a hub id.")]
Data = Annotated[
    list[Path],
    typer.Option(
        help="Prompts (.txt, .json, .jsonl, .jsonl.xz), or what a target wrote (.answers; .bin of uint16 ids). Repeat."
    ),
]
Out = Annotated[Path, typer.Option(help="Run folder; the head is written to its export/.")]
RecipeFile = Annotated[Path | None, typer.Option(help="A recipe, such as recipes/mini-eagle3.toml.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps; the recipe's unless given.")]
TokensPerStep = Annotated[int | None, typer.Option(help="Tokens a step; the recipe's unless given.")]
DataTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of all prompts with their answers, or of each .answers or .bin file; 0: what there is.", min=0
    ),
]
CaptureBytes = Annotated[
    int | None,
    typer.Option(help="Keep the target's states on disk, in at most so many bytes; 0 recomputes them.", min=0),
]
Device = Annotated[str, typer.Option(help="Where to train: cpu or cuda.")]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Delete the folder's run first, or resume it.")]


@app.callback()
def train() -> None:
    """Train language models and draft heads."""


@app.command("lm")
def lm(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/mini-target.toml.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME unless given.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the training text; the recipe's unless given.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Delete the folder's run first, or resume it.")
    ] = False,
) -> None:
    """Train a language model, or resume its training, and export it in Hugging Face layout."""
    from forerun.training.console import Console
    from forerun.training.lm import train_lm
    from forerun.training.recipe import load_recipe, with_data_dir

    chosen = with_data_dir(load_recipe(recipe), data)
    folder = out or Path("runs") / chosen.name
    finished = train_lm(chosen, folder, fresh, Console())
    typer.echo(f"{'finished' if finished else 'stopped; start again to go on'}: {folder / 'export'}")


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run folder of `forerun train lm`.")],
    folder: Annotated[Path, typer.Argument(help="Where the model is written.")],
) -> None:
    """Write the last checkpoint of a run, even of one in progress, in Hugging Face layout."""
    from forerun.training.lm import export_run

    typer.echo(f"step {export_run(run, folder)} written to {folder}")


@app.command("answers")
def answers(
    target: Target,
    data: Annotated[list[Path], typer.Option(help="Prompts (.txt, .json, .jsonl, .jsonl.xz). Repeat.")],
    out: Annotated[Path, typer.Option(help="Folder: turn1.answers, turn2.answers and so on are written to it.")],
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 160,
    prompt_tokens: Annotated[int, typer.Option(help="Longer prompts lose their beginning.", min=1)] = 864,
    temperatures: Annotated[str, typer.Option(help="Taken in turns, separated by commas.")] = "0,1,0,0.7",
    turns: Annotated[int, typer.Option(help="Answer so many turns of a conversation.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 1,
) -> None:
    """Let a target answer prompts, or resume that; draft heads learn from the resulting files (--data)."""
    from forerun.training.heads.console import HeadConsole
    from forerun.training.heads.conversations import AnswerOptions, answer_files, read_temperatures

    options = AnswerOptions(prompt_tokens, answer_tokens, read_temperatures(temperatures), turns, seed)
    for path in answer_files(target, data, out, options, HeadConsole().say):
        typer.echo(f"finished: {path}")


@app.command("corpus")
def corpus(
    files: Annotated[list[Path], typer.Argument(help="Text files, .json or .jsonl (every string in them), .answers.")],
    target: Target,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    max_size: Annotated[
        str, typer.Option(help="Most bytes of the file, 8 a token: the first texts that fit.")
    ] = "256M",
) -> None:
    """Make texts into a file that the drafter suffix copies from (--drafter suffix=FILE)."""
    from forerun.training.corpus import make_corpus

    made = make_corpus(target, files, out, max_size, typer.echo)
    left_out = f"; {made.num_left_out} texts did not fit, or not whole: raise --max-size" if made.num_left_out else ""
    typer.echo(
        f"finished: {out}, {made.num_tokens} tokens of {made.num_texts} texts, {made.num_bytes / 1e6:.1f} MB{left_out}"
    )


@app.command("medusa")
def medusa(
    target: Target,
    data: Data,
    out: Out,
    recipe: RecipeFile = None,
    steps: Steps = None,
    tokens_per_step: TokensPerStep = None,
    data_tokens: DataTokens = None,
    capture_bytes: CaptureBytes = None,
    device: Device = "cpu",
    fresh: Fresh = False,
) -> None:
    """Train Medusa heads for a target, or resume the training, and export them in vLLM's layout."""
    sizes = (steps, tokens_per_step, data_tokens, capture_bytes)
    _train_head("medusa", target, data, out, recipe, sizes, device, fresh)


@app.command("eagle3")
def eagle3(
    target: Target,
    data: Data,
    out: Out,
    recipe: RecipeFile = None,
    steps: Steps = None,
    tokens_per_step: TokensPerStep = None,
    data_tokens: DataTokens = None,
    capture_bytes: CaptureBytes = None,
    device: Device = "cpu",
    fresh: Fresh = False,
) -> None:
    """Train an EAGLE-3 head for a target, or resume the training, and export it in SafeAILab's layout."""
    sizes = (steps, tokens_per_step, data_tokens, capture_bytes)
    _train_head("eagle3", target, data, out, recipe, sizes, device, fresh)


@app.command("dflash")
def dflash(
    target: Target,
    data: Data,
    out: Out,
    recipe: RecipeFile = None,
    steps: Steps = None,
    tokens_per_step: TokensPerStep = None,
    data_tokens: DataTokens = None,
    capture_bytes: CaptureBytes = None,
    device: Device = "cpu",
    fresh: Fresh = False,
) -> None:
    """Train a DFlash head for a target, or resume the training, and export it in z-lab's layout."""
    sizes = (steps, tokens_per_step, data_tokens, capture_bytes)
    _train_head("dflash", target, data, out, recipe, sizes, device, fresh)


@app.command("mtp")
def mtp(
    target: Target,
    data: Data,
    out: Out,
    recipe: RecipeFile = None,
    steps: Steps = None,
    tokens_per_step: TokensPerStep = None,
    data_tokens: DataTokens = None,
    capture_bytes: CaptureBytes = None,
    device: Device = "cpu",
    fresh: Fresh = False,
) -> None:
    """Train an MTP module for a target, or resume the training, and export it in MiMo's layout."""
    sizes = (steps, tokens_per_step, data_tokens, capture_bytes)
    _train_head("mtp", target, data, out, recipe, sizes, device, fresh)


@app.command("draft")
def draft(
    target: Target,
    data: Data,
    out: Out,
    recipe: RecipeFile = None,
    steps: Steps = None,
    tokens_per_step: TokensPerStep = None,
    data_tokens: DataTokens = None,
    capture_bytes: CaptureBytes = None,
    device: Device = "cpu",
    fresh: Fresh = False,
) -> None:
    """Distil a small draft model from a target, or resume the training, and export it in Hugging Face layout."""
    sizes = (steps, tokens_per_step, data_tokens, capture_bytes)
    _train_head("draft", target, data, out, recipe, sizes, device, fresh)


@app.command("vocabulary")
def vocabulary(
    texts: Annotated[
        list[Path],
        typer.Argument(help="Texts (.txt, .json, .jsonl, .jsonl.xz), or answers of the target (.answers; .bin)."),
    ],
    target: Target,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the list goes: FILE.json, or FILE.pt for SGLang.")],
    size: Annotated[
        int | None, typer.Option(help="Tokens of the list. Default: 32768, or all tokens of a smaller vocabulary.")
    ] = None,
) -> None:
    """List the tokens that are most frequent in texts: the only ones drafters propose with --draft-vocabulary."""
    from forerun.training.heads.token_list import count_texts, write_list

    counts = count_texts(texts, target)
    size = min(32768, len(counts)) if size is None else size
    covered = write_list(out, counts, size)
    typer.echo(f"{size} of {len(counts)} tokens written to {out}: {covered:.2%} of the tokens of these texts")


def _train_head(
    kind: str, target: str, data: list[Path], out: Path, recipe: Path | None, sizes: tuple[int | None, ...],
    device: str, fresh: bool,
) -> None:  # fmt: skip
    """sizes: steps, tokens a step, tokens of data and bytes of captured states, None to keep the recipe's."""
    from forerun.training.heads.config import HeadJob, load_head_recipe
    from forerun.training.heads.console import HeadConsole
    from forerun.training.heads.run import train_head

    chosen = load_head_recipe(kind, recipe).with_sizes(*sizes)
    finished = train_head(chosen, HeadJob(target, tuple(data), out, fresh, device), HeadConsole())
    typer.echo(f"{'finished' if finished else 'stopped; start again to go on'}: {out / 'export'}")

"""`forerun generate`: complete one prompt.

Knows: how a prompt is asked and how an answer is shown. Does not know: where a prompt comes from, how text is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note
from forerun.cli.drafted import DraftedText, has_colour, legend, render
from forerun.cli.engine import note_sampling, open_llm, stats_dict, stats_line
from forerun.cli.explain import explain_dict, print_explanation
from forerun.cli.prompt import model_and_prompt
from forerun.core import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM


def generate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]", help="A lone argument that names a model is one, any other is the prompt."
        ),
    ] = None,
    model: opt.ModelOption = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Through the chat template, or as it stands. Default: chat if there is one."),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Show text as it is made.")] = True,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens by who drafted them.")] = False,
    explain: opt.Explain = False,
    json: opt.JsonOption = False,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.AnswerTemperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = 0,
    num_samples: Annotated[int, typer.Option(help="Independent answers.", rich_help_panel=opt.SAMPLING)] = 1,
    repetition_penalty: opt.RepetitionPenalty = None,
    generation_config: opt.GenerationConfig = "auto",
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    logit_bias: opt.LogitBias = None,
    allowed_token_ids: opt.AllowedTokens = None,
    bad_words: opt.BadWords = None,
    min_tokens: opt.MinTokens = 0,
    stop: opt.Stop = None,
    stop_token_ids: opt.StopTokens = None,
    ignore_eos: opt.IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: this many alternatives a token.", rich_help_panel=opt.SAMPLING)
    ] = None,
    drafter: opt.DrafterName = None,
    draft_model: opt.DraftModel = None,
    max_draft_tokens: opt.MaxDraftTokens = None,
    tree_width: opt.TreeWidth = None,
    head_weights: opt.HeadWeights = "stored",
    adaptive: opt.Adaptive = True,
    verification: opt.Verification = "coupled",
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    max_model_len: opt.MaxModelLen = None,
    device: opt.Device = "auto",
    kernels: opt.KernelsName = "auto",
    threads: opt.Threads = None,
) -> None:
    """Complete a prompt, given as an argument, with --file or on standard input."""
    given = locals()
    name, prompt = model_and_prompt(arguments or [], model, file)
    llm = _open(name, given)
    params = _sampling_params(given, llm.loaded.sampling)
    _answer(
        llm, as_prompt(llm, prompt, chat), params, as_json=json, stream=stream, show_drafts=show_drafts, explain=explain
    )


def _open(name: str, given: dict[str, Any]) -> LLM:
    """The engine the options ask for, with room for this command's samples only."""
    _sampling_params(given, {})  # says what is wrong with the options before anything is loaded
    drafting = ("max_draft_tokens", "tree_width", "head_weights", "adaptive", "verification")
    engine = ("dtype", "kv_cache_dtype", "max_model_len", "device", "kernels", "threads", "generation_config")
    options = {key: given[key] for key in (*drafting, *engine)}
    drafter = given["drafter"] or opt.default_drafter(name, given["draft_model"])
    llm = open_llm(name, drafter, given["draft_model"], max_num_seqs=given["num_samples"], **options)
    note_sampling(llm)
    return llm


def _sampling_params(given: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    same = ("max_tokens", "seed", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "logprobs")
    lists: dict[str, Any] = {name: tuple(given[name] or ()) for name in ("bad_words", "stop", "stop_token_ids")}
    allowed = tuple(given["allowed_token_ids"]) if given["allowed_token_ids"] else None
    return SamplingParams(
        n=given["num_samples"],
        logit_bias=opt.biases(given["logit_bias"]),
        allowed_token_ids=allowed,
        **opt.own_sampling(given, defaults),
        **{name: given[name] for name in same},
        **lists,
    )


def as_prompt(llm: LLM, prompt: str, chat: bool | None) -> list[int]:
    """Token ids, through the chat template where there is one unless told otherwise."""
    if chat is False or (chat is None and llm.tokenizer.chat_template is None):
        return llm.tokenizer.encode(prompt)
    return llm.render_chat([{"role": "user", "content": prompt}])


def _answer(
    llm: LLM,
    prompt: list[int],
    params: SamplingParams,
    *,
    as_json: bool,
    stream: bool,
    show_drafts: bool,
    explain: bool,
) -> None:
    if as_json:
        print_json(_as_json(_checked(llm.generate([prompt], params)[0]), explain))
        return
    if params.n == 1 and stream:
        output = _stream(llm, prompt, params, show_drafts)
    else:
        output = _checked(llm.generate([prompt], params)[0])
        _show(llm, output, show_drafts)
    if show_drafts:
        sources = [source for sample in output.outputs for source in sample.token_sources]
        err().print(legend(sources, marked=not has_colour(out())))
    for sample in output.outputs:
        print_note(stats_line(sample.stats))
        if explain:
            print_explanation(sample.stats)


def _checked(output: RequestOutput) -> RequestOutput:
    """Raise what went wrong while the request ran."""
    for sample in output.outputs:
        if sample.error is not None:
            raise sample.error
    return output


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, show_drafts: bool) -> RequestOutput:
    """Write text as it comes."""
    console, text = out(), DraftedText(llm.tokenizer, prompt)
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        pieces = text.take(output.outputs[0])
        if show_drafts:
            console.print(render(pieces, not has_colour(console)), end="", soft_wrap=True)
        else:
            typer.echo("".join(piece.text for piece in pieces), nl=False)
    typer.echo()
    assert output is not None
    return _checked(output)


def _show(llm: LLM, output: RequestOutput, show_drafts: bool) -> None:
    """Write finished samples, numbered if there are several."""
    console = out()
    for sample in output.outputs:
        if len(output.outputs) > 1:
            console.print(f"[bold]#{sample.index + 1}[/]")
        pieces = DraftedText(llm.tokenizer, output.prompt_token_ids).take(sample)
        if show_drafts:
            console.print(render(pieces, not has_colour(console)), soft_wrap=True)
        else:
            typer.echo(sample.text)


def _as_json(output: RequestOutput, explain: bool) -> dict[str, Any] | list[dict[str, Any]]:
    """One object, or a list of them for several samples."""
    samples = [_sample_json(sample, explain) for sample in output.outputs]
    return samples[0] if len(samples) == 1 else samples


def _sample_json(sample: CompletionOutput, explain: bool) -> dict[str, Any]:
    """The fields are fixed by a test; "logprobs" and "explain" are there only when asked for."""
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stats": stats_dict(sample.stats),
    }
    if explain:
        result["explain"] = explain_dict(sample.stats)
    if sample.logprobs is not None:
        result["logprobs"] = [
            {"chosen": entry.chosen._asdict(), "top": [other._asdict() for other in entry.top]}
            for entry in sample.logprobs
        ]
    return result

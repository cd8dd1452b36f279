"""`forerun generate`: complete one prompt.

Knows: how a prompt is asked and how an answer is shown. Does not know: where a prompt comes from, how text is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note
from forerun.cli.drafted import DraftedText, has_colour, legend, shown_params, write
from forerun.cli.engine import adapter_of, note_sampling, open_to_answer, stats_dict, stats_line
from forerun.cli.explain import explain_dict, print_explanation
from forerun.cli.prompt import model_and_prompt, read_file
from forerun.core import CompletionOutput, RequestOutput, SamplingParams
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.llm import LLM


def _sampling(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=opt.SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedText:
    """The model, the prompt, and how the answer is shown."""

    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]", help="A single argument is the model if it names one, else the prompt."
        ),
    ] = None
    model: opt.ModelOption = None
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file, without its last newline.")
    ] = None
    prediction: Annotated[
        Path | None,
        typer.Option(
            help="A file with text that the answer will repeat in large part; it only makes the answer faster."
        ),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Use the chat template, or the prompt as it is. Default: chat if there is a template."
        ),
    ] = None
    stream: Annotated[bool, typer.Option(help="Show text as it is made.")] = True
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens by who drafted them.")] = False
    explain: opt.Explain = False
    json: opt.JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSampling(opt.Sampling):
    """All sampling options."""

    max_tokens: opt.MaxTokens = 256
    n: Annotated[int, _sampling("Independent answers.", "--num-samples")] = 1
    presence_penalty: Annotated[float, _sampling("Subtracted once from tokens already generated.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("Subtracted as often as a token was generated.")] = 0.0
    logit_bias: Annotated[list[str] | None, _sampling("ID=VALUE added to a token's logit; repeatable.")] = None
    allowed_token_ids: Annotated[
        list[int] | None, _sampling("Only these token ids; repeatable.", "--allowed-token-id")
    ] = None
    bad_words: Annotated[list[str] | None, _sampling("Never write this; repeatable.", "--bad-word")] = None
    min_tokens: Annotated[int, _sampling("Do not end before this many tokens.")] = 0
    stop: Annotated[list[str] | None, _sampling("End before this text; repeatable.")] = None
    stop_token_ids: Annotated[list[int] | None, _sampling("End at this token id; repeatable.", "--stop-token-id")] = (
        None
    )
    ignore_eos: Annotated[bool, _sampling("Go on after the model's end token.", "--ignore-eos")] = False
    logprobs: Annotated[int | None, _sampling("With --json: this many alternatives a token.")] = None

    def given(self) -> dict[str, Any]:
        """See `Sampling`; lists become tuples, and empty ones are left out."""
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in opt.Sampling.given(self).items()}
        return {**{name: v for name, v in given.items() if v != ()}, "logit_bias": opt.biases(self.logit_bias)}


def generate(asked: AskedText, sampling: FullSampling, drafting: opt.Drafting, loading: opt.RankedLoading) -> None:
    """Complete a prompt, given as an argument, with --file or on standard input."""
    name, prompt = model_and_prompt(asked.arguments or [], asked.model, asked.file)
    sampling.params({})  # checks the options before anything is loaded
    if sampling.logprobs is not None and not asked.json:
        raise ConfigError(f"--logprobs {sampling.logprobs} are printed with --json only: add it, or leave them out")
    prediction = None if asked.prediction is None else read_file(asked.prediction, "the prediction")
    if prediction is not None and drafting.drafter is None:  # the usual drafter of a model may read none
        drafting = replace(drafting, drafter="auto")
    llm = open_to_answer(name, sampling, drafting, loading, max_num_seqs=sampling.n)
    note_sampling(llm, sampling.given())
    with closing(llm):
        _answer(llm, as_prompt(llm, prompt, asked.chat), sampling.params(llm.loaded.sampling), asked, prediction)


def as_prompt(llm: LLM, prompt: str, chat: bool | None) -> list[int]:
    """Token ids, through the chat template where there is one unless told otherwise."""
    if chat is False or (chat is None and llm.tokenizer.chat_template is None):
        return llm.tokenizer.encode(prompt)
    if llm.tokenizer.chat_template is None:
        raise ConfigError("this model has no chat template: leave --chat out, or give --raw for the prompt as it is")
    return llm.render_chat([{"role": "user", "content": prompt}])


def _answer(llm: LLM, prompt: list[int], params: SamplingParams, asked: AskedText, prediction: str | None) -> None:
    beside: Any = {"lora": adapter_of(llm), "prediction": prediction}
    if asked.json:
        print_json(_as_json(_checked(llm.generate([prompt], params, **beside)[0]), asked.explain))
        return
    of_chat = asked.chat is not False and llm.tokenizer.chat_template is not None
    params = shown_params(llm.tokenizer, params) if of_chat else params
    if params.n == 1 and asked.stream:
        text = DraftedText(llm.tokenizer, prompt, of_chat)
        output = _stream(text, llm.stream(prompt, params, **beside), asked.show_drafts)
    else:
        output = _checked(llm.generate([prompt], params, **beside)[0])
        _show(llm, output, asked.show_drafts, of_chat)
    if asked.show_drafts:
        sources = [source for sample in output.outputs for source in sample.token_sources]
        err().print(legend(sources, marked=not has_colour(out())))
    for sample in output.outputs:
        print_note(stats_line(sample.stats))
        if asked.explain:
            print_explanation(sample.stats)


def _checked(output: RequestOutput) -> RequestOutput:
    """Raise the error that a request ended with, if any."""
    for sample in output.outputs:
        if sample.error is not None:
            raise sample.error
    return output


def _stream(text: DraftedText, outputs: Iterable[RequestOutput], show_drafts: bool) -> RequestOutput:
    """Write text as it comes."""
    output: RequestOutput | None = None
    for output in outputs:
        write(text.take(output.outputs[0]), out(), show_drafts)
    typer.echo()
    assert output is not None
    return _checked(output)


def _show(llm: LLM, output: RequestOutput, show_drafts: bool, of_chat: bool) -> None:
    """Write finished samples, numbered if there are several."""
    for sample in output.outputs:
        if len(output.outputs) > 1:
            out().print(f"#{sample.index + 1}", style="bold")
        pieces = DraftedText(llm.tokenizer, output.prompt_token_ids, of_chat).take(sample)
        write(pieces, out(), show_drafts, end="\n")


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

"""Runs prompt cases through an engine, turn by turn, with the model's own answers in between.

Knows: cases and the offline API. Does not know: what is measured or compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.bench.prompts import PromptCase
from forerun.core import CompletionOutput, SamplingParams
from forerun.errors import DataError

if TYPE_CHECKING:
    from forerun.llm import LLM

ROLES = ("user", "assistant")


def run_cases(
    llm: LLM, cases: Sequence[PromptCase], params: Sequence[SamplingParams], loras: Sequence[str | None] = ()
) -> list[list[CompletionOutput]]:
    """Every case's answers, all cases together in one batch -> one list of answers per case, one answer per turn.

    `loras`: the name of each case's adapter, if any has one.
    A conversation ends before the turn that no longer fits the context. A request that fails raises its error.
    """
    answers: list[list[CompletionOutput]] = [[] for _ in cases]
    for turn in range(max((len(case.turns) for case in cases), default=0)):
        going_on = [i for i, case in enumerate(cases) if turn < len(case.turns) and len(answers[i]) == turn]
        prompts = {i: _prompt(llm, cases[i], answers[i]) for i in going_on}
        fitting = {i: prompt for i, prompt in prompts.items() if len(prompt) < llm.max_model_len}
        names = [loras[i] if loras else None for i in fitting]
        given = [params[i] for i in fitting]
        outputs = llm.generate(list(fitting.values()), given, lora=names) if fitting else []
        for i, output in zip(fitting, outputs, strict=True):
            answers[i].append(_checked(output.outputs[0]))
    return answers


def _checked(output: CompletionOutput) -> CompletionOutput:
    if output.error is not None:
        raise output.error
    return output


def _prompt(llm: LLM, case: PromptCase, answers: Sequence[CompletionOutput]) -> list[int]:
    """Token ids of the conversation up to the next answer."""
    texts = [text for turn, answer in zip(case.turns, answers, strict=False) for text in (turn, answer.text)]
    texts.append(case.turns[len(answers)])
    if not case.is_chat or llm.tokenizer.chat_template is None:
        return llm.tokenizer.encode("\n\n".join(texts))
    messages = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(texts)]
    return llm.tokenizer.encode_chat(messages)


def fitting_cases(llm: LLM, cases: Sequence[PromptCase]) -> list[PromptCase]:
    """The cases whose first turn fits the context. Raises DataError if none does."""
    fitting = [case for case in cases if len(_prompt(llm, case, [])) < llm.max_model_len]
    if not fitting:
        raise DataError(
            f"none of the {len(cases)} prompts fits the model's context of {llm.max_model_len} tokens: "
            "give shorter prompts or a model with a longer context"
        )
    return fitting

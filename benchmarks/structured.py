"""Many answers to JSON schemas at once, drafted and not: all valid, and the same ones token for token.

    python benchmarks/structured.py --model mini [--num-requests 1000] [--concurrency 16] [--drafter portfolio]

Chat requests at temperature 1, each with a seed, a prompt and one of several schemas of its own, go to a server three
times: drafted, with speculation off for each request, and to a second server that has no drafter. Every answer must
end by itself, satisfy its schema by the judgement of the package jsonschema (another implementation than the one that
made the masks), and have the text and the token ids of the other two runs. The schemas bound their texts, so that
`--max-tokens` cuts none. Also fails if nothing was drafted or accepted, for then nothing was shown.

Writes benchmarks/results/DATE-structured.json, prints counts, exits with 1 if anything differed.

    python benchmarks/structured.py --forced --model MODEL [--drafter suffix ...] [--num-requests 6]

measures speed instead: what it brings that the tokens a grammar leaves no choice about are drafts
(`engine/masks.py`). Answers to one schema with fixed keys (with `--items 0` about 140 tokens where values are short
words, 40 more for each item of the order), one at a time, in turns by two engines with the same drafter and weights,
one of which is not told what is forced. The texts must be equal. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from serving import RESULTS, machine, server

from forerun import LLM, SamplingParams
from forerun.bench.interval import geometric_mean, interval_of
from forerun.server.grammar_compiler import GrammarCompiler
from forerun.server.grammar_masks import PrefixMask
from forerun.server.structured import GrammarSpec

TIMEOUT_S = 600.0
NUM_EXAMPLES = 5  # of what went wrong, in the result
TOPICS = ("a fox", "an old teacher", "the weather at sea", "a red bicycle", "a market in spring", "two small dogs")


def words(most: int) -> dict[str, Any]:
    """One or two lower-case words of bounded length, the second perhaps with quotes, which JSON escapes."""
    return {"type": "string", "pattern": f'^[a-z]{{2,{most}}}( [a-z"]{{2,{most}}})?$'}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed(
        name={"type": "string", "minLength": 1, "maxLength": 8},
        age={"type": "integer", "minimum": 0, "maximum": 150},
        kind={"enum": ["fox", "cat", None, 7, True]},
        tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    ),
    "choice": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"enum": ["yes", "no", "perhaps", "ask again"]}]},
    "event": closed(
        title=words(8),
        date={"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"},
        open={"type": "boolean"},
    ),
    "grid": {
        "type": "array", "minItems": 2, "maxItems": 3,
        "items": {"type": "array", "minItems": 3, "maxItems": 3,
                  "items": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "shape": {"anyOf": [
        closed(kind={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 500}),
        closed(kind={"const": "line"}, length={"type": "integer", "minimum": 0, "maximum": 9999}, thick=words(5)),
    ]},
    "nested": closed(
        owner=closed(id={"type": "string", "pattern": "^[A-F0-9]{6}$"}, level={"enum": ["low", "middle", "high"]}),
        parts={"type": "array", "minItems": 1, "maxItems": 2,
               "items": closed(name=words(6), count={"type": "integer", "minimum": 0, "maximum": 1000})},
    ),
    "referring": {
        "$defs": {"mark": {"enum": ["A", "B", "C", "D", "F"]}},
        **closed(maths={"$ref": "#/$defs/mark"}, music={"$ref": "#/$defs/mark"}, sport={"$ref": "#/$defs/mark"}),
    },
    "optional": {
        "type": "object", "required": ["code"], "additionalProperties": False,
        "properties": {"code": {"type": "integer", "minimum": 100, "maximum": 599}, "text": words(6),
                       "again": {"type": "boolean"}, "unicode": {"type": "string", "maxLength": 4}},
    },
}  # fmt: skip


def order(num_items: int) -> dict[str, Any]:
    """An order of so many articles: long keys, short values."""
    item = closed(
        article=words(8), quantity={"type": "integer", "minimum": 1, "maximum": 9},
        price_in_cents={"type": "integer", "minimum": 100, "maximum": 9999}, currency={"const": "EUR"},
    )  # fmt: skip
    return closed(
        order_number={"type": "integer", "minimum": 1000, "maximum": 9999},
        customer=closed(
            first_name=words(8), last_name=words(8), customer_since={"enum": [2021, 2022, 2023]},
            receives_newsletter={"type": "boolean"},
        ),
        delivery_address=closed(
            street=words(8), house_number={"type": "integer", "minimum": 1, "maximum": 200}, city=words(8),
            country={"enum": ["France", "Norway", "Spain"]},
        ),
        ordered_items={"type": "array", "minItems": num_items, "maxItems": num_items, "items": item},
        payment_method={"enum": ["invoice", "credit card", "bank transfer"]},
        is_gift={"type": "boolean"},
        current_status={"enum": ["open", "paid", "sent"]},
    )  # fmt: skip


class Answer(NamedTuple):
    """What came back of one request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    drafted: int
    accepted: int


def main() -> None:
    """Ask three times, compare, keep, print."""
    given = options()
    result = measured(given) if given.forced else judge(given, asked(given))
    result |= {"command": " ".join(["python benchmarks/structured.py", *sys.argv[1:]]), "machine": machine()}
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{result['machine']['date']}-{'forced' if given.forced else 'structured'}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=1))
    sys.exit(1 if result["failures"] else 0)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Answers to JSON schemas: valid, and the same with and without drafts."
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument(
        "--drafter", action="append", help="NAME or NAME=MODEL; portfolio unless given; one but --forced"
    )
    parser.add_argument("--forced", action="store_true", help="measure what forced tokens bring")
    parser.add_argument("--items", type=int, default=2, help="of the order that --forced asks for")
    parser.add_argument("--num-requests", type=int, help="1000 unless given, with --forced 6")
    parser.add_argument("--temperature", type=float, default=1.0, help="of --forced")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=160, help="more than any schema here can take")
    parser.add_argument("--max-draft-tokens", type=int, help="always draft so many, whether or not it pays")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    given = parser.parse_args()
    given.drafter = given.drafter or ["portfolio"]
    given.num_requests = given.num_requests or (6 if given.forced else 1000)
    return given


# -- asking -----------------------------------------------------------------------------------------------------


def asked(given: argparse.Namespace) -> dict[str, list[Answer]]:
    """The answers of each run, in the requests' order."""
    always = ["--max-draft-tokens", str(given.max_draft_tokens), "--no-adaptive"] if given.max_draft_tokens else []
    runs: dict[str, list[Answer]] = {}
    with server(given.model, ["--drafter", given.drafter[0], *always]) as (url, _):
        for name, speculation in (("drafted", "auto"), ("switched off", "off")):
            runs[name] = asyncio.run(ask_all(url, given, speculation))
    with server(given.model, ["--drafter", "none"]) as (url, _):
        runs["no drafter"] = asyncio.run(ask_all(url, given, "auto"))
    return runs


async def ask_all(url: str, given: argparse.Namespace, speculation: str) -> list[Answer]:
    """All requests, so many at a time."""
    started, turns = time.monotonic(), asyncio.Semaphore(given.concurrency)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def one(index: int) -> Answer:
            async with turns:
                return await ask(session, {**body_of(index, given), "speculation": speculation})

        answers = await asyncio.gather(*(one(index) for index in range(given.num_requests)))
    print(
        f"{len(answers)} answers with speculation {speculation} in {time.monotonic() - started:.0f} s", file=sys.stderr
    )
    return list(answers)


def body_of(index: int, given: argparse.Namespace) -> dict[str, Any]:
    """Request `index`: every schema meets every topic."""
    name = schema_of(index)
    topic = TOPICS[index // len(SCHEMAS) % len(TOPICS)]
    wanted = {"name": name, "schema": SCHEMAS[name], "strict": True}
    return {
        "messages": [
            {"role": "system", "content": "You answer in JSON and write nothing else."},
            {"role": "user", "content": f"Number {index}: something of the kind {name!r} about {topic}, please."},
        ],
        "response_format": {"type": "json_schema", "json_schema": wanted},
        "temperature": 1.0, "seed": given.seed + index, "max_tokens": given.max_tokens, "return_token_ids": True,
    }  # fmt: skip


def schema_of(index: int) -> str:
    """The name of request `index`'s schema."""
    return list(SCHEMAS)[index % len(SCHEMAS)]


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    """One request. Raises RuntimeError if it is not answered."""
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:500]}")
        answer = await response.json()
    [choice], figures = answer["choices"], answer["forerun"]
    return Answer(
        choice["message"]["content"],
        tuple(choice["token_ids"]),
        choice["finish_reason"],
        figures["drafted_tokens"],
        figures["accepted_tokens"],
    )


# -- judging ----------------------------------------------------------------------------------------------------


def judge(given: argparse.Namespace, runs: dict[str, list[Answer]]) -> dict[str, Any]:
    """Counts of each run and what should not be: an answer cut off, invalid, or not the one of the first run."""
    validators = validators_of_schemas()
    counts = {name: counts_of(answers, validators) for name, answers in runs.items()}
    first, *others = runs
    wrong = [
        {"request": index, "schema": schema_of(index), "run": name, first: one.text, name: other.text}
        for name in others
        for index, (one, other) in enumerate(zip(runs[first], runs[name], strict=True))
        if (one.text, one.token_ids) != (other.text, other.token_ids)
    ]
    failures = [f"{name}: {count['requests'] - count['valid']} of {count['requests']} are not valid"
                for name, count in counts.items() if count["valid"] != count["requests"]]  # fmt: skip
    failures += [f"{len(wrong)} answers differ"] if wrong else []
    failures += [] if counts[first]["accepted_tokens"] else ["no draft was accepted: this run shows nothing"]
    failures += [f"{name}: it drafted" for name in others if counts[name]["drafted_tokens"]]
    num_equal = given.num_requests * len(others) - len(wrong)
    examples = {"different": wrong[:NUM_EXAMPLES], "invalid": invalid(runs[first], validators)[:NUM_EXAMPLES]}
    return {"counts": counts, "equal": num_equal, **examples, "failures": failures}


def validators_of_schemas() -> dict[str, Any]:
    """jsonschema's judges, by the schema's name."""
    from jsonschema import Draft202012Validator

    return {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}


def counts_of(answers: Sequence[Answer], validators: dict[str, Any]) -> dict[str, Any]:
    """How many ended by themselves, are valid, and what speculation did."""
    valid = [is_valid(answer, validators[schema_of(index)]) for index, answer in enumerate(answers)]
    return {
        "requests": len(answers),
        "valid": sum(valid),
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
        "different_texts": len({answer.text for answer in answers}),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "most_tokens": max(len(answer.token_ids) for answer in answers),
        "drafted_tokens": sum(answer.drafted for answer in answers),
        "accepted_tokens": sum(answer.accepted for answer in answers),
    }


def invalid(answers: Sequence[Answer], validators: dict[str, Any]) -> list[dict[str, str]]:
    """Answers that are not valid, with their schemas' names."""
    named = ((schema_of(index), answer) for index, answer in enumerate(answers))
    return [{"schema": name, "text": answer.text} for name, answer in named if not is_valid(answer, validators[name])]


def is_valid(answer: Answer, validator: Any) -> bool:
    """Whether it ended by itself, is JSON, and satisfies its schema."""
    try:
        value = json.loads(answer.text)
    except ValueError:
        return False
    return answer.finish_reason == "stop" and bool(validator.is_valid(value))


# -- what forced tokens bring -----------------------------------------------------------------------------------


class Untold:
    """The same mask for an engine that is not told what is forced."""

    def __init__(self, mask: PrefixMask) -> None:
        self.allowed, self.ready = mask.allowed, mask.ready


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Decoding seconds of every answer with and without, by drafter."""
    plain = LLM(given.model, keep_learned=False)
    compiler = GrammarCompiler(plain.tokenizer, plain.loaded.model.vocab_size, TIMEOUT_S)
    try:
        rows = [row_of(plain, drafter, compiler, given) for drafter in given.drafter]
    finally:
        compiler.close()
    return {"drafters": rows, "failures": [f"{row['drafter']}: texts differ" for row in rows if not row["equal"]]}


def row_of(plain: LLM, drafter: str, compiler: GrammarCompiler, given: argparse.Namespace) -> dict[str, Any]:
    """The two engines in turns, after a first answer each that does not count."""
    engines = [plain.with_drafter(drafter, keep_learned=False, across_requests=False) for _ in range(2)]
    seconds: list[list[float]] = [[], []]  # told, untold
    outputs: list[list[Any]] = [[], []]
    for index in range(-1, given.num_requests):
        for which in (0, 1) if index % 2 else (1, 0):
            mask = compiler.mask(GrammarSpec("json", json.dumps(order(given.items))))
            output = answered(engines[which], mask if which == 0 else Untold(mask), index, given)
            if index >= 0:
                seconds[which].append(output.stats.decode_s)
                outputs[which].append(output)
    ratios = [without / with_forced for with_forced, without in zip(*seconds, strict=True)]
    tokens = [len(output.token_ids) for output in outputs[0]]
    return {
        "drafter": drafter,
        "equal": [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]],
        "speed-up": round(geometric_mean(ratios), 3),
        "interval": interval_of(ratios),
        "tokens": tokens,
        "forced_accepted": [output.stats.drafters["grammar"].accepted for output in outputs[0]],
        "steps": [[output.stats.num_steps for output in each] for each in outputs],
        "tokens_per_second": [round(sum(tokens) / sum(each), 1) for each in seconds],
    }


def answered(llm: LLM, grammar: PrefixMask | Untold, index: int, given: argparse.Namespace) -> Any:
    """One answer to a prompt that does not name the schema's keys."""
    params = SamplingParams(temperature=given.temperature, seed=given.seed + index + 1, max_tokens=600, grammar=grammar)
    prompt = f"Number {index}: somebody bought {TOPICS[index % len(TOPICS)]}. Write that down as JSON.\n"
    [completion] = llm.generate(prompt, params)[0].outputs
    if completion.error is not None:
        raise completion.error
    return completion


if __name__ == "__main__":
    main()

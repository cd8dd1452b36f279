"""dspy: calls of its language model, one of them bound by a schema."""

import json

import dspy
from tour import FOX, KEY, MODEL, V1, check

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=120, cache=False, num_retries=0)


@check("call")
def _():
    return lm(FOX)


@check("a call bound by a schema")
def _():
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return "yes" in json.loads(lm("Yes?", response_format=wanted)[0])

"""openai-agents: its default is the Responses API."""

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from tour import FOX, KEY, MODEL, V1, check

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=V1, api_key=KEY), use_for_tracing=False)
SHORT = ModelSettings(max_tokens=40, temperature=0)
CALLS = []


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    CALLS.append((a, b))
    return str(a + b)


class Answer(BaseModel):
    yes: bool


@check("text, turns, previous_response_id")
async def _():
    agent = Agent(name="a", instructions="Be kind.", model=MODEL, model_settings=SHORT)
    first = await Runner.run(agent, FOX)
    await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And a cat?"}])
    return (await Runner.run(agent, "And?", previous_response_id=first.last_response_id)).final_output


@check("streams")
async def _():
    run = Runner.run_streamed(Agent(name="s", model=MODEL, model_settings=SHORT), FOX)
    pieces = [event.data.delta async for event in run.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]  # fmt: skip
    return run.final_output == "".join(pieces) and len(pieces) > 1


@check("tools")
async def _():
    settings = ModelSettings(tool_choice="required", temperature=0, parallel_tool_calls=False, max_tokens=200)
    agent = Agent(name="t", model=MODEL, tools=[add], tool_use_behavior="stop_on_first_tool", model_settings=settings)
    await Runner.run(agent, "Add 1 and 2")
    return CALLS


@check("structured output")
async def _():
    agent = Agent(name="o", model=MODEL, output_type=Answer, model_settings=SHORT)
    return isinstance((await Runner.run(agent, "Yes?")).final_output, Answer)

"""LangChain: chat completions, the Responses API, Anthropic's messages, and an agent of LangGraph."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tour import BASE, FOX, KEY, MODEL, V1, check


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Answer(BaseModel):
    yes: bool


def every_way(llm, forced):
    """Text, a second turn, a stream, a forced call and its result, a structured answer."""
    first = llm.invoke([("system", "Be kind."), ("human", FOX)])
    llm.invoke([HumanMessage(FOX), first, HumanMessage("And a cat?")])
    streamed = "".join(chunk.text for chunk in llm.stream(FOX))
    called = llm.bind_tools([add], tool_choice=forced, parallel_tool_calls=False).invoke("Add 1 and 2")
    results = [ToolMessage(add.invoke(c["args"]), tool_call_id=c["id"]) for c in called.tool_calls]
    llm.bind_tools([add]).invoke([HumanMessage("Add 1 and 2"), called, *results])
    return streamed and called.tool_calls and isinstance(llm.with_structured_output(Answer).invoke("Yes?"), Answer)


LIMITS = {"model": MODEL, "api_key": KEY, "max_tokens": 200, "max_retries": 0, "temperature": 0}


@check("chat completions: text, turns, streams, tools, structured output")
def _():
    return every_way(ChatOpenAI(base_url=V1, **LIMITS), "required")


@check("Responses API: the same")
def _():
    return every_way(ChatOpenAI(base_url=V1, use_responses_api=True, **LIMITS), "required")


@check("ChatAnthropic: the same")
def _():
    return every_way(ChatAnthropic(base_url=BASE, **LIMITS), "any")


@check("an agent of LangGraph")
def _():
    from langchain.agents import create_agent

    agent = create_agent(ChatOpenAI(base_url=V1, **LIMITS), [add])
    return agent.invoke({"messages": [("human", FOX)]})["messages"][-1].content

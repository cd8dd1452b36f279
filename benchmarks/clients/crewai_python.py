"""CrewAI: its language model, and a crew of one."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from tour import FOX, KEY, MODEL, V1, check

llm = LLM(model=f"openai/{MODEL}", base_url=V1, api_key=KEY, max_tokens=30)


@check("call")
def _():
    return llm.call(FOX)


@check("a crew")
def _():
    agent = Agent(role="teller", goal="tell", backstory="old", llm=llm, max_iter=1, verbose=False)
    return (
        Crew(agents=[agent], tasks=[Task(description=FOX, expected_output="a sentence", agent=agent)], verbose=False)
        .kickoff()
        .raw
    )

"""openai-agents: an agent with a tool over chat completions and over the Responses API."""

from __future__ import annotations

import asyncio
from typing import Literal

import agents
import openai

from common import LONG, MODEL, QUESTION, TOKENS, URL, check_text

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
called: list[str] = []


@agents.function_tool
def get_weather(city: Literal["Bern", "Rome", "Oslo"]) -> str:
    """The weather of a city."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        settings = agents.ModelSettings(max_tokens=TOKENS, temperature=0)
        plain = agents.Agent(name="a", model=model, model_settings=settings)
        check_text((await agents.Runner.run(plain, QUESTION)).final_output)
        streamed = agents.Runner.run_streamed(plain, QUESTION)
        async for _ in streamed.stream_events():
            pass
        check_text(streamed.final_output)
        before = len(called)
        agent = agents.Agent(
            name="b", model=model, tools=[get_weather], tool_use_behavior="stop_on_first_tool",
            model_settings=agents.ModelSettings(
                max_tokens=LONG, temperature=0, tool_choice="required", parallel_tool_calls=False
            ),
        )  # fmt: skip
        result = await agents.Runner.run(agent, QUESTION, max_turns=2)
        assert len(called) > before
        assert str(result.final_output).startswith("sunny in "), result.final_output


asyncio.run(main())

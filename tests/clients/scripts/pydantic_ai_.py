"""pydantic-ai: an agent that answers, typed output by tool and by schema, Responses."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from common import LONG, MODEL, QUESTION, TOKENS, URL, check_text

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
short = {"max_tokens": TOKENS, "temperature": 0.0, "timeout": 60}
settings = {"max_tokens": LONG, "temperature": 1.0, "seed": 1, "timeout": 60}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


async def streamed() -> None:
    agent = Agent(
        OpenAIChatModel(MODEL, provider=provider), model_settings={**settings, "max_tokens": TOKENS}
    )
    async with agent.run_stream(QUESTION) as result:
        check_text(await result.get_output())


check_text(Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=short).run_sync(QUESTION).output)
check_text(
    Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=short).run_sync(QUESTION).output
)
asyncio.run(streamed())
for output in (ToolOutput(Weather, strict=True), NativeOutput(Weather)):
    agent = Agent(
        OpenAIChatModel(MODEL, provider=provider), output_type=output, model_settings=settings, retries=0
    )
    found = agent.run_sync(QUESTION).output
    assert isinstance(found, Weather), found

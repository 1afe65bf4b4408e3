"""langchain-openai: chats, streams, tools, structured output in each of its methods, the Responses API."""

from __future__ import annotations

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from common import LONG, MODEL, QUESTION, TOKENS, URL, check_text, check_weather

there = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "timeout": 60}
chat = ChatOpenAI(max_tokens=TOKENS, max_retries=0, **there)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@tool(args_schema=Weather)
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days}"


text = chat.invoke(QUESTION).content
check_text(text)
assert "".join(str(piece.content) for piece in chat.stream(QUESTION)) == text
assert len(chat.batch([QUESTION, QUESTION])) == 2
long = ChatOpenAI(max_tokens=LONG, max_retries=0, **{**there, "temperature": 1, "seed": 1})
called = long.bind_tools([get_weather], tool_choice="required", strict=True).invoke(QUESTION)
check_weather(called.tool_calls[0]["args"])
for method in ("json_schema", "function_calling"):
    found = long.with_structured_output(Weather, method=method, strict=True).invoke(QUESTION)
    assert isinstance(found, Weather), (method, found)
assert isinstance(
    long.with_structured_output(Weather, method="json_schema", strict=True).invoke(QUESTION), Weather
)
responses = ChatOpenAI(max_tokens=TOKENS, max_retries=0, use_responses_api=True, **there)
check_text(responses.invoke(QUESTION).text)
vectors = OpenAIEmbeddings(
    model=MODEL, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False
).embed_documents(["one", "two"])
assert len(vectors) == 2

"""instructor: an object of a model's class, in each mode that any model can follow."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

from common import LONG, MODEL, QUESTION, URL


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60), mode=mode
    )
    found = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_model=Weather,
        max_retries=0, max_tokens=LONG, temperature=1, seed=1,
    )  # fmt: skip
    assert isinstance(found, Weather), (mode, found)

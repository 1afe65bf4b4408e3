"""litellm: chats, streams, tools, structured output, embeddings, the text completions that it translates."""

from __future__ import annotations

import litellm

from common import LONG, MODEL, QUESTION, TOKENS, TOOL, URL, WEATHER, check_text, check_weather

there = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "timeout": 60}
as_openai = {**there, "model": f"openai/{MODEL}"}  # hosted_vllm takes additionalProperties out of schemas
messages = [{"role": "user", "content": QUESTION}]

answer = litellm.completion(messages=messages, max_tokens=TOKENS, temperature=0, **there)
text = answer.choices[0].message.content
check_text(text)
pieces = litellm.completion(messages=messages, max_tokens=TOKENS, temperature=0, stream=True, **there)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
called = litellm.completion(
    messages=messages,
    tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}],
    tool_choice="required",
    max_tokens=LONG,
    temperature=1,
    seed=1,
    **as_openai,
)
check_weather(called.choices[0].message.tool_calls[0].function.arguments)
schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
shaped = litellm.completion(messages=messages, response_format=schema, max_tokens=LONG, **there)
check_weather(shaped.choices[0].message.content)
said = litellm.text_completion(
    prompt="one", max_tokens=4, **{**there, "model": f"text-completion-openai/{MODEL}"}
)
assert said.choices[0].text
responded = litellm.responses(input=QUESTION, max_output_tokens=TOKENS, temperature=0, **as_openai)
check_text(responded.output[-1].content[0].text)
vectors = litellm.embedding(input=["one", "two"], encoding_format="float", **as_openai)
assert len(vectors.data) == 2
try:
    litellm.completion(messages=messages, **{**there, "model": "hosted_vllm/another"})
except litellm.exceptions.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there has answered")

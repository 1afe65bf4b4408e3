// openai (JavaScript): chats, streams, tools, structured output, Responses, embeddings, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { LONG, MODEL, QUESTION, TOKENS, TOOL, URL, WEATHER, checkText, checkWeather } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: QUESTION }];
const asked = { model: MODEL, messages, max_tokens: TOKENS, temperature: 0 };

const answer = await client.chat.completions.create(asked);
const text = answer.choices[0].message.content;
checkText(text);
let streamed = "";
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta.content ?? "";
assert.equal(streamed, text);

const tools = { ...asked, tools: [TOOL], tool_choice: "required", max_tokens: LONG, parallel_tool_calls: false };
const called = await client.chat.completions.create(tools);
checkWeather(called.choices[0].message.tool_calls[0].function.arguments);
const final = await client.chat.completions.stream(tools).finalChatCompletion();
checkWeather(final.choices[0].message.tool_calls[0].function.arguments);

const format = { type: "json_schema", json_schema: { name: "weather", schema: WEATHER, strict: true } };
const shaped = await client.chat.completions.create({ ...asked, max_tokens: LONG, response_format: format });
checkWeather(shaped.choices[0].message.content);

const response = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: TOKENS, temperature: 0 });
checkText(response.output_text);
const next = await client.responses.create({ model: MODEL, input: "And?", previous_response_id: response.id, max_output_tokens: 4 });
assert.equal(next.previous_response_id, response.id);

const vectors = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
assert.equal(vectors.data.length, 2);
assert.ok(vectors.data[0].embedding.length > 8);
await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);

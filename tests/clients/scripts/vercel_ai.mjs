// Vercel's ai: texts, streams, tools and objects, over chat completions and over the Responses API.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { LONG, MODEL, QUESTION, TOKENS, URL, WEATHER, checkText, checkWeather } from "./common.mjs";

const compatible = createOpenAICompatible({
  name: "baton", baseURL: `${URL}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const common = { prompt: QUESTION, temperature: 0, maxRetries: 0 };

for (const model of [compatible(MODEL), openai.chat(MODEL), openai.responses(MODEL)]) {
  const { text } = await generateText({ ...common, model, maxOutputTokens: TOKENS });
  checkText(text);
  let streamed = "";
  const stream = streamText({ ...common, model, maxOutputTokens: TOKENS, onError: ({ error }) => { throw error; } });
  for await (const piece of stream.textStream) streamed += piece;
  assert.equal(streamed, text);
  assert.ok((await stream.totalUsage).outputTokens > 0);

  const tools = { get_weather: tool({ description: "The weather of a city.", inputSchema: jsonSchema(WEATHER) }) };
  const called = await generateText({ ...common, model, tools, toolChoice: "required", maxOutputTokens: LONG });
  checkWeather(called.toolCalls[0].input);

  const output = Output.object({ schema: jsonSchema(WEATHER) });
  const shaped = await generateText({ ...common, model, output, maxOutputTokens: LONG });
  checkWeather(shaped.output);
}

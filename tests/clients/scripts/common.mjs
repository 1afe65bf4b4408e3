// As common.py.

import assert from "node:assert/strict";

export const URL = process.env.BATON_URL;
export const MODEL = process.env.BATON_MODEL;
export const QUESTION = "What does os.path.join do?";
export const TOKENS = 48;
export const LONG = 1000;
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Bern", "Rome", "Oslo"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "get_weather", description: "The weather of a city.", parameters: WEATHER },
};

export function checkText(text) {
  assert.equal(typeof text, "string");
  if (process.env.BATON_TRAINED === "1") assert.match(text, /pathname components/);
  else assert.ok(text.length > 0);
}

export function checkWeather(found) {
  const weather = typeof found === "string" ? JSON.parse(found) : found;
  assert.deepEqual(Object.keys(weather).sort(), ["city", "days"]);
  assert.ok(["Bern", "Rome", "Oslo"].includes(weather.city));
  assert.ok(weather.days >= 1 && weather.days <= 9);
}

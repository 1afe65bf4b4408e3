// The dashboard: reads /admin/live (router/dashboard/view.py says what is in an event) and draws it.

import { flowDiagram, icicle, lines, pagesBar, waterfall } from "./charts.js";

const SHOWN_EVENTS = 150;
const history = { tokens: [], ttft50: [], ttft95: [] };
const at = (id) => document.getElementById(id);
let key = sessionStorage.getItem("baton-admin-key") || "";

// ---- reading

async function ask(path, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, signal });
  if (answer.status === 401) {
    at("key-form").hidden = false;
    throw new Error("this listener wants its key");
  }
  if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
  return answer;
}

// The data of each server-sent event. EventSource cannot send a key.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield data.join("\n");
    }
  }
}

async function follow() {
  for (;;) {
    try {
      const answer = await ask("admin/live");
      at("key-form").hidden = true;
      for await (const data of eventsOf(answer)) {
        const view = JSON.parse(data);
        if (view.error) say(view.error, true);
        else show(view);
      }
      say("the router has ended this page's stream", true);
    } catch (error) {
      say(error.message, true);
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
}

function say(text, bad = false) {
  at("state").textContent = text;
  at("state").classList.toggle("bad", bad);
}

// ---- showing

const seconds = (value) => value === null ? "–" : value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`;
const number = (value, digits = 1) => value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

function bytes(value) {
  const step = Math.min(Math.max(Math.floor(Math.log10(Math.max(value, 1)) / 3), 1), 4);
  return `${(value / 1000 ** step).toPrecision(3)} ${["", "KB", "MB", "GB", "TB"][step]}`;
}

function show(view) {
  const { figures, workers } = view;
  at("model").textContent = [...new Set(workers.map((one) => one.model))].join(", ") || "no worker";
  say(`${view.window_s === null ? "since the start" : `last ${view.window_s.toFixed(0)} s`}, ` +
    new Date(1000 * view.at).toLocaleTimeString());
  const errors = Object.entries(figures.statuses).map(([status, count]) => `${count} × ${status}`).join(", ");
  fill(at("tiles"), [
    ["requests/s", number(figures.requests_s)], ["output tokens/s", number(figures.output_tokens_s)],
    ["cached prompt tokens", figures.hit_rate === null ? "–" : `${(100 * figures.hit_rate).toFixed(1)} %`],
    ["TTFT p50", seconds(figures.ttft_s[0])], ["TTFT p95", seconds(figures.ttft_s[1])], ["TTFT p99", seconds(figures.ttft_s[2])],
    ["ITL p50", seconds(figures.itl_s[0])], ["ITL p95", seconds(figures.itl_s[1])],
    ["rooms running", number(figures.rooms)], ["waiting in routers", number(figures.queued)],
    ["restarts", number(figures.restarts)], ["suspected", number(figures.suspected)], ["errors", errors || "none"],
  ].map(([name, value]) => element("div", { className: "tile" }, element("b", {}, value), element("span", {}, name))));
  for (const [name, value] of [["tokens", figures.output_tokens_s], ["ttft50", figures.ttft_s[0]], ["ttft95", figures.ttft_s[1]]]) {
    history[name].push(value);
    history[name].splice(0, history[name].length - SHOWN_EVENTS);
  }
  lines(at("chart-tokens"), [history.tokens], (value) => number(value));
  lines(at("chart-ttft"), [history.ttft50, history.ttft95], seconds);
  showWorkers(workers);
  const ids = (role) => workers.filter((one) => one.role === role).map((one) => one.id);
  flowDiagram(at("flows"), ids("prefill"), ids("decode"), view.flows,
    (flow) => `${bytes(flow.bytes_per_s)}/s`);
  showRequests(view.requests);
  choices(at("tree-worker"), workers.map((one) => one.id));
  choices(at("chat-model"), [...new Set(workers.map((one) => one.model))]);
}

function showWorkers(workers) {
  table(at("workers"), ["worker", "role", "running", "waiting", "queued tokens", "KV in use", "KV pages", "prefill tokens/s", "decode step", "host", "rack"],
    workers.map((one) => [
      one.id,
      element("span", { className: `role ${one.role}` }, one.role + (one.draining ? ", drains" : "")),
      `${one.running} of ${one.most_running}`, number(one.waiting), number(one.queued_tokens),
      `${(100 * one.kv_use).toFixed(0)} %`,
      element("span", {}, ...one.kv.flatMap((pages) => [pagesBar(pages), ` ${pages.group} on ${pages.tier} `])),
      one.prefill_tokens_s ? number(one.prefill_tokens_s, 0) : "–", seconds(one.step_s || null),
      one.host.slice(0, 8), one.rack,
    ]));
}

function showRequests(requests) {
  const milliseconds = (value) => value === null ? "–" : `${value.toFixed(0)} ms`;
  table(at("requests"), ["request", "first token", "all", "prefill", "decode", "KV"],
    requests.map((one) => [one.request_id.slice(0, 18), milliseconds(one.ttft_ms), milliseconds(one.total_ms),
      one.prefill || "–", one.decode || "–", one.kv_bytes ? bytes(one.kv_bytes) : "–"]),
    requests.map((one) => one.request_id));
}

async function showTrace(id) {
  const trace = await (await ask(`debug/trace/${encodeURIComponent(id)}`)).json();
  const facts = trace.otherData;
  at("waterfall-of").textContent = `${id}: prefill ${facts.prefill || "–"}, decode ${facts.decode || "–"}, ` +
    `${bytes(facts.kv_bytes)} of KV ${facts.kv_backend ? `by ${facts.kv_backend}` : ""}`;
  waterfall(at("waterfall"), trace);
  return facts;
}

async function showTree() {
  const worker = at("tree-worker").value;
  if (!worker) return;
  const nodes = await (await ask(`debug/inspect?what=nodes&worker=${encodeURIComponent(worker)}`)).json();
  const tokens = nodes.reduce((sum, node) => sum + node.tokens.length, 0);
  at("tree-summary").textContent = `${nodes.length} nodes, ${number(tokens)} tokens; wide: tokens, red: hits`;
  icicle(at("tree"), nodes, (node) => node.tenant || "all");
}

// ---- the playground

async function chat() {
  const headers = { "Content-Type": "application/json" };
  if (at("api-key").value) headers.Authorization = `Bearer ${at("api-key").value}`;
  const body = {
    model: at("chat-model").value, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(at("chat-tokens").value), messages: [{ role: "user", content: at("chat-text").value }],
  };
  const answer = await fetch(`${at("api").value}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let usage = null;
  at("chat-answer").textContent = "";
  for await (const data of eventsOf(answer)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices[0]?.delta ?? {};
    at("chat-answer").append((delta.reasoning_content ?? "") + (delta.content ?? ""));
    usage = chunk.usage ?? usage;
  }
  const id = answer.headers.get("x-request-id");
  const facts = id ? await showTrace(id) : {};
  at("chat-facts").textContent = `${usage.prompt_tokens} prompt tokens, ` +
    `${usage.prompt_tokens_details?.cached_tokens ?? 0} of them cached; ${usage.completion_tokens} tokens; ` +
    `prefill on ${facts.prefill ?? "–"}, decode on ${facts.decode ?? "–"}`;
}

// ---- elements

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

function fill(parent, children) { parent.replaceChildren(...children); }

function table(parent, heads, rows, ids = []) {
  const head = element("tr", {}, ...heads.map((name) => element("th", {}, name)));
  fill(parent, [head, ...rows.map((cells, i) => {
    const row = element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
    if (ids[i]) row.dataset.id = ids[i];
    return row;
  })]);
}

// Options of a select; what was chosen stays chosen.
function choices(select, names) {
  const shown = [...select.options].map((option) => option.value);
  if (shown.join() !== names.join()) {
    const chosen = select.value;
    fill(select, names.map((name) => element("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }
}

const reporting = (work) => async (event) => {
  event.preventDefault();
  try { await work(event); } catch (error) { say(error.message, true); at("chat-facts").textContent = error.message; }
};

at("api").value = `${location.protocol}//${location.hostname}:8000`;
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("baton-admin-key", key);
  say("connecting");
});
at("requests").addEventListener("click", reporting(async (event) => {
  const row = event.target.closest("tr[data-id]");
  if (row) await showTrace(row.dataset.id);
}));
at("tree-load").addEventListener("click", reporting(showTree));
at("chat-form").addEventListener("submit", reporting(async () => {
  at("chat-send").disabled = true;
  try { await chat(); } finally { at("chat-send").disabled = false; }
}));
follow();

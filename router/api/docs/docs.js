// The page at /docs: reads /openapi.json and shows each path, its fields and its answers. A request can be tried.

const at = (id) => document.getElementById(id);
const METHODS = ["get", "post", "delete"];
let schemas = {};

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

const headers = () => at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {};

async function read() {
  at("state").textContent = "reading";
  const answer = await fetch("openapi.json", { headers: headers() });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? `${answer.status}`);
  schemas = told.components.schemas;
  at("paths").replaceChildren(...Object.entries(told.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => methods[method]).map((method) => operation(path, method, methods[method]))));
  at("state").textContent = "";
}

function operation(path, method, about) {
  const body = about.requestBody?.content["application/json"]?.schema;
  const heads = element("summary", {},
    element("span", { className: `method ${method}` }, method.toUpperCase()),
    element("code", {}, path), element("span", { className: "about" }, `  ${about.summary ?? ""}`));
  const parts = [heads];
  if (body) parts.push(element("h4", {}, "Fields"), fields(resolve(body)));
  parts.push(element("h4", {}, "Answers"), answers(about.responses), trial(path, method, body));
  return element("details", {}, ...parts);
}

function fields(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => element("tr", {},
    element("td", {}, element("code", {}, name), required.includes(name) ? " (required)" : ""),
    element("td", { className: "type" }, typeOf(field)),
    element("td", {}, aboutOf(field), ...objectsOf(field).map(inner))));
  return element("table", {}, ...rows);
}

// The fields of an object in a field.
function inner(name) {
  const shown = element("details", {}, element("summary", {}, element("code", {}, name)));
  shown.addEventListener("toggle", () => {  // when it is opened: objects may contain themselves
    if (shown.open && shown.childElementCount === 1) shown.append(fields(schemas[name]));
  });
  return shown;
}

function answers(responses) {
  return element("table", {}, ...Object.entries(responses).map(([status, answer]) =>
    element("tr", {}, element("td", {}, element("code", {}, status)), element("td", {}, answer.description))));
}

function trial(path, method, body) {
  const text = element("textarea", { rows: 6, value: body ? JSON.stringify(resolve(body).examples?.[0] ?? {}, null, 2) : "", hidden: !body });
  const where = element("input", { value: path, size: 40 });
  const shown = element("pre", { hidden: true });
  const button = element("button", { type: "button" }, "Try");
  button.addEventListener("click", async () => {
    shown.hidden = false;
    shown.textContent = "";
    const sent = body ? { body: text.value, headers: { ...headers(), "Content-Type": "application/json" } } : { headers: headers() };
    try {
      const answer = await fetch(where.value.slice(1), { method: method.toUpperCase(), ...sent });
      shown.append(`${answer.status}\n`);
      for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) shown.append(piece);
    } catch (error) {
      shown.append(error.message);
    }
  });
  return element("details", {}, element("summary", {}, "Try it"), where, text, button, shown);
}

// ---- schemas

const resolve = (schema) => schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
const branches = (schema) => (schema.anyOf ?? schema.oneOf)?.flatMap(branches) ?? [schema];

function typeOf(schema) {
  const names = branches(schema).map((one) => {
    if (one.$ref) return one.$ref.split("/").pop();
    if ("const" in one) return JSON.stringify(one.const);
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (one.type === "array") return `[${one.items ? typeOf(one.items) : "..."}]`;
    const bounds = [["≥", one.minimum], ["≤", one.maximum]].filter(([, value]) => value !== undefined);
    return [one.type ?? "anything", ...bounds.map(([sign, value]) => `${sign} ${value}`)].join(" ");
  });
  return [...new Set(names)].join(" | ");
}

function aboutOf(schema) {
  return [schema, ...branches(schema), ...(schema.anyOf ?? [])].map((one) => one.description).find(Boolean) ?? "";
}

function objectsOf(schema) {
  return branches(schema).flatMap((one) => one.type === "array" && one.items ? objectsOf(one.items) :
    one.$ref && resolve(one).properties ? [one.$ref.split("/").pop()] : []);
}

async function show() {
  try { await read(); } catch (error) { at("state").textContent = error.message; }
}

at("key-form").addEventListener("submit", (event) => { event.preventDefault(); show(); });
show();

// Drawings of the dashboard: functions that fill an <svg> with what they are given.

const NAMESPACE = "http://www.w3.org/2000/svg";

export function shape(kind, attributes, ...children) {
  const made = document.createElementNS(NAMESPACE, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function canvas(svg, height) {
  const width = Math.max(svg.getBoundingClientRect().width, 200);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  return width;
}

function label(text, x, y, attributes = {}) {
  return shape("text", { x, y, ...attributes }, text);
}

// `series`: lists of numbers or null, of equal length, oldest first. `write` makes a text of a value.
export function lines(svg, series, write, height = 120) {
  const width = canvas(svg, height);
  const left = 58, bottom = height - 6;
  const top = Math.max(...series.flat().filter((value) => value !== null), 1e-9);
  svg.append(
    shape("line", { x1: left, y1: bottom, x2: width, y2: bottom, class: "axis" }),
    label(write(top), 0, 14, { class: "dim" }), label("0", 0, bottom, { class: "dim" }));
  series.forEach((values, which) => {
    const step = (width - left) / Math.max(values.length - 1, 1);
    let path = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      path += `${pen}${left + i * step},${bottom - (bottom - 8) * value / top}`;
      pen = "L";
    });
    svg.append(shape("path", { d: path, class: `line-${which}` }));
  });
}

// A bar of pages that are used, cached and free.
export function pagesBar(pages) {
  const total = Math.max(pages.used + pages.cached + pages.free, 1);
  const svg = shape("svg", { class: "kv", viewBox: `0 0 ${total} 1`, preserveAspectRatio: "none" });
  let x = 0;
  for (const kind of ["used", "cached", "free"]) {
    svg.append(shape("rect", { x, y: 0, width: pages[kind], height: 1, class: kind }));
    x += pages[kind];
  }
  svg.append(shape("title", {}, `${pages.group}, ${pages.tier}: ${pages.used} used, ${pages.cached} cached, ` +
    `${pages.free} free; ${pages.evicted} evicted so far`));
  return svg;
}

// Prefill workers at the left, decode workers at the right, a line for each pair that KV has moved between.
export function flowDiagram(svg, prefill, decode, flows, write) {
  const rows = Math.max(prefill.length, decode.length, 1);
  const height = 34 * rows + 10, width = canvas(svg, height);
  const box = Math.min(170, width * 0.32);
  const y = (i) => 8 + 34 * i;
  const most = Math.max(...flows.map((flow) => flow.bytes_per_s), 1);
  for (const flow of flows) {
    const from = prefill.indexOf(flow.prefill), to = decode.indexOf(flow.decode);
    if (from < 0 || to < 0) continue;
    const y1 = y(from) + 12, y2 = y(to) + 12, middle = width / 2;
    svg.append(shape("path", {
      d: `M${box},${y1} C${middle},${y1} ${middle},${y2} ${width - box},${y2}`, class: "flow",
      "stroke-width": 1 + 5 * flow.bytes_per_s / most }, shape("title", {}, write(flow))));
    // The text lies on the curve, at another part of it for each decode worker, so that texts do not meet.
    const t = 0.24 + 0.52 * (to + 0.5 * (from % 2)) / decode.length, rest = 1 - t;
    const x = rest ** 3 * box + 3 * rest * t * middle + t ** 3 * (width - box);
    const at = (rest ** 3 + 3 * rest ** 2 * t) * y1 + (3 * rest * t ** 2 + t ** 3) * y2;
    svg.append(label(write(flow), x, at - 4, { "text-anchor": "middle" }));
  }
  const nodes = (names, x) => names.forEach((name, i) => svg.append(
    shape("rect", { x, y: y(i), width: box, height: 24, rx: 4, class: "node" }), label(name, x + 8, y(i) + 16)));
  nodes(prefill, 0.5);
  nodes(decode, width - box - 0.5);
  if (!flows.length) svg.append(label("none lately", width / 2, height / 2, { "text-anchor": "middle", class: "dim" }));
}

// A trace in Chrome's format: a row for each stage, in the order in which they began.
export function waterfall(svg, trace) {
  const names = {}, rows = [];
  for (const event of trace.traceEvents) {
    if (event.ph === "M" && event.name === "process_name") names[event.pid] = event.args.name;
    if (event.ph === "X") rows.push(event);
  }
  rows.sort((a, b) => a.ts - b.ts);
  const height = 18 * rows.length + 24, width = canvas(svg, height);
  if (!rows.length) return;
  const start = rows[0].ts, end = Math.max(...rows.map((row) => row.ts + row.dur));
  const left = Math.min(330, width * 0.35), scale = (width - left - 70) / Math.max(end - start, 1);
  rows.forEach((row, i) => {
    const y = 18 * i + 4, x = left + (row.ts - start) * scale, wide = Math.max(row.dur * scale, 1.5);
    const kind = names[row.pid] === "router" ? "bar-router" : `bar-${row.pid % 3}`;
    svg.append(
      label(`${names[row.pid]}  ${row.name}`, 0, y + 11),
      shape("rect", { x, y, width: wide, height: 12, rx: 2, class: kind },
        shape("title", {}, `${names[row.pid]}: ${row.name}, ${(row.dur / 1000).toFixed(2)} ms`)),
      label(`${(row.dur / 1000).toFixed(1)} ms`, Math.min(x + wide + 4, width - 60), y + 11, { class: "dim" }));
  });
  svg.append(label(`0`, left, height - 4, { class: "dim" }),
    label(`${((end - start) / 1000).toFixed(0)} ms`, width - 60, height - 4, { class: "dim" }));
}

// Nodes of a prefix tree: width is tokens, a row is a step from the root, colour is hits, the border its owner.
export function icicle(svg, nodes, ownerOf) {
  const children = nodes.map(() => []), roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  const weight = nodes.map(() => 0);
  for (let i = nodes.length - 1; i >= 0; i--) {
    weight[i] = Math.max(nodes[i].tokens.length, children[i].reduce((sum, child) => sum + weight[child], 0));
  }
  const depth = nodes.map(() => 0);
  nodes.forEach((node, i) => { if (node.parent >= 0) depth[i] = depth[node.parent] + 1; });
  const rows = Math.max(...depth, 0) + 1, height = Math.max(22 * rows, 30), width = canvas(svg, height);
  if (!nodes.length) {
    svg.append(label("nothing is cached", 8, 18, { class: "dim" }));
    return;
  }
  const hottest = Math.log1p(Math.max(...nodes.map((node) => node.hits), 1));
  const draw = (list, x, scale) => {
    for (const i of list) {
      const node = nodes[i], wide = weight[i] * scale, heat = Math.log1p(node.hits) / hottest;
      const cell = shape("rect", {
        x, y: 22 * depth[i], width: Math.max(wide - 0.5, 0.5), height: 21, class: "cell",
        fill: `hsl(${210 - 190 * heat} 70% ${62 - 12 * heat}%)` });
      cell.append(shape("title", {}, `${node.tokens.length} tokens, ${node.hits} hits, ${node.lock} locks, ` +
        `owner ${ownerOf(node)}; ${Object.entries(node.held).map(([name, held]) => `${name} ${held}`).join(", ")}`));
      svg.append(cell);
      if (wide > 60) svg.append(label(`${node.tokens.length} · ${ownerOf(node)}`, x + 4, 22 * depth[i] + 15));
      draw(children[i], x, scale);
      x += wide;
    }
  };
  draw(roots, 0, width / Math.max(roots.reduce((sum, i) => sum + weight[i], 0), 1));
}

"use strict";

const $ = (id) => document.getElementById(id);
const KINDS = ["cached", "computed", "forced", "sampled"];
let running = null;
let before = null;

function make(tag, content, attributes = {}) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...[content].flat());
  return element;
}

async function api(path, options = {}) {
  const headers = { ...options.headers };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw new Error(await complaint(response));
  return response;
}

async function complaint(response) {
  const body = await response.json().catch(() => null);
  return body && body.error ? body.error.message : `status ${response.status}`;
}

// ------------------------------------------------------------------------------------------------ status and metrics

async function refreshStatus() {
  try {
    const metrics = parse(await (await api("/metrics")).text());
    const ready = metrics.sglite_ready === 1;
    state(ready ? "ready" : "not ready", ready);
    if (ready && $("about").textContent === "") await about();
    showMetrics(metrics);
  } catch (error) {
    state(error.message, false);
  }
}

function state(text, ready) {
  $("state").textContent = text;
  $("state").className = ready ? "ready" : "down";
}

async function about() {
  const info = await (await api("/server_info")).json();
  $("model").textContent = info.model_path;
  $("about").textContent = `sglite ${info.version}`;
}

function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{[^}]*\})? (\S+)$/.exec(line);
    if (match && !match[1].endsWith("_bucket")) found[match[1]] = (found[match[1]] || 0) + Number(match[2]);
  }
  return found;
}

function showMetrics(now) {
  const seconds = before ? (performance.now() - before.at) / 1000 : 0;
  const rate = (name) => (before ? (now[name] - before.values[name]) / seconds : 0);
  const share = (value) => (value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);
  const mean = (name) => {
    const count = now[`${name}_count`];
    return count ? `${((1000 * now[`${name}_sum`]) / count).toFixed(0)} ms` : "–";
  };
  const shown = {
    "Tokens a second": Math.max(0, rate("sglite_generation_tokens_total")).toFixed(0),
    "Requests under way": now.sglite_requests_in_flight,
    Running: now.sglite_running ?? "–",
    Queued: now.sglite_waiting ?? "–",
    "KV pool used": share(now.sglite_kv_usage),
    "Cache hits": share(now.sglite_cache_hit_rate),
    "First token": mean("sglite_time_to_first_token_seconds"),
    "Between tokens": mean("sglite_inter_token_latency_seconds"),
    "Forced tokens": now.sglite_forced_tokens_total,
    "Retractions": now.sglite_retractions_total,
  };
  $("metrics").replaceChildren(
    ...Object.entries(shown).map(([name, value]) => make("div", [make("dt", name), make("dd", String(value))])),
  );
  before = { at: performance.now(), values: now };
}

// -------------------------------------------------------------------------------------------------------- playground

function requestBody() {
  const messages = [{ role: "user", content: $("prompt").value }];
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  const body = { messages, max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value) };
  if ($("schema").value.trim()) {
    const schema = JSON.parse($("schema").value);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return $("stream").checked ? { ...body, stream: true, stream_options: { include_usage: true } } : body;
}

async function run() {
  $("answer").textContent = $("problem").textContent = $("usage").textContent = "";
  let body;
  try {
    body = requestBody();
  } catch (error) {
    $("problem").textContent = `The schema is not JSON: ${error.message}`;
    $("schema").focus();
    return;
  }
  running = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  const began = performance.now();
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const response = await api("/v1/chat/completions", { ...options, signal: running.signal });
    await (body.stream ? showStream(response, began) : showWhole(response, began));
  } catch (error) {
    $("problem").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  $("run").disabled = false;
  $("stop").disabled = true;
  running = null;
  refreshPrograms();
}

async function showWhole(response, began) {
  const answer = await response.json();
  $("answer").textContent = answer.choices[0].message.content;
  showUsage(answer.usage, began, null);
}

async function showStream(response, began) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let first = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((text) => text.startsWith("data: {"))) {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices.length ? event.choices[0].delta : {};
      if (delta.content) first ??= performance.now() - began;
      $("answer").append(delta.reasoning_content || "", delta.content || "");
      if (event.usage) showUsage(event.usage, began, first);
    }
  }
}

function showUsage(usage, began, first) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const start = first === null ? "" : `, first after ${first.toFixed(0)} ms`;
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  $("usage").textContent =
    `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} new, ${seconds} s${start}`;
}

// ------------------------------------------------------------------------------------------------------------ traces

async function refreshPrograms() {
  try {
    const found = (await (await api("/v1/sglite/programs")).json()).data;
    const rows = found.slice(0, 30).map((program) => programRow(program, () => openProgram(program.program)));
    $("programs").replaceChildren(...(rows.length ? rows : [make("li", "Nothing has run yet.")]));
  } catch (error) {
    $("programs").replaceChildren(make("li", error.message));
  }
}

function programRow(program, open) {
  const button = make("button", program.program.slice(0, 24), { type: "button" });
  button.addEventListener("click", open);
  const text = ` ${program.count} calls, ${program.branches} branches, ${program.new_tokens} new tokens`;
  return make("li", [button, text]);
}

async function openProgram(name) {
  showTrace(await (await api(`/v1/sglite/programs/${encodeURIComponent(name)}`)).json());
}

async function openFile() {
  try {
    const traces = [JSON.parse(await $("file").files[0].text())].flat();
    traces.forEach((trace) => summarise(trace));
    $("programs").replaceChildren(...traces.map((trace) => programRow(trace, () => showTrace(trace))));
    if (traces.length) showTrace(traces[0]);
  } catch (error) {
    $("programs").replaceChildren(make("li", `This is no trace: ${error.message}`));
  }
}

function summarise(trace) {
  trace.count = trace.calls.length;
  trace.branches = new Set(trace.calls.map((call) => call.branch)).size;
  trace.new_tokens = trace.calls.reduce((sum, call) => sum + call.new_tokens, 0);
}

function counts(call) {
  return {
    cached: call.cached_tokens,
    computed: call.prompt_tokens - call.cached_tokens,
    forced: call.forced_tokens,
    sampled: call.new_tokens - call.forced_tokens,
  };
}

function describe(call) {
  const parts = Object.entries(counts(call)).filter(([, count]) => count);
  const tokens = parts.map(([kind, count]) => `${count} ${kind}`).join(", ") || "no tokens";
  return `${call.name || call.kind}: ${tokens}; ${(1000 * call.wall).toFixed(0)} ms, ${call.finish}`;
}

function showTrace(trace) {
  $("trace").hidden = false;
  $("trace-title").textContent = `${trace.function} ${trace.program}`;
  $("tree").replaceChildren(tree(trace.calls));
  $("timeline").replaceChildren(timeline(trace.calls));
  $("trace-title").focus();
}

function tree(calls) {
  const lists = new Map([["", make("ul", [])]]);
  const list = (branch) => {
    if (!lists.has(branch)) {
      const inner = make("ul", []);
      const parent = branch.includes(".") ? branch.slice(0, branch.lastIndexOf(".")) : "";
      const branches = make("details", [make("summary", `branch ${branch}`), inner], { open: "" });
      list(parent).append(make("li", branches));
      lists.set(branch, inner);
    }
    return lists.get(branch);
  };
  for (const call of calls) list(call.branch).append(make("li", [describe(call), bar(call)]));
  return lists.get("");
}

function svg(tag, attributes, content = []) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...content);
  return element;
}

function segments(call, x, y, width, height) {
  const found = counts(call);
  const total = KINDS.reduce((sum, kind) => sum + found[kind], 0) || 1;
  let from = x;
  return KINDS.filter((kind) => found[kind] > 0).map((kind) => {
    const size = (width * found[kind]) / total;
    const piece = svg("rect", { class: kind, x: from, y, width: size, height }, [svg("title", {}, [`${found[kind]} ${kind}`])]);
    from += size;
    return piece;
  });
}

function bar(call) {
  return svg("svg", { width: 320, height: 10, role: "img", "aria-label": describe(call) }, segments(call, 0, 0, 320, 10));
}

function timeline(calls) {
  const width = 960;
  const row = 26;
  const end = Math.max(...calls.map((call) => call.start + call.wall), 0.001);
  const rows = calls.map((call, index) => {
    const x = (width * call.start) / end;
    const wide = Math.max(2, (width * call.wall) / end);
    const y = index * row;
    const label = `${call.branch ? `${call.branch} ` : ""}${call.name || call.kind}`;
    const anchor = x > width / 2 ? "end" : "start";
    return svg("g", { role: "img", "aria-label": `at ${(1000 * call.start).toFixed(0)} ms, ${describe(call)}` }, [
      ...segments(call, x, y + 12, wide, 10),
      svg("rect", { class: "frame", x, y: y + 12, width: wide, height: 10 }),
      svg("text", { x: anchor === "end" ? x + wide : x, y: y + 9, "text-anchor": anchor }, [label]),
    ]);
  });
  const text = `${calls.length} calls in ${(1000 * end).toFixed(0)} ms`;
  const frame = { viewBox: `0 0 ${width} ${calls.length * row}`, role: "group", "aria-label": text, width: "100%" };
  return svg("svg", frame, rows);
}

// ------------------------------------------------------------------------------------------------------------- wiring

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  refreshStatus();
  refreshPrograms();
});
$("stop").addEventListener("click", () => running && running.abort());
$("refresh").addEventListener("click", refreshPrograms);
$("file").addEventListener("change", openFile);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
refreshStatus();
refreshPrograms();
setInterval(() => document.hidden || refreshStatus(), 2000);

"use strict";
// The server as the page sees it: the key, requests, streams. All addresses are relative to the page.

const KEY_NAME = "openspec-key";
const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function button(name, act) {
  const one = make("button", "plain", name);
  one.type = "button";
  one.addEventListener("click", act);
  return one;
}

function onClick(id, act) {
  $(id).addEventListener("click", act);
}

/// What this tab remembers until it is closed.
function remembered(name) {
  try { return sessionStorage.getItem(name) || ""; } catch { return ""; }
}

/// Whether the browser lets the tab remember it.
function remember(name, value) {
  try { if (value) sessionStorage.setItem(name, value); else sessionStorage.removeItem(name); } catch { return false; }
  return true;
}

function storedKey() {
  return remembered(KEY_NAME);
}

function storeKey(key) {
  if (!remember(KEY_NAME, key)) note("This browser keeps no key; it is asked for at each visit.");
}

function headers() {
  const all = { "content-type": "application/json" };
  if (storedKey()) all.authorization = "Bearer " + storedKey();
  return all;
}

class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function refusal(response) {
  const text = await response.text();
  try { return new ApiError(response.status, JSON.parse(text).error.message); } catch { /* not JSON */ }
  return new ApiError(response.status, `The server answered ${response.status}.`);
}

async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

/// What the settings make of a prompt; what is empty is left to the server. `speculative` overrides the switch.
function requestOf(mode, prompt, history, settings, speculative = settings.speculation) {
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    ...settings.fields,
    speculative: { enabled: speculative, detailed: true },
  };
  if (speculative && settings.drafts) body.speculative.num_speculative_tokens = settings.drafts;
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.form) body.structured_outputs = { [kindOf(settings.form)]: settings.form };
  if (mode === "completion") return { ...body, prompt };
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return { ...body, messages: [...system, ...history, { role: "user", content: prompt }] };
}

function kindOf(form) {
  return form[0] === "{" ? "json" : form.includes("::=") ? "grammar" : "regex";
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

/// The request for a shell, without the key.
function curlOf(path, body) {
  const url = new URL(path, location.href).href;
  const key = storedKey() ? ' -H "authorization: Bearer $OPENSPEC_API_KEY"' : "";
  return `curl -N ${quoted(url)} -H 'content-type: application/json'${key} -d ${quoted(JSON.stringify(body))}`;
}

/// Calls `onChunk` with each event of an answer, until it ends.
async function stream(path, body, signal, onChunk) {
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", began = performance.now();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (performance.now() - began > 8) {
        await new Promise((go) => setTimeout(go)); // what came at once leaves room for frames
        began = performance.now();
      }
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ApiError(200, chunk.error.message);
      onChunk(chunk);
    }
  }
}

function emptyRun(path, body) {
  return { path, body, steps: [], metrics: null, usage: null, content: "", thinking: "", seconds: 0, finish: null };
}

/// Runs a request and records it in `run`: each step with the time of its arrival, in seconds. The run's own time is
/// that of its last step, so tokens, seconds and rates belong together. One that is stopped keeps what it has.
async function record(run, signal, onStep) {
  const start = performance.now();
  const take = (chunk) => {
    const seconds = (performance.now() - start) / 1000;
    if (chunk.usage) run.usage = chunk.usage;
    if (chunk.metrics) run.metrics = chunk.metrics;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {}, content = delta.content || choice.text || "";
      const thinking = delta.reasoning_content || delta.reasoning || "";
      run.content += content;
      run.thinking += thinking;
      if (choice.finish_reason) run.finish = choice.finish_reason;
      for (const step of choice.steps || []) {
        step.at = run.seconds = seconds;
        if (Boolean(content) !== Boolean(thinking)) step.is_thought = Boolean(thinking);
        run.steps.push(step);
        onStep(step);
      }
    }
  };
  try {
    await stream(run.path, run.body, signal, take);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    run.finish = "stopped";
  }
  return run;
}

/// A saved run, if the file is one: whoever wrote it, only its shape counts.
function checkedRuns(text) {
  const saved = JSON.parse(text);
  if (saved.format !== "openspec-run-1" || !Array.isArray(saved.turns)) throw new Error("This is no saved run.");
  checkedTurns(saved.turns);
  return saved;
}

function checkedTurns(turns) {
  const isList = (value, type) => Array.isArray(value) && value.every((one) => typeof one === type);
  for (const turn of turns) {
    if (typeof turn.asked !== "string" || !Array.isArray(turn.runs) || !turn.runs.length) throw new Error("A turn is broken.");
    for (const run of turn.runs) {
      run.content ??= "";
      run.thinking ??= "";
      if (typeof run.content !== "string" || typeof run.thinking !== "string" || typeof run.seconds !== "number") throw new Error("A run is broken.");
      for (const step of run.steps) {
        const count = step.draft_token_ids.length;
        const isWhole = isList(step.tokens, "string") && isList(step.token_ids, "number")
          && step.tokens.length === step.token_ids.length && typeof step.at === "number"
          && isList(step.draft_tokens, "string") && step.draft_tokens.length === count
          && isList(step.draft_parents, "number") && step.draft_parents.length === count
          && step.draft_parents.every((parent, index) => parent >= -1 && parent < index)
          && isList(step.accepted, "number") && step.accepted.every((at) => at >= 0 && at < count)
          && [step.num_forced_tokens, step.num_copied_tokens].every((count) => count === undefined || typeof count === "number")
          && (step.draft_scores === undefined || isList(step.draft_scores, "number"));
        if (!isWhole) throw new Error("A step is broken.");
      }
    }
  }
  return turns;
}

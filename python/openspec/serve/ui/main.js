// Views and controls.

const EXAMPLES = {
  chat: ["Rewrite this code with `value` renamed to `item`:\n\n```python\ndef total(values):\n    result = 0\n    for value in values:\n        if value > 0:\n            result += value\n    return result\n```", "What comes after Tuesday?", "Repeat the following text exactly: Now is the winter of our discontent made glorious summer by this sun of York."],
  completion: ["def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n\ndef mean(values):", "KING HENRY:\nNow, my lords,"],
};
EXAMPLES.race = EXAMPLES.chat;

const page = { mode: "chat", info: null, turns: { chat: [], completion: [], race: [] }, history: [], stop: null, lanes: null, replay: 0 };

function note(text) {
  $("note").textContent = text;
  clearTimeout(note.timer);
  note.timer = setTimeout(() => { $("note").textContent = ""; }, 6000);
}

function settings() {
  const number = (id, fallback) => { const value = $(id).valueAsNumber; return Number.isFinite(value) ? value : fallback; };
  return {
    speculation: $("speculation").checked, drafts: number("drafts", null), temperature: number("temperature", 0),
    seed: Math.trunc(number("seed", 1)), maxTokens: Math.trunc(number("max-tokens", 512)), thinking: $("thinking").checked,
    form: $("form-of").value.trim(),
  };
}

function plan(prompt, speculative) {
  const mode = page.mode === "race" ? "chat" : page.mode;
  const history = page.mode === "chat" ? page.history : [];
  return { path: PATHS[mode], body: requestOf(mode, prompt, history, settings(), speculative) };
}

function setBusy(isBusy) {
  $("send").textContent = isBusy ? "Stop" : "Send";
  $("stage").setAttribute("aria-busy", isBusy);
}

function setMode(mode) {
  page.mode = mode;
  for (const button of $("modes").children) {
    button.setAttribute("aria-checked", button.dataset.mode === mode);
    button.tabIndex = button.dataset.mode === mode ? 0 : -1;
  }
  document.body.className = mode + ($("show-steps").checked ? " marks" : "");
  $("prompt").placeholder = mode === "completion" ? "Text to go on from" : "Ask something";
  show();
}

/// Draws the current view anew from what was recorded.
function show() {
  const turns = page.turns[page.mode];
  page.replay += 1;
  $("log").replaceChildren();
  $("race").hidden = page.mode !== "race" || !turns.length;
  $("empty").hidden = turns.length > 0;
  $("examples").replaceChildren(...EXAMPLES[page.mode].map((text) => {
    const button = make("button", "", text.split("\n")[0].replace(/:$/, ""));
    button.type = "button";
    button.addEventListener("click", () => { $("prompt").value = text; fit(); $("form").requestSubmit(); });
    return button;
  }));
  if (page.mode === "race") {
    if (turns.length) showRace(turns[turns.length - 1]);
    return;
  }
  for (const turn of turns) {
    const { view, meta } = openTurn(turn.asked);
    for (const step of turn.runs[0].steps) view.add(step);
    closeTurn(meta, turn.runs[0]);
    showNumbers(turn.runs[0].steps);
  }
}

function openTurn(asked) {
  const turn = make("div", "turn"), root = make("div", "answer"), meta = make("div", "meta");
  const question = make("p", page.mode === "completion" ? "asked mono" : "asked", visible(asked));
  turn.append(question, root, meta);
  $("log").append(turn);
  const view = new TokenView(root, showStep);
  return { view, meta, turn };
}

function closeTurn(meta, run) {
  const all = totals(run.steps);
  const length = all.drafts ? ` \u00b7 ${(1 + all.accepted / all.drafts).toFixed(2)} tokens a drafted step` : "";
  meta.textContent = `${all.tokens} tokens in ${run.steps.length} steps \u00b7 ${run.seconds.toFixed(2)} s \u00b7 ${short(rateOf(run.steps))} tokens a second${length}`;
}

function atEnd() {
  const stage = $("stage");
  return stage.scrollHeight - stage.scrollTop - stage.clientHeight < 120;
}

async function ask(prompt) {
  const { path, body } = plan(prompt);
  $("empty").hidden = true;
  const { view, meta, turn } = openTurn(prompt);
  view.root.classList.add("cursor");
  $("stage").scrollTop = $("stage").scrollHeight;
  let shown = 0, follows = true;
  view.onDrawn = () => {
    if (follows) $("stage").scrollTop = $("stage").scrollHeight;
    if (performance.now() - shown > 250) { shown = performance.now(); showNumbers(view.steps); }
  };
  const onScroll = () => { follows = atEnd(); };
  $("stage").addEventListener("scroll", onScroll);
  try {
    const run = await record(path, body, page.stop.signal, (step) => view.add(step));
    page.turns[page.mode].push({ asked: prompt, runs: [run] });
    if (page.mode === "chat") {
      page.history.push({ role: "user", content: prompt }, { role: "assistant", content: run.content });
    }
    closeTurn(meta, run);
  } catch (error) {
    fail(error, turn);
  } finally {
    $("stage").removeEventListener("scroll", onScroll);
    view.root.classList.remove("cursor");
    showNumbers(view.steps);
  }
}

function fail(error, place) {
  if (error.name === "AbortError") { place.append(make("p", "meta", "Stopped.")); return; }
  const message = make("p", "failed", visible(error.message));
  message.setAttribute("role", "alert");
  place.append(message);
  if (error.status === 401) $("key-dialog").showModal();
}

// Side by side

function lanes() {
  if (!page.lanes) page.lanes = ["a", "b"].map((name) => new TokenView($("race-" + name), showStep));
  return page.lanes;
}

async function race(prompt) {
  $("empty").hidden = true;
  $("race").hidden = false;
  page.replay += 1;
  $("race-asked").textContent = visible(prompt);
  const runs = [];
  $("verdict").replaceChildren();
  for (const view of lanes()) view.clear();
  // No run finds another's prompt in the cache.
  const salted = (speculative) => {
    const { path, body } = plan(prompt, speculative);
    body.cache_salt = "ui-" + [...crypto.getRandomValues(new Uint32Array(2))].join("-");
    return { path, body };
  };
  try {
    // What a server does once, at its first answers, is no part of either run.
    for (const speculative of [true, false]) {
      $("verdict").replaceChildren(make("span", "quiet", "Warming up \u2026"));
      const { path, body } = salted(speculative);
      body.speculative.detailed = false;
      body.max_tokens = Math.min(8, body.max_tokens);
      await stream(path, body, page.stop.signal, () => {});
    }
    for (const [index, speculative] of [true, false].entries()) {
      $("verdict").replaceChildren(make("span", "quiet", speculative ? "First with speculation \u2026" : "Then without \u2026"));
      const { path, body } = salted(speculative);
      runs.push(await record(path, body, page.stop.signal, (step) => lanes()[index].add(step)));
    }
  } catch (error) {
    $("verdict").replaceChildren();
    fail(error, $("verdict"));
    return;
  }
  const turn = { asked: prompt, runs };
  page.turns.race.push(turn);
  showRace(turn);
  play(0);
}

function idsOf(run) {
  return run.steps.flatMap((step) => step.token_ids);
}

/// Whether both runs brought the same token ids and ended alike.
function isIdentical(runs) {
  const [a, b] = runs.map(idsOf);
  return a.length === b.length && a.every((id, i) => id === b[i]) && runs[0].finish === runs[1].finish;
}

function showRace(turn) {
  const [fast, plain] = turn.runs;
  const same = isIdentical(turn.runs);
  $("race-asked").textContent = visible(turn.asked);
  const ratio = plain.seconds / fast.seconds;
  const headline = ratio >= 1 ? `${ratio.toFixed(2)}\u00d7 as fast` : `${(1 / ratio).toFixed(2)}\u00d7 as slow`;
  const answer = make("span", same ? "" : "no", `identical: ${same ? "yes" : "no"}`);
  answer.id = "identical";
  $("verdict").replaceChildren(`${headline}, `, answer,
    make("small", "", `${fast.seconds.toFixed(2)} s and ${plain.seconds.toFixed(2)} s for ${idsOf(fast).length} tokens, compared by their ids. Same prompt, same seed, one run after the other.`));
  for (const [index, view] of lanes().entries()) {
    view.clear();
    for (const step of turn.runs[index].steps) view.add(step);
    $("lane-" + "ab"[index]).textContent = `${short(rateOf(turn.runs[index].steps))} tokens a second`;
  }
  showNumbers(fast.steps);
  setClock(Math.max(fast.seconds, plain.seconds), turn);
}

/// Both runs as they were at a time, without touching what need not change.
function setClock(seconds, turn = page.turns.race[page.turns.race.length - 1]) {
  const longest = Math.max(...turn.runs.map((run) => run.seconds)) || 1;
  $("clock").textContent = seconds.toFixed(2) + " s";
  $("scrub").value = 1000 * seconds / longest;
  turn.runs.forEach((run, index) => {
    const view = lanes()[index];
    const count = run.steps.filter((step) => step.at <= seconds).length;
    if (view.spans.length > count) { view.clear(); view.steps = run.steps.slice(); }
    view.limit = count;
    if (view.spans.length < count) view.flush();
    $("bar-" + "ab"[index]).style.transform = `scaleX(${Math.min(1, seconds / (run.seconds || 1))})`;
  });
}

function play(from) {
  const turn = page.turns.race[page.turns.race.length - 1];
  if (!turn) return;
  const id = page.replay += 1;
  const longest = Math.max(...turn.runs.map((run) => run.seconds));
  let seconds = from, last = performance.now();
  $("play").textContent = "\u2759\u2759";
  const frame = (now) => {
    if (id !== page.replay) { $("play").textContent = "\u25b6"; return; }
    seconds = Math.min(longest, seconds + (now - last) / 1000 * Number($("rate").value));
    last = now;
    setClock(seconds);
    if (seconds < longest) requestAnimationFrame(frame); else { page.replay += 1; $("play").textContent = "\u25b6"; }
  };
  requestAnimationFrame(frame);
}

// Controls

async function submit(event) {
  event.preventDefault();
  if (page.stop) { page.stop.abort(); return; }
  const prompt = $("prompt").value;
  if (!prompt.trim()) { $("prompt").focus(); return; }
  page.stop = new AbortController();
  setBusy(true);
  $("prompt").value = "";
  fit();
  try { await (page.mode === "race" ? race(prompt) : ask(prompt)); } finally { page.stop = null; setBusy(false); }
}

async function copyCurl() {
  const turns = page.turns[page.mode];
  const { path, body } = $("prompt").value || !turns.length ? plan($("prompt").value || "Hello") : turns[turns.length - 1].runs[0];
  const text = curlOf(path, body);
  try { await navigator.clipboard.writeText(text); note("Copied, without the key."); } catch { window.prompt("The request, without the key", text); }
}

function save() {
  const turns = page.turns[page.mode];
  if (!turns.length) { note("There is no run yet."); return; }
  const saved = { format: "openspec-run-1", mode: page.mode, server: page.info, turns };
  const url = URL.createObjectURL(new Blob([JSON.stringify(saved)], { type: "application/json" }));
  const link = make("a");
  link.href = url;
  link.download = `openspec-${page.mode}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function load(file) {
  try {
    const saved = checkedRuns(await file.text());
    const mode = EXAMPLES[saved.mode] ? saved.mode : "chat";
    if (mode === "race" && saved.turns.some((turn) => turn.runs.length !== 2)) throw new Error("A side is missing.");
    page.turns[mode] = saved.turns;
    setMode(mode);
    note("Opened " + visible(file.name));
  } catch (error) {
    note("This file cannot be opened: " + visible(error.message).slice(0, 80));
  }
}

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = $("prompt").scrollHeight + 2 + "px";
}

async function connect() {
  try {
    page.info = await getJson("server_info");
    const { model, method, num_speculative_tokens: most, device, num_replicas: engines } = page.info;
    $("model").textContent = `${model} \u00b7 ${method === "none" ? "no drafter" : `${method}, ${most} drafts`} \u00b7 ${engines > 1 ? engines + " \u00d7 " : ""}${device}`;
    $("drafts").max = Math.max(1, most);
    $("drafts").value = most || "";
    $("drafts").disabled = $("speculation").disabled = !most;
    $("key").textContent = storedKey() ? "Key \u2713" : "Key";
  } catch (error) {
    $("model").textContent = error.status === 401 ? "needs an API key" : "not reachable";
    if (error.status === 401) $("key-dialog").showModal();
  }
}

function drawLegend() {
  const entries = [["p1", "1"], ["p2", "2"], ["p3", "3"], ["p4", "4\u20137"], ["p8", "8+"], ["pf", "forced by a grammar"]].map(([name, text]) => {
    return make("b", "t d " + name, text);
  });
  $("legend").replaceChildren(make("span", "", "Drafted, by position"), ...entries, make("span", "", "The target\u2019s own is plain."));
}

function closeStep() {
  document.body.classList.remove("picked");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-pressed", theme === "dark");
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("modes").addEventListener("click", (event) => { if (event.target.dataset.mode && !page.stop) setMode(event.target.dataset.mode); });
  $("modes").addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move || page.stop) return;
    event.preventDefault();
    const all = [...$("modes").children];
    const next = all[(all.findIndex((one) => one.dataset.mode === page.mode) + move + all.length) % all.length];
    setMode(next.dataset.mode);
    next.focus();
  });
  $("form").addEventListener("submit", submit);
  $("prompt").addEventListener("input", fit);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
  });
  $("show-steps").addEventListener("change", () => document.body.classList.toggle("marks", $("show-steps").checked));
  $("more").addEventListener("click", () => {
    $("settings").hidden = !$("settings").hidden;
    $("more").setAttribute("aria-expanded", !$("settings").hidden);
  });
  $("step-close").addEventListener("click", closeStep);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeStep(); });
  $("curl").addEventListener("click", copyCurl);
  $("save").addEventListener("click", save);
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { if ($("file").files[0]) load($("file").files[0]); $("file").value = ""; });
  $("clear").addEventListener("click", () => { if (page.stop) return; page.turns[page.mode] = []; if (page.mode === "chat") page.history = []; show(); });
  $("key").addEventListener("click", () => $("key-dialog").showModal());
  $("key-dialog").addEventListener("close", () => {
    const choice = $("key-dialog").returnValue;
    if (choice === "save" && $("key-input").value) storeKey($("key-input").value.trim());
    if (choice === "forget") storeKey("");
    $("key-input").value = "";
    if (choice) connect();
    $("key-dialog").returnValue = "";
  });
  $("play").addEventListener("click", () => {
    if ($("play").textContent !== "\u25b6") { page.replay += 1; return; }
    const at = Number($("scrub").value) / 1000;
    const turn = page.turns.race[page.turns.race.length - 1];
    play(at >= 1 ? 0 : at * Math.max(...turn.runs.map((run) => run.seconds)));
  });
  $("scrub").addEventListener("input", () => {
    page.replay += 1;
    const turn = page.turns.race[page.turns.race.length - 1];
    setClock(Number($("scrub").value) / 1000 * Math.max(...turn.runs.map((run) => run.seconds)));
  });
  drawLegend();
  showNumbers([]);
  setMode("chat");
  connect();
  new LivePanel();
}

start();

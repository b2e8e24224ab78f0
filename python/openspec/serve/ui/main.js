// Views and controls.

const EXAMPLES = {
  // The first is the demo's.
  chat: ["Rewrite this code with `start` renamed to `first`:\n\n```python\ndef shortest_path(graph, start, goal):\n    \"\"\"Return the shortest list of nodes from start to goal, or None.\"\"\"\n    queue = [[start]]\n    seen = {start}\n    while queue:\n        path = queue.pop(0)\n        node = path[-1]\n        if node == goal:\n            return path\n        for other in graph.get(node, ()):\n            if other not in seen:\n                seen.add(other)\n                queue.append(path + [other])\n    return None\n```", "What comes after Tuesday?", "Repeat the following text exactly:\n\nDUKE:\nWhat news from them that went to hold the bridge?\n\nMESSENGER:\nMy lord, they held it till the sun was down,\nAnd then, their arrows spent, they held it still\nWith stones and staves, and with their naked hands."],
  completion: ["KING HENRY:\nNow, my lords,"],
};
EXAMPLES.race = EXAMPLES.chat;

const page = { mode: "chat", info: null, turns: { chat: [], completion: [], race: [] }, chat: null, current: null, open: [], stop: null };

function note(text) {
  $("note").textContent = text;
  clearTimeout(note.timer);
  note.timer = setTimeout(() => { $("note").textContent = ""; }, 6000);
}

function settings() {
  const fields = {};
  for (const input of document.querySelectorAll("[data-field]")) {
    if (Number.isFinite(input.valueAsNumber)) fields[input.dataset.field] = input.valueAsNumber;
  }
  const lines = $("stop-strings").value.split("\n").filter(Boolean);
  return {
    fields, speculation: $("speculation").checked, drafts: $("drafts").valueAsNumber || null, thinking: $("thinking").value,
    system: $("system").value, stop: lines.map((line) => line.replaceAll("\\n", "\n")), form: $("form-of").value.trim(),
  };
}

/// The messages of a conversation before its next question.
function historyOf(turns) {
  const answered = turns.filter(({ runs }) => runs[0].content);
  return answered.flatMap(({ asked, runs }) => [{ role: "user", content: asked }, { role: "assistant", content: runs[0].content }]);
}

function plan(prompt, speculative) {
  const mode = page.mode === "race" ? "chat" : page.mode;
  const history = page.mode === "chat" ? historyOf(page.turns.chat) : [];
  return { path: PATHS[mode], body: requestOf(mode, prompt, history, settings(), speculative) };
}

function isIdle() {
  if (page.stop) note("An answer is under way.");
  return !page.stop;
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
  $("clear").textContent = mode === "chat" ? "New" : "Clear";
  $("prompt").placeholder = mode === "completion" ? "Text to go on from" : "Ask something";
  setClasses();
  show();
}

function setClasses() {
  document.body.classList.remove("chat", "completion", "race");
  document.body.classList.add(page.mode);
  document.body.classList.toggle("marks", $("show-steps").checked);
  if (document.body.classList.toggle("text", $("as-text").checked && page.mode === "chat")) {
    for (const turn of page.open) turn.write();
  }
}

/// Draws the current view anew from what was recorded.
function show() {
  const turns = page.turns[page.mode];
  lanes.replay += 1;
  clearStep();
  showNumbers([]);
  $("log").replaceChildren();
  page.open = [];
  $("race").hidden = page.mode !== "race" || !turns.length;
  $("empty").hidden = turns.length > 0;
  $("examples").replaceChildren(...EXAMPLES[page.mode].map((text) => {
    const name = text.split("\n")[0].replace(/:$/, "");
    return button(name, () => { $("prompt").value = text; fit(); $("form").requestSubmit(); });
  }));
  if (page.mode === "race") {
    if (turns.length) showRace(turns[turns.length - 1]);
    return;
  }
  for (const turn of turns) {
    const shown = openTurn(turn);
    for (const step of turn.runs[0].steps) shown.view.add(step);
    shown.close();
    showNumbers(turn.runs[0].steps);
  }
}

/// A question as text, with what stands between fences in the type of code.
function questionOf(text) {
  const question = make("p", page.mode === "completion" ? "asked mono" : "asked");
  let isCode = false;
  for (const part of visible(text).split(/^(?=```)/m)) {
    const fence = isCode ? part.indexOf("\n") + 1 || part.length : 0; // a closing one
    isCode = !isCode && part.startsWith("```");
    const end = isCode ? part.length : fence;
    if (end) question.append(make("span", "mono", part.slice(0, end)));
    question.append(part.slice(end));
  }
  return question;
}

/// Puts a turn at the end of the log: its question, its answer as tokens and as text, and what belongs to it. Where no
/// steps are kept, the text stands for them.
function openTurn(turn) {
  const [run] = turn.runs;
  const root = make("div", "turn"), answer = make("div", "answer"), prose = make("div", "prose"), meta = make("div", "meta");
  const isBare = !run.steps.length && Boolean(run.content || run.thinking);
  root.classList.toggle("bare", isBare);
  root.append(questionOf(turn.asked), answer, prose, meta);
  $("log").append(root);
  const view = new TokenView(answer, showStep);
  let next = 0;
  const write = () => {
    const began = performance.now();
    const thought = make("details", "fold");
    thought.append(make("summary", "", "Thinking"), markdown(run.thinking));
    thought.open = prose.querySelector("details")?.open ?? !run.content;
    prose.replaceChildren(...(run.thinking ? [thought] : []), markdown(run.content));
    next = performance.now() + 5 * (performance.now() - began) + 50; // a long text leaves room for all else
  };
  const refresh = (isLast) => { if ((isBare || document.body.classList.contains("text")) && (isLast || performance.now() > next)) write(); };
  const close = () => { refresh(true); fillMeta(meta, turn); };
  const open = { root, view, write, refresh, close };
  page.open.push(open);
  return open;
}

function fillMeta(meta, turn) {
  const [run] = turn.runs, all = totals(run.steps);
  const length = all.drafts ? ` \u00b7 ${(1 + all.accepted / all.drafts).toFixed(2)} tokens a drafted step` : "";
  const end = { stopped: " \u00b7 stopped", length: " \u00b7 cut at the longest answer" }[run.finish] || "";
  const figures = run.steps.length ? `${short(all.tokens)} tokens in ${short(run.steps.length)} steps \u00b7 ${duration(run.seconds)} \u00b7 ${short(rateOf(run.steps))} tokens a second${length}${end}` : (run.content ? "Its steps are not kept" : "No tokens") + end;
  meta.replaceChildren(make("span", "", figures), button("Copy", () => copy(run.content, "Copied the answer.")),
    button("Again", () => again(turn)), button("Edit", () => edit(turn)));
}

/// Takes a turn out; of a conversation also what followed it.
function takeOut(turn) {
  const turns = page.turns[page.mode], at = turns.indexOf(turn);
  turns.splice(at, page.mode === "chat" ? turns.length : 1);
  show();
}

function again(turn) {
  if (!isIdle()) return;
  // With the same seed the answer would be the same.
  if ($("temperature").valueAsNumber > 0 && Number.isFinite($("seed").valueAsNumber)) {
    $("seed").value = $("seed").valueAsNumber + 1;
    note(`Seed ${$("seed").value}.`);
  }
  takeOut(turn);
  send(turn.asked);
}

function edit(turn) {
  if (!isIdle()) return;
  takeOut(turn);
  $("prompt").value = turn.asked;
  fit();
  $("prompt").focus();
}

async function copy(text, done) {
  try { await navigator.clipboard.writeText(text); note(done); } catch { window.prompt("Copy this", text); }
}

function atEnd() {
  const stage = $("stage");
  return stage.scrollHeight - stage.scrollTop - stage.clientHeight < 120;
}

async function ask(prompt) {
  const { path, body } = plan(prompt);
  const turn = { asked: prompt, runs: [emptyRun(path, body)] }, [run] = turn.runs;
  $("empty").hidden = true;
  clearStep();
  showNumbers([]);
  const { root, view, close, refresh } = openTurn(turn);
  page.current = page.mode === "chat" ? turn : null;
  view.root.classList.add("cursor");
  $("stage").scrollTop = $("stage").scrollHeight;
  let shown = 0, follows = true;
  view.onDrawn = () => {
    refresh(false);
    if (follows) $("stage").scrollTop = $("stage").scrollHeight;
    if (performance.now() - shown > 250) { shown = performance.now(); showNumbers(view.steps); }
  };
  const onScroll = () => { follows = atEnd(); };
  $("stage").addEventListener("scroll", onScroll);
  try {
    await record(run, page.stop.signal, (step) => view.add(step));
    page.turns[page.mode].push(turn);
    close();
    if (page.mode === "chat") keepChat();
  } catch (error) {
    fail(error, root);
    if (!$("prompt").value) { $("prompt").value = prompt; fit(); }
  } finally {
    page.current = null;
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

// Controls

function submit(event) {
  event.preventDefault();
  if (page.stop) { page.stop.abort(); return; }
  const prompt = $("prompt").value;
  if (!prompt.trim()) { $("prompt").focus(); return; }
  $("prompt").value = "";
  fit();
  send(prompt);
}

async function send(prompt) {
  page.stop = new AbortController();
  setBusy(true);
  try { await (page.mode === "race" ? race(prompt) : ask(prompt)); } finally { page.stop = null; setBusy(false); }
}

async function copyCurl() {
  const turns = page.turns[page.mode];
  const last = turns.at(-1)?.runs[0];
  const { path, body } = $("prompt").value || !last?.body ? plan($("prompt").value || "Hello") : last;
  await copy(curlOf(path, body), "Copied, without the key.");
}

function save() {
  const turns = page.turns[page.mode];
  if (!turns.length) { note("There is no run yet."); return; }
  const saved = { format: "openspec-run-1", mode: page.mode, server: page.info, turns };
  if (page.mode === "chat") saved.title = page.chat.title;
  const url = URL.createObjectURL(new Blob([JSON.stringify(saved)], { type: "application/json" }));
  const link = make("a");
  link.href = url;
  link.download = `openspec-${page.mode}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function load(file) {
  if (!isIdle()) return;
  try {
    const saved = checkedRuns(await file.text());
    const mode = EXAMPLES[saved.mode] ? saved.mode : "chat";
    if (mode === "race" && saved.turns.some((turn) => turn.runs.length !== 2)) throw new Error("A side is missing.");
    if (mode === "chat") newChat(typeof saved.title === "string" ? saved.title : "");
    page.turns[mode] = saved.turns;
    setMode(mode);
    note("Opened " + visible(file.name));
    if (mode === "chat") keepChat();
  } catch (error) {
    note("This file cannot be opened: " + visible(error.message).slice(0, 80));
  }
}

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = $("prompt").scrollHeight + 2 + "px";
}

/// What the server drafts at most in a step; a tree has more drafts than levels.
function draftsOf({ method, max_draft_tokens: most, num_speculative_tokens: depth, max_copied_drafts: copied }) {
  if (!most) return "no drafter";
  const beside = copied ? ", and copies" : "";
  return (most > depth ? `${method}, trees of up to ${most} drafts, ${depth} deep` : `${method}, up to ${most} drafts`) + beside;
}

async function connect() {
  try {
    page.info = await getJson("server_info");
    const { model, device, num_replicas: engines, acceptance } = page.info;
    const most = Math.max(page.info.max_draft_tokens, page.info.max_copied_drafts);
    $("model").textContent = `${model} \u00b7 ${draftsOf(page.info)} \u00b7 ${engines > 1 ? engines + " \u00d7 " : ""}${device}`;
    $("drafts").max = Math.max(1, most);
    $("drafts").placeholder = most || "";
    $("drafts").disabled = $("speculation").disabled = !most;
    $("same").textContent = acceptance === "match" ? "The text is the same either way." : "";
    $("key").textContent = storedKey() ? "Key \u2713" : "Key";
  } catch (error) {
    $("model").textContent = error.status === 401 ? "needs an API key" : "not reachable";
    if (error.status === 401) $("key-dialog").showModal();
  }
}

function drawLegend() {
  const tints = [["p1", "1"], ["p2", "2"], ["p3", "3"], ["p4", "4\u20137"], ["p8", "8+"], ["pf", "forced"]].map(([name, text]) => make("b", "t d " + name, text));
  const last = make("span");
  last.append(word("target", "The target"), "\u2019s own tokens are plain; \u00b7 is a token with ", word("no text"), ".");
  const forced = tints.pop();
  forced.dataset.word = "forced";
  forced.tabIndex = 0;
  $("legend").replaceChildren(make("span", "", "Drafted, by position"), ...tints, forced, last);
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
  onClick("theme", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  onClick("modes", (event) => { if (event.target.dataset.mode && !page.stop) setMode(event.target.dataset.mode); });
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
  for (const name of ["show-steps", "as-text"]) $(name).addEventListener("change", setClasses);
  onClick("more", () => {
    $("settings").hidden = !$("settings").hidden;
    $("more").setAttribute("aria-expanded", !$("settings").hidden);
  });
  onClick("step-close", closeStep);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeStep(); });
  onClick("curl", copyCurl);
  onClick("save", save);
  onClick("open", () => $("file").click());
  $("file").addEventListener("change", () => { if ($("file").files[0]) load($("file").files[0]); $("file").value = ""; });
  onClick("clear", () => {
    if (!isIdle()) return;
    if (page.mode === "chat") newChat(); else page.turns[page.mode] = [];
    show();
  });
  onClick("key", () => $("key-dialog").showModal());
  $("key-dialog").addEventListener("close", () => {
    const choice = $("key-dialog").returnValue;
    if (choice === "save" && $("key-input").value) storeKey($("key-input").value.trim());
    if (choice === "forget") storeKey("");
    $("key-input").value = "";
    if (choice) connect();
    $("key-dialog").returnValue = "";
  });
  startPlayer();
  explainWords();
  drawLegend();
  startChats();
  connect();
  new LivePanel();
}

start();

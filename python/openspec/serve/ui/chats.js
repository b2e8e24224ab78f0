// The list of conversations, in this browser's storage and nowhere else: the one that was answered last comes first.

const CHATS_KEY = "openspec-chats", OPEN_KEY = "openspec-chat";
const MOST_CHATS = 50;
const MOST_CHARS = 2e6;

const chats = { memory: null }; // the list as text, where a browser stores nothing

function storedChats() {
  let text = chats.memory;
  try { text ??= localStorage.getItem(CHATS_KEY); } catch { keepInMemory("[]"); }
  try { return JSON.parse(text).filter(isChat); } catch { return []; }
}

/// Whoever wrote it, only its shape counts.
function isChat(chat) {
  try { return typeof chat.title === "string" && checkedTurns(chat.turns).length > 0; } catch { return false; }
}

function keepInMemory(text) {
  if (chats.memory === null) note("This browser keeps no conversations: they last until the page is closed.");
  chats.memory = text;
}

function withoutSteps(text) {
  const chat = JSON.parse(text);
  for (const run of chat.turns.flatMap((turn) => turn.runs)) run.steps = [];
  return JSON.stringify(chat);
}

/// Stores the list. Where it has no room, the oldest lose their steps, then go.
function storeChats(list) {
  const all = list.map((chat) => JSON.stringify(chat));
  if (all.length && withoutSteps(all[0]).length > MOST_CHARS) {
    note("This conversation is too long for the list. Save writes it to a file.");
    return;
  }
  const texts = all.slice(0, MOST_CHATS);
  for (const shrink of [withoutSteps, () => ""]) {
    for (let at = texts.length - 1; at >= 0 && texts.join().length >= MOST_CHARS; at -= 1) texts[at] = shrink(texts[at]);
  }
  const kept = texts.filter(Boolean), text = `[${kept.join()}]`;
  if (kept.length < all.length) note("The list is full: the oldest conversation is gone.");
  else if (kept.some((one, at) => one !== all[at])) note("The list is full: the oldest conversation lost its steps.");
  if (chats.memory === null) {
    try { localStorage.setItem(CHATS_KEY, text); return; } catch { /* no room, or no storage */ }
  }
  keepInMemory(text);
}

function newChat(title = "") {
  page.chat = { id: Date.now() + Math.random(), title };
  page.turns.chat = [];
  remember(OPEN_KEY, "");
}

/// Puts the open conversation in front of the list, with its first words as title. Of the requests only the last is
/// kept, for each has all messages before it.
function keepChat(turns = page.turns.chat) {
  if (!turns.length) return;
  const { chat } = page;
  chat.title ||= [...turns[0].asked.trim().split("\n")[0]].slice(0, 80).join("") || "\u2026";
  const lean = turns.map((turn) => turn === turns.at(-1) ? turn : { ...turn, runs: turn.runs.map((run) => ({ ...run, body: null })) });
  storeChats([{ ...chat, at: Date.now(), turns: lean }, ...storedChats().filter(({ id }) => id !== chat.id)]);
  remember(OPEN_KEY, chat.id);
}

function openChat({ id, title, turns }) {
  page.chat = { id, title };
  page.turns.chat = turns;
  remember(OPEN_KEY, id);
  setMode("chat");
  const { view, root } = page.open.at(-1);
  view.onDrawn = () => { view.onDrawn = null; root.scrollIntoView(); };
}

// The dialog

function rowOf(chat) {
  const row = make("li"), title = visible(chat.title);
  const act = (name, change) => {
    const one = button(name, () => { if (change()) drawChats(chat.id); });
    one.setAttribute("aria-label", `${name}: ${title}`);
    return one;
  };
  const opener = button(title, () => { $("chats").close(); openChat(chat); });
  opener.append(make("small", "", new Date(chat.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })));
  if (chat.id === page.chat.id) opener.setAttribute("aria-current", "true");
  row.append(opener, act("Rename", () => rename(chat)), act("Delete", () => forget(`\u201c${title}\u201d`, (id) => id === chat.id)));
  return row;
}

function rename({ id, title: old }) {
  const title = window.prompt("Title", old)?.trim();
  if (!title) return false;
  storeChats(storedChats().map((chat) => chat.id === id ? { ...chat, title } : chat));
  if (id === page.chat.id) page.chat.title = title;
  return true;
}

function forget(what, isMeant) {
  if (!window.confirm(`Delete ${what}?`)) return false;
  storeChats(storedChats().filter(({ id }) => !isMeant(id)));
  if (isMeant(page.chat.id)) { newChat(); setMode(page.mode); }
  return true;
}

/// Draws the list anew; the focus goes to a conversation that is in it.
function drawChats(focused) {
  const all = storedChats(), rows = all.map(rowOf);
  $("chat-list").replaceChildren(...rows);
  $("chat-hint").textContent = `${all.length ? "" : "None yet. "}Kept ${chats.memory === null ? "in this browser only" : "until this page is closed: the browser stores none"}. At most ${MOST_CHATS}, or 2 MB: the oldest lose their steps, then go.`;
  $("chat-all").hidden = !all.length;
  if (focused) (rows[all.findIndex(({ id }) => id === focused)]?.firstChild || $("chat-new")).focus();
}

function startChats() {
  onClick("chats-open", () => {
    if (!isIdle()) return;
    drawChats();
    $("chats").showModal();
  });
  onClick("chats-close", () => $("chats").close());
  onClick("chat-new", () => { $("chats").close(); newChat(); setMode("chat"); $("prompt").focus(); });
  onClick("chat-all", () => { if (forget("all conversations", () => true)) drawChats(-1); });
  addEventListener("storage", ({ key }) => { if (key === CHATS_KEY && $("chats").open) drawChats(); });
  addEventListener("pagehide", () => {
    if (!page.current) return;
    page.current.runs[0].finish = "stopped";
    keepChat([...page.turns.chat, page.current]);
  });
  // A tab that is loaded again goes on where it was.
  const open = storedChats().find(({ id }) => String(id) === remembered(OPEN_KEY));
  newChat();
  setMode("chat");
  if (open) openChat(open);
}

// An answer as tokens. Everything is text: nothing that a model writes becomes markup.

const BLOCK_TOKENS = 160;
const BLOCK_CHARS = 4000;
const FRAME_TOKENS = 400;

/// Text with what would act on the page made visible: control and bidirectional characters.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (c) => {
      const code = c.charCodeAt(0);
      if (code < 32) return String.fromCharCode(0x2400 + code);
      if (code === 127) return "\u2421";
      return "[U+" + code.toString(16).toUpperCase().padStart(4, "0") + "]";
    });
}

/// A token's text as a label: spaces and line ends shown.
function label(text, most = 16) {
  const shown = visible(text).replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  const letters = [...shown];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "\u2026" : shown || "\u2205";
}

/// The class of an accepted draft by its position, counted from 1.
function tint(position) {
  return position <= 3 ? "p" + position : position <= 7 ? "p4" : "p8";
}

/// The class of the accepted draft number i of a step: a grammar's drafts come first.
function tintOf(step, i) {
  return step.accepted[i] < (step.num_forced_tokens || 0) ? "pf" : tint(i + 1);
}

/// Shows steps as they come, a frame's worth at a time.
class TokenView {
  constructor(root, onSelect) {
    this.root = root;
    this.onSelect = onSelect;
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Answer. Left and right arrow keys go from step to step.");
    root.addEventListener("mouseover", (event) => this.point(event, false));
    root.addEventListener("click", (event) => this.point(event, true));
    root.addEventListener("mouseleave", () => { if (!this.isPinned) this.select(-1); });
    root.addEventListener("keydown", (event) => this.key(event));
    this.clear();
  }

  clear() {
    this.steps = [];
    this.spans = []; // by step
    this.block = null;
    this.numTokens = this.numChars = 0;
    this.isCode = this.isThought = this.isPinned = this.hasTags = false;
    this.fold = null; // of the thinking
    this.tail = "";
    this.selected = -1;
    this.limit = Infinity;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.root.replaceChildren();
  }

  add(step) {
    this.steps.push(step);
    this.draw();
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.flush());
  }

  /// Appends what has come since the last frame, up to `limit` steps.
  flush() {
    this.frame = 0;
    const count = Math.min(this.limit, this.steps.length);
    let left = FRAME_TOKENS;
    while (this.spans.length < count && left > 0) {
      const step = this.steps[this.spans.length];
      left -= step.tokens.length;
      this.append(step, this.spans.length);
    }
    if (this.spans.length < count) this.draw();
    else if (this.onDrawn) this.onDrawn();
  }

  append(step, index) {
    const spans = [];
    this.hasTags ||= step.tokens.some((text) => /<\/?think>/.test(text));
    // Without tags in the answer, what the server calls thinking tells.
    if (!this.hasTags && step.is_thought !== undefined) this.think(step.is_thought);
    step.tokens.forEach((text, i) => {
      const isDraft = i < step.accepted.length;
      this.tail = (this.tail + text).slice(-16);
      if (text.includes("<think>")) this.think(true);
      let classes = "t " + (isDraft ? "d " + tintOf(step, i) : "o");
      if (i === 0) classes += " first";
      if (i === step.tokens.length - 1) classes += " last";
      if (!text) classes += " void";
      if (this.isThought) classes += " thought";
      const isFence = /```[^`]*$/.test(this.tail) && text.includes("`");
      if (this.isCode || isFence) classes += " mono";
      if (isFence && /```$/.test(this.tail)) { this.isCode = !this.isCode; this.tail = ""; }
      // A text without line ends is cut all the same: the browser lays out a block as a whole.
      for (let at = 0; at === 0 || at < text.length; at += BLOCK_CHARS) {
        const piece = make("span", classes);
        text.slice(at, at + BLOCK_CHARS).split("\n").forEach((line, n) => {
          if (n) piece.append(make("i", "nl"), "\n"); // the mark stands where the line ends
          if (line) piece.append(visible(line));
        });
        piece.dataset.s = index;
        if (!text) piece.dataset.word = "no text";
        this.room().append(piece);
        this.numChars += Math.min(BLOCK_CHARS, text.length - at);
        spans.push(piece);
      }
      this.numTokens += 1;
      if (text.includes("</think>")) this.think(false);
      if (/\n$/.test(text) && (this.numTokens >= BLOCK_TOKENS || /\n\n$/.test(text))) {
        if (!this.block.textContent.trim()) this.block.classList.add("blank"); // such as behind the thinking
        this.block = null;
      }
    });
    this.spans.push(spans);
  }

  /// Goes into the fold of the thinking, or out of it; out of it the fold closes.
  think(isThought) {
    if (this.isThought === isThought) return;
    this.isThought = isThought;
    this.block = null;
    if (isThought) {
      this.fold = make("details", "fold");
      this.fold.open = true;
      this.fold.append(make("summary", "", "Thinking"));
      this.root.append(this.fold);
    } else this.fold.open = false;
  }

  room() {
    if (!this.block || this.numChars >= BLOCK_CHARS) {
      this.block = make("div", "block");
      (this.isThought ? this.fold : this.root).append(this.block);
      this.numTokens = this.numChars = 0;
    }
    return this.block;
  }

  point(event, isPinned) {
    const token = event.target.closest(".t");
    if (!token || (this.isPinned && !isPinned)) return;
    const index = Number(token.dataset.s);
    this.isPinned = isPinned && !(this.isPinned && this.selected === index);
    this.select(index);
    if (this.isPinned) token.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const last = this.spans.length - 1;
    const target = { ArrowLeft: this.selected - 1, ArrowRight: this.selected + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") { this.isPinned = false; this.select(-1); return; }
    if (target === undefined || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.isPinned = true;
    this.select(Math.max(0, Math.min(last, target)));
    const fold = this.spans[this.selected][0]?.closest("details");
    if (fold) fold.open = true;
    this.spans[this.selected][0]?.scrollIntoView({ block: "nearest" });
  }

  select(index) {
    for (const span of this.spans[this.selected] || []) span.classList.remove("sel");
    this.selected = index;
    for (const span of this.spans[index] || []) span.classList.add("sel");
    if (index >= 0) this.onSelect(this.steps[index], index, this);
  }
}

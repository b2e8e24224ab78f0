// Markdown as elements. All text becomes text nodes, so nothing that a model writes becomes markup, and
// a link leads to http, https or mail alone. The time is linear in the length of the text.

const MAX_NESTING = 8;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const TABLE_RULE = /^\|?:?-+:?(\|:?-+:?)*\|?$/; // of a line without its spaces

function markdown(text) {
  const all = document.createDocumentFragment();
  all.append(...blocksOf(text.split("\n"), 0));
  return all;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^ {0,3}>/.test(line);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  const takeWhile = (test) => { const from = at; while (at < lines.length && test(lines[at])) at += 1; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) { at += 1; continue; }
    if (fence) {
      at += 1;
      const ends = (one) => one.trim().startsWith(fence[1]) && !one.trim().replaceAll(fence[1][0], "");
      const code = takeWhile((one) => !ends(one));
      at += 1;
      const pre = make("pre");
      pre.append(make("code", "", visible(code.join("\n"))));
      blocks.push(pre);
    } else if (heading) {
      at += 1;
      blocks.push(withInline("h" + Math.min(6, heading[1].length + 2), heading[2].replace(/ #+ *$/, ""), depth));
    } else if (RULE.test(line)) {
      at += 1;
      blocks.push(make("hr"));
    } else if (/^ {0,3}>/.test(line) && depth < MAX_NESTING) {
      const quote = make("blockquote");
      quote.append(...blocksOf(takeWhile((one) => /^ {0,3}>/.test(one)).map((one) => one.replace(/^ {0,3}> ?/, "")), depth + 1));
      blocks.push(quote);
    } else if (ITEM.test(line) && depth < MAX_NESTING) {
      const [list, end] = listOf(lines, at, depth);
      blocks.push(list);
      at = end;
    } else if (line.includes("|") && lines[at + 1]?.includes("|") && TABLE_RULE.test(lines[at + 1].replaceAll(" ", ""))) {
      blocks.push(tableOf(takeWhile((one) => one.includes("|")), depth));
    } else {
      at += 1;
      const more = takeWhile((one) => one.trim() && !startsBlock(one));
      blocks.push(withInline("p", [line, ...more].join("\n"), depth));
    }
  }
  return blocks;
}

/// The list that begins at a line, and the number of the line behind it.
function listOf(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const list = make(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = parseInt(marker, 10);
  let item = null, inset = 0;
  const close = () => {
    if (!item) return;
    const entry = make("li");
    entry.append(...blocksOf(item, depth + 1));
    list.append(entry);
  };
  for (; at < lines.length; at += 1) {
    const line = lines[at], found = ITEM.exec(line), lead = /^ */.exec(line)[0].length;
    if (found && found[1].length <= indent.length + 1) {
      if (/\d/.test(found[2]) !== isOrdered) break;
      close();
      item = [found[3]];
      inset = found[1].length + found[2].length + 1;
    } else if (!line.trim()) {
      const next = lines[at + 1] || "";
      if (!ITEM.test(next) && /^ */.exec(next)[0].length <= indent.length) break;
      item.push("");
    } else if (lead > indent.length || !startsBlock(line)) {
      item.push(line.slice(Math.min(lead, inset)));
    } else break;
  }
  close();
  return [list, at];
}

function tableOf(lines, depth) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
  const table = make("table");
  lines.forEach((line, index) => {
    if (index === 1) return; // the rule
    const row = make("tr");
    row.append(...cells(line).map((cell) => withInline(index ? "td" : "th", cell.trim(), depth)));
    table.append(row);
  });
  return table;
}

function withInline(tag, text, depth) {
  const element = make(tag);
  addInline(element, text, depth);
  return element;
}

const MARKS = { "**": "strong", "__": "strong", "*": "em", "_": "em", "~~": "del" };
const SPECIAL = /\\[!-\/:-@[-`{-~]|`{1,3}|\*\*|__|~~|[*_]|!?\[|https?:\/\/[^\s<>()[\]"'`*]+/g;

/// Code, emphasis and links of a text, as children of an element.
function addInline(parent, text, depth) {
  const places = new Map(); // by closer where it was found last, so that no part is searched twice
  const find = (closer, from) => {
    const last = places.get(closer);
    if (last === undefined || (last >= 0 && last < from)) places.set(closer, text.indexOf(closer, from));
    return places.get(closer);
  };
  let done = 0;
  const add = (from, child, end) => { parent.append(visible(text.slice(done, from)), child); done = end; };
  for (const found of text.matchAll(SPECIAL)) {
    const mark = found[0], from = found.index, start = from + mark.length;
    if (from < done) continue;
    if (mark[0] === "\\") add(from, mark[1], start);
    else if (mark[0] === "`") {
      const end = find(mark, start);
      if (end > start) add(from, make("code", "", visible(text.slice(start, end))), end + mark.length);
    } else if (mark[0] === "h") {
      const address = mark.replace(/[.,;:!?]$/, "");
      add(from, linkTo(address, address, depth), from + address.length);
    } else if (depth === MAX_NESTING) continue;
    else if (mark.endsWith("[")) {
      const middle = find("](", start), end = middle < 0 ? -1 : find(")", middle);
      if (end > 0) add(from, linkTo(text.slice(middle + 2, end), text.slice(start, middle) || "image", depth + 1), end + 1);
    } else {
      const end = find(mark, start);
      const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);
      const isInside = mark[0] === "_" && (isWord(text[from - 1]) || isWord(text[end + mark.length]));
      const isTight = end > start && /\S/.test(text[start]) && /\S/.test(text[end - 1]);
      if (isTight && !isInside) add(from, withInline(MARKS[mark], text.slice(start, end), depth + 1), end + mark.length);
    }
  }
  parent.append(visible(text.slice(done)));
}

function linkTo(target, text, depth) {
  const address = target.trim().split(/\s/)[0];
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return document.createTextNode(visible(`${text} (${target})`));
  const link = text === target ? make("a", "", visible(text)) : withInline("a", text, depth);
  link.href = address;
  link.title = visible(address);
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

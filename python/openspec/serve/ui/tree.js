// Drawings: the drafts of a step, bars, a trace.

const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function picture(width, height, title) {
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  return svg;
}

/// The rows of a step's drawing: draft -1 is the token before the step, `own` the target's choice.
/// The accepted path comes first, so it runs down the left like stairs.
function rowsOf(step) {
  const children = new Map();
  step.draft_parents.forEach((parent, index) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(index);
  });
  const accepted = new Set(step.accepted);
  const last = step.accepted.length ? step.accepted[step.accepted.length - 1] : -1;
  const hasOwn = step.token_ids.length > step.accepted.length;
  const rows = [];
  const stack = [{ draft: -1, depth: 0, parent: -2, own: false }];
  while (stack.length) {
    const row = stack.pop();
    rows.push(row);
    if (row.own) continue;
    const below = (children.get(row.draft) || []).map((draft) => ({
      draft, depth: row.depth + 1, parent: row.draft, own: false, accepted: accepted.has(draft),
    }));
    below.sort((a, b) => b.accepted - a.accepted || a.draft - b.draft);
    if (hasOwn && row.draft === last) below.unshift({ draft: -3, depth: row.depth + 1, parent: row.draft, own: true });
    stack.push(...below.reverse());
  }
  return rows;
}

/// The drafts of a step: a chain or a tree, its scores, the accepted path, the target's choice.
function drawStep(step, before) {
  const rows = rowsOf(step);
  const deepest = Math.max(...rows.map((row) => row.depth));
  const indent = Math.max(9, Math.min(24, 190 / Math.max(1, deepest)));
  const line = 27, width = 346;
  const hasScores = Array.isArray(step.draft_scores);
  const svg = picture(width, rows.length * line + 4, summary(step));
  const y = new Map(rows.map((row, index) => [row.draft, index * line + 15]));
  const x = (depth) => 8 + depth * indent;
  const edges = rows.filter((row) => row.depth > 0).map((row) => {
    const isWay = row.own || row.accepted;
    const x0 = x(row.depth - 1), y0 = y.get(row.parent), x1 = x(row.depth), y1 = y.get(row.draft);
    const bend = Math.min(9, indent * .8);
    return draw("path", {
      class: isWay ? "edge way" : "edge",
      "data-from": row.parent, "data-to": row.own ? "own" : row.draft,
      d: `M${x0} ${y0}V${y1 - bend}Q${x0} ${y1} ${x0 + bend} ${y1}H${x1}`,
    });
  });
  svg.append(...edges.filter((edge) => !edge.classList.contains("way")), ...edges.filter((edge) => edge.classList.contains("way")));
  for (const row of rows) {
    const at = y.get(row.draft);
    const kind = row.own ? "own" : row.accepted ? "hit " + tintOf(step, row.depth - 1) : "";
    const group = draw("g", { class: "node", "data-draft": row.own ? "own" : row.draft, "data-accepted": row.accepted ? "yes" : "no" });
    group.append(draw("circle", { class: "dot " + kind, cx: x(row.depth), cy: at, r: row.depth ? 5 : 3.5 }));
    const text = row.own ? step.tokens[step.tokens.length - 1] : row.draft < 0 ? before : step.draft_tokens[row.draft];
    const isStrong = row.own || row.accepted;
    const name = draw("text", { x: x(row.depth) + 13, y: at + 4.5, class: isStrong ? "" : "dim" }, label(text));
    if (isStrong) name.setAttribute("font-weight", "600");
    if (row.own) name.append(draw("tspan", { class: "tiny", dx: 9 }, "the target\u2019s own"));
    else if (row.draft >= 0) name.append(draw("tspan", { class: "tiny", dx: 9 }, sourceOf(step, row.draft)));
    group.append(name);
    if (hasScores && row.draft >= 0) {
      const share = Math.exp(step.draft_scores[row.draft]);
      group.append(
        draw("rect", { class: "gauge", x: width - 84, y: at - 2, width: 48, height: 4, rx: 2 }),
        draw("rect", { class: row.accepted ? "strong" : "fill", x: width - 84, y: at - 2, width: 48 * share, height: 4, rx: 2 }),
        draw("text", { class: "tiny", x: width, y: at + 3.5, "text-anchor": "end", "data-score": step.draft_scores[row.draft] },
          share < .005 ? "<1%" : Math.round(100 * share) + "%"));
    }
    svg.append(group);
  }
  return svg;
}

/// Who made draft number i of a step, if not the drafter: a grammar's come first, then copies.
function sourceOf(step, i) {
  const forced = step.num_forced_tokens || 0;
  return i < forced ? "forced" : i < forced + (step.num_copied_tokens || 0) ? "copied" : "";
}

function summary(step) {
  const drafts = step.draft_tokens.length;
  if (!drafts) return "No drafts; the target chose " + label(step.tokens[0] || "");
  const isTree = step.draft_parents.some((parent, index) => parent !== index - 1);
  const own = step.tokens.length > step.accepted.length ? `, then the target chose ${label(step.tokens[step.tokens.length - 1])}` : "";
  return `${step.accepted.length} of ${drafts} drafts accepted, ${isTree ? "a tree" : "a chain"}${own}`;
}

/// By position the share of the drafts that reached it, as columns.
function drawPositions(shares) {
  const width = 346, height = 84, step = Math.min(58, width / Math.max(1, shares.length));
  const svg = picture(width, height, "Acceptance by position: " + shares.map((share, i) => `${i + 1}: ${Number.isNaN(share) ? "none" : Math.round(100 * share) + " percent"}`).join(", "));
  shares.forEach((share, i) => {
    const tall = 50 * share, left = i * step;
    if (Number.isNaN(share)) return; // no draft reached the position
    svg.append(
      draw("rect", { class: "gauge", x: left, y: 16, width: step - 8, height: 50, rx: 3 }),
      draw("rect", { class: tint(i + 1), x: left, y: 66 - tall, width: step - 8, height: Math.max(1, tall), rx: Math.min(3, tall / 2) }));
    if (step > 25) svg.append(draw("text", { class: "tiny", x: left + (step - 8) / 2, y: 11, "text-anchor": "middle" }, Math.round(100 * share) + "%"));
    svg.append(draw("text", { class: "tiny", x: left + (step - 8) / 2, y: 80, "text-anchor": "middle" }, i + 1));
  });
  return svg;
}

/// One bar that shows what takes the time of a step.
function drawSplit(parts) {
  const width = 346, all = parts.reduce((sum, part) => sum + part.ms, 0) || 1;
  const svg = picture(width, 46, "Step time: " + parts.map((part) => `${part.name} ${part.ms.toFixed(2)} ms`).join(", "));
  let left = 0, labelAt = 0;
  for (const part of parts) {
    const wide = width * part.ms / all;
    svg.append(draw("rect", { class: part.name, x: left, y: 4, width: Math.max(0, wide - 1.5), height: 12, rx: 2 }));
    const text = draw("text", { class: "tiny", x: labelAt + 12, y: 36 }, `${part.name} ${part.ms.toFixed(part.ms < 10 ? 2 : 0)} ms`);
    svg.append(draw("rect", { class: part.name, x: labelAt, y: 28, width: 8, height: 8, rx: 2 }), text);
    labelAt += Math.min(112, width / parts.length);
    left += wide;
  }
  return svg;
}

/// Values over the last minute.
function drawTrace(values) {
  const width = 346, height = 46, most = Math.max(1, ...values);
  const svg = picture(width, height, `Tokens a second over the last minute, at most ${Math.round(most)}`);
  if (values.length < 2) return svg;
  const points = values.map((value, i) => `${(i * width / 59).toFixed(1)} ${(height - 3 - (height - 8) * value / most).toFixed(1)}`);
  const end = ((values.length - 1) * width / 59).toFixed(1);
  svg.append(draw("path", { class: "area", d: `M0 ${height}L${points.join("L")}L${end} ${height}Z` }),
    draw("path", { class: "trace", d: "M" + points.join("L") }));
  return svg;
}

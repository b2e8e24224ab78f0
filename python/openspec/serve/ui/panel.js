// The numbers beside the answer, and the server's.

const INTERVAL_MS = 1000;

function figures(list, entries) {
  list.replaceChildren(...entries.map(([name, value, unit]) => {
    const entry = make("div"), number = make("dd", "", value);
    if (unit) number.append(" ", make("small", "", unit));
    entry.append(make("dt", "", name), number);
    return entry;
  }));
}

function short(value, digits = 0) {
  return Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : "\u2013";
}

/// What the steps of an answer add up to.
function totals(steps) {
  const all = { tokens: 0, drafts: 0, drafted: 0, accepted: 0, forced: 0, perPosition: [], time: 0, device: 0, draft: 0, isSplit: true };
  for (const step of steps) {
    all.tokens += step.tokens.length;
    all.time += step.time_ms || 0;
    all.device += step.device_time_ms || 0;
    if (step.draft_time_ms === null || step.draft_time_ms === undefined) all.isSplit = false;
    else all.draft += step.draft_time_ms;
    if (!step.draft_tokens.length) continue;
    all.drafts += 1;
    all.drafted += step.draft_tokens.length;
    all.accepted += step.accepted.length;
    all.forced += step.num_forced_tokens || 0;
    step.accepted.forEach((_, i) => { all.perPosition[i] = (all.perPosition[i] || 0) + 1; });
    const depth = [];
    step.draft_parents.forEach((parent, i) => { depth[i] = parent < 0 ? 1 : depth[parent] + 1; });
    for (let i = all.perPosition.length; i < Math.max(...depth); i += 1) all.perPosition.push(0);
  }
  return all;
}

/// Draft, verify, rest of a mean step; device and rest where the device tells no more.
function splitOf(all, numSteps) {
  const of = (ms) => Math.max(0, ms) / Math.max(1, numSteps);
  const rest = { name: "rest", ms: of(all.time - all.device) };
  if (!all.isSplit) return [{ name: "verify", ms: of(all.device) }, rest];
  return [{ name: "draft", ms: of(all.draft) }, { name: "verify", ms: of(all.device - all.draft) }, rest];
}

function rateOf(steps) {
  if (steps.length < 2) return NaN;
  const seconds = steps[steps.length - 1].at - steps[0].at;
  const tokens = steps.slice(1).reduce((sum, step) => sum + step.tokens.length, 0);
  return seconds > 0 ? tokens / seconds : NaN;
}

function showNumbers(steps) {
  const all = totals(steps);
  figures($("answer-numbers"), [
    ["tokens a second", short(rateOf(steps))],
    ["mean acceptance length", all.drafts ? short(1 + all.accepted / all.drafts, 2) : "1.00"],
    ["accepted", all.drafted ? short(100 * all.accepted / all.drafted) : "\u2013", all.drafted ? "%" : ""],
    ["tokens", short(all.tokens)], ["steps", short(steps.length)],
    ["drafted", short(all.drafted)],
    ...(all.forced ? [["forced", short(all.forced)]] : []),
  ]);
  $("positions").replaceChildren(...(all.drafts ? [drawPositions(all.perPosition.map((count) => count / all.drafts))] : []));
  $("split").replaceChildren(...(steps.length ? [drawSplit(splitOf(all, steps.length))] : []));
}

function showStep(step, index, view) {
  let before = "";
  for (let i = index - 1; i >= 0 && !before; i -= 1) before = view.steps[i].tokens.filter(Boolean).pop() || "";
  $("step-hint").hidden = true;
  document.body.classList.toggle("picked", view.isPinned);
  const head = $("step-head");
  head.replaceChildren(make("b", "", `${index + 1}`), ` of ${view.steps.length} \u00b7 `, summary(step));
  $("step-tree").replaceChildren(drawStep(step, before || "start"));
  const count = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;
  const foot = `${count(step.num_rows, "row")} and ${count(step.num_sequences, "sequence")} in the step`;
  $("step-foot").replaceChildren(make("p", "quiet", foot), drawSplit(splitOf(totals([step]), 1)));
  $("step-foot").firstChild.style.fontSize = "12.5px";
}

/// Samples of a page in Prometheus' form, by name and, for positions and parts, label: sums over the engines,
/// and means of shares.
function parseMetrics(text) {
  const values = new Map(), counts = new Map();
  for (const line of text.split("\n")) {
    const match = /^openspec:(\w+)(?:\{([^}]*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const label = /(?:position|part)="(\w+)"/.exec(match[2] || "");
    const name = label ? `${match[1]}/${label[1]}` : match[1];
    values.set(name, (values.get(name) || 0) + Number(match[3]));
    counts.set(name, (counts.get(name) || 0) + 1);
  }
  const share = "kv_cache_usage_perc";
  values.set(share, values.get(share) / counts.get(share));
  return values;
}

class LivePanel {
  constructor() {
    this.last = null;
    this.rates = [];
    this.tick();
  }

  async tick() {
    if (!document.hidden) {
      try {
        const response = await fetch("metrics");
        if (response.ok) this.show(parseMetrics(await response.text()), performance.now());
      } catch { /* the server is away; the next tick asks again */ }
    }
    setTimeout(() => this.tick(), INTERVAL_MS);
  }

  show(now, time) {
    const since = (name) => (now.get(name) || 0) - (this.last ? this.last.get(name) || 0 : 0);
    if (this.last) {
      const rate = since("generation_tokens_total") / (time - this.time) * 1000;
      this.rates = [...this.rates, rate].slice(-60);
      // What is shown of drafts is the last second that had some.
      const drafts = since("spec_decode_num_drafts_total");
      if (drafts > 0) {
        this.length = 1 + since("spec_decode_num_accepted_tokens_total") / drafts;
        this.shares = [];
        for (let i = 0; now.has(`spec_decode_num_accepted_tokens_per_pos_total/${i}`); i += 1) {
          this.shares.push(since(`spec_decode_num_accepted_tokens_per_pos_total/${i}`) / drafts);
        }
      }
      const steps = since("engine_steps_total");
      if (steps > 0) {
        const part = (name) => ({ name, ms: 1000 * since("engine_step_seconds_total/" + name) / steps });
        const both = { ...part("draft_and_verify"), name: "both" };
        const draft = part("draft"), verify = part("verify");
        this.split = both.ms > 0 ? [draft, verify, both].filter(({ ms }) => ms > 0) : [draft, verify];
        this.split.push(part("rest"));
      }
      figures($("server-numbers"), [
        ["tokens a second", short(rate)],
        ["mean acceptance length", short(this.length, 2)],
        ["KV in use", short(100 * now.get("kv_cache_usage_perc"), 1), "%"],
        ["batch", short(now.get("num_requests_running"))],
        ["waiting", short(now.get("num_requests_waiting"))],
        ["steps a second", short(steps / (time - this.time) * 1000)],
      ]);
      $("spark").replaceChildren(drawTrace(this.rates));
      $("server-split").replaceChildren(...(this.split ? [drawSplit(this.split)] : []));
      $("server-positions").replaceChildren(...(this.shares ? [drawPositions(this.shares)] : []));
    }
    this.last = now;
    this.time = time;
  }
}

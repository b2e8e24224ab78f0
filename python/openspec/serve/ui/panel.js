// The numbers beside the answer, and the server's.

const INTERVAL_MS = 1000;

/// Numbers with their names, each a text or a word with its explanation. Names stay where they are, and so does the focus.
function figures(list, entries) {
  const names = entries.map(([name]) => name.textContent || name).join();
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...entries.map(([name]) => {
      const entry = make("div"), term = make("dt");
      term.append(name);
      entry.append(term, make("dd"));
      return entry;
    }));
  }
  entries.forEach(([, value, unit], i) => {
    list.children[i].lastChild.replaceChildren(value, ...(unit ? [" ", make("small", "", unit)] : []));
  });
}

function short(value, digits = 0) {
  return Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : "\u2013";
}

/// What the steps of an answer add up to.
function totals(steps) {
  const all = { tokens: 0, drafts: 0, drafted: 0, accepted: 0, forced: 0, copied: 0, acceptedAt: [], reachedAt: [], time: 0, device: 0, draft: 0, isSplit: true };
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
    all.copied += step.num_copied_tokens || 0;
    const depth = [];
    step.draft_parents.forEach((parent, i) => { depth[i] = parent < 0 ? 1 : depth[parent] + 1; });
    for (let i = 0; i < Math.max(...depth); i += 1) {
      all.reachedAt[i] = (all.reachedAt[i] || 0) + 1;
      all.acceptedAt[i] = (all.acceptedAt[i] || 0) + (i < step.accepted.length);
    }
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

/// Tokens over the whole time, from sending the request to the last of them.
function rateOf(steps) {
  const seconds = steps.length ? steps[steps.length - 1].at : 0;
  return seconds > 0 ? steps.reduce((sum, step) => sum + step.tokens.length, 0) / seconds : NaN;
}

/// Seconds with three digits that count, so that a reader who divides by them gets what is shown.
function duration(seconds) {
  return seconds < 100 ? `${Number(seconds.toPrecision(3))} s` : `${short(seconds)} s`;
}

function showNumbers(steps) {
  const all = totals(steps);
  const share = all.drafted ? [short(100 * all.accepted / all.drafted), "%"] : ["\u2013"];
  figures($("answer-numbers"), [
    [word("tokens a second"), short(rateOf(steps))],
    [word("acceptance length", "mean acceptance length"), all.drafts ? short(1 + all.accepted / all.drafts, 2) : "\u2013"],
    [word("accepted"), ...share],
    ["tokens", short(all.tokens)], [word("steps"), short(steps.length)],
    [word("drafted"), short(all.drafted)],
    [word("first token"), ...(steps.length ? [short(1000 * steps[0].at), "ms"] : ["\u2013"])],
    ...(all.forced ? [[word("forced"), short(all.forced)]] : []),
    ...(all.copied ? [[word("copied"), short(all.copied)]] : []),
  ]);
  const shares = all.reachedAt.map((count, i) => all.acceptedAt[i] / count);
  $("positions").replaceChildren(...(all.drafts ? [drawPositions(shares)] : []));
  $("split").replaceChildren(...(steps.length ? [drawSplit(splitOf(all, steps.length))] : []));
}

/// Back to the hint: what was shown belongs to an answer that is no longer the last.
function clearStep() {
  document.body.classList.remove("picked");
  $("step-hint").hidden = false;
  for (const id of ["step-head", "step-tree", "step-foot"]) $(id).replaceChildren();
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
  const foot = make("p", "quiet small");
  foot.append(word("rows", count(step.num_rows, "row")), ` and ${count(step.num_sequences, "sequence")} in the step`);
  $("step-foot").replaceChildren(foot, drawSplit(splitOf(totals([step]), 1)));
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
          const reached = since(`spec_decode_num_drafts_per_pos_total/${i}`);
          this.shares.push(since(`spec_decode_num_accepted_tokens_per_pos_total/${i}`) / reached);
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
        [word("all tokens a second", "tokens a second"), short(rate)],
        [word("recent length", "mean acceptance length"), short(this.length, 2)],
        [word("KV in use"), short(100 * now.get("kv_cache_usage_perc"), 1), "%"],
        [word("batch"), short(now.get("num_requests_running"))],
        [word("waiting"), short(now.get("num_requests_waiting"))],
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

// Side by side: the same prompt with speculation and without, replayed on one clock.

const lanes = { views: null, replay: 0 };

function laneViews() {
  lanes.views ??= ["a", "b"].map((name) => new TokenView($("race-" + name), showStep));
  return lanes.views;
}

function lastRace() {
  return page.turns.race[page.turns.race.length - 1];
}

async function race(prompt) {
  $("empty").hidden = true;
  $("race").hidden = false;
  lanes.replay += 1;
  showRaceQuestion(prompt);
  clearStep();
  showNumbers([]);
  for (const view of laneViews()) view.clear();
  // No run finds another's prompt in the cache.
  const salted = (speculative) => {
    const { path, body } = plan(prompt, speculative);
    body.cache_salt = "ui-" + [...crypto.getRandomValues(new Uint32Array(2))].join("-");
    return { path, body };
  };
  const tell = (text) => $("verdict").replaceChildren(make("span", "quiet", text));
  const runs = [];
  try {
    // What a server does once, at its first answers, is no part of either run.
    tell("Warming up \u2026");
    for (const speculative of [true, false]) {
      const { path, body } = salted(speculative);
      body.speculative.detailed = false;
      body.max_tokens = Math.min(8, body.max_tokens || 8);
      await stream(path, body, page.stop.signal, () => {});
    }
    for (const [index, speculative] of [true, false].entries()) {
      tell(speculative ? "First with speculation \u2026" : "Then without \u2026");
      const { path, body } = salted(speculative);
      const run = await record(emptyRun(path, body), page.stop.signal, (step) => laneViews()[index].add(step));
      if (run.finish === "stopped") throw new DOMException("", "AbortError");
      runs.push(run);
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

/// The first line of the prompt, which opens to the whole.
function showRaceQuestion(prompt) {
  const [first, ...more] = prompt.trim().split("\n");
  $("race-asked").replaceChildren(make("summary", "", visible(first)), ...(more.length ? [make("div", "", visible(more.join("\n")))] : []));
}

function idsOf(run) {
  return run.steps.flatMap((step) => step.token_ids);
}

/// Whether both runs brought the same token ids and ended alike.
function isIdentical(runs) {
  const [a, b] = runs.map(idsOf);
  return a.length === b.length && a.every((id, i) => id === b[i]) && runs[0].finish === runs[1].finish;
}

/// The ratio of the times, where it says something: the same text, and drafts that could make a difference.
function headlineOf([fast, plain]) {
  if (!isIdentical([fast, plain])) return "No ratio of different texts";
  if (!totals(fast.steps).drafts) return "Nothing was drafted";
  const ratio = plain.seconds / fast.seconds;
  return ratio >= 1 ? `${ratio.toFixed(2)}\u00d7 as fast` : `${(1 / ratio).toFixed(2)}\u00d7 as slow`;
}

function showRace(turn) {
  const [fast, plain] = turn.runs;
  const isSame = isIdentical(turn.runs);
  showRaceQuestion(turn.asked);
  const answer = make("span", isSame ? "" : "no", `identical: ${isSame ? "yes" : "no"}`);
  answer.id = "identical";
  $("verdict").replaceChildren(`${headlineOf(turn.runs)}, `, answer,
    make("small", "", `${duration(fast.seconds)} and ${duration(plain.seconds)} for ${short(idsOf(fast).length)} tokens, compared by their ids. Same prompt, same settings, one run after the other.`));
  for (const [index, view] of laneViews().entries()) {
    view.clear();
    for (const step of turn.runs[index].steps) view.add(step);
    $("lane-" + "ab"[index]).textContent = `${short(rateOf(turn.runs[index].steps))} tokens a second`;
  }
  showNumbers(fast.steps);
  setClock(Math.max(fast.seconds, plain.seconds), turn);
}

/// Both runs as they were at a time, without touching what need not change.
function setClock(seconds, turn = lastRace()) {
  const longest = Math.max(...turn.runs.map((run) => run.seconds)) || 1;
  $("clock").textContent = seconds.toFixed(2) + " s";
  $("scrub").value = 1000 * seconds / longest;
  turn.runs.forEach((run, index) => {
    const view = laneViews()[index];
    const count = run.steps.filter((step) => step.at <= seconds).length;
    if (view.spans.length > count) { view.clear(); view.steps = run.steps.slice(); }
    view.limit = count;
    if (view.spans.length < count) view.flush();
    view.root.scrollTop = view.root.scrollHeight; // where a lane scrolls, the newest is in sight
    $("bar-" + "ab"[index]).style.transform = `scaleX(${Math.min(1, seconds / (run.seconds || 1))})`;
  });
}

function play(from) {
  const turn = lastRace();
  if (!turn) return;
  const id = lanes.replay += 1;
  const longest = Math.max(...turn.runs.map((run) => run.seconds));
  let seconds = from, last = performance.now();
  $("play").textContent = "\u2759\u2759";
  const frame = (now) => {
    if (id !== lanes.replay) { $("play").textContent = "\u25b6"; return; }
    seconds = Math.min(longest, seconds + (now - last) / 1000 * Number($("rate").value));
    last = now;
    setClock(seconds);
    if (seconds < longest) requestAnimationFrame(frame); else { lanes.replay += 1; $("play").textContent = "\u25b6"; }
  };
  requestAnimationFrame(frame);
}

function startPlayer() {
  const longest = () => Math.max(...lastRace().runs.map((run) => run.seconds));
  onClick("play", () => {
    if (!lastRace()) return;
    if ($("play").textContent !== "\u25b6") { lanes.replay += 1; return; }
    const at = Number($("scrub").value) / 1000;
    play(at >= 1 ? 0 : at * longest());
  });
  $("scrub").addEventListener("input", () => {
    if (!lastRace()) return;
    lanes.replay += 1;
    setClock(Number($("scrub").value) / 1000 * longest());
  });
}

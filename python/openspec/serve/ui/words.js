// House words, and what they mean: shown beside a word that is pointed at, tapped or focused.

const WORDS = {
  "step": "One run of the model. It checks the drafts of each sequence and adds one token of its own choice.",
  "target": "The model that was asked for. What it chose itself is plain; a drafter only guesses.",
  "no text": "A token without text of its own: the end of the answer, a hidden token, or a part of a character.",
  "forced": "Drafts that the answer\u2019s form left no choice of.",
  "copied": "Drafts that follow an earlier place of the text like this one, taken in place of a head\u2019s where they promise more.",
  "tokens a second": "Tokens of the answer over the time from sending the request to its last token, as this page received them.",
  "first token": "Time from sending the request to its first token.",
  "acceptance length": "Tokens that a step with drafts brings, on average: accepted drafts and one of the target\u2019s own. An answer without drafts has none.",
  "accepted": "Drafts that equalled the target\u2019s choice, of all drafts. Of a tree only one path can be accepted.",
  "steps": "Runs of the model that brought tokens of this answer.",
  "drafted": "Tokens that the drafter guessed and the target checked.",
  "by position": "Of the drafts with a token at a position, the share in which that token and all before it equalled the target\u2019s choice.",
  "step time": "Draft: the drafter\u2019s time. Verify: the target\u2019s. Both: where no timing tells them apart. Rest: all other work of a step.",
  "rows": "Token positions that the step computed, for all sequences together: their last tokens, their drafts, and prompts under way.",
  "KV in use": "Taken pages of the key-value cache, which holds what the model knows of each token.",
  "batch": "Sequences that run now.",
  "waiting": "Requests that wait for a place.",
  "all tokens a second": "Tokens of all answers in the last second.",
  "recent length": "Mean acceptance length of the last second in which something was drafted, in all answers.",
  "speculation": "Whether drafts may be made. The switch says \u201cenabled\u201d in the request.",
  "drafts per step": "At most so many drafts in a step. Of a tree this is its size, not its depth. Empty: as the server was started.",
  "temperature": "0 takes the most likely token; more is more varied.",
  "top p": "Draws from the most likely tokens that together have this probability.",
  "top k": "Draws from so many of the most likely tokens.",
  "min p": "Leaves out tokens less likely than this share of the most likely one.",
  "repetition penalty": "Above 1: tokens of the prompt and the answer become less likely.",
  "presence penalty": "Above 0: tokens that the answer has already become less likely.",
  "frequency penalty": "As presence, but for each time that the answer has the token.",
  "seed": "The same seed and settings give the same answer. Empty: another one each time.",
  "longest answer": "In tokens. The answer is cut there.",
  "thinking": "Whether the model thinks before it answers, if its template has a switch for it.",
  "system prompt": "A message in front of the conversation that tells the model how to behave.",
  "stop strings": "One on each line, where \\n stands for a line end. The answer ends before the first that it would contain.",
  "form": "What the answer must match: a JSON schema, which begins with {, a grammar in EBNF with its rule root ::=, or a pattern.",
};

/// A word with its explanation.
function word(name, text = name) {
  const element = make("span", "", text);
  element.dataset.word = name;
  return explained(element);
}

function explained(element) {
  element.classList.add("word");
  element.tabIndex = 0;
  return element;
}

/// Shows the explanation of the word that is pointed at or focused, next to it.
function explainWords() {
  document.querySelectorAll("[data-word]").forEach(explained);
  const tip = $("tip");
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const target = event.target.closest?.("[data-word]");
    if (!target) return;
    tip.textContent = WORDS[target.dataset.word];
    tip.hidden = false;
    target.setAttribute("aria-describedby", "tip");
    const place = target.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const below = place.bottom + 8 + box.height < innerHeight;
    tip.style.left = Math.max(8, Math.min(place.left, innerWidth - box.width - 8)) + "px";
    tip.style.top = (below ? place.bottom + 6 : Math.max(4, place.top - box.height - 6)) + "px";
  };
  for (const name of ["mouseover", "focusin"]) document.addEventListener(name, show);
  for (const name of ["mouseout", "focusout"]) document.addEventListener(name, hide);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}

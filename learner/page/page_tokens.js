// Owns the tokens of one stretch of text: shaded, hovered, walked with the arrow keys, a few hundred at a time.

const PAGE_TOKENS = 1200;
const tip = document.getElementById("tip");
let cursor = null;

// A stretch of tokens. `facts(i)` tells a sampled token's logprob and advantage; without it they are given text.
function stretch(tokens, missing, facts, name) {
  const box = withAttributes(make("div", facts ? "tokens sampled" : "tokens given"), { role: "group", "aria-label": name, tabindex: "0" });
  const self = { box, tokens, facts, spans: [], more: null };
  box.stretch = self;
  growStretch(self, missing);
  return box;
}

function growStretch(self, missing) {
  const { box, tokens } = self;
  self.more?.remove();
  const from = self.spans.length;
  const to = Math.min(tokens.numbers.length, from + PAGE_TOKENS);
  const fragment = document.createDocumentFragment();
  for (let at = from; at < to; at += 1) fragment.append(tokenSpan(self, at));
  box.append(fragment);
  const left = tokens.numbers.length - to;
  if (left > 0) {
    self.more = button(`${plural(left, "more token")}`, "", () => {
      growStretch(self, missing);
      shadeStretch(self);
      markFound();
    }, "more");
    box.append(self.more);
  } else if (missing) {
    box.append(make("span", "missing", ` ${plural(missing, "more token")} of this part are only in the log `));
  }
}

function tokenSpan(self, at) {
  const token = self.tokens.numbers[at];
  const text = self.tokens.texts[at];
  const span = make("span", "token");
  if (SPECIAL.has(token)) span.classList.add("special");
  if (UNKNOWN.has(token) || (BYTES.has(token) && text.startsWith("\\x"))) span.classList.add("bytes");
  if (text.length > FIRST_CHARACTERS) span.append(longText("", text));
  else if (text === "") span.append(make("span", "mark", "·"));
  else text.split("\n").forEach((line, part) => {
    if (part) span.append(make("span", "mark", "↵"), "\n");
    if (line) addText(span, line);
  });
  span.at = at;
  self.spans.push(span);
  return span;
}

// Shade what was sampled by what the reader asked for, relative to the step's largest advantage.
function shadeStretch(self) {
  if (!self.facts) return;
  self.spans.forEach((span, at) => {
    const fact = self.facts(at);
    const kind = state.shade === "logprob" ? "s" + bucket(Math.min(1, -fact.logprob / 5)) :
      fact.trained ? shadeClass(fact.advantage, self.facts.scale) : "untrained";
    span.className = span.className.replace(/ (?:[pns]\d|untrained)\b/g, "") + (kind ? " " + kind : "");
  });
}

function describeToken(self, at) {
  const token = self.tokens.numbers[at];
  const rows = [["token", `${WORDS.ids[token]}, ${at + 1} of ${count(self.tokens.numbers.length)}`]];
  if (SPECIAL.has(token)) rows.push(["kind", "control token of the chat format"]);
  if (BYTES.has(token)) rows.push(["bytes", WORDS.texts[token].replace(/../g, "$& ").trim() + ", part of a character"]);
  if (!self.facts) return [...rows, ["loss", "outside: given to the policy, not sampled"]];
  const fact = self.facts(at);
  rows.push(["logprob", number(fact.logprob, 4) + " (p " + number(Math.exp(fact.logprob), 4) + ")"]);
  if (fact.reference !== null) rows.push(["base logprob", number(fact.reference, 4)]);
  rows.push(["advantage", fact.trained ? signed(fact.advantage, 4) : "–"]);
  rows.push(["loss", fact.trained ? (fact.advantage === 0 ? "inside, with advantage 0" : "inside") : fact.why]);
  return rows;
}

function showTip(span) {
  const self = span.parentElement?.stretch;
  if (!self) return hideTip();
  const text = self.tokens.texts[span.at];
  const shown = make("p", "tip-text");
  addText(shown, text.length > 80 ? text.slice(0, 80) + "…" : JSON.stringify(text).slice(1, -1));
  tip.replaceChildren(shown, table(describeToken(self, span.at)));
  tip.hidden = false;
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8));
  const below = place.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = left + "px";
  tip.style.top = (below ? place.bottom + 8 : Math.max(8, place.top - tip.offsetHeight - 8)) + "px";
}

function hideTip() {
  tip.hidden = true;
}

function setCursor(span) {
  cursor?.classList.remove("cursor");
  cursor = span;
  if (!span) return hideTip();
  span.classList.add("cursor");
  span.scrollIntoView({ block: "nearest" });
  return showTip(span);
}

function startTokens() {
  const turns = document.getElementById("turns");
  turns.addEventListener("pointerover", (event) => {
    const span = event.target.closest?.(".token");
    if (span) showTip(span);
    else hideTip();
  });
  turns.addEventListener("pointerleave", hideTip);
  turns.addEventListener("scroll", hideTip, { passive: true });
  turns.addEventListener("focusout", () => setCursor(null));
  turns.addEventListener("keydown", (event) => {
    const self = event.target.stretch;
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity }[event.key];
    if (!self || !by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const here = cursor?.parentElement === self.box ? cursor.at : by > 0 ? -1 : self.spans.length;
    setCursor(self.spans[Math.max(0, Math.min(self.spans.length - 1, here + by))] ?? null);
  });
}

// Mark the tokens that hold a match of the search text.
function markFound() {
  const words = state.text.trim().toLowerCase();
  for (const box of document.querySelectorAll("#turns .tokens")) {
    const { spans, tokens } = box.stretch;
    for (const span of spans) span.classList.remove("found");
    if (words) markStretch(spans, tokens, words);
  }
}

function markStretch(spans, tokens, words) {
  const text = tokens.text.toLowerCase();
  let at = 0;
  let start = 0;
  for (let hit = text.indexOf(words); hit >= 0; hit = text.indexOf(words, hit + words.length)) {
    while (at < spans.length && start + tokens.texts[at].length <= hit) start += tokens.texts[at++].length;
    for (let next = at, from = start; next < spans.length && from < hit + words.length; next += 1) {
      spans[next].classList.add("found");
      from += tokens.texts[next].length;
    }
    if (at >= spans.length) return;
  }
}

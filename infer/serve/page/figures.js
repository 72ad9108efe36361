// The panel's figures: accepted length, speeds, shares by position, the strip of rounds.
"use strict";

let figuresDrawnAt = 0;
let figuresTimer = 0;

// Now, or soon: digits that change with every frame cannot be read.
function showFigures({ now = false } = {}) {
  const wait = figuresDrawnAt + FIGURES_EVERY_MS - performance.now();
  clearTimeout(figuresTimer);
  if (!now && wait > 0) {
    figuresTimer = setTimeout(() => showFigures({ now: true }), wait);
    return;
  }
  figuresDrawnAt = performance.now();
  const turn = state.shown?.turn || null;
  showTitle(turn);
  showNumbers(turn);
  showPositions();
  showStrip(turn);
  showTree(turn);
  if (turn && state.busy?.kind === "answer") showFacts(turn);
}

function showTitle(turn) {
  const place = state.turns.indexOf(turn) + 1;
  byId("figures-title").textContent = !turn
    ? "Figures"
    : state.turns.length > 1
      ? `Answer ${place} of ${state.turns.length}`
      : "This answer";
}

function showNumbers(turn) {
  const { numTokens, numDrafts, length, speed } = countsOf(turn?.rounds || []);
  const isPlain = turn && numTokens > 0 && !isDrafting(turn.request);
  byId("figure-length").textContent = length === null ? (isPlain ? "1.00" : "–") : length.toFixed(2);
  byId("figure-speed").textContent = speed === null ? "–" : oneDigit(speed);
  byId("figure-first").textContent = numTokens ? seconds(turn.rounds[0].at - turn.sent) : "–";
  byId("figure-written").textContent = numTokens ? `${numTokens} in ${plural(turn.rounds.length, "round")}` : "–";
  byId("figure-drafts").textContent = numDrafts ? `${numDrafts} of them with a draft` : "\u00a0";
  byId("figure-ratio").textContent = againstPlain(turn, speed, isPlain) || "\u00a0";
  byId("figure-ratio").classList.toggle("measured", Boolean(turn?.race));
  document
    .querySelectorAll(".figure b")
    .forEach((figure) => figure.classList.toggle("empty-figure", figure.textContent === "–"));
}

function againstPlain(turn, speed, isPlain) {
  if (turn?.race) return `${turn.race.ratio.toFixed(2)}× plain, raced`;
  if (isPlain) return "plain decoding";
  if (state.plainSpeed && speed !== null) return `${(speed / state.plainSpeed).toFixed(1)}× plain, as raced before`;
  // The cost table was measured at another hour, under another load: no ratio is made of it.
  const estimate = state.status?.plain_tokens_per_second;
  if (estimate) return `plain, by cost table: ${oneDigit(estimate)}`;
  return turn?.phase === "done" ? "race to compare" : "";
}

// Rounds in which the draft token at each place was accepted, over the conversation's rounds with drafts.
function sharesByPosition() {
  const counts = Array.from({ length: Math.min(8, state.model?.headstart?.max_depth || 0) }, () => 0);
  let numDrafts = 0;
  for (const turn of state.turns) {
    for (const round of turn.rounds) {
      if (!round.numNodes) continue;
      numDrafts += 1;
      for (let place = 0; place < numHits(round); place++) counts[place] = (counts[place] || 0) + 1;
    }
  }
  return numDrafts ? counts.map((count) => count / numDrafts) : [];
}

function showPositions() {
  const shares = sharesByPosition();
  const list = byId("positions");
  byId("positions-none").hidden = shares.length > 0;
  list.hidden = !shares.length;
  while (list.children.length > shares.length) list.lastChild.remove();
  while (list.children.length < shares.length) {
    list.append(
      element(
        "li",
        {},
        element("span", { class: "share" }),
        element("span", { class: "track" }, element("i")),
        element("span", { class: "place" }, `${list.children.length + 1}`),
      ),
    );
  }
  shares.forEach((share, place) => {
    const [label, track] = list.children[place].children;
    label.textContent = `${Math.round(100 * share)}%`;
    track.firstChild.hidden = !share;
    track.firstChild.style.height = `${Math.max(100 * share, 4)}%`;
  });
}

// One bar a round: below the drafted tokens that stood, on top the model's own.
function showStrip(turn) {
  const rounds = turn?.rounds || [];
  byId("strip").hidden = rounds.length < 2;
  if (rounds.length < 2) return;
  const top = Math.max(5, ...rounds.map((round) => round.tokens.length));
  const width = rounds.length > 120 ? 1 : 0.8;
  const bar = (x, low, high) => `M${x} ${top - low}V${top - high}h${width}V${top - low}z`;
  let own = "";
  let hit = "";
  rounds.forEach((round, x) => {
    const hits = numHits(round);
    hit += bar(x, 0, hits);
    own += bar(x, hits, round.tokens.length);
  });
  const picture = byId("strip-picture");
  picture.setAttribute("viewBox", `0 0 ${rounds.length} ${top}`);
  picture.children[0].setAttribute("d", own);
  picture.children[1].setAttribute("d", hit);
  const scrub = byId("scrub");
  scrub.max = rounds.length;
  scrub.value = state.shown.round + 1;
  scrub.setAttribute("aria-valuetext", `Round ${state.shown.round + 1} of ${rounds.length}`);
  const mark = byId("strip-mark");
  mark.style.left = `${(100 * state.shown.round) / rounds.length}%`;
  mark.style.width = `${100 / rounds.length}%`;
}

function pick(turn, number) {
  state.shown = { turn, round: number, following: Boolean(state.busy) && number === turn.rounds.length - 1 };
  showFigures({ now: true });
}

function pickClicked(turn, event) {
  const round = event.target.closest(".round");
  if (!round || !getSelection().isCollapsed) return;
  pick(turn, Number(round.dataset.round));
  if (isNarrow()) openPanel();
}

function markRound(turn, number) {
  document.querySelectorAll(".round.picked").forEach((view) => view.classList.remove("picked"));
  if (!turn || state.shown.following) return;
  turn.view.text.querySelector(`[data-round="${number}"]`)?.classList.add("picked");
}

// A race of an answer against the same answer decoded the other way.
"use strict";

const COULD_DIFFER = {
  distribution: "That may be: the server keeps the model’s distribution, not the tokens of a seed.",
  lossy: "That may be: the server runs a lossy rule.",
};

function whyDifferent() {
  const { exactness, dtype } = state.model?.headstart || {};
  if (COULD_DIFFER[exactness]) return COULD_DIFFER[exactness];
  if (exactness === "seed" && dtype && dtype !== "float32")
    return `In ${dtype}, near ties may round either way; exactness “bitwise” rules that out.`;
  return "That should not happen, unless two tokens were a near tie. Please report it, with the prompt and the seed.";
}

class Lane {
  constructor(name, note, total) {
    Object.assign(this, { text: "", rounds: [], total });
    this.rate = element("b", {}, "–");
    this.clock = element("span", { class: "lane-clock" }, "");
    this.fill = element("i");
    this.body = element("div", { class: "lane-text", tabindex: "0", role: "group", "aria-label": `${name}: text` });
    this.root = element(
      "div",
      { class: "lane" },
      element("div", { class: "lane-head" }, element("h4", {}, name), element("span", { class: "quiet" }, note)),
      element("p", { class: "lane-rate" }, this.rate, element("span", {}, "tokens/s"), this.clock),
      element("div", { class: "lane-track" }, this.fill),
      this.body,
    );
  }

  add(round) {
    this.rounds.push(round);
    this.body.append(roundView(this, round, this.rounds.length - 1));
  }

  draw() {
    const { numTokens, speed } = countsOf(this.rounds);
    this.fill.style.transform = `scaleX(${Math.min(1, numTokens / this.total)})`;
    if (speed !== null) this.rate.textContent = oneDigit(speed);
    if (this.rounds.length) this.clock.textContent = seconds(this.rounds.at(-1).at - this.rounds[0].at);
    this.body.scrollTop = this.body.scrollHeight;
  }
}

const idsOf = (rounds) => rounds.flatMap((round) => round.tokens.map((token) => token.id));

// Asks for the same answer the other way. The answer that is there runs beside it at the pace at which it came: asking
// for both at once would make them share the machine.
async function runRace(turn) {
  if (state.busy) return;
  const wasDrafted = isDrafting(turn.request);
  const numTokens = countsOf(turn.rounds).numTokens;
  const request = { ...turn.request, ...draftFields(!wasDrafted) };
  if (wasDrafted) delete request.tree;
  if (turn.phase !== "done") request.max_tokens = numTokens;
  const names = wasDrafted ? ["With drafts", "Plain decoding"] : ["Plain decoding", "With drafts"];
  const replay = new Lane(names[0], "replayed at its pace", numTokens);
  const live = new Lane(names[1], "live", numTokens);
  const verdict = element("p", { class: "verdict" }, "Waiting for the first token…");
  const order = wasDrafted ? [replay, live] : [live, replay];
  turn.view.lanes.replaceChildren(element("div", { class: "lanes" }, ...order.map((lane) => lane.root)), verdict);
  turn.view.lanes.hidden = false;
  turn.view.race.textContent = "Racing…";
  turn.view.lanes.scrollIntoView({ block: "nearest" });
  const controller = begin("race");
  const error = await runLanes(turn, request, replay, live, verdict, controller).catch((thrown) => thrown);
  finish();
  concludeRace(turn, live, verdict, { error, stopped: controller.signal.aborted, wasDrafted });
}

async function runLanes(turn, request, replay, live, verdict, controller) {
  const waiting = [];
  const catchUp = () => {
    for (const round of waiting.splice(0)) live.add(round);
    const now = live.rounds.length ? performance.now() - live.rounds[0].at : -1;
    while (
      replay.rounds.length < turn.rounds.length &&
      turn.rounds[replay.rounds.length].at - turn.rounds[0].at <= now
    ) {
      replay.add(turn.rounds[replay.rounds.length]);
    }
    replay.draw();
    live.draw();
    if (live.rounds.length) verdict.textContent = soFar(idsOf(turn.rounds), idsOf(live.rounds));
  };
  let running = true;
  const tick = () => {
    if (!running) return;
    catchUp();
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
  try {
    for await (const chunk of streamChat(request, controller.signal)) {
      const choice = chunk.choices?.[0];
      const round = choice && roundOf(chunk, choice);
      if (round) waiting.push(round);
    }
    const end = (live.rounds[0] || waiting[0])?.at + turn.rounds.at(-1).at - turn.rounds[0].at;
    await until(end, controller.signal);
  } finally {
    running = false;
    catchUp();
    turn.rounds.slice(replay.rounds.length).forEach((round) => replay.add(round));
    replay.draw();
  }
  return null;
}

function soFar(mine, other) {
  const first = other.findIndex((id, place) => id !== mine[place]);
  return first < 0
    ? `The same so far: ${other.length} of ${plural(mine.length, "token")}`
    : `Different from token ${first + 1} on`;
}

// Resolves at a time of performance.now(), or when the signal fires.
function until(time, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, Math.max(0, time - performance.now()) || 0);
    signal.addEventListener("abort", resolve);
  });
}

function concludeRace(turn, live, verdict, { error, stopped, wasDrafted }) {
  turn.view.race.textContent = "Race again";
  const mine = idsOf(turn.rounds);
  const other = idsOf(live.rounds);
  const isWhole = !error && !stopped;
  const length = isWhole ? Math.max(mine.length, other.length) : other.length;
  const first = Array.from({ length }).findIndex((_, place) => mine[place] !== other[place]);
  const same = first < 0;
  const [fast, plain] = (wasDrafted ? [turn.rounds, live.rounds] : [live.rounds, turn.rounds]).map(
    (rounds) => countsOf(rounds).speed,
  );
  const ratio = fast && plain && other.length > 2 ? fast / plain : null;
  if (isWhole && ratio) {
    turn.race = { ratio, plain, same };
    state.plainSpeed = plain;
  }
  const parts = [];
  if (error && !stopped)
    parts.push(
      element(
        "span",
        { class: "verdict-error" },
        error instanceof ConnectionLost ? "The connection was lost." : error.message,
      ),
    );
  if (stopped) parts.push(element("span", {}, "Race stopped."));
  if (other.length) parts.push(verdictView({ same, first, length, isWhole, mine: turn.rounds, other: live.rounds }));
  if (ratio && isWhole) parts.push(element("span", { class: "ratio" }, ratioText(ratio)));
  verdict.replaceChildren(...parts);
  verdict.dataset.same = same;
  verdict.scrollIntoView({ block: "nearest" });
  announce(verdict.textContent);
  showFigures({ now: true });
}

function ratioText(ratio) {
  return ratio >= 1
    ? `${ratio.toFixed(2)}× the speed of plain decoding`
    : `${ratio.toFixed(2)}× the speed: plain decoding was faster`;
}

function verdictView({ same, first, length, isWhole, mine, other }) {
  const mark = element("i", { "aria-hidden": "true" }, same ? "✓" : "≠");
  if (same && isWhole)
    return element("span", { class: "verdict-main" }, mark, `Identical: all ${plural(length, "token")} are the same.`);
  if (same) return element("span", { class: "verdict-main" }, mark, `The same so far, for ${plural(length, "token")}.`);
  const tokenAt = (rounds) => JSON.stringify(rounds.flatMap((round) => round.tokens)[first]?.text ?? "the end");
  const where = `Different from token ${first + 1} on: ${tokenAt(mine)} and ${tokenAt(other)}.`;
  return element("span", { class: "verdict-main" }, mark, `${where} ${whyDifferent()}`);
}

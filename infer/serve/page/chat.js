// The conversation: what is asked, and answers as they come, each token with who wrote it.
"use strict";

function messagesFor(question) {
  const messages = state.settings.system.trim() ? [{ role: "system", content: state.settings.system }] : [];
  for (const turn of state.turns) {
    if (turn.content && !turn.replaced)
      messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.content });
  }
  return [...messages, { role: "user", content: question }];
}

function draftBounds() {
  const { maxNodes, maxDepth } = state.settings;
  if (maxNodes === null && maxDepth === null) return true;
  return {
    ...(maxNodes === null ? {} : { max_nodes: maxNodes }),
    ...(maxDepth === null ? {} : { max_depth: maxDepth }),
  };
}

const hasDrafter = () =>
  !state.model?.headstart || !["", null, undefined, "none"].includes(state.model.headstart.drafter);
const isDrafting = (request) => request.draft !== false && hasDrafter();

function requestFor(question) {
  const { temperature, topP, maxTokens, seed, draft } = state.settings;
  const request = {
    messages: messagesFor(question),
    stream: true,
    stream_options: { include_usage: true },
    acceptance: true,
    temperature,
    top_p: topP,
    max_tokens: maxTokens,
    // Chosen here where none is set, so that a race can ask for the same.
    seed: seed ?? Math.floor(Math.random() * 2 ** 31),
  };
  if (state.model) request.model = state.model.id;
  return { ...request, ...draftFields(draft) };
}

// Nothing is said about drafts where there is no drafter.
function draftFields(draft) {
  if (!hasDrafter()) return {};
  return draft ? { draft: draftBounds(), tree: true } : { draft: false };
}

function ask(question) {
  const turn = {
    question,
    request: requestFor(question),
    rounds: [],
    content: "",
    phase: "waiting",
    sent: performance.now(),
    finish: null,
    replaced: false,
    race: null,
    text: "",
    numShown: 0,
  };
  turn.view = viewOf(turn);
  state.turns.push(turn);
  document.body.dataset.chat = "open";
  byId("empty").hidden = true;
  byId("conversation").append(turn.view.root);
  state.shown = { turn, round: -1, following: true };
  const answered = receive(turn);
  showFigures({ now: true });
  scrollDown();
  return answered;
}

async function receive(turn) {
  const controller = begin("answer");
  const frame = new Frames(() => showNews(turn));
  try {
    for await (const chunk of streamChat(turn.request, controller.signal)) {
      take(turn, chunk);
      frame.ask();
    }
    turn.phase = "done";
  } catch (error) {
    turn.phase = controller.signal.aborted ? "stopped" : "failed";
    if (turn.phase === "failed") turn.error = error;
  } finally {
    frame.end();
    finish();
    conclude(turn);
  }
}

function take(turn, chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return;
  turn.content += choice.delta?.content || "";
  turn.finish = choice.finish_reason || turn.finish;
  const round = roundOf(chunk, choice);
  if (!round) return;
  turn.rounds.push(round);
  turn.phase = "streaming";
}

function begin(kind) {
  state.busy = { controller: new AbortController(), kind };
  document.body.dataset.busy = kind;
  const hadFocus = document.activeElement === byId("send");
  byId("send").hidden = true;
  byId("stop").hidden = false;
  if (hadFocus) byId("stop").focus();
  return state.busy.controller;
}

function finish() {
  state.busy = null;
  delete document.body.dataset.busy;
  const hadFocus = document.activeElement === byId("stop");
  byId("send").hidden = false;
  byId("stop").hidden = true;
  if (hadFocus) byId("prompt").focus();
  checkStatus();
}

const stop = () => state.busy?.controller.abort();

// At most one drawing a frame; a hidden tab, which has no frames, draws when the stream ends.
class Frames {
  constructor(draw) {
    this.draw = draw;
    this.asked = 0;
  }

  ask() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.draw();
    });
  }

  end() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
    this.draw();
  }
}

function viewOf(turn) {
  const text = element("div", { class: "answer-text" });
  const facts = element("p", { class: "facts" });
  const copy = element(
    "button",
    { type: "button", class: "text-button", hidden: true, onclick: () => copyText(turn, copy) },
    "Copy",
  );
  const race = element(
    "button",
    { type: "button", class: "text-button race-button", hidden: true, onclick: () => runRace(turn) },
    raceLabel(turn),
  );
  const notice = element("div", { class: "notice", hidden: true });
  const lanes = element("section", { class: "race", hidden: true, "aria-label": "Race" });
  const root = element(
    "article",
    { class: "turn", "data-phase": "waiting" },
    element(
      "div",
      { class: "question" },
      element("h3", { class: "hidden" }, "You"),
      element("p", { class: "question-text" }, turn.question),
    ),
    element(
      "div",
      { class: "answer" },
      element("h3", { class: "hidden" }, "Model"),
      text,
      notice,
      element("div", { class: "answer-foot" }, facts, element("span", { class: "actions" }, copy, race)),
      lanes,
    ),
  );
  text.addEventListener("click", (event) => pickClicked(turn, event));
  return { root, text, facts, copy, race, notice, lanes };
}

const raceLabel = (turn) => (isDrafting(turn.request) ? "Race plain decoding" : "Race with drafts");

// Adds the tokens that came since the last frame, and moves the panel along.
function showNews(turn) {
  const follow = isAtEnd();
  turn.view.root.dataset.phase = turn.phase;
  for (; turn.numShown < turn.rounds.length; turn.numShown++) {
    turn.view.text.append(roundView(turn, turn.rounds[turn.numShown], turn.numShown));
  }
  if (state.shown?.turn === turn && state.shown.following) state.shown.round = turn.rounds.length - 1;
  showFigures();
  if (follow) scrollDown();
  showJump();
}

// A round's tokens as spans. `holder.text` is the answer so far: between fences, tokens are code.
function roundView(holder, round, number) {
  const view = element("span", { class: "round", "data-round": number });
  for (const token of round.tokens) {
    const isCode = (holder.text.match(/^ {0,3}```/gm) || []).length % 2 === 1;
    holder.text += token.text;
    if (!token.text) continue;
    const classes = ["token", token.drafted && "drafted", (isCode || token.text.includes("```")) && "code"].filter(
      Boolean,
    );
    // The mark leaves leading blanks out: at the end of a line they would stand as a stump.
    const blanks = token.text.match(/^\s*/)[0];
    view.append(
      element(
        "span",
        { class: classes.join(" ") },
        blanks,
        element("span", { class: "mark" }, token.text.slice(blanks.length)),
      ),
    );
  }
  return view;
}

function conclude(turn) {
  const { view } = turn;
  view.root.dataset.phase = turn.phase;
  view.copy.hidden = !turn.content;
  view.race.hidden = turn.rounds.length < 2 || !hasDrafter();
  view.race.textContent = raceLabel(turn);
  const last = turn.rounds.at(-1)?.tokens.at(-1);
  if (turn.finish === "stop" && last && !last.text) state.endId = last.id;
  treeDrawn = null; // the end can be named now
  showFigures({ now: true });
  showFacts(turn);
  const follow = isAtEnd();
  if (turn.phase === "failed") showFailure(turn);
  else if (turn.finish === "length")
    showNotice(turn, `The answer ends at ${plural(turn.request.max_tokens, "token")}, the most that was asked for.`);
  else if (turn.phase === "stopped") showNotice(turn, "Stopped.");
  else if (turn.finish === "abort") showNotice(turn, "The server ended this answer.");
  else if (!turn.content) showNotice(turn, "The model ended its answer at once.");
  if (follow) scrollDown();
  if (turn.phase === "done") announce(`Answer complete: ${turn.view.facts.textContent}`);
  if (turn.phase === "stopped") announce("Stopped");
}

function showFacts(turn) {
  const { numTokens, length, speed } = countsOf(turn.rounds);
  const parts = [];
  if (numTokens) parts.push(plural(numTokens, "token"));
  if (numTokens && !isDrafting(turn.request)) parts.push("plain decoding");
  if (length !== null) parts.push(`${length.toFixed(2)} a round`);
  if (speed !== null) parts.push(`${oneDigit(speed)} tokens/s`);
  if (turn.request.temperature > 0 && numTokens) parts.push(`seed ${turn.request.seed}`);
  turn.view.facts.replaceChildren(...parts.map((part) => element("span", {}, part)));
}

function showNotice(turn, text, { isError = false, actions = [] } = {}) {
  turn.view.notice.replaceChildren(element("p", {}, text), ...actions);
  turn.view.notice.classList.toggle("error", isError);
  turn.view.notice.hidden = false;
}

// A failure in words, what stays, and what can be done.
function showFailure(turn) {
  const { error } = turn;
  const kept = turn.content ? " The text so far is kept." : "";
  const retry = element(
    "button",
    { type: "button", class: "button small", onclick: () => askAgain(turn) },
    "Ask again",
  );
  let text = `${error.message}${kept}`;
  if (error instanceof ConnectionLost) text = `The connection to the server was lost.${kept}`;
  else if (error.status === 401)
    text = "The server asks for an API key, or does not know the one it got. Enter it below.";
  else if (error.status === 429)
    text = `The server’s waiting line is full. It asks to wait ${plural(error.retryAfter || 1, "second")}.${kept}`;
  else if (error.status === 503) text = `The server is shutting down and takes no new requests.${kept}`;
  else if (!(error instanceof ServerError)) text = `The answer could not be read (${error.message}).${kept}`;
  // With a key, the question is asked again by itself.
  showNotice(turn, text, { isError: true, actions: error.status === 401 ? [] : [retry] });
  announce(text);
  if (error.status === 401) askForKey(turn);
  if (error.status === 429) waitFor(retry, error.retryAfter || 1);
}

function waitFor(button, left) {
  button.disabled = left > 0;
  button.textContent = left > 0 ? `Ask again in ${left} s` : "Ask again";
  if (left > 0) setTimeout(() => waitFor(button, left - 1), 1000);
}

// An empty failure goes; one with text stays in sight, and out of what the model is told.
function askAgain(turn) {
  if (state.busy) return;
  if (turn.content) turn.replaced = true;
  else {
    state.turns.splice(state.turns.indexOf(turn), 1);
    turn.view.root.remove();
  }
  turn.view.notice.querySelector("button")?.remove();
  byId("prompt").focus();
  ask(turn.question);
}

async function copyText(turn, button) {
  try {
    await navigator.clipboard.writeText(turn.content);
    button.textContent = "Copied";
  } catch {
    // The clipboard is closed to pages that are not secure: selected, the text is one key away.
    getSelection().selectAllChildren(turn.view.text);
    button.textContent = "Selected";
  }
  announce(`Answer ${button.textContent.toLowerCase()}`);
  setTimeout(() => {
    button.textContent = "Copy";
  }, 1600);
}

function newChat() {
  stop();
  state.turns = [];
  state.shown = null;
  byId("conversation").replaceChildren();
  delete document.body.dataset.chat;
  byId("empty").hidden = false;
  showFigures({ now: true });
  showJump();
  byId("prompt").focus();
}

function isAtEnd() {
  const box = byId("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function scrollDown() {
  const box = byId("scroll");
  box.scrollTop = box.scrollHeight;
}

function showJump() {
  byId("jump").hidden = isAtEnd() || !state.turns.length;
}

// The page of `headstart serve` (its other scripts are listed in index.html): the server's state, the settings, the keys.
// Text of the model goes into the document as text only. Nothing is fetched but from the server itself.
"use strict";

function exactnessOf({ exactness, dtype, lossless, row_invariant: rowInvariant }) {
  const kind = dtype || "this precision";
  if (lossless === false || exactness === "lossy")
    return {
      short: "Lossy",
      warn: true,
      long: "A lossy rule is on: answers may differ from the model’s own distribution.",
    };
  if (exactness === "bitwise")
    return {
      short: "Bitwise",
      long: `The same tokens as plain decoding for the same seed, in ${kind} too: every forward has one fixed shape.`,
    };
  if (exactness === "distribution")
    return {
      short: "Same distribution",
      long: "Answers follow the model’s distribution exactly. They are not plain decoding’s for the same seed.",
    };
  if (rowInvariant)
    return {
      short: "Seed-exact",
      long: `The same tokens as plain decoding for the same seed, in ${kind} too: no token’s bits depend on its neighbours.`,
    };
  if (dtype && dtype !== "float32")
    return {
      short: "Seed-exact up to ties",
      long: `The same tokens as plain decoding for the same seed, but where ${kind} rounds two near ties either way.`,
    };
  return {
    short: "Seed-exact",
    long: "The same tokens as plain decoding: seed-exact in float32. A race shows it on any answer.",
  };
}

async function loadModel() {
  const { data } = await getJson("v1/models");
  state.model = data[0];
  const served = state.model.headstart || {};
  byId("model").textContent = state.model.id;
  byId("drafter").replaceChildren(...drafterWords(served));
  document.title = `${state.model.id} · headstart`;
  const { short, long, warn } = exactnessOf(served);
  byId("exactness").hidden = !state.model.headstart;
  byId("exactness").replaceChildren(short, element("span", {}, served.dtype && !warn ? `, ${served.dtype}` : ""));
  byId("exactness").classList.toggle("warn", Boolean(warn));
  byId("exactness-note").textContent = long;
  byId("pitch").hidden = !hasDrafter();
  byId("draft").disabled = !hasDrafter();
  byId("draft-fields").disabled = !hasDrafter();
  for (const [id, most] of [
    ["max-nodes", served.max_nodes],
    ["max-depth", served.max_depth],
  ]) {
    if (!most) continue;
    byId(id).max = most;
    byId(id).placeholder = most;
  }
  showSettings();
}

function drafterWords({ drafter, dead }) {
  if (!hasDrafter()) return ["no drafter"];
  return dead ? ["drafter switched off"] : [element("span", { class: "by" }, "drafted by "), drafter];
}

async function checkStatus() {
  try {
    if (!state.model) await loadModel();
    state.status = await getJson("status");
    showConnection(...connectionOf(state.status));
    showFigures();
  } catch (error) {
    if (error.status === 401) {
      showConnection("key", "Key needed");
      if (!state.retryWithKey) askForKey(null);
    } else if (error.status === 503) showConnection("busy", "Draining");
    else showConnection("lost", "Not reachable");
  }
}

function connectionOf(status) {
  if (status.is_alive === false) return ["lost", "Engine stopped"];
  const load = [];
  if (status.num_running) load.push(`${status.num_running} running`);
  if (status.num_waiting) load.push(`${status.num_waiting} waiting`);
  if (status.is_draining) return ["busy", ["Draining", ...load].join(", ")];
  if (status.is_drafting === false && hasDrafter()) return ["busy", ["Drafter off", ...load].join(", ")];
  return [status.num_waiting ? "busy" : "ready", load.join(", ") || "Ready"];
}

function showConnection(kind, text) {
  byId("connection").dataset.state = kind;
  byId("connection-text").textContent = text;
  byId("connection").title = state.status ? `${text}; ${state.status.num_slots} slots` : text;
}

async function watch() {
  if (!document.hidden) await checkStatus();
  setTimeout(watch, STATUS_EVERY_MS);
}

function askForKey(turn) {
  state.retryWithKey = turn;
  byId("key-form").hidden = false;
  if (turn) byId("key").focus();
}

async function useKey(event) {
  event.preventDefault();
  state.key = byId("key").value.trim();
  store("sessionStorage", API_KEY, state.key);
  byId("key-form").hidden = true;
  byId("key").value = "";
  const turn = state.retryWithKey;
  state.retryWithKey = null;
  await checkStatus();
  if (turn && byId("key-form").hidden) askAgain(turn);
  byId("prompt").focus();
}

const NUMBERS = {
  temperature: "temperature",
  "top-p": "topP",
  "max-tokens": "maxTokens",
  seed: "seed",
  "max-nodes": "maxNodes",
  "max-depth": "maxDepth",
};

function readSettings() {
  state.settings.system = byId("system").value;
  for (const [id, name] of Object.entries(NUMBERS)) {
    const input = byId(id);
    if (input.value === "" && !input.validity.badInput) state.settings[name] = DEFAULTS[name];
    else if (input.validity.valid) state.settings[name] = input.valueAsNumber;
  }
  state.settings.draft = byId("draft").checked;
  store("sessionStorage", SETTINGS_KEY, state.settings);
  showSettingsLine();
}

function showSettings() {
  byId("system").value = state.settings.system;
  for (const [id, name] of Object.entries(NUMBERS)) byId(id).value = state.settings[name] ?? "";
  byId("draft").checked = state.settings.draft && hasDrafter();
  showSettingsLine();
}

function showSettingsLine() {
  const { system, temperature, topP, maxTokens, seed, maxNodes, maxDepth } = state.settings;
  const parts = [temperature === 0 ? "greedy" : `temperature ${temperature}`];
  if (topP < 1 && temperature > 0) parts.push(`top-p ${topP}`);
  parts.push(`max ${maxTokens}`);
  if (seed !== null && temperature > 0) parts.push(`seed ${seed}`);
  if (maxNodes !== null) parts.push(plural(maxNodes, "node"));
  if (maxDepth !== null) parts.push(`depth ${maxDepth}`);
  if (system.trim()) parts.push("system prompt");
  byId("settings-line").textContent = parts.join(" · ");
}

function resetSettings() {
  state.settings = { ...DEFAULTS, draft: state.settings.draft };
  showSettings();
  readSettings();
}

const isDark = () =>
  (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const isNarrow = () => matchMedia("(max-width: 1023px)").matches;

function showTheme() {
  const text = isDark() ? "Use light colours" : "Use dark colours";
  byId("theme").setAttribute("aria-label", text);
  byId("theme").title = text;
}

function changeTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  store("localStorage", THEME_KEY, theme);
  showTheme();
}

function openPanel() {
  document.body.dataset.panel = "open";
  byId("open-panel").setAttribute("aria-expanded", "true");
  byId("shade").hidden = false;
  document.querySelector("main").inert = true;
  byId("close-panel").focus();
  treeDrawn = null; // drawn while hidden, it did not know its width
  showFigures({ now: true });
}

function closePanel() {
  if (!document.body.dataset.panel) return;
  delete document.body.dataset.panel;
  byId("open-panel").setAttribute("aria-expanded", "false");
  byId("shade").hidden = true;
  document.querySelector("main").inert = false;
  byId("open-panel").focus();
}

function send(event) {
  event?.preventDefault();
  const question = byId("prompt").value.trim();
  if (!question || state.busy) return;
  byId("prompt").value = "";
  fitPrompt();
  ask(question);
}

function fitPrompt() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 220)}px`;
}

function keyInPrompt(event) {
  // Enter that ends the composition of a character sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function keyAnywhere(event) {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (document.body.dataset.panel) closePanel();
  else stop();
}

function showExamples() {
  byId("examples").append(
    ...EXAMPLES.map(({ title, text, note }) =>
      element(
        "li",
        {},
        element(
          "button",
          {
            type: "button",
            class: "example",
            onclick: () => {
              if (!state.busy) {
                ask(text);
                byId("prompt").focus({ preventScroll: true });
              }
            },
          },
          element("b", {}, title),
          element("span", { class: "example-text" }, text),
          element("span", { class: "example-note" }, note),
        ),
      ),
    ),
  );
}

function toggleNote() {
  const note = byId("exactness-note");
  note.hidden = !note.hidden;
  byId("exactness").setAttribute("aria-expanded", String(!note.hidden));
}

function listen() {
  const on = (id, kind, handler) => byId(id).addEventListener(kind, handler);
  on("composer", "submit", send);
  on("prompt", "keydown", keyInPrompt);
  on("prompt", "input", fitPrompt);
  on("stop", "click", stop);
  on("new-chat", "click", newChat);
  on("theme", "click", changeTheme);
  on("exactness", "click", toggleNote);
  on("plain-text", "change", (event) => document.body.classList.toggle("plain", event.target.checked));
  on("draft", "change", readSettings);
  on("open-settings", "click", () => byId("settings").showModal());
  on("settings", "input", readSettings);
  on("settings", "close", () => {
    showSettings();
    byId("prompt").focus();
  });
  on("reset-settings", "click", resetSettings);
  on("key-form", "submit", useKey);
  on("jump", "click", () => {
    scrollDown();
    showJump();
  });
  on("scroll", "scroll", showJump);
  on("scrub", "input", (event) => pick(state.shown.turn, event.target.valueAsNumber - 1));
  on("open-panel", "click", openPanel);
  on("close-panel", "click", closePanel);
  on("shade", "click", closePanel);
  document.addEventListener("keydown", keyAnywhere);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  addEventListener("resize", () => {
    if (!isNarrow()) closePanel();
    treeDrawn = null;
    showFigures();
  });
}

document.addEventListener("DOMContentLoaded", () => {
  listen();
  showTheme();
  showSettings();
  showExamples();
  showFigures({ now: true });
  if (!isNarrow()) byId("prompt").focus();
  watch();
});

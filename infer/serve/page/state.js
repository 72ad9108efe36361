// What the page knows and remembers, and small helpers: loaded first, so that a remembered theme does not flash.
"use strict";

const THEME_KEY = "headstart.theme";
const SETTINGS_KEY = "headstart.settings";
const API_KEY = "headstart.key";
const STATUS_EVERY_MS = 3000;
const FIGURES_EVERY_MS = 200;
const DEFAULTS = {
  system: "",
  temperature: 0,
  topP: 1,
  maxTokens: 400,
  seed: null,
  draft: true,
  maxNodes: null,
  maxDepth: null,
};
const EXAMPLES = [
  {
    title: "Code",
    text: "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    note: "Names, brackets and keywords are easy to guess",
  },
  {
    title: "A pattern",
    text: "Count from 1 to 30, separated by commas.",
    note: "Once it is clear, whole runs are accepted",
  },
  {
    title: "Advice",
    text: "Give three tips for staying healthy.",
    note: "Even sentences, two or three tokens a round",
  },
  { title: "An explanation", text: "What is gravity?", note: "Free prose: shorter runs, and still ahead" },
];

// What the panel draws before there is an answer: the round behind "Paris" of the sample text.
const SAMPLE_ROUND = {
  tokens: [" is", " the", " capital", " of", " France"].map((text, place) => ({ id: null, text, drafted: place < 4 })),
  tree: {
    tokens: [" is", " the", " capital", " of", " was", " has", " a", " largest", " city", " founded", " and"],
    parents: [-1, 0, 1, 2, -1, -1, 0, 1, 7, 4, 2],
    path: [0, 1, 2, 3],
    values: [0.71, 0.6, 0.52, 0.5, 0.14, 0.06, 0.08, 0.05, 0.04, 0.05, 0.02],
  },
};

function stored(storage, key) {
  try {
    return JSON.parse(window[storage].getItem(key));
  } catch {
    return null; // storage is off, or holds what another version wrote
  }
}

function store(storage, key, value) {
  try {
    window[storage].setItem(key, JSON.stringify(value));
  } catch {
    // Storage is off: the choice lasts as long as the page.
  }
}

// Before the body is drawn, so that a remembered theme does not flash.
if (["light", "dark"].includes(stored("localStorage", THEME_KEY))) {
  document.documentElement.dataset.theme = stored("localStorage", THEME_KEY);
}

const state = {
  turns: [],
  busy: null, // {controller, kind: "answer" | "race"} while something streams
  shown: null, // {turn, round, following}: whose figures and which tree the panel shows
  settings: { ...DEFAULTS, ...stored("sessionStorage", SETTINGS_KEY) },
  key: stored("sessionStorage", API_KEY) || "",
  model: null, // an entry of /v1/models
  status: null,
  endId: undefined, // the token that ends answers, once one has ended
  plainSpeed: null, // tokens a second of plain decoding, as the last race saw them
  retryWithKey: null, // the turn that a key was asked for
};

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const oneDigit = (number) => number.toFixed(number < 100 ? 1 : 0);
const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
const announce = (text) => {
  byId("announcer").textContent = text;
};

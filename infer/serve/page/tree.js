// The draft tree of a round: its layout and its picture.
"use strict";

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

function label(text, id) {
  if (!text) return id === state.endId ? "end" : id === null || id === undefined ? "…" : `#${id}`;
  const shown = visible(text).trim() || "␣".repeat(Math.min(text.length, 4));
  return shown.length > 12 ? `${shown.slice(0, 11)}…` : shown;
}

let treeDrawn = null;

function showTree(turn) {
  const number = state.shown?.round ?? -1;
  const round = turn?.rounds[number];
  byId("tree-none").hidden = Boolean(turn);
  byId("tree-round").textContent = round ? `round ${number + 1} of ${turn.rounds.length}` : "";
  byId("tree-caption").textContent = round ? caption(round, number, turn) : "";
  markRound(turn, number);
  // Someone who asked for less motion sees the tree when the answer is there, or when a round is picked.
  const isStill = state.shown?.following && state.busy && matchMedia("(prefers-reduced-motion: reduce)").matches;
  const drawing = isStill ? null : turn ? round : SAMPLE_ROUND;
  if (treeDrawn === drawing) return;
  treeDrawn = drawing;
  const hasTree = Boolean(drawing?.tree?.tokens.length);
  byId("tree-legend").hidden = !hasTree;
  byId("tree").replaceChildren(
    ...(hasTree ? [treePicture(drawing.tree, drawing, turn ? rootLabel(turn, number) : "Paris")] : []),
  );
}

function rootLabel(turn, number) {
  const before = turn.rounds[number - 1]?.tokens.at(-1);
  return before ? label(before.text, before.id) : "prompt";
}

function caption(round, number, turn) {
  if (!round.numNodes) {
    if (number === 0) return "The prompt’s own forward wrote this; drafts start behind it.";
    return isDrafting(turn.request) ? "No draft in this round." : "Plain decoding: one token a round, no draft.";
  }
  const hits = numHits(round);
  return `${plural(round.numNodes, "guess", "guesses")}, ${round.depth} deep, ${hits || "none"} accepted`;
}

// Where nodes stand: the first child keeps its parent's row, the accepted child comes first. So the top row reads as
// what was written, and edges never cross. Node -1 is the root; node n, behind the accepted path, the model's own token.
function layout(tree, round, root) {
  const accepted = new Set(tree.path);
  const nodes = tree.tokens.map((text, node) => ({
    node,
    parent: tree.parents[node],
    text: label(text, tree.token_ids?.[node]),
    full: text,
    value: tree.values?.[node] ?? 0,
    kind: accepted.has(node) ? "hit" : "miss",
  }));
  const own = round.tokens.at(-1);
  if (own && !own.drafted) {
    nodes.push({
      node: nodes.length,
      parent: tree.path.at(-1) ?? -1,
      text: label(own.text, own.id),
      full: own.text,
      value: null,
      kind: "own",
    });
  }
  const start = { node: -1, parent: null, text: root, full: root, value: null, kind: "root", depth: 0, row: 0 };
  const children = new Map();
  const rank = { hit: 0, own: 0, miss: 1 };
  for (const one of nodes) children.set(one.parent, [...(children.get(one.parent) || []), one]);
  for (const list of children.values()) list.sort((a, b) => rank[a.kind] - rank[b.kind]);
  let rows = 1;
  const place = (one) =>
    (children.get(one.node) || []).forEach((child, order) => {
      child.depth = one.depth + 1;
      child.row = order === 0 ? one.row : rows++;
      child.from = one;
      place(child);
    });
  place(start);
  return { nodes: [start, ...nodes], rows };
}

// Pixels: from row to row, a node's height, between columns, beside a node's text.
const ROW = 30;
const PILL = 23;
const GAP = 18;
const PAD = 8;

function treePicture(tree, round, root) {
  const { nodes, rows } = layout(tree, round, root);
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = `600 12.5px ${getComputedStyle(byId("tree")).fontFamily}`;
  const widths = [];
  for (const one of nodes) {
    one.width = Math.ceil(measure.measureText(one.text).width) + 2 * PAD;
    widths[one.depth] = Math.max(widths[one.depth] || 26, one.width);
  }
  const lefts = widths.reduce((made, width) => [...made, made.at(-1) + width + GAP], [1]);
  const width = lefts[widths.length] - GAP + 1;
  const height = (rows - 1) * ROW + PILL + 2;
  for (const one of nodes) {
    one.x = lefts[one.depth];
    one.y = one.row * ROW + 1 + PILL / 2;
  }
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": inWords(nodes) });
  // Shrunk a little to fit; beyond that it scrolls.
  const scale = Math.max(0.74, Math.min(1, (byId("tree").clientWidth || width) / width));
  picture.setAttribute("width", Math.round(width * scale));
  picture.setAttribute("height", Math.round(height * scale));
  const behind = nodes
    .filter((one) => one.from)
    .sort((a, b) => (a.kind === "miss" ? 0 : 1) - (b.kind === "miss" ? 0 : 1));
  picture.append(...behind.map(edge), ...nodes.map(pill));
  return picture;
}

function edge(one) {
  const x = one.from.x + one.from.width;
  const y = one.from.y;
  // All edges of a node turn in the gap before its children's column.
  const turn = one.x - GAP / 2;
  const bend = 6;
  const first = `M${x} ${y}H${turn - bend}Q${turn} ${y} ${turn} ${y + bend}`;
  const down = `${first}V${one.y - bend}Q${turn} ${one.y} ${turn + bend} ${one.y}H${one.x}`;
  return drawn("path", { class: `edge ${one.kind}`, d: one.row === one.from.row ? `M${x} ${y}H${one.x}` : down });
}

function pill(one) {
  const top = one.y - PILL / 2;
  const group = drawn(
    "g",
    { class: `node ${one.kind}` },
    drawn("title"),
    drawn("rect", { x: one.x, y: top, width: one.width, height: PILL, rx: 6 }),
  );
  group.firstChild.textContent = one.kind === "root" ? "the last token before this round" : describe(one);
  if (one.value) {
    // The pill is filled as far as the node is likely.
    const width = Math.max(2, (one.width - 3) * Math.min(1, one.value));
    group.append(
      drawn("rect", {
        class: "value",
        x: one.x + 1.5,
        y: top + 1.5,
        width: width.toFixed(1),
        height: PILL - 3,
        rx: Math.min(4.5, width / 2),
      }),
    );
  }
  const text = drawn("text", {
    x: one.x + one.width / 2,
    y: one.y,
    "text-anchor": "middle",
    "dominant-baseline": "central",
  });
  text.textContent = one.text;
  group.append(text);
  return group;
}

const KINDS = { hit: "accepted", miss: "rejected", own: "the model’s own token" };

function describe(one) {
  const chance = one.value ? `, reached with a chance of ${Math.round(100 * one.value)}%` : "";
  return `${JSON.stringify(one.full)}: ${KINDS[one.kind]}${chance}`;
}

function inWords(nodes) {
  const texts = (kind) =>
    nodes
      .filter((one) => one.kind === kind)
      .map((one) => JSON.stringify(one.full))
      .join(", ");
  const [hits, own, misses] = ["hit", "own", "miss"].map((kind) => texts(kind) || "none");
  return `Draft tree. Accepted: ${hits}. The model’s own: ${own}. Rejected: ${misses}.`;
}

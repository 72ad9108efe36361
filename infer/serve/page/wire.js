// The server's wire: requests with the key, the events of a stream, and what a chunk says of its round.
"use strict";

class ServerError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

class ConnectionLost extends Error {}

function headers(more = {}) {
  return state.key ? { ...more, Authorization: `Bearer ${state.key}` } : more;
}

async function errorOf(response) {
  let message = `The server answered ${response.status}.`;
  try {
    const body = await response.json();
    message = body.error?.message || message;
  } catch {
    // No body of ours, as from a proxy: the status has to do.
  }
  const wait = Number.parseInt(response.headers.get("Retry-After"), 10);
  return new ServerError(message, {
    status: response.status,
    retryAfter: Number.isFinite(wait) ? Math.max(1, wait) : null,
  });
}

async function getJson(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(8000), cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// The stream's objects, in order. Throws ServerError for what the server says, ConnectionLost where it ends too early.
async function* streamChat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  }).catch((error) => {
    throw error.name === "AbortError" ? error : new ConnectionLost();
  });
  if (!response.ok) throw await errorOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const parsed = JSON.parse(data);
    if (parsed.error)
      throw new ServerError(parsed.error.message || "The server reports an error.", {
        status: Number(parsed.error.code) || 500,
      });
    yield parsed;
  }
  throw new ConnectionLost();
}

// The data of server-sent events. A comment (": ping") or an empty event carries none.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ConnectionLost();
      });
      if (done) return;
      buffer += value.replaceAll("\r", "");
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What one chunk adds: a round, or null where it carries no token.
function roundOf(chunk, choice) {
  const details = choice.acceptance;
  const text = (choice.delta?.reasoning_content || choice.delta?.reasoning || "") + (choice.delta?.content || "");
  const tokens = details?.tokens || (text ? [{ id: null, text, drafted: false }] : []);
  if (!tokens.length) return null;
  return {
    tokens,
    numNodes: details?.num_nodes || 0,
    depth: details?.depth || 0,
    tree: choice.tree || chunk.tree || null,
    at: performance.now(),
  };
}

const numHits = (round) => round.tokens.filter((token) => token.drafted).length;

// Of rounds: how many tokens, how many rounds with a draft, the accepted length (null without), and tokens a second
// after the first block.
function countsOf(rounds) {
  const drafted = rounds.filter((round) => round.numNodes > 0);
  const numTokens = rounds.reduce((sum, round) => sum + round.tokens.length, 0);
  const numAccepted = drafted.reduce((sum, round) => sum + numHits(round), 0);
  const elapsed = rounds.length > 1 ? rounds.at(-1).at - rounds[0].at : 0;
  return {
    numTokens,
    numDrafts: drafted.length,
    length: drafted.length ? 1 + numAccepted / drafted.length : null,
    speed: elapsed > 0 ? (1000 * (numTokens - rounds[0].tokens.length)) / elapsed : null,
  };
}

"""Static rounds: a captured graph against the same round computed eagerly, and answers against ordinary rounds'.

In invariant mode (`Engine(exactness="bitwise")`) answers must be plain decoding's to the last token in bfloat16 too;
elsewhere a difference must be a near tie (`infer.divergence`).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.gpu.models import random_eagle3
from benchmarks.gpu.session import Session, requests_label
from benchmarks.gpu.static import RandomText
from benchmarks.gpu.tokens import Asked, check_answers, has_static_rounds, token_methods
from benchmarks.gpu.tree_attention import random_parents
from infer.drafters.base import Drafter, TreeSettings
from infer.engine import Engine
from infer.graphs.rounds import Outcome, StaticRound
from infer.machine import dtype_name
from infer.target import TargetModel
from infer.tree import ROOT

TEMPERATURES = (0.0, 1.0)
GRAPH_METHODS = ("plain", "scripted tree, half right", "random head, tree of 16")
REPLAY_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of logits, where a library chooses another order of sums while a graph is captured."""
INVARIANT_METHODS = GRAPH_METHODS[1:]
INVARIANT_ROWS = 32
LEAST_ACCEPTED = 1.2
"""Tokens a round, below which equality would prove nothing."""


def check_graphs(session: Session) -> None:
    for dtype in ("bfloat16", "float32"):
        target = session.target(dtype)
        _check_replays(session, target)
        if dtype == "bfloat16":
            _check_invariant(session, target)
        _check_engine(session, target)


# Replays.


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """What a round left: outcomes, logits of all rows, keys and values, and the states for the next draft."""

    outcomes: list[Outcome]
    logits: torch.Tensor
    storages: list[torch.Tensor]

    @classmethod
    def of(cls, static: StaticRound) -> Snapshot:
        kept = [] if static.draft is None else [static.draft.pending]
        logits = torch.cat([static.logits(place) for place in range(static.shape.batch)])
        return cls(
            outcomes=static.read(),
            logits=logits.clone(),
            storages=[storage.clone() for storage in (static.cache.keys, static.cache.values, *kept)],
        )

    def has_bits_of(self, other: Snapshot) -> bool:
        pairs = zip((self.logits, *self.storages), (other.logits, *other.storages), strict=True)
        return all(torch.equal(own, others) for own, others in pairs)

    def error(self, other: Snapshot) -> float:
        """Relative error of the logits."""
        difference = torch.linalg.vector_norm(self.logits.double() - other.logits.double())
        return float(difference / torch.linalg.vector_norm(other.logits.double()))


def _check_replays(session: Session, target: TargetModel) -> None:
    """Plain steps, trees of the host and trees of a head, for one request and several."""
    head = random_eagle3(target, draft_vocab=8192, seed=1)
    nodes, depth = 12, 4
    kinds = {"plain step": (None, 0, 0), "tree of the host": (None, nodes, 8), "tree of a head": (head, nodes, depth)}
    for name, (drafts, num_nodes, deepest) in kinds.items():
        for batch in session.sizes.graph_batches:
            label = f"graph replay, {dtype_name(target.dtype)}, {name}, {requests_label(batch)}"
            if session.is_late("graphs"):
                session.skip("graphs", f"out of time before {label}")
                continue
            text = RandomText(target, batch=batch, context=session.sizes.graph_context, max_nodes=nodes, head=drafts)
            _check_replay(session, text, label, num_nodes, deepest)


def _check_replay(session: Session, text: RandomText, label: str, nodes: int, depth: int) -> None:
    """Two sets of inputs, each computed eagerly and replayed: a graph that did not read its inputs would show."""
    static = text.round(nodes=nodes, depth=depth)
    trees = _random_tree(text.target, nodes) if text.head is None else ([], [])
    first_states = None if static.draft is None else static.draft.pending.clone()

    def restore(seed: int) -> None:
        if static.draft is not None and first_states is not None:
            static.draft.pending.copy_(first_states)
        text.place(static, seed=seed, temperature=float(seed % 2), trees=trees)

    if trees[0]:  # the first node of the first request's tree is right, so that a row is moved
        restore(1)
        static.compute()
        trees[0][0] = static.read()[0].token
    eager, replayed = [], []
    for seed in (1, 2):
        restore(seed)
        static.compute()
        eager.append(Snapshot.of(static))
    restore(1)
    replay = static.capture()
    for seed in (1, 2):
        restore(seed)
        replay()
        replayed.append(Snapshot.of(static))
    errors = [one.error(other) for one, other in zip(replayed, eager, strict=True)]
    same_bits = all(one.has_bits_of(other) for one, other in zip(replayed, eager, strict=True))
    same_outcomes = all(one.outcomes == other.outcomes for one, other in zip(replayed, eager, strict=True))
    differ = not replayed[0].has_bits_of(replayed[1])
    moves = not trees[0] or len(eager[0].outcomes[0].path) > 0
    passed = same_outcomes and differ and moves and max(errors) <= REPLAY_TOLERANCE[text.target.dtype]
    how = "equal to the bit" if same_bits else f"relative error of logits {max(errors):.1e}"
    detail = f"{how}, outcomes {'equal' if same_outcomes else 'DIFFER'}"
    session.check(label, passed, detail if differ else f"{detail}; both sets of inputs gave the same")


def _random_tree(target: TargetModel, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens, and parents as nodes; the first is a child of the root."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, target.vocab_size, size=nodes).tolist()
    return tokens, [ROOT + parent for parent in random_parents(generator, nodes)]


# Answers.


def _check_engine(session: Session, target: TargetModel) -> None:
    """Static rounds against one-token ordinary rounds of the same requests."""
    asked = _asked(session, target)
    answers = asked.answers(Engine(target, graphs=False))
    batches = [(batch, asked) for batch in session.sizes.graph_batches]
    for method in token_methods(target):
        if method.name not in GRAPH_METHODS:
            continue
        name = f"tokens in graphs, {dtype_name(target.dtype)}, {method.name}"
        if session.is_late("graphs"):
            session.skip("graphs", f"out of time before {name}")
            continue
        check_answers(session, target, method, name, answers, batches, graphs=True)


def _check_invariant(session: Session, target: TargetModel) -> None:
    """Every token of drafted answers against plain decoding's, in invariant mode, alone and together."""
    asked = _asked(session, target)
    answers = asked.answers(_invariant_engine(target, None, 1))
    num_same = num_tokens = 0
    lengths: list[int] = []
    is_static = True
    for method, batch in product(token_methods(target), session.sizes.graph_batches):
        if method.name not in INVARIANT_METHODS:
            continue
        if session.is_late("graphs"):
            session.skip("graphs", f"out of time before invariant mode, {method.name}, {requests_label(batch)}")
            continue
        engine = _invariant_engine(target, method.make(answers), batch)
        for completion, params in zip(engine.generate(asked.prompts, asked.params), asked.params, strict=True):
            answer = answers[completion.prompt_token_ids, params.temperature]
            num_same += sum(one == other for one, other in zip(completion.token_ids, answer, strict=False))
            num_tokens += max(len(completion.token_ids), len(answer))
            lengths.extend(completion.accepted_lengths[1:])
        is_static = is_static and has_static_rounds(engine)
    if not lengths:
        return
    session.equality = (num_same, num_tokens)
    detail = f"{num_same}/{num_tokens} tokens are plain decoding's, {statistics.fmean(lengths):.2f} tokens a round"
    session.check(
        f"tokens in graphs, {dtype_name(target.dtype)}, invariant mode",
        num_same == num_tokens and statistics.fmean(lengths) > LEAST_ACCEPTED and is_static,
        detail if is_static else f"{detail}; NO ROUND WAS STATIC",
    )


def _asked(session: Session, target: TargetModel) -> Asked:
    prompts = session.prompts(target)[: session.sizes.num_graph_prompts]
    return Asked.of(prompts, TEMPERATURES, max_tokens=session.sizes.graph_tokens)


def _invariant_engine(target: TargetModel, drafter: Drafter | None, batch: int) -> Engine:
    return Engine(
        target,
        drafter,
        max_requests=batch,
        exactness="bitwise",
        row_width=INVARIANT_ROWS,
        tree=TreeSettings(max_nodes=16, max_depth=8, branch=4, beam=4, adaptive=False),
        graphs=True,
    )

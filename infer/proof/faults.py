"""Faults that break the law, each planted alone: in the source of the functions that the engine calls, in a
drafter, or in the noise.

Every scenario is exact without its fault, and was chosen so that the fault shows: many small settings hide
many faults. `python -m infer.proof.faults` prints the table.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from infer import growth, noise, request, sampling, verify
from infer.cost import CostModel
from infer.proof.enumeration import (
    Code,
    Drafter,
    Key,
    Model,
    Noise,
    Processed,
    RandomModel,
    Scenario,
    Tokens,
    ToyLaw,
    coupled,
    greedy_sets,
    levels,
    sampled,
)
from infer.proof.scenarios import EXACT, keep_mass, keep_top, only_argmax, penalise
from infer.sampling import SamplingParams
from infer.tree import ROOT, DraftTree, Sampled
from infer.verify import Chance, Purpose

ROUNDING = 1e-6
"""The most that float32 rows may add to a total variation."""

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`right` and `wrong` measure the total variation from plain sampling without the fault, which is at most
    `exact`, and with it, which is at least `shows`."""

    name: str
    right: Callable[[], float]
    wrong: Callable[[], float]
    exact: float = EXACT
    shows: float = 1e-2

    def measure(self) -> Finding:
        without, planted = self.right(), self.wrong()
        return Finding(self.name, without, planted, without <= self.exact and planted >= self.shows)


class Finding(NamedTuple):
    """A fault's total variation from plain sampling, and that of the same scenario without it."""

    name: str
    without: float
    total_variation: float
    caught: bool


def edited(module: ModuleType, edits: Edits) -> Mapping[str, Any]:
    """The names of a copy of `module` with fragments of its source replaced, each of which must stand there once;
    the module's own without edits."""
    if not edits:
        return vars(module)
    source = inspect.getsource(module)
    for fragment, replacement in edits:
        assert source.count(fragment) == 1, f"found {source.count(fragment)} times, not once:\n{fragment}"
        source = source.replace(fragment, replacement)
    copy = ModuleType(f"edited_{module.__name__.replace('.', '_')}")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source, f"{copy.__name__}.py", "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return vars(copy)


def edited_code(edits: Edits) -> Code:
    """The rules and keys of an edited copy of `infer.verify`."""
    copy = edited(verify, edits)
    return Code(rules=copy["RULES"], chance=copy["KeyedChance"])


def in_source(name: str, scenario: Scenario, *edits: tuple[str, str]) -> Fault:
    """A fault in the source of `infer.verify`."""
    return Fault(
        name=name,
        right=scenario.total_variation,
        wrong=lambda: scenario.total_variation(edited_code(edits)),
    )


def in_scenario(name: str, right: Scenario, wrong: Scenario) -> Fault:
    """A fault in what a drafter says, or in the numbers."""
    return Fault(name=name, right=right.total_variation, wrong=wrong.total_variation)


Pair = tuple[Model, Model]
Process = Callable[[Tensor, Tokens], Tensor]
RowEdit = tuple[ModuleType, tuple[str, str]]


def rule_faults(small: Pair, larger: Pair, sparse: Pair) -> list[Fault]:
    """Faults in the rules, on pairs of target and draft that show them."""
    target, draft = small
    siblings = Scenario(rule="recursive", target=target, draft=sampled(draft, levels(2)), length=2)
    wide = replace(siblings, target=larger[0], draft=sampled(larger[1], levels(2)))
    independent = replace(siblings, draft=sampled(draft, levels(2), replacement=True))
    triplets = replace(wide, draft=sampled(larger[1], levels(3)))
    block = Scenario(rule="block", target=target, draft=sampled(draft, levels(1, 1, 1)), length=4)
    token = replace(block, rule="token")
    tree = Scenario(rule="traversal", target=target, draft=sampled(draft, levels(2, 2)), length=3)
    greedy = replace(siblings, rule="greedy_set", draft=greedy_sets(draft, levels(2)))
    first_draft = "_draft_row(tree, node, target_probs)"

    return [
        in_source(
            "recursive: sibling accepted with the first draft law",
            siblings,
            (
                "likeness = ratio(target_probs, draft_probs, token)\n            if",
                f"likeness = ratio(target_probs, {first_draft}, token)\n            if",
            ),
        ),
        in_source(
            "recursive: sibling's draft law not renormalised",
            triplets,
            ("return remaining / mass if mass > 0 else remaining", "return remaining"),
        ),
        in_source(
            "recursive: residual with the first draft law",
            triplets,
            (
                "target_probs = residual(target_probs, draft_probs)\n",
                f"target_probs = residual(target_probs, {first_draft})\n",
            ),
        ),
        in_source(
            "recursive: residual not renormalised",
            wide,
            (
                "return leftover / mass if mass > 0 else target_probs",
                "return leftover if mass > 0 else target_probs",
            ),
        ),
        in_source(
            "recursive: replacement from the target instead of the residual",
            siblings,
            (
                "return Verdict(tree.path(node), chance.choose(target_probs, node",
                "return Verdict(tree.path(node), chance.choose(law.probs(node), node",
            ),
        ),
        in_source(
            "recursive: siblings without replacement verified as independent",
            triplets,
            (
                "return draft_probs if tree.kind.replacement else remove(draft_probs, [token])",
                "return draft_probs",
            ),
        ),
        in_source(
            "recursive: independent siblings verified as without replacement",
            independent,
            (
                "return draft_probs if tree.kind.replacement else remove(draft_probs, [token])",
                "return remove(draft_probs, [token])",
            ),
            ("if not draft > 0:", "if False:"),
            ("return target / draft", "return target / draft if draft else math.inf"),
        ),
        in_source(
            "token: replacement from the target instead of the residual",
            token,
            ("leftover = residual(target_probs, draft_probs)\n        ", "leftover = target_probs\n        "),
        ),
        in_source(
            "block: stop at the first failure",
            block,
            (
                "            kept, emit_from = node, emit_after\n",
                "            kept, emit_from = node, emit_after\n        else:\n            break\n",
            ),
        ),
        in_source(
            "block: pass with the reach itself",
            block,
            ("passes, emit_after = share(mass, reach),", "passes, emit_after = reach,"),
        ),
        in_source(
            "block: leftover mass from the row before",
            block,
            (
                "        target_probs = law.probs(node)\n        if node + 1 == len(tree):",
                "        before = target_probs, draft_probs\n"
                "        target_probs = law.probs(node)\n        if node + 1 == len(tree):",
            ),
            (
                "passes, emit_after = share(mass, reach),",
                "passes, emit_after = share(float(excess(reach * before[0], before[1]).sum()), reach),",
            ),
        ),
        in_source(
            "block: reach clamped only where it is used",
            block,
            ("    reach, kept = 1.0, ROOT\n", "    raw, kept = 1.0, ROOT\n"),
            (
                "        reach = min(1.0, reach * ratio(target_probs, draft_probs, token))\n        if reach == 0",
                "        raw *= ratio(target_probs, draft_probs, token)\n"
                "        reach = min(1.0, raw)\n        if reach == 0",
            ),
        ),
        in_source(
            "block: residual as if the reach were 1",
            block,
            (
                "passes, emit_after = share(mass, reach), leftover if mass > 0 else target_probs",
                "passes, emit_after = share(mass, reach), residual(target_probs, draft_probs)",
            ),
        ),
        in_source(
            "traversal: leftover mass over what remains of the draft law",
            tree,
            (
                "            draft_probs = _after_rejecting(tree, draft_probs, token)\n"
                "            reach = share(mass, reach)",
                "            remaining = 1.0 - float(draft_probs[token])\n"
                "            draft_probs = _after_rejecting(tree, draft_probs, token)\n"
                "            reach = min(1.0, mass / remaining) if remaining > 0 else 1.0",
            ),
        ),
        in_source(
            "traversal: reach not updated after a rejection",
            tree,
            ("            reach = share(mass, reach)\n    if node", "    if node"),
        ),
        in_source(
            "traversal: target law not updated after a rejection",
            tree,
            ("            target_probs = leftover / mass\n", ""),
        ),
        in_source(
            "traversal: an empty residual normalised and read",
            replace(tree, target=sparse[0], draft=sampled(sparse[1], levels(2, 2))),
            ("            if mass == 0:\n                reach = 0.0\n                break\n", ""),
            ("if not target >= 0:", "if False:"),
        ),
        in_source(
            "greedy set: drawn child accepted with the whole draft law",
            greedy,
            (
                "likeness = ratio(emit_from, draft_probs, tree.tokens[drawn])",
                "likeness = ratio(emit_from, _draft_row(tree, node, emit_from), tree.tokens[drawn])",
            ),
        ),
        in_source(
            "greedy set: residual with the whole draft law",
            greedy,
            (
                "emit_from = residual(emit_from, draft_probs)",
                "emit_from = residual(emit_from, _draft_row(tree, node, emit_from))",
            ),
        ),
    ]


def drafter_faults(target: Model, draft: Model) -> list[Fault]:
    """Faults by which a tree says something wrong of how its children were drawn."""
    argmax, top_two = Processed(draft, only_argmax), Processed(draft, keep_top(2))
    chain, pair = levels(1, 1), levels(2)
    token = Scenario(rule="token", target=target, draft=sampled(draft, chain), length=3)
    siblings = Scenario(rule="recursive", target=target, draft=sampled(draft, pair), length=2)
    independent = replace(siblings, draft=sampled(draft, pair, replacement=True))
    prunable = ("return isinstance(tree.kind, OneHot | Coupled)", "return True")
    merged = sampled(draft, pair, replacement=True, tamper=lambda drawn, row: list(dict.fromkeys(drawn)))

    def tampered(name: str, tamper: Callable[[list[int], Tensor], list[int]]) -> Fault:
        tampering = sampled(draft, pair, tamper=tamper)
        return in_scenario(name, siblings, replace(siblings, draft=tampering))

    return [
        in_scenario(
            "drafter: argmax drafts tested with the softmax law",
            replace(token, draft=sampled(argmax, chain)),
            replace(token, draft=sampled(argmax, chain, said=draft)),
        ),
        in_scenario(
            "drafter: law given before its filter",
            replace(token, draft=sampled(top_two, chain)),
            replace(token, draft=sampled(top_two, chain, said=draft)),
        ),
        tampered("drafter: only the likelier child kept", lambda drawn, row: [max(drawn, key=row.__getitem__)]),
        tampered("drafter: unlikely children dropped", lambda drawn, row: [x for x in drawn if row[x] >= 0.3]),
        tampered("drafter: first child dropped when unlikely", lambda drawn, row: drawn[row[drawn[0]] < 0.3 :]),
        tampered("drafter: siblings sorted by likelihood", lambda drawn, row: sorted(drawn, key=lambda x: -row[x])),
        tampered("drafter: siblings sorted by token", lambda drawn, row: sorted(drawn)),
        in_scenario(
            "drafter: equal independent siblings merged",
            independent,
            replace(independent, draft=merged),
        ),
        Fault(
            name="growth: sampled children pruned to the most valuable",
            right=lambda: replace(siblings, draft=fitted(siblings.draft)).total_variation(),
            wrong=lambda: replace(siblings, draft=fitted(siblings.draft, prunable)).total_variation(),
        ),
    ]


def fitted(drafter: Drafter, *edits: tuple[str, str]) -> Drafter:
    """The drafter's trees, each node valued at its draft probability, cut to one node by `infer.growth`."""
    fit = edited(growth, edits)["fit"]

    def draft(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
        tree = drafter(context, chance, noise)
        assert isinstance(tree.kind, Sampled)
        rows = tree.kind.draft_probs
        values = tuple(float(rows[parent][token]) for parent, token in zip(tree.parents, tree.tokens, strict=True))
        (cut,) = fit([replace(tree, values=values)], CostModel.free(), max_nodes=[1], adaptive=False)
        return cast(DraftTree, cut)

    return draft


# What a rule is told of the target: the engine's own rows, made of a toy model's logits.


@dataclass(frozen=True)
class EngineLaw(ToyLaw):
    """Rows that `RequestLaw` and `Processor`, or edited copies of them, make of `model`'s logits."""

    model: Model = field(kw_only=True)
    params: SamplingParams = field(kw_only=True)
    law: Callable[..., Any] = field(kw_only=True)
    processor: Callable[..., Any] = field(kw_only=True)

    def probs(self, node: int) -> Tensor:
        paths = [tuple(self.tree.tokens[i] for i in self.tree.path(each)) for each in range(ROOT, len(self.tree))]
        logits = torch.stack([self.model.probs(self.context + path).log() for path in paths])  # [N + 1, V]
        stack = self.processor(self.params, prompt_ids=(), eos_ids=(), vocab_size=self.model.size)
        running = SimpleNamespace(processor=stack, output_ids=list(self.context), params=self.params)
        row: Tensor = self.law(running, self.tree, logits).probs(node)
        return row.double()


def in_rows(name: str, model: Model, draft: Model, params: SamplingParams, process: Process, *edits: RowEdit) -> Fault:
    """A fault in `infer.request` or `infer.sampling`; the law without it is `process`, written for toys alone."""
    chain = Scenario(rule="token", target=Processed(model, process), draft=sampled(draft, levels(1, 1)), length=3)

    def deviation(edits: tuple[RowEdit, ...]) -> float:
        laws, processors = (
            edited(module, tuple(edit for where, edit in edits if where is module)) for module in (request, sampling)
        )
        law = partial(EngineLaw, model=model, params=params, law=laws["RequestLaw"], processor=processors["Processor"])
        return replace(chain, law=law).total_variation()

    return Fault(name=name, right=lambda: deviation(()), wrong=lambda: deviation(edits), exact=ROUNDING)


def row_faults(target: Model, draft: Model) -> list[Fault]:
    """Faults in what the rule is told of the target."""
    top_k = (
        "        if params.top_k and params.top_k < self.vocab_size:\n"
        "            row = row.masked_fill(row < torch.topk(row, params.top_k).values[-1], -math.inf)\n"
    )
    top_p = "        if params.top_p < 1.0:\n            row = top_p_filter(row, params.top_p)\n"
    filters = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    cooler = SamplingParams(temperature=0.5)
    penalties = SamplingParams(temperature=1.0, presence_penalty=math.log(4.0))

    def filtered(row: Tensor, context: Tokens) -> Tensor:
        return keep_mass(0.5)(keep_top(2)(row, context), context)

    return [
        in_rows(
            "rows: filters in another order than plain decoding",
            target,
            draft,
            filters,
            filtered,
            (sampling, (top_k + top_p, top_p + top_k)),
        ),
        in_rows(
            "rows: penalties once a round instead of along the path",
            target,
            draft,
            penalties,
            penalise,
            (request, ("[*self.request.output_ids, *path]", "self.request.output_ids")),
        ),
        in_rows(
            "rows: temperature left out",
            target,
            draft,
            cooler,
            lambda row, context: row.square() / row.square().sum(),
            (sampling, ("if self.params.temperature != 1.0:", "if False:")),
        ),
        rounded_rows(),
    ]


def rounded_rows(vocab_size: int = 128_000) -> Fault:
    """One step of token-level rejection at a real vocabulary's size, its law summed up rather than enumerated:
    the draft's law is float32 throughout, and what the rule is told of both is rounded to bfloat16."""

    def deviation(process: Callable[[Tensor], Tensor]) -> float:
        first, second = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        target, draft = torch.softmax(3 * first, dim=-1), torch.softmax(3 * first + 0.3 * second, dim=-1)
        told_target, told_draft = process(target.float()), process(draft.float())
        ratios = [verify.ratio(told_target, told_draft, token) for token in range(vocab_size)]
        accepted = draft * torch.tensor(ratios, dtype=torch.float64).clamp_max(1)
        leftover = verify.residual(told_target, told_draft).double()
        emitted = accepted + (1 - accepted.sum()) * leftover / leftover.sum()
        return 0.5 * float((emitted - target).abs().sum())

    return Fault(
        name="rows: both laws rounded to bfloat16, 128,000 tokens",
        right=lambda: deviation(lambda row: row),
        wrong=lambda: deviation(coarse),
        exact=ROUNDING,
        shows=5e-4,
    )


def coarse(row: Tensor) -> Tensor:
    """The row, rounded to bfloat16."""
    return row.bfloat16().to(row.dtype)


def noise_faults(target: Model, draft: Model) -> list[Fault]:
    """Faults by which one random number serves twice."""
    token = Scenario(rule="token", target=target, draft=sampled(draft, levels(1, 1)), length=3)
    siblings = replace(token, rule="recursive", draft=sampled(draft, levels(2)))
    tree = replace(token, rule="traversal", draft=sampled(draft, levels(2, 1)))
    rounds = replace(token, rule="block", rounds=2, length=4)
    match = replace(token, rule="match", draft=coupled(draft, levels(2, 1)))

    def reuse(name: str, scenario: Scenario, rename: Callable[[Key], Hashable | None]) -> Fault:
        return in_scenario(f"noise: {name}", scenario, replace(scenario, rename=rename))

    def draft_accepts(key: Key) -> Hashable:
        if key.purpose == Purpose.EMIT:
            return None
        return key.node - 1 if key.purpose == Purpose.ACCEPT else key.node

    def draft_replaces(key: Key) -> Hashable:
        return None if key.purpose == Purpose.ACCEPT else key.node

    def test_replaces(key: Key) -> Hashable:
        if key.purpose == Purpose.DRAFT:
            return None
        return key.node - 1 if key.purpose == Purpose.ACCEPT else key.node

    def one_test(key: Key) -> Hashable:
        return "shared" if key.purpose == Purpose.ACCEPT else None

    def draft_of_depth(key: Key) -> Hashable:
        return ("depth", min(key.node, 0), key.trial) if key.purpose == Purpose.DRAFT else None

    def draft_of_position(key: Key) -> Hashable:
        return key.context_length + key.node if key.purpose == Purpose.DRAFT else None

    return [
        reuse("a draft's number accepts it", token, draft_accepts),
        reuse("a draft's number replaces it", token, draft_replaces),
        reuse("a test's number replaces the token", token, test_replaces),
        reuse("siblings share a test's number", siblings, one_test),
        reuse("branches share the draft numbers of a depth, traversal", tree, draft_of_depth),
        reuse("a position's draft number again in the next round, block", rounds, draft_of_position),
        in_scenario("noise: match walk tied to slots that the drafter sees", match, replace(match, slot_noise=True)),
    ]


def key_faults(target: Model, draft: Model) -> list[Fault]:
    """Faults by which keys collide: a part is left out of what the engine hashes."""
    siblings = Scenario(rule="recursive", target=target, draft=sampled(draft, levels(3), replacement=True), length=2)
    chain = replace(siblings, rule="token", draft=sampled(draft, levels(1, 1)), length=3)
    rounds = replace(chain, rule="block", rounds=2, length=4)
    match = replace(chain, rule="match", draft=coupled(draft, levels(2)), length=3)

    def collision(part: str, scenario: Scenario, fragment: str, remaining: str) -> Fault:
        return in_source(f"keys: {part} left out", scenario, (fragment, remaining))

    positions = (
        ("noise_key(_POSITION, seed, sample, attempt, position)", "noise_key(_POSITION, seed, sample, attempt)"),
    )
    return [
        collision("the round", rounds, "self.round_index, node - ROOT", "node - ROOT"),
        collision("the node", chain, "node - ROOT, int(purpose)", "int(purpose)"),
        collision("the purpose", chain, "int(purpose), trial)", "trial)"),
        collision("the trial", siblings, "int(purpose), trial)", "int(purpose))"),
        Fault(
            name="keys: the position left out of the target's own noise",
            right=match.total_variation,
            wrong=lambda: match.total_variation(Code(position_key=edited(noise, positions)["position_key"])),
        ),
    ]


_SEED = 39
"""Draws the small models. At this seed every fault shows; at most seeds some do not."""


def all_faults() -> list[Fault]:
    """Every fault, on the models that show it."""

    def pair(size: int, *, zeros: bool = False) -> Pair:
        return RandomModel(size, 2 * _SEED, zeros), RandomModel(size, 2 * _SEED + 1, zeros)

    small, larger, sparse = pair(3), pair(4), pair(3, zeros=True)
    return [
        *rule_faults(small, larger, sparse),
        *drafter_faults(*small),
        *row_faults(*larger),
        *noise_faults(*small),
        *key_faults(*small),
    ]


FAULTS = all_faults()

if __name__ == "__main__":
    print("TV      without  fault")
    for finding in (fault.measure() for fault in FAULTS):
        mark = "" if finding.caught else "  NOT CAUGHT"
        print(f"{finding.total_variation:.4f}  {finding.without:7.0e}  {finding.name}{mark}")

"""Does decoding compute what training computed? The decode loop runs over texts whose tokens are known, with every
tensor on the way recorded, and the training graph is held against it.

A drafter that knows the text takes a head's stepper down the true path at every round, and proposes a part of that
path, so that the engine commits rounds of all lengths: caches, positions, pairing of states and tokens, and what is
overwritten between rounds are the real ones. The training graph (`DraftHead.unroll`) then runs on the very states that
decoding handed to the head, in the same float32. So the two differ by rounding, or they compute different things.

Shapes: R packed rows, B requests, Q rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from heads.base import DraftHead
from heads.block import BlockHead
from heads.unroll import Batch
from infer.cost import CostModel
from infer.doctor.findings import Finding, Problem, Verdict, judged
from infer.doctor.texts import Evidence, TargetText
from infer.drafters.base import DraftLimit, Room, TreeSettings
from infer.drafters.block import BlockRound
from infer.drafters.growing import TreeGrower
from infer.drafters.spec import head_drafter
from infer.drafters.stepper import Frontier, Stepper
from infer.engine import Engine
from infer.request import Request
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import KindType

PARITY, ROUNDS = "train/decode parity", "rounds foretold"

ROUNDING = 2e-4
"""Largest difference that is rounding in float32, as a share of the largest entry of the training graph's row. What is
compared went through one layer of matrix products and one attention, by two orders of summation."""

COARSE_ROUNDING = 0.1
"""The same of heads whose states the target's layers compute twice, in half precision."""

METHODS: Mapping[str, str] = {
    "fuse": "fused features",
    "roots": "root state",
    "draft": "drafted state",
    "forward": "new state",
    "outputs": "what the LM head reads",
}
"""The steps of a head that are recorded by name; its modules are recorded by theirs."""
STATE_READ, LOGITS = "state read", "logits"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where the two computations part: the depth (from 1), the tensor, and by how much. share: of the largest entry."""

    depth: int
    tensor: str
    largest: float
    share: float
    text: int
    position: int


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """first: the shallowest depth's first tensor that differs. worst: the largest share of all that do not. calls:
    tensors that one side computed more often than the other, with both counts."""

    first: Difference | None
    worst: Difference | None
    num_rounds: int
    num_tensors: int
    num_depths: int
    calls: Mapping[str, tuple[int, int]]


@dataclass
class _Tape:
    """Rows of recorded tensors. `rows` picks, from a tensor's leading size, the row of each subject; None where the
    tensor has no row for it."""

    rows: Callable[[int], Sequence[int] | None]
    records: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2:
            return
        rows = self.rows(value.shape[0])
        if rows is not None:
            self.records.append((name, value[list(rows)].detach().clone()))

    def by_name(self) -> dict[str, list[torch.Tensor]]:
        """Recorded rows [subjects, width] in the order in which they came."""
        found: dict[str, list[torch.Tensor]] = {}
        for name, value in self.records:
            found.setdefault(name, []).append(value)
        return found


@contextmanager
def _recorded(head: DraftHead, tape: Callable[[], _Tape | None]) -> Iterator[None]:
    """Let every module and step of `head` write to the tape of the moment.

    Not those of a head that computes all depths in one pass, over rows that training and decoding lay out differently:
    what its LM head reads is all that is compared.
    """
    if isinstance(head, BlockHead):
        yield
        return

    def write(name: str, value: Any) -> None:
        current = tape()
        if current is not None:
            current.add(name, value)

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        write(name, output)

    handles = [module.register_forward_hook(partial(after, name)) for name, module in head.named_modules() if name]
    wrapped = [name for name in METHODS if callable(getattr(type(head), name, None))]
    for name in wrapped:
        vars(head)[name] = _writing(head, name, write)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in wrapped:
            del vars(head)[name]


def _writing(head: DraftHead, name: str, write: Callable[[str, Any], None]) -> Callable[..., Any]:
    method = getattr(head, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "forward" and len(args) > 1:
            write(STATE_READ, args[1])
        result = method(*args, **kwargs)
        write(METHODS[name], result[0] if isinstance(result, tuple) else result)
        return result

    return call


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    """What one request's round left: the row of its root, and the recorded tensors of each depth (one row each)."""

    root: int
    depths: list[dict[str, list[torch.Tensor]]]


@dataclass(kw_only=True, eq=False)
class _Seen:
    """What decoding showed of one text: the states that it handed to the head, and its rounds."""

    taps: list[torch.Tensor] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=list)


class _KnowingDrafter:
    """Takes a stepper down the true continuation of each text, and proposes a part of it."""

    kinds: tuple[KindType, ...] = (OneHot,)
    spent_milliseconds = 0.0

    def __init__(self, stepper: Stepper, head: DraftHead, texts: Sequence[TargetText], num_depths: int) -> None:
        self.stepper = stepper
        self.name = stepper.name
        self.taps = head.config.taps  # of heads that compute their own states too: the training graph needs them
        self.seen = [_Seen() for _ in texts]
        self.tape: _Tape | None = None
        self._texts = texts
        self._index_of = {text.params.seed: index for index, text in enumerate(texts)}
        self._num_depths = num_depths
        self._num_new: dict[Request, int] = {}

    def open(self, room: Room) -> None:
        self.stepper.open(room)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        assert states is not None
        self.seen[self._index(request)].taps.append(states.detach().clone())
        self._num_new[request] = self._num_new.get(request, 0) + len(states)
        self.stepper.observe(request, states if self.stepper.taps else None)

    def close(self, request: Request) -> None:
        self._num_new.pop(request, None)
        self.stepper.close(request)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        paths = [self._path(request) for request in requests]
        known = [self._follows(request) for request in requests]
        depths: list[list[dict[str, list[torch.Tensor]]]] = [[] for _ in requests]
        ends = torch.tensor([self._num_new.pop(request) for request in requests]).cumsum(0)
        rows_of: dict[int, list[int]] = {int(ends[-1]): (ends - 1).tolist(), len(requests): [*range(len(requests))]}
        self.tape = _Tape(rows=rows_of.get)
        draft_round = self.stepper.begin(requests, [self._num_depths] * len(requests))
        alive = list(range(len(requests)))
        for depth in range(self._num_depths):
            alive, before = [i for i in alive if known[i] and len(paths[i]) >= depth], alive
            if not alive:
                break
            if depth:
                self.tape = _Tape(rows={len(alive): [*range(len(alive))]}.get)
            frontiers = [
                Frontier(
                    request=requests[i],
                    index=i,
                    nodes=[depth - 1 if depth else ROOT],
                    tokens=paths[i][depth - 1 : depth],
                    parents=[depth - 2 if depth > 1 else ROOT] if depth else [],
                    parent_rows=[before.index(i) if depth else i],
                )
                for i in alive
            ]
            logits = draft_round.logits(frontiers, depth)
            named = self.tape.by_name()
            if isinstance(draft_round, BlockRound):
                named = {METHODS["outputs"]: [draft_round.outputs(frontiers, depth)]}
            for place, i in enumerate(alive):
                # What `begin` recorded has a row a request; what came later, one a frontier.
                kept = {
                    name: [value[place if len(value) == len(alive) else i] for value in values]
                    for name, values in named.items()
                }
                depths[i].append({**kept, LOGITS: [logits[place].clone()]})
        self.tape = None
        for i, request in enumerate(requests):
            if depths[i]:
                self.seen[self._index(request)].rounds.append(_Round(root=request.num_tokens - 2, depths=depths[i]))
        return [
            DraftTree.chain(tuple(path[: min(self._length(request), limit.max_depth, limit.max_nodes)]))
            for request, path, limit in zip(requests, paths, limits, strict=True)
        ]

    def _index(self, request: Request) -> int:
        return self._index_of[request.seed]

    def _path(self, request: Request) -> list[int]:
        """The true tokens after the last one emitted."""
        text = self._texts[self._index(request)]
        start = request.num_tokens
        return list(text.token_ids[start : start + self._num_depths])

    def _follows(self, request: Request) -> bool:
        """Whether the answer is still the text's: rounding may have made it another at a near tie."""
        text = self._texts[self._index(request)]
        return tuple(request.tokens_from(0)) == text.token_ids[: request.num_tokens]

    def _length(self, request: Request) -> int:
        """Drafts to propose: from round to round another number, so that rounds of all lengths are committed."""
        return len(request.accepted_lengths) % (self._num_depths + 1)


def compare(
    target: TargetModel,
    head: DraftHead,
    evidence: Evidence,
    numbers: Sequence[int],
    *,
    num_depths: int,
) -> ParityResult:
    """Decode the texts of those `numbers` with `head` as the draft, and hold every recorded tensor against the training
    graph's."""
    texts = [evidence.texts[number] for number in numbers]
    stepper = _stepper_of(head, target)
    drafter = _KnowingDrafter(stepper, head, texts, num_depths)
    engine = Engine(
        target, drafter, max_requests=len(texts), tree=TreeSettings.chain(num_depths), cost=CostModel.free()
    )
    # The answers are as long as they were, whether a token ended them or the limit.
    params = [replace(text.params, max_tokens=len(text.answer)) for text in texts]
    with _recorded(head, lambda: drafter.tape):
        engine.generate([text.prompt for text in texts], params)
    computes_states = not stepper.taps and target.dtype != torch.float32  # in the target's dtype, by its own layers
    comparison = _Comparison(num_depths=num_depths, rounding=COARSE_ROUNDING if computes_states else ROUNDING)
    taps = evidence.batch(head.config.taps).taps.split(evidence.lengths)
    for place, (number, seen) in enumerate(zip(numbers, drafter.seen, strict=True)):
        if seen.rounds:
            comparison.add(number, head, texts[place], taps[number], seen)
    return comparison.result()


def _stepper_of(head: DraftHead, target: TargetModel) -> Stepper:
    drafter = head_drafter(head, target, name="doctor")
    assert isinstance(drafter, TreeGrower)
    return drafter.stepper


class _Comparison:
    """Gathers differences between rounds of decoding and the training graph."""

    def __init__(self, *, num_depths: int, rounding: float) -> None:
        self.num_depths = num_depths
        self.rounding = rounding
        self.num_rounds = 0
        self.num_tensors = 0
        self.worst: Difference | None = None
        self.differing: dict[tuple[int, int], Difference] = {}  # (depth, place of the tensor) -> the largest
        self.calls: dict[str, tuple[int, int]] = {}

    def add(self, index: int, head: DraftHead, text: TargetText, states: torch.Tensor, seen: _Seen) -> None:
        """`states` [T, taps * H] of the whole text, for the rows whose states decoding had no use for."""
        roots = [one.root for one in seen.rounds]
        taps = torch.cat(seen.taps)
        taps = torch.cat([taps.to(states), states[len(taps) :]])
        trained = _training_rows(head, text, taps, roots, [len(one.depths) for one in seen.rounds])
        for place, one in enumerate(seen.rounds):
            self.num_rounds += 1
            for depth, decoded in enumerate(one.depths):
                self._compare(index, one.root, depth, trained[place][depth], decoded)

    def _compare(
        self,
        index: int,
        root: int,
        depth: int,
        trained: Mapping[str, list[torch.Tensor]],
        decoded: Mapping[str, list[torch.Tensor]],
    ) -> None:
        for order, (name, values) in enumerate(trained.items()):
            others = decoded.get(name)
            if others is None:
                continue
            if len(values) != len(others):
                self.calls.setdefault(name, (len(values), len(others)))
            # Where one side computed a tensor more often, the last of each is what went on.
            for value, other in zip(reversed(values), reversed(others), strict=False):
                self.num_tensors += 1
                self._note(index, root, depth, order, name, value.float(), other.float())

    def _note(
        self, index: int, root: int, depth: int, order: int, name: str, value: torch.Tensor, other: torch.Tensor
    ) -> None:
        if value.shape != other.shape:
            largest, share = float("inf"), float("inf")
        else:
            largest = float((value - other).abs().max())
            share = largest / max(float(value.abs().max()), 1e-6)
            share = share if share == share else float("inf")
        one = Difference(depth=depth + 1, tensor=name, largest=largest, share=share, text=index, position=root)
        if share > self.rounding:
            before = self.differing.get((depth, order))
            if before is None or before.share < share:
                self.differing[depth, order] = one
        elif self.worst is None or self.worst.share < share:
            self.worst = one

    def result(self) -> ParityResult:
        return ParityResult(
            first=self.differing[min(self.differing)] if self.differing else None,
            worst=self.worst,
            num_rounds=self.num_rounds,
            num_tensors=self.num_tensors,
            num_depths=self.num_depths,
            calls=self.calls,
        )


@torch.inference_mode()
def _training_rows(
    head: DraftHead, text: TargetText, taps: torch.Tensor, roots: Sequence[int], num_depths: Sequence[int]
) -> list[list[dict[str, list[torch.Tensor]]]]:
    """Of each root and depth, what the training graph computes there."""
    length = len(text.token_ids)
    device = head.device
    states = taps.to(device=device, dtype=head.dtype)
    batch = Batch(
        token_ids=torch.tensor(text.token_ids, device=device),
        loss_mask=torch.ones(length, dtype=torch.bool, device=device),
        lengths=(length,),
        taps=states,
        last=states.new_zeros((length, head.config.hidden_size)),  # a matter of losses alone
        log_normalizer=states[:, 0],
    )
    plan = [
        torch.tensor([root for root, depths in zip(roots, num_depths, strict=True) if depths > step], device=device)
        for step in range(max(num_depths))
    ]
    result: list[list[dict[str, list[torch.Tensor]]]] = [[] for _ in roots]
    tape: _Tape | None = None
    with _recorded(head, lambda: tape):
        steps = head.unroll(batch, plan)
        for rows in plan:
            tape = _Tape(rows={len(rows): [*range(len(rows))], length: rows.tolist()}.get)
            answer = next(steps)
            named = tape.by_name()
            if isinstance(head, BlockHead):
                named = {METHODS["outputs"]: [answer.states]}
            alive = [roots.index(row) for row in rows.tolist()]
            logits = answer.logits()
            for place, i in enumerate(alive):
                kept = {name: [value[place] for value in values] for name, values in named.items()}
                result[i].append({**kept, LOGITS: [logits[place]]})
    return result


@dataclass(frozen=True, kw_only=True)
class RoundsResult:
    """Rounds of greedy decoding against the lengths that the training graph foretells. wrong: (text, position of the
    last token before the round, length foretold, length seen). num_near_ties: rounds that differ where the head's two
    most likely tokens are nearly as likely, which rounding decides. num_other: answers that left the text."""

    num_rounds: int
    num_near_ties: int
    num_other: int
    wrong: tuple[tuple[int, int, int, int], ...]


NEAR_TIE = 1e-3
"""Two logits that differ by less than this share of the largest are a near tie."""


def compare_rounds(
    target: TargetModel, head: DraftHead, evidence: Evidence, logits: Sequence[torch.Tensor], numbers: Sequence[int]
) -> RoundsResult:
    """Decode the greedy texts of those `numbers` with a plain chain of drafts, as users do, and compare each round's
    length with what `logits` (the training graph's, of every step, at the rows of `evidence.plan`) foretell."""
    num_depths = len(logits)
    drafter = head_drafter(head, target, name="doctor")
    engine = Engine(
        target, drafter, max_requests=len(numbers), tree=TreeSettings.chain(num_depths), cost=CostModel.free()
    )
    texts = [evidence.texts[number] for number in numbers]
    completions = engine.generate(
        [text.prompt for text in texts], [replace(text.params, max_tokens=len(text.answer)) for text in texts]
    )
    matched, margins = _matched(head, evidence, logits)
    num_rounds = num_near_ties = num_other = 0
    wrong: list[tuple[int, int, int, int]] = []
    for number, text, completion in zip(numbers, texts, completions, strict=True):
        if completion.token_ids != text.answer:
            num_other += 1
            continue
        position = text.num_prompt  # of the last token emitted; the prefill emits the answer's first
        for seen in completion.accepted_lengths[1:]:
            row = evidence.starts[number] + position - 1
            accepted = next((step for step in range(num_depths) if not matched[step].get(row)), num_depths)
            foretold = min(accepted + 1, len(text.token_ids) - 1 - position)
            num_rounds += 1
            if foretold != seen:
                parting = min(foretold, seen) - 1
                if margins[parting].get(row, 0.0) < NEAR_TIE:
                    num_near_ties += 1
                else:
                    wrong.append((number, position, foretold, seen))
            position += seen
    return RoundsResult(num_rounds=num_rounds, num_near_ties=num_near_ties, num_other=num_other, wrong=tuple(wrong))


def _matched(
    head: DraftHead, evidence: Evidence, logits: Sequence[torch.Tensor]
) -> tuple[list[dict[int, bool]], list[dict[int, float]]]:
    """Of each step and packed row: whether the draft is the text's own token, and its margin over the next likeliest
    as a share of the largest logit."""
    token_ids = torch.tensor([token for text in evidence.texts for token in text.token_ids])
    matched, margins = [], []
    for step, rows in enumerate(evidence.plan(len(logits))):
        top = logits[step].topk(min(2, logits[step].shape[-1]), dim=-1)
        drafted = head.target_ids[top.indices[:, 0]].cpu()
        rows = rows.cpu()
        right = drafted == token_ids[rows + 2 + step]
        gap = (top.values[:, 0] - top.values[:, -1]) / logits[step].abs().amax(-1).clamp_min(1e-6)
        matched.append(dict(zip(rows.tolist(), right.tolist(), strict=True)))
        margins.append(dict(zip(rows.tolist(), gap.tolist(), strict=True)))
    return matched, margins


def check_parity(result: ParityResult) -> Finding:
    """Whether decoding computes what training did, at every depth."""
    figures: dict[str, Any] = {
        "num_rounds": result.num_rounds,
        "num_tensors": result.num_tensors,
        "num_depths": result.num_depths,
        "first": None if result.first is None else asdict(result.first),
        "worst": None if result.worst is None else asdict(result.worst),
        "calls": {name: list(counts) for name, counts in result.calls.items()},
    }
    problems = []
    if result.first is not None:
        one = result.first
        often = "".join(
            f"; {name} was computed {decoded} time{'' if decoded == 1 else 's'} in decoding and {trained} in training"
            for name, (trained, decoded) in result.calls.items()
        )
        finding = (
            f"decoding and training part at depth {one.depth}: {one.tensor} differs by up to {one.largest:.2g} "
            f"({one.share:.1%} of its largest entry), as at position {one.position} of text {one.text}{often}"
        )
        advice = "this is a fault of the program and not of the head: what is served is not what was trained"
        problems.append(Problem(verdict=Verdict.FAIL, finding=finding, advice=advice))
    elif not result.num_tensors:
        finding = "no round could be compared: the answers left the texts at once"
        problems.append(Problem(verdict=Verdict.WARNING, finding=finding, advice="try --dtype float32"))
    worst = 0.0 if result.worst is None else result.worst.share
    fine = (
        f"{result.num_tensors} tensors of {result.num_rounds} rounds at depths 1 to {result.num_depths} are the "
        f"training graph's: the largest difference is {worst:.1g} of the largest entry"
    )
    return judged(PARITY, fine, problems, figures)


def check_rounds(result: RoundsResult) -> Finding:
    """Whether rounds end where the training graph says that they should."""
    figures = asdict(result)
    problems = []
    if result.wrong:
        number, position, foretold, seen = result.wrong[0]
        finding = (
            f"{len(result.wrong)} of {result.num_rounds} rounds have another length than the training graph foretells: "
            f"first text {number}, behind position {position}: {foretold} tokens foretold, {seen} decoded"
        )
        advice = "this is a fault of the program and not of the head: what is served is not what was trained"
        problems.append(Problem(verdict=Verdict.FAIL, finding=finding, advice=advice))
    elif not result.num_rounds:
        finding = "no greedy answer could be compared: all left their texts"
        problems.append(Problem(verdict=Verdict.WARNING, finding=finding, advice="try --dtype float32"))
    ties = f" ({result.num_near_ties} but for near ties)" if result.num_near_ties else ""
    fine = f"all {result.num_rounds} rounds of greedy decoding have the length that the training graph foretells{ties}"
    return judged(ROUNDS, fine, problems, figures)

"""Times of the engine with the target at hand: forwards, rounds, answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch

from benchmarks.gpu.machine import busy_ms, median_ms, synchronize
from benchmarks.gpu.models import random_head
from benchmarks.gpu.session import Session, requests_label
from benchmarks.gpu.tokens import seeded_params, token_ids
from infer.cost import CostModel
from infer.drafters.base import Drafter, DraftLimit, TreeSettings
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import Script, ScriptedDrafter
from infer.engine import Engine
from infer.request import Request
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot


def measure_speed(session: Session) -> None:
    target = session.target("bfloat16")
    floor = session.floor_ms(target.num_weight_bytes)
    session.machine["target_weight_mb"] = round(target.num_weight_bytes / 1e6, 1)
    cost = measure_forwards(session, target, floor)
    measure_rounds(session, target, floor)
    measure_decoding(session, target, floor, cost)


def measure_forwards(session: Session, target: TargetModel, floor: float | None) -> CostModel:
    """The bare forward of one request, by width."""
    widths = (1, 8, 16, 32)
    times = []
    for width in widths:
        step = forward_step(target, num_requests=1, width=width, context=session.sizes.context)
        times.append(median_ms(step, session.device, repeats=session.sizes.repeats))
        busy = busy_ms(step, session.device)
        detail = "" if busy is None else f"device busy for {busy:.2f} ms"
        session.time(f"target forward, {width} rows", times[-1], "ms", floor=floor, detail=detail)
    rising = [max(times[: index + 1]) for index in range(len(times))]  # a dip is noise
    return CostModel(widths=widths, milliseconds=tuple(rising))


def forward_step(target: TargetModel, *, num_requests: int, width: int, context: int) -> Callable[[], object]:
    """A forward of `width` new rows of each of some requests behind `context` tokens, over a random cache."""
    cache = target.new_cache(num_slots=num_requests, num_columns=context + width)
    generator = torch.Generator(device=target.device).manual_seed(0)
    for storage in (cache.keys, cache.values):
        storage.normal_(generator=generator)
    groups = [RowGroup(slot=slot, prefix=context, tokens=[7] * width) for slot in range(num_requests)]
    return lambda: target.forward(groups, cache)


def measure_rounds(session: Session, target: TargetModel, floor: float | None) -> None:
    """Whole rounds of the engine, ordinary ones and in graphs: draft, forward, verification and commit, with drafts
    that are always wrong."""
    drafts: dict[str, tuple[Drafter | None, TreeSettings]] = {"plain step": (None, TreeSettings(adaptive=False))}
    for num_nodes in (16, 32):
        tree = TreeSettings(max_nodes=num_nodes, max_depth=4, branch=4, beam=num_nodes // 4, adaptive=False)
        drafts[f"round, {num_nodes} nodes"] = (ScriptedDrafter(wrong_tree(num_nodes)), tree)
        drafts[f"round, {num_nodes} nodes, with a draft head"] = (random_head(target, seed=num_nodes), tree)
    prompts = (session.prompts(target) * 8)[:8]
    for num_requests, in_graphs in product((1, 8), (True, False)):
        params = seeded_params(prompts[:num_requests], 0.0, session.sizes.speed_tokens // 3)
        for draft, (drafter, tree) in drafts.items():
            name = f"{draft}, {requests_label(num_requests)}{', in graphs' if in_graphs else ''}"
            if session.is_late("speed"):
                session.skip("speed", f"out of time before {name}")
                continue
            engine = Engine(target, drafter, max_requests=num_requests, tree=tree, graphs=in_graphs)
            milliseconds = round_ms(engine, prompts[:num_requests], params, session.device)
            session.time(name, milliseconds, "ms", floor=floor)


def wrong_tree(num_nodes: int) -> Script:
    """Chains of four below the root. Token 0 is what no answer here consists of; if it were, rounds would be fewer."""
    parents = tuple(ROOT if node % 4 == 0 else node - 1 for node in range(num_nodes))

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        if limit.max_depth < 4:
            return DraftTree.empty()
        return DraftTree(tokens=(0,) * num_nodes, parents=parents, kind=OneHot())

    return script


def round_ms(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], device: torch.device
) -> float:
    """Median milliseconds of a round, over the rounds in which every request still runs; prefill not counted."""
    engine.generate(prompts, params)  # room is made and kernels are loaded
    requests = engine.submit(prompts, params)
    engine.step()
    times = []
    while all(request.finish_reason is None for request in requests):
        synchronize(device)
        start = time.perf_counter()
        engine.step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    engine.abort()
    return 1e3 * statistics.median(times[:-4] or times)  # the last rounds have no room for a whole tree


def measure_decoding(session: Session, target: TargetModel, floor: float | None, cost: CostModel) -> None:
    """Tokens a second over whole answers, prefill included, in the rounds that an engine has by default."""
    prompts = (session.prompts(target) * 8)[:8]
    params = seeded_params(prompts, 0.0, session.sizes.speed_tokens)
    answers = dict(zip(map(tuple, prompts), token_ids(Engine(target, max_requests=1), prompts, params), strict=True))

    def perfect(request: Request, limit: DraftLimit) -> DraftTree:
        start = len(request.output_ids)
        return DraftTree.chain(answers[request.prompt_ids][start : start + min(4, limit.max_depth)])

    methods: dict[str, tuple[Drafter | None, TreeSettings]] = {
        "plain decoding": (None, TreeSettings(adaptive=False)),
        "n-gram drafts": (NgramDrafter(), TreeSettings(max_nodes=16)),
        "UPPER BOUND: perfect drafts of depth 4": (ScriptedDrafter(perfect), TreeSettings.chain(4)),
    }
    for num_requests in (1, 8):
        limit = None if floor is None else 1e3 * num_requests / floor
        for name, (drafter, tree) in methods.items():
            if session.is_late("speed"):
                session.skip("speed", f"out of time before {name}")
                continue
            engine = Engine(target, drafter, max_requests=num_requests, tree=tree, cost=cost)
            rate, accepted = decoding_rate(engine, prompts[:num_requests], params[:num_requests], session.device)
            detail = f"{accepted:.2f} tokens a round; the floor takes one"
            session.time(f"{name}, {requests_label(num_requests)}", rate, "tokens/s", floor=limit, detail=detail)


def decoding_rate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], device: torch.device
) -> tuple[float, float]:
    """(median tokens a second of three runs after one untimed, tokens a round)."""
    engine.generate(prompts, params)
    rates = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        completions = engine.generate(prompts, params)
        synchronize(device)
        rates.append(sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - start))
    lengths = [length for completion in completions for length in completion.accepted_lengths[1:]]
    return statistics.median(rates), statistics.fmean(lengths)

"""A head trained here, on text that the target writes itself, and what it is worth: plain against speculative decoding
of held-out prompts, both in graphs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.session import CannotRun, Session, requests_label
from benchmarks.gpu.speed import decoding_rate
from benchmarks.gpu.training import TrainedHead, TrainingSizes, train_head
from infer.drafters.base import TreeSettings
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel

DECODING_SECONDS = 25.0
"""Kept for decoding at the end, whatever training would like."""
LEAST_SECONDS = 20.0
TREE_DEPTH = 6


def train_and_decode(session: Session) -> None:
    target = session.target("bfloat16")
    seconds = session.seconds_left("training") - DECODING_SECONDS
    if session.sizes.train_tokens is None and seconds < LEAST_SECONDS:
        raise CannotRun(f"{max(0.0, seconds):.0f} s are left for training: {LEAST_SECONDS:.0f} would show something")
    trained = train_head(
        target,
        device=session.device,
        seconds=None if session.sizes.train_tokens is not None else seconds,
        tokens=session.sizes.train_tokens,
        sizes=TrainingSizes.reduced() if session.sizes.train_tokens is not None else TrainingSizes(),
        notice=session.note,
    )
    _report_training(session, trained)
    for batch, nodes in session.sizes.trained_batches.items():
        for temperature in session.sizes.trained_temperatures:
            if session.seconds_left("training") < 0:
                session.skip("training", f"out of time before decoding {requests_label(batch)}, T = {temperature:g}")
                continue
            _compare(session, target, trained, batch, nodes, temperature)


def _compare(
    session: Session, target: TargetModel, trained: TrainedHead, batch: int, nodes: int, temperature: float
) -> None:
    """Plain and speculative answers to the same prompts, the same seeds."""
    prompts = _cycled(trained.prompts, max(batch, session.sizes.num_trained_prompts))
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=session.sizes.speed_tokens)
        for index in range(len(prompts))
    ]
    tree = TreeSettings(max_nodes=nodes, max_depth=TREE_DEPTH, branch=4, beam=4, adaptive=False)
    rates: dict[str, float] = {}
    for name, drafter in (("plain", None), ("speculative", trained.drafter)):
        engine = Engine(target, drafter, max_requests=batch, tree=tree, graphs=True)
        rates[name], accepted = decoding_rate(engine, prompts, params, session.device)
        speedup = rates[name] / rates["plain"]
        detail = "" if drafter is None else f"{accepted:.2f} tokens a round, {speedup:.2f} x plain"
        session.time(
            f"trained head, {name}, {requests_label(batch)}, T = {temperature:g}",
            rates[name],
            "tokens/s",
            detail=detail,
            figures={
                "what": f"{name} decoding",
                "batch": batch,
                "nodes": 0 if drafter is None else nodes,
                "temperature": temperature,
                "tokens_per_round": accepted,
                "speedup": speedup,
            },
        )


def _cycled(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    return [prompts[index % len(prompts)] for index in range(count)]


def _report_training(session: Session, trained: TrainedHead) -> None:
    figures = trained.figures
    detail = (
        f"{figures['tokens']:,.0f} tokens seen, loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}; "
        f"its text was written at {figures['writing_tokens_per_second']:,.0f} tokens/s"
    )
    session.time(
        "training an EAGLE-3 head",
        figures["training_tokens_per_second"],
        "tokens/s",
        detail=detail,
        figures={"what": "training", **figures},
    )

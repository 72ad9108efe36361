"""Whether the project's targets for GPUs were reached, from what a run found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.gpu.findings import Timing, Verdict
from benchmarks.gpu.session import Session

SHAPE = "8B"
FLOOR_SHARE = 0.80
ROUND_RATIO = 1.45
NODES, DEPTH = 32, 6


def verdicts(session: Session) -> list[Verdict]:
    """At every context that was measured: the worst of them counts."""
    return [_plain_step(session.timings), _round(session.timings), _equality(session)]


def _plain_step(timings: Sequence[Timing]) -> Verdict:
    shares = {
        int(timing.figures["context"]): timing.floor / timing.value
        for timing in _at_batch_1(timings, "plain step")
        if timing.floor is not None
    }
    return _judge(
        f"a plain step of {SHAPE} shapes reaches {FLOOR_SHARE:.0%} of the memory floor, batch 1",
        shares,
        is_reached=lambda share: share >= FLOOR_SHARE,
        text=lambda share: f"{share:.1%}",
    )


def _round(timings: Sequence[Timing]) -> Verdict:
    ratios = {
        int(timing.figures["context"]): float(timing.figures["ratio"])
        for timing in _at_batch_1(timings, "round")
        if (timing.figures["nodes"], timing.figures["depth"]) == (NODES, DEPTH)
    }
    return _judge(
        f"a round of {NODES} nodes, depth {DEPTH}, takes at most {ROUND_RATIO} plain steps of {SHAPE} shapes, batch 1",
        ratios,
        is_reached=lambda ratio: ratio <= ROUND_RATIO,
        text=lambda ratio: f"{ratio:.3f}",
    )


def _equality(session: Session) -> Verdict:
    num_same, num_tokens = session.equality
    target = "in invariant mode every token is plain decoding's, in bfloat16"
    if not num_tokens:
        return Verdict(target=target, status="not measured", value="")
    status = "reached" if num_same == num_tokens else "missed"
    return Verdict(target=target, status=status, value=f"{num_same} of {num_tokens} tokens")


def _at_batch_1(timings: Sequence[Timing], what: str) -> list[Timing]:
    wanted = (what, SHAPE, 1)
    return [each for each in timings if tuple(map(each.figures.get, ("what", "shape", "batch"))) == wanted]


def _judge(
    target: str,
    by_context: dict[int, float],
    *,
    is_reached: Callable[[float], bool],
    text: Callable[[float], str],
) -> Verdict:
    if not by_context:
        return Verdict(target=target, status="not measured", value="")
    status = "reached" if all(map(is_reached, by_context.values())) else "missed"
    value = ", ".join(f"{text(found)} at context {context}" for context, found in sorted(by_context.items()))
    return Verdict(target=target, status=status, value=value)

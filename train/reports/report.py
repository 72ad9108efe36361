"""A run in a few lines of text, each figure with its definition; several runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.reports.evaluation import verification_in
from train.reports.scaling import outlooks_across, outlooks_of_run
from train.reports.story import Record, Story


def describe_run(folder: Path) -> str:
    """The run, finished or not, in a few lines."""
    return "\n".join(_lines(Story.read(folder)))


def describe_runs(folders: Sequence[Path]) -> str:
    """Runs of different data sizes, and what still more data would give."""
    stories = [Story.read(folder) for folder in folders]
    lines = []
    for story in stories:
        best, amount = story.best, story.unique_label_tokens
        length = "nothing evaluated" if best is None else f"accepted length {_with_error(best)}"
        how = verification_in(best or {})
        length += " (simulated, from the training graph)" if best is not None and best.get("simulated") else ""
        length += f" ({how})" if how else ""
        length += "".join(f"; warning: {warning}" for warning in story.warnings)
        lines.append(f"{story.name}: {'?' if amount is None else f'{amount:,.0f}'} unique label tokens, {length}")
    try:
        outlooks = outlooks_across(stories)
        lines += [*(outlook.describe() for outlook in outlooks), f"  ({outlooks[0].caveat})"]
    except ValueError as error:
        lines.append(f"no prediction: {error}")
    return "\n".join(lines)


def report_values(folder: Path) -> dict[str, Any]:
    """What `headstart report --json` writes: the summary, as far as there is one, and what the report adds to it."""
    story = Story.read(folder)
    return {
        "name": story.name,
        "status": story.status,
        **{
            name: value
            for name, value in story.position.items()
            if name in ("step", "epoch", "tokens", "train_seconds")
        },
        "data": dict(story.data),
        "best": story.best and dict(story.best),
        **story.summary,
        "resumed_at": story.resumed_at,
        "last": story.last and dict(story.last),
        "time_split": story.time_split(),
        "outlook": [outlook.to_dict() for outlook in outlooks_of_run(story)],
        "warnings": story.warnings,
    }


def comparison_values(folders: Sequence[Path]) -> dict[str, Any]:
    """What `headstart report RUN RUN ... --json` writes."""
    stories = [Story.read(folder) for folder in folders]
    runs = [
        {
            "name": story.name,
            "status": story.status,
            "unique_label_tokens": story.unique_label_tokens,
            "accepted_length": None if story.best is None else story.best["accepted_length"],
        }
        for story in stories
    ]
    try:
        return {"runs": runs, "outlook": [outlook.to_dict() for outlook in outlooks_across(stories)]}
    except ValueError as error:
        return {"runs": runs, "outlook": [], "reason": str(error)}


def compare_best_and_last(story: Story) -> str | None:
    """Whether training on made the head worse; None before the first evaluation."""
    best, last = story.best, story.last
    if best is None or last is None:
        return None
    if best["step"] == last["step"]:
        return f"the last head is the best one (step {best['step']})"
    change = last["accepted_length"] / best["accepted_length"] - 1
    error = best.get("standard_error")
    verdict = ""
    if error is not None:
        within = best["accepted_length"] - last["accepted_length"] <= error
        verdict = "; within the noise" if within else "; training on made it worse: use best/, and stop earlier"
    return (
        f"last head: step {last['step']}, accepted length {_with_error(last)}, {change:+.1%} against the best{verdict}"
    )


def _lines(story: Story) -> Iterator[str]:
    position = story.position
    epochs = "" if position.get("epoch") is None else f" ({position['epoch']:.1f} epochs)"
    yield (
        f"{story.name}: {story.status} after {position['step']} steps, "
        f"{position.get('train_seconds', 0.0) / 60:.1f} min, {position.get('tokens', 0):,} token visits{epochs}"
        + (f", resumed at step {', '.join(map(str, story.resumed_at))}" if story.resumed_at else "")
    )
    if story.data:
        coverage, size = story.fact("label_coverage"), story.fact("draft_vocab_size")
        vocabulary = "" if coverage is None else f", {coverage:.1%} of these in the draft vocabulary of {size:,}"
        yield f"data: {story.data.get('rows', 0)} rows, {story.data.get('label_tokens', 0):,} labels{vocabulary}"
    if story.best is not None:
        yield from _best_lines(story, story.best)
    else:
        yield "nothing was evaluated yet"
    split = story.time_split()
    if split:
        yield "training time: " + ", ".join(f"{name} {share:.0%}" for name, share in split.items())
    outlooks = outlooks_of_run(story)
    yield from (outlook.describe() for outlook in outlooks)
    if outlooks:
        yield f"  ({outlooks[0].caveat})"
    yield from (f"warning: {warning}" for warning in story.warnings)


def _best_lines(story: Story, best: Record) -> Iterator[str]:
    how = (
        "on held-out text, simulated from the training graph"
        if best.get("simulated")
        else f"on held-out prompts, by the decode loop drafting a {best.get('shape', 'chain')}"
        + ("" if best.get("rule", "match") == "match" else f", verified by rule {best['rule']}")
    )
    yield f"best head: step {best['step']}, {how}"
    acceptance = best["acceptance"]
    if acceptance.get("definition"):
        yield f"  {acceptance['definition']}"
    errors = best.get("standard_errors", {})
    for temperature, measured in acceptance["by_temperature"].items():
        shares = " ".join(f"{share:.2f}" for share in measured["by_position"])
        error = errors.get(f"{float(temperature):g}")
        yield (
            f"  temperature {float(temperature):g}: {measured['accepted_length']:.2f}"
            f"{'' if error is None else f' ± {error:.2f}'} over {measured['num_rounds']} rounds; "
            f"share of rounds accepted by draft position {shares}"
        )
    agreement = " ".join(f"{share:.3f}" for share in best.get("agreement", ()))
    yield f"  agreement with the target's most likely token on held-out text, by depth: {agreement}"
    comparison = compare_best_and_last(story)
    if comparison is not None:
        yield comparison


def _with_error(record: Record) -> str:
    error = record.get("standard_error")
    return f"{record['accepted_length']:.3f}" + ("" if error is None else f" ± {error:.3f}")

"""What `peers.py` found: rows of medians and ratios, one table, and the lines that a reader needs beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers_engines import Answer
from infer.evaluate import DEFINITION
from infer.machine import NOISY_LOAD

STOCK, PLAIN = "stock", "plain"
IDLE_SHARE = 0.05
"""Above this share of a core, engines that should have been idle disturbed the one that was measured."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How every method answered one prompt at one temperature. idle_shares: what the processes of all other methods
    took meanwhile, in cores."""

    index: int
    domain: str
    temperature: float
    by_method: Mapping[str, Answer]
    idle_shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one temperature. None: not defined for it, or what it is held against was not measured.

    Speeds and ratios are medians over prompts of one prompt's figure, prefill included. own: the same engine without a
    draft (`baseline`).
    """

    method: str
    baseline: str
    temperature: float
    weights: str
    num_prompts: int
    num_tokens: int
    tokens_per_second: float
    ratio_to_stock: float | None
    ratio_to_plain: float | None
    ratio_to_own: float | None
    accepted_length: float | None
    identical_to_plain: float | None
    identical_to_own: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was measured; `to_dict` is the file that --json writes. skipped: why a method is not in it."""

    machine: Mapping[str, Any]
    target: str
    head: str
    settings: Mapping[str, Any]
    versions: Mapping[str, Mapping[str, str]]
    rows: Sequence[Row]
    answers: Sequence[Answers]
    skipped: Mapping[str, str]
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        answers = [
            {
                "index": each.index,
                "domain": each.domain,
                "temperature": each.temperature,
                "idle_shares": dict(each.idle_shares),
                "by_method": {method: asdict(answer) for method, answer in each.by_method.items()},
            }
            for each in self.answers
        ]
        return {
            "machine": dict(self.machine),
            "target": self.target,
            "head": self.head,
            "settings": dict(self.settings),
            "definition": DEFINITION,
            "versions": {method: dict(each) for method, each in self.versions.items()},
            "results": [asdict(row) for row in self.rows],
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "answers": answers,
        }


def make_rows(
    answers: Sequence[Answers], *, baselines: Mapping[str, str], weights: Mapping[str, str]
) -> tuple[Row, ...]:
    """A row for each temperature and method of `baselines` that answered every prompt."""
    rows = []
    for temperature in dict.fromkeys(each.temperature for each in answers):
        some = [each for each in answers if each.temperature == temperature]
        rows += [
            _row(method, baseline, some, weights[method])
            for method, baseline in baselines.items()
            if all(method in each.by_method for each in some)
        ]
    return tuple(rows)


def _row(method: str, baseline: str, answers: Sequence[Answers], weights: str) -> Row:
    own = [each.by_method[method] for each in answers]
    temperature = answers[0].temperature

    def others(name: str) -> list[Answer] | None:
        found = [each.by_method[name] for each in answers if name in each.by_method]
        return found if len(found) == len(own) else None

    # Drawn answers are other texts, except where one engine draws them with one noise: ours.
    same_noise = baseline == PLAIN
    return Row(
        method=method,
        baseline=baseline,
        temperature=temperature,
        weights=weights,
        num_prompts=len(own),
        num_tokens=sum(len(answer.token_ids) for answer in own),
        tokens_per_second=statistics.median(answer.tokens_per_second for answer in own),
        ratio_to_stock=_ratio(own, others(STOCK)),
        ratio_to_plain=_ratio(own, others(PLAIN)),
        ratio_to_own=_ratio(own, others(baseline)),
        accepted_length=_accepted_length(own),
        identical_to_plain=_identical(own, others(PLAIN)) if temperature == 0 or same_noise else None,
        identical_to_own=_identical(own, others(baseline)) if temperature == 0 or same_noise else None,
    )


def _ratio(answers: Sequence[Answer], others: Sequence[Answer] | None) -> float | None:
    if others is None:
        return None
    return statistics.median(
        answer.tokens_per_second / other.tokens_per_second for answer, other in zip(answers, others, strict=True)
    )


def _identical(answers: Sequence[Answer], others: Sequence[Answer] | None) -> float | None:
    if others is None:
        return None
    return statistics.fmean(answer.token_ids == other.token_ids for answer, other in zip(answers, others, strict=True))


def _accepted_length(answers: Sequence[Answer]) -> float | None:
    """Tokens a round, pooled; None where the engine does not tell, or took no round."""
    rounds = [answer.num_rounds for answer in answers if answer.num_rounds is not None]
    if len(rounds) < len(answers) or not sum(rounds):
        return None
    return sum(len(answer.token_ids) - 1 for answer in answers) / sum(rounds)


def ending_notes(answers: Sequence[Answers], *, eos_ids: frozenset[int], max_tokens: int) -> list[str]:
    """Methods whose answers end elsewhere than at an end of the target's or at the longest length: their figures are
    those of another task."""
    notes = []
    for method in dict.fromkeys(method for each in answers for method in each.by_method):
        odd = [
            each.index
            for each in answers
            if method in each.by_method and not ends_as_asked(each.by_method[method].token_ids, eos_ids, max_tokens)
        ]
        if odd:
            notes.append(
                f"{method}: the answers to prompts {', '.join(map(str, odd))} end neither at an end token of the "
                f"target's {sorted(eos_ids)} nor after {max_tokens} tokens, or go on behind one"
            )
    return notes


def ends_as_asked(token_ids: Sequence[int], eos_ids: frozenset[int], max_tokens: int) -> bool:
    """Whether an answer goes to its first end token, or else to its longest length."""
    if not token_ids or any(token in eos_ids for token in token_ids[:-1]):
        return False
    return token_ids[-1] in eos_ids or len(token_ids) == max_tokens


def noise_notes(answers: Sequence[Answers], *, load: float | None) -> list[str]:
    """What disturbed the times: other work on the machine, or engines that were not idle when they should have been."""
    notes = []
    if load is not None and load > NOISY_LOAD:
        notes.append(
            f"the load average was {load:.1f} before the engines were loaded: other work ran beside this, and the "
            "times are noisy"
        )
    shares = [share for each in answers for share in each.idle_shares.values()]
    if shares and statistics.median(shares) > IDLE_SHARE:
        notes.append(
            f"engines that were not asked took {100 * statistics.median(shares):.0f} % of a core (median): they "
            "slowed down the others"
        )
    return notes


def table(rows: Sequence[Row]) -> str:
    """The rows of one temperature as text."""
    head = ("", "weights", "tokens/s", "x stock", "x plain", "x own", "accepted", "= plain", "= own")
    cells = [head]
    cells += [
        (
            row.method,
            row.weights,
            f"{row.tokens_per_second:.1f}",
            _number(row.ratio_to_stock),
            _number(row.ratio_to_plain),
            _number(row.ratio_to_own),
            _number(row.accepted_length),
            _share(row.identical_to_plain),
            _share(row.identical_to_own),
        )
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for name, weights, *figures in cells:
        right = (figure.rjust(width) for figure, width in zip(figures, widths[2:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), weights.ljust(widths[1]), *right]))
    return "\n".join(lines)


def text(report: Report) -> str:
    """The report for people: what was compared where, a table a temperature, then what to know of it."""
    machine, settings = report.machine, report.settings
    lines = [
        f"{report.target}, head {report.head}: {settings['num_prompts']} prompts, one at a time, at most "
        f"{settings['max_tokens']} tokens each",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread(s) for every engine; forward here: "
        f"{settings['forward']}",
        *version_lines(report.versions),
        "",
    ]
    for temperature in dict.fromkeys(row.temperature for row in report.rows):
        some = [row for row in report.rows if row.temperature == temperature]
        lines += [f"temperature {temperature:g}", table(some), ""]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"skipped {', '.join(methods)}: {reason}" for reason, methods in _by_value(report.skipped).items()]
    lines += [
        "Medians over prompts of tokens/s and of its ratios, prefill included; own: the same engine without a draft;",
        "= plain, = own: share of identical answers.",
        f"Definition: {DEFINITION}.",
    ]
    return "\n".join(lines)


def version_lines(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each set of versions, with the methods that ran with it."""
    said = {method: ", ".join(f"{name} {number}" for name, number in each.items()) for method, each in versions.items()}
    return [f"{', '.join(methods)}: {line}" for line, methods in _by_value(said).items()]


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that share a value."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"

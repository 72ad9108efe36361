"""Other readings of a head's files: what it would compute for someone who counts layers from 0, norms elsewhere, turns
by other angles, or reads the vocabulary map in another form.

The same weights run under each of them over the same texts. A head whose configuration is right is best as it is
configured; one that was written by other conventions, or damaged on the way, is better in another reading, and that
reading says what is wrong. The figure compared is the overlap (`infer.doctor.behaviour`), averaged over the depths and
paired by position. Unlike likelihood it does not reward a reading that merely makes the head less sure.

Shapes: C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from heads.base import DraftHead, HeadConfig, final_tap
from heads.layers import Attention, RMSNorm, Rotary, RotaryTable
from heads.rope import rotary_table
from infer.doctor.behaviour import TELLING, Examiner, Guesses, Paired, Subject
from infer.doctor.files import own_lm_head
from infer.doctor.findings import Finding, Problem, Verdict, judged
from infer.doctor.texts import Evidence

READINGS = "other readings"

OTHER_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""Bases of rotary embeddings that are common among targets."""
MAX_EXCHANGES = 30
"""Pairs of equally shaped tensors that are tried the other way round."""

CLEARLY = 4.0
"""Standard errors by which a reading must be better to be called the right one: of a hundred readings that are all as
good as the configured one, fewer than one in a hundred runs would see one so much better."""
LEAST_GAIN = 0.004
"""A smaller gain in overlap is of no use to anyone."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Reading:
    """name: what is read, as it stands behind "with". cause: how a file comes to need it, and what to do. near: whether
    a healthy head may do as well in it. peeks: whether it gives the head states that know more than they may.
    """

    name: str
    cause: str
    applied: Callable[[Subject], AbstractContextManager[Subject]]
    kind: str
    near: bool = False
    peeks: bool = False


def taps_to_try(config: HeadConfig, num_layers: int) -> dict[tuple[int, ...], str]:
    """Other taps than the configured ones, and how a head comes to need them."""
    final = final_tap(num_layers)
    taps = tuple(config.taps)
    found: dict[tuple[int, ...], str] = {}

    def add(other: Sequence[int], cause: str) -> None:
        if tuple(other) != taps and all(0 <= tap <= final for tap in other):
            found.setdefault(tuple(other), cause)

    if final in taps:
        add([num_layers if tap == final else tap for tap in taps], "its states were taken before the final norm")
    elif num_layers in taps:
        add([final if tap == num_layers else tap for tap in taps], "its last state was taken after the final norm")
    other_numbering = "it was written with the other numbering of layers (from 0, or from 1)"
    add([tap - 1 for tap in taps], other_numbering)
    add([tap + 1 for tap in taps], other_numbering)
    add(taps[::-1], "its taps are fused in the other order")
    if len(taps) == 3:
        add((2, num_layers // 2, num_layers - 3), "it reads the layers that EAGLE-3 reads where none are named")
        add((1, num_layers // 2 - 1, num_layers - 4), "it reads the layers that EAGLE-3 reads where none are named")
    return found


def readings_of(subject: Subject, evidence: Evidence, *, target_rope: tuple[float, Any]) -> Iterator[Reading]:
    """Readings of configuration and map; those of single tensors are `tensor_readings`. target_rope: base and scaling
    of the target's rotary embeddings."""
    yield from _state_readings(subject, evidence)
    yield from _flag_readings(subject.head)
    yield from _rope_readings(subject.head, target_rope)
    yield from _vocabulary_readings(subject)


def _state_readings(subject: Subject, evidence: Evidence) -> Iterator[Reading]:
    batch = subject.batch
    for taps, cause in taps_to_try(subject.head.config, evidence.num_layers).items():
        if evidence.has(taps):
            other = evidence.batch(taps)
            yield Reading(
                name=f"taps {list(taps)}",
                cause=f"{cause}: write these taps into config.json, in every place that names them",
                applied=partial(_replaced, batch=other),
                kind="taps",
            )
    for shift, name, peeks in ((1, "before", False), (-1, "after", True)):
        taps_shifted = replace(batch, taps=batch.taps.roll(shift, 0))
        yield Reading(
            name=f"the states of the position {name} the one beside each token",
            cause="its states and tokens were paired one position off: train it anew with row t = (state t, token t+1)",
            applied=partial(_replaced, batch=taps_shifted),
            kind="position",
            peeks=peeks,
        )
    tokens_shifted = replace(batch, token_ids=batch.token_ids.roll(1))
    yield Reading(
        name="each state beside its own token instead of the one after",
        cause="its states and tokens were paired one position off: train it anew with row t = (state t, token t+1)",
        applied=partial(_replaced, batch=tokens_shifted),
        kind="position",
    )


def _flag_readings(head: DraftHead) -> Iterator[Reading]:
    """Every flag of the configuration the other way round, where the same tensors serve."""
    for item in dataclasses.fields(head.config):
        value = getattr(head.config, item.name)
        if not isinstance(value, bool):
            continue
        twin = _configured(head, **{item.name: not value})
        if twin is not None:
            other = str(not value).lower()
            yield Reading(
                name=f"{item.name} = {other}",
                cause=f"its config.json says {item.name} = {str(value).lower()}, and its weights were trained with "
                f"{other}: correct the flag",
                applied=partial(_replaced, head=twin),
                kind="flag",
            )


def _rope_readings(head: DraftHead, target_rope: tuple[float, Any]) -> Iterator[Reading]:
    tables = [
        (module, name)
        for module in head.modules()
        for name, value in vars(module).items()
        if isinstance(value, RotaryTable)
    ]
    config: Any = head.config
    if not tables or not hasattr(config, "rope_theta"):
        return
    scaling = getattr(config, "rope_scaling", None)
    settings: dict[str, tuple[float, Any]] = {
        "the target's rotary embeddings": target_rope,
        "unscaled rotary embeddings": (config.rope_theta, None),
        **{f"rope_theta = {base:g}": (base, scaling) for base in OTHER_BASES},
    }
    tried: list[tuple[float, Any]] = [(config.rope_theta, scaling)]
    for name, setting in settings.items():
        if setting in tried:
            continue
        tried.append(setting)
        table = rotary_table(config.head_dim, *setting)
        said = f"rope_theta {setting[0]:g}" + (f", scaling {setting[1]['rope_type']}" if setting[1] else "")
        yield Reading(
            name=f"{name} ({said})" if "=" not in name else name,
            cause="its config.json names other rotary embeddings than those that it was trained with: correct them",
            applied=partial(_rotated, tables=tables, table=table),
            kind="rope",
            near=True,
        )
    yield Reading(
        name="no rotary embeddings",
        cause="it was trained without rotary embeddings, which this family has: it is another network",
        applied=partial(_rotated, tables=tables, table=_Unrotated(config.head_dim, config.rope_theta)),
        kind="rope",
    )
    for to_halves in (True, False):
        yield Reading(
            name=f"query and key rows reordered from {'pairs to halves' if to_halves else 'halves to pairs'}",
            cause="its rotary embeddings turn pairs of neighbouring features, and these turn halves: reorder the rows "
            "of q_proj and k_proj when converting it",
            applied=partial(_reordered, to_halves=to_halves),
            kind="rope",
            near=True,
        )


def _vocabulary_readings(subject: Subject) -> Iterator[Reading]:
    ids = subject.target_ids
    vocab_size = subject.head.config.vocab_size
    if len(ids) == vocab_size or own_lm_head(subject.head) is None:  # the target's rows follow the map, whatever it is
        return
    places = torch.arange(len(ids), device=ids.device)
    maps = {
        "the map's entries taken as target ids": (
            ids - places,
            "its d2t holds target ids, and was read as differences",
        ),
        "the map's entries taken as differences": (ids + places, "its map holds differences, and was read as ids"),
        "each draft token standing for the next entry of the map": (ids.roll(-1), "its map is shifted by one entry"),
        "each draft token standing for the entry before": (ids.roll(1), "its map is shifted by one entry"),
        "the map's ids raised by one": (ids + 1, "its map is of a tokenizer whose ids are one lower"),
        "the map's ids lowered by one": (ids - 1, "its map is of a tokenizer whose ids are one higher"),
        "draft tokens numbered as the target's": (places, "its map is not the one that it was trained with"),
        "the map reversed": (ids.flip(0), "its map is in descending order"),
    }
    tried = [ids]
    for name, (other, cause) in maps.items():
        other = other.clamp(0, vocab_size - 1)
        if any(torch.equal(other, one) for one in tried):
            continue
        tried.append(other)
        yield Reading(
            name=name,
            cause=f"{cause}: convert it with the right map",
            applied=partial(_replaced, target_ids=other),
            kind="vocabulary",
        )


def tensor_readings(head: DraftHead) -> Iterator[Reading]:
    """Each tensor negated, transposed, left out, or exchanged for one of its shape."""
    norms = {id(module.weight) for module in head.modules() if isinstance(module, RMSNorm)}
    parameters = dict(head.named_parameters())
    for name, parameter in parameters.items():
        with torch.inference_mode(mode=False):
            values = parameter.detach()
            others: dict[str, torch.Tensor] = {}
            if id(parameter) in norms:
                others["of ones"] = torch.ones_like(values)
            else:
                others["left out (zero)"] = torch.zeros_like(values)
            if parameter.ndim == 2:
                others["negated"] = -values
                if values.shape[0] == values.shape[1]:
                    others["transposed"] = values.T.contiguous()
        for how, other in others.items():
            yield Reading(
                name=f"{name} {how}",
                cause=f"{name}, or what it is multiplied with, is damaged: write the head again from a good copy",
                applied=partial(_filled, pairs=((parameter, other),)),
                kind="tensor",
            )
    pairs = [
        (first, second)
        for first, second in itertools.combinations(parameters, 2)
        if parameters[first].shape == parameters[second].shape
    ]
    for first, second in pairs[:MAX_EXCHANGES]:
        exchanged = (
            (parameters[first], parameters[second].detach()),
            (parameters[second], parameters[first].detach()),
        )
        yield Reading(
            name=f"{first} and {second} exchanged",
            cause="the two stand in each other's place: rename them when converting the head",
            applied=partial(_filled, pairs=exchanged),
            kind="tensor",
        )


def _configured(head: DraftHead, **changes: Any) -> DraftHead | None:
    """The same weights under another configuration; None where they do not fit it."""
    try:
        with torch.random.fork_rng(devices=[]):
            twin = type(head)(replace(head.config, **changes), head.vocabulary)
    except ValueError:
        return None
    tensors = head.state_dict()
    if {name: tensor.shape for name, tensor in twin.state_dict().items()} != {
        name: tensor.shape for name, tensor in tensors.items()
    }:
        return None
    twin.load_state_dict(tensors)
    twin.to(device=head.device, dtype=head.dtype)
    return twin.bind(head.lent).eval().requires_grad_(False)


def _replaced(subject: Subject, **changes: Any) -> AbstractContextManager[Subject]:
    return nullcontext(replace(subject, **changes))


class _Unrotated(RotaryTable):
    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        return super().__call__(torch.zeros_like(positions), dtype)


@contextmanager
def _rotated(subject: Subject, tables: Sequence[tuple[nn.Module, str]], table: RotaryTable) -> Iterator[Subject]:
    before = [vars(module)[name] for module, name in tables]
    for module, name in tables:
        setattr(module, name, table)
    try:
        yield subject
    finally:
        for (module, name), old in zip(tables, before, strict=True):
            setattr(module, name, old)


@contextmanager
def _filled(subject: Subject, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> Iterator[Subject]:
    before = [parameter.data for parameter, _ in pairs]
    for parameter, other in pairs:
        parameter.data = other
    try:
        yield subject
    finally:
        for (parameter, _), old in zip(pairs, before, strict=True):
            parameter.data = old


def _reordered(subject: Subject, to_halves: bool) -> AbstractContextManager[Subject]:
    pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
    for module in subject.head.modules():
        if isinstance(module, Attention):
            size = module.head_dim
            order = torch.arange(size).view((-1, 2) if to_halves else (2, -1)).T.reshape(-1)
            for projection in (module.q_proj, module.k_proj):
                weight = cast(nn.Parameter, projection.weight)
                rows = weight.detach().unflatten(0, (-1, size))
                pairs.append((weight, rows[:, order.to(rows.device)].flatten(0, 1)))
    return _filled(subject, pairs)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a head does in a reading. gain, agreement_gain: over the configured reading, paired by position and averaged
    over the depths."""

    reading: Reading
    agreement: float
    overlap: float
    gain: Paired
    agreement_gain: Paired

    @property
    def is_clearly_better(self) -> bool:
        """A changed tensor may merely make a head surer or less sure, which suits one that is not calibrated: it must
        choose better tokens, too."""
        if self.gain.standard_errors < CLEARLY or self.gain.mean < LEAST_GAIN:
            return False
        return self.reading.kind != "tensor" or (
            self.agreement_gain.standard_errors >= TELLING and self.agreement_gain.mean >= LEAST_GAIN
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.reading.name,
            "kind": self.reading.kind,
            "agreement": self.agreement,
            "overlap": self.overlap,
            "gain": self.gain.mean,
            "standard_errors": self.gain.standard_errors,
            "agreement_gain": self.agreement_gain.mean,
        }


def try_readings(
    examiner: Examiner, subject: Subject, logits: Sequence[torch.Tensor], readings: Iterable[Reading]
) -> list[Outcome]:
    """Every reading that changes what the head says; `logits` are those of the configured one."""
    configured = examiner.judge(logits, subject.target_ids)
    before, agreed = examiner.mean(configured.overlap), examiner.mean(configured.agreement)
    outcomes = []
    for reading in readings:
        with reading.applied(subject) as other:
            if other.head is subject.head and other.batch is subject.batch and reading.kind == "vocabulary":
                guesses = examiner.judge(logits, other.target_ids)
            else:
                guesses = examiner.examine(other)
        after = examiner.mean(guesses.overlap)
        if torch.equal(after, before) or not bool(torch.isfinite(after).all()):
            continue
        outcomes.append(
            Outcome(
                reading=reading,
                agreement=_first(guesses),
                overlap=float(after.mean()),
                gain=examiner.paired(after - before),
                agreement_gain=examiner.paired(examiner.mean(guesses.agreement) - agreed),
            )
        )
    return outcomes


def _first(guesses: Guesses) -> float:
    return float(guesses.agreement[0].mean())


def check_readings(
    examiner: Examiner, configured: Guesses, outcomes: Sequence[Outcome], *, is_telling: bool
) -> Finding:
    """Whether the head is best as it is configured. `is_telling`: whether it knows enough to say."""
    overlap, agreement = float(examiner.mean(configured.overlap).mean()), _first(configured)
    ranked = sorted(outcomes, key=lambda outcome: -outcome.overlap)
    figures = {
        "agreement": agreement,
        "overlap": overlap,
        "depths": examiner.num_depths,
        "readings": [outcome.to_dict() for outcome in ranked],
    }
    better = [
        outcome
        for outcome in ranked
        if outcome.is_clearly_better
        # States that know more than they may are better for many a sound head.
        and (not outcome.reading.peeks or (not is_telling and outcome.agreement >= max(2 * agreement, 0.2)))
    ]
    if better:
        # Of those that are as good as the best, the one that was tried first: the likelier mistakes come first.
        as_good = [outcome for outcome in better if outcome.overlap >= better[0].overlap - LEAST_GAIN]
        best = min(as_good, key=outcomes.index)
        finding = (
            f"the head agrees with the target's next token at {agreement:.1%} of positions as configured (overlap "
            f"{overlap:.3f}), and at {best.agreement:.1%} ({best.overlap:.3f}) with {best.reading.name}"
        )
        others = [f"{one.reading.name} ({one.overlap:.3f})" for one in better if one is not best]
        if others:
            finding += f". Also better: {'; '.join(others[: _SHOWN - 1])}"
        problems = [Problem(verdict=Verdict.FAIL, finding=finding, advice=best.reading.cause)]
        return judged(READINGS, "", problems, figures)
    open_ones = [
        outcome
        for outcome in ranked
        if outcome.gain.standard_errors > -TELLING
        and not (outcome.reading.near or outcome.reading.peeks or outcome.reading.kind == "tensor")
    ]
    problems = []
    if not is_telling:
        finding = f"the head is too weak to tell: none of {len(outcomes)} other readings makes it good"
        advice = "its weights are damaged or were never trained: no setting explains it"
        problems.append(Problem(verdict=Verdict.WARNING, finding=finding, advice=advice))
    elif open_ones:
        names = ", ".join(one.reading.name for one in open_ones[:_SHOWN])
        finding = f"the configured reading cannot be told from {names} (overlap {overlap:.3f})"
        advice = "give more text (--prompts) if you want to be sure"
        problems.append(Problem(verdict=Verdict.WARNING, finding=finding, advice=advice))
    named = [one for one in ranked if not (one.reading.near or one.reading.peeks or one.reading.kind == "tensor")]
    fine = f"best as configured (overlap {overlap:.3f}) of {len(outcomes) + 1} readings"
    if named:
        fine += f"; the nearest is {named[0].reading.name} ({named[0].overlap:.3f}, "
        fine += f"{-named[0].gain.standard_errors:.0f} standard errors)"
    return judged(READINGS, fine, problems, figures)

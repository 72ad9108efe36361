"""How well a head guesses the target's next tokens on texts of the target's, its steps fed with the true tokens.

    agreement   share of rows at which the head's most likely token is the target's own (of its whole vocabulary)
    overlap     mean probability that a token drawn from the head would be accepted: the sum over the tokens of the
                smaller of the two probabilities

Shapes: Q rows of a step, C draft vocabulary, V target vocabulary, N texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heads.base import DraftHead
from heads.unroll import Batch
from infer.doctor.findings import Finding, Problem, Verdict, judged
from infer.doctor.texts import Evidence

AGREEMENT, DISTRIBUTIONS = "agreement", "draft distributions"

BLOCK = 8
"""Neighbouring positions of a text are not independent, so figures are compared by blocks of this many."""
TELLING = 3.0
"""A mean difference of so many standard errors is no accident."""
_LOW_SHARE, _FAILING_SHARE = 0.65, 0.35
"""Shares of the overlap on the card, which was measured on other text, below which the head is not what it was."""
_UNIFORM, _CERTAIN = 0.95, 0.02
"""A draft distribution whose entropy is more than the one share of the greatest possible tells nothing; one with less
than the other is certain of everything."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A difference between two figures of the same positions: its mean, and that in standard errors over blocks."""

    mean: float
    standard_errors: float

    @classmethod
    def of(cls, differences: torch.Tensor, rows: torch.Tensor, texts: torch.Tensor) -> Paired:
        """`differences` [Q] at packed `rows` [Q] of `texts` [Q]."""
        blocks = texts * (int(rows.max()) + BLOCK) + rows // BLOCK
        _, places = blocks.unique(return_inverse=True)
        differences = differences.double()
        sums = differences.new_zeros(int(places.max()) + 1).index_add_(0, places, differences)
        counts = torch.zeros_like(sums).index_add_(0, places, torch.ones_like(differences))
        means = sums / counts
        mean = float(differences.mean())
        if len(means) < 2:
            return cls(mean=mean, standard_errors=0.0)
        error = float(means.std()) / math.sqrt(len(means))
        return cls(mean=mean, standard_errors=float(means.mean()) / max(error, 1e-9))


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is run: a head, the texts as it reads them, and the target's token of each draft token [C]."""

    head: DraftHead
    batch: Batch
    target_ids: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Guesses:
    """Of each step, a number for every planned row [Q]: whether the most likely token is the target's (0 or 1), the
    overlap, the entropy of the draft distribution in nats, and the draft token most likely."""

    agreement: list[torch.Tensor]
    overlap: list[torch.Tensor]
    entropy: list[torch.Tensor]
    best: list[torch.Tensor]


class Examiner:
    """Holds heads against the target's logits at the planned rows of `num_depths` steps."""

    def __init__(self, evidence: Evidence, num_depths: int) -> None:
        self.evidence = evidence
        self.plan = [rows for rows in evidence.plan(num_depths) if len(rows)]
        self._probs = torch.softmax(evidence.logits, dim=-1)  # [A, V]
        self._best = evidence.logits.argmax(dim=-1)  # [A]
        self._places = [torch.searchsorted(evidence.logit_rows, rows + 1 + step) for step, rows in enumerate(self.plan)]

    @property
    def num_depths(self) -> int:
        return len(self.plan)

    def target_tokens(self, step: int) -> torch.Tensor:
        """[Q]: the target's most likely token where the guesses of a step are about."""
        return self._best[self._places[step]]

    def target_entropy(self, step: int) -> torch.Tensor:
        entropy: torch.Tensor = torch.special.entr(self._probs[self._places[step]]).sum(-1)
        return entropy

    @torch.inference_mode()
    def logits(self, subject: Subject, num_depths: int | None = None) -> list[torch.Tensor]:
        """Draft logits [Q, C] of every step, float32."""
        plan = self.plan[:num_depths]
        return [answer.logits().float() for answer in subject.head.unroll(subject.batch, plan)]

    @torch.inference_mode()
    def judge(self, logits: Sequence[torch.Tensor], target_ids: torch.Tensor) -> Guesses:
        """`logits` of the first steps against the target's, if draft token i stands for `target_ids[i]`."""
        result = Guesses(agreement=[], overlap=[], entropy=[], best=[])
        for step, rows in enumerate(logits):
            draft_probs = torch.softmax(rows, dim=-1)
            target_probs = self._probs[self._places[step]][:, target_ids]
            best = rows.argmax(dim=-1)
            result.best.append(best)
            result.agreement.append((target_ids[best] == self.target_tokens(step)).float())
            result.overlap.append(torch.minimum(draft_probs, target_probs).sum(-1))
            result.entropy.append(torch.special.entr(draft_probs).sum(-1))
        return result

    def examine(self, subject: Subject, num_depths: int | None = None) -> Guesses:
        return self.judge(self.logits(subject, num_depths), subject.target_ids)

    def mean(self, figures: Sequence[torch.Tensor]) -> torch.Tensor:
        """[Q]: the mean over all depths of figures of each step, at the rows that have all depths."""
        return torch.stack([each[places] for each, places in zip(figures, self._deepest, strict=True)]).mean(0)

    def paired(self, differences: torch.Tensor, step: int = -1) -> Paired:
        """`differences` at the planned rows of a step (by default the last, whose rows have all depths)."""
        rows = self.plan[step]
        return Paired.of(differences, rows, self.evidence.text_of(rows))

    @property
    def _deepest(self) -> list[torch.Tensor]:
        """Of each step, the places of the last step's rows among its own."""
        return [torch.searchsorted(rows, self.plan[-1]) for rows in self.plan]


def check_agreement(
    examiner: Examiner,
    guesses: Guesses,
    acceptance: Mapping[str, Any],
    spelled: Callable[[int], str],
) -> tuple[Finding, bool]:
    """Whether the head knows more than which token is frequent, and whether it does as well as its card says. The
    second value says whether it knows enough to be compared in other readings."""
    agreement = [float(each.mean()) for each in guesses.agreement]
    overlap = [float(each.mean()) for each in guesses.overlap]
    targets = examiner.target_tokens(0)
    frequent = int(targets.mode().values)
    always = (targets == frequent).float()
    gain = examiner.paired(guesses.agreement[0] - always, 0)
    figures = {
        "num_positions": [len(each) for each in guesses.agreement],
        "agreement": agreement,
        "overlap": overlap,
        "most_frequent_token": frequent,
        "most_frequent_share": float(always.mean()),
        "gain_standard_errors": gain.standard_errors,
    }
    problems = []
    is_telling = gain.standard_errors >= TELLING
    baseline = f"always guessing {spelled(frequent)} ({float(always.mean()):.1%})"
    if not is_telling:
        better = gain.mean > 0 and gain.standard_errors >= 2.0
        problems.append(
            Problem(
                verdict=Verdict.WARNING if better else Verdict.FAIL,
                finding=f"the head agrees with the target's next token at {agreement[0]:.1%} of positions, "
                f"{'hardly' if better else 'no'} better than {baseline}",
                advice="it was never trained, or it is damaged, or made for something else: see the other checks",
            )
        )
    said = acceptance.get("overlap")
    if isinstance(said, Sequence) and said and isinstance(said[0], float) and said[0] > 0:
        share = overlap[0] / said[0]
        figures |= {"card_overlap": list(said), "share_of_card": share}
        if share < _LOW_SHARE:
            problems.append(
                Problem(
                    verdict=Verdict.FAIL if share < _FAILING_SHARE else Verdict.WARNING,
                    finding=f"the card says an overlap of {said[0]:.2f} at depth 1, and here it is {overlap[0]:.2f}",
                    advice="either these texts are of another kind (give some of yours with --prompts), or the head is "
                    "not what it was when it was measured",
                )
            )
    shown = " ".join(f"{each:.0%}" for each in agreement)
    overlaps = " ".join(f"{each:.2f}" for each in overlap)
    fine = (
        f"at depths 1 to {len(agreement)} the head agrees with the target at {shown} of positions "
        f"(always {spelled(frequent)}: {float(always.mean()):.0%}); overlap {overlaps}"
    )
    return judged(AGREEMENT, fine, problems, figures), is_telling


def check_distributions(examiner: Examiner, guesses: Guesses, num_tokens: int) -> Finding:
    """Whether the head distinguishes tokens, and texts."""
    most = math.log(num_tokens)
    entropies = [float(each.mean()) for each in guesses.entropy]
    target = [float(examiner.target_entropy(step).mean()) for step in range(len(entropies))]
    figures = {"entropy": entropies, "target_entropy": target, "uniform_entropy": most}
    problems = []
    for step, (entropy, best) in enumerate(zip(entropies, guesses.best, strict=True)):
        depth = step + 1
        if not math.isfinite(entropy):
            finding = f"the draft distribution at depth {depth} is not finite"
        elif entropy > _UNIFORM * most and num_tokens > 1:
            finding = f"the draft distribution at depth {depth} is uniform: {entropy:.2f} of at most {most:.2f} nats"
        elif len(best) > BLOCK and int(best.unique().numel()) == 1:
            finding = f"at depth {depth} the head drafts one and the same token everywhere"
        else:
            continue
        problems.append(Problem(verdict=Verdict.FAIL, finding=finding, advice="train the head, or write it again"))
        break
    if not problems and entropies[0] < _CERTAIN * most and entropies[0] < 0.1 * target[0]:
        problems.append(
            Problem(
                verdict=Verdict.WARNING,
                finding=f"the head is sure of nearly everything ({entropies[0]:.3f} nats, the target {target[0]:.2f})",
                advice="sampled answers will accept little of it; `headstart calibrate` helps trees only",
            )
        )
    fine = f"entropy {' '.join(f'{each:.1f}' for each in entropies)} nats by depth (the target's {target[0]:.1f}, "
    return judged(DISTRIBUTIONS, f"{fine}uniform {most:.1f})", problems, figures)

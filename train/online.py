"""A head that goes on learning from what is served, and is taken back where that does not help.

    recorder    the target's states of what is served, as decoding computed them   (`infer.drafters.recording`)
    answers     finished ones, the newest within a budget of tokens; every `HELD_OUT_EVERY`th is never trained on
    twin        a copy of the head in float32, trained on the others with the objective of `headstart train`
    swap        when the twin would have needed fewer rounds for the held-out answers, its weights become the head's
    rollback    when the head before it would do better on held-out answers that came since, it comes back

All of it happens in the engine's thread, between two steps, in pieces of one pass or less over `LESSON_TOKENS` tokens
of one answer: as many as there are while nothing is served, else within a share of the time. Text and states are kept
in memory alone.

Heads are compared by the rounds that a greedy chain would take over the same text (`train.evaluation.simulate`). Answer
by answer d = rounds before - rounds after, and z = sum(d) / sqrt(sum(d²)): if neither head were better, each d would
have either sign as easily, and |z| of 2 would be rare. What is served may change at any time, so a fall of the
acceptance that requests really see (`Acceptance`) only makes the look at held-out answers come sooner and ask for less.

Requests that run while the head changes go on with what the former one computed of their text: their drafts are neither
head's, and they count on neither side. Later ones take nothing over from them, so each beginning that requests share is
prefilled once more. Tokens never change: verification keeps the target's.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import cast

import torch

from configs.schema import OptimConfig, TrainSettings
from heads.base import DraftHead, final_tap
from heads.checkpoint import HeadCard, present_folder, read_card, save_head
from heads.lora import LORA
from infer.adapter import ADAPTER_FOLDER
from infer.calibration import KEY, Calibration
from infer.chat import Rendered
from infer.drafters.base import Drafter
from infer.drafters.growing import TreeGrower
from infer.drafters.hybrid import HybridDrafter, parts_of
from infer.drafters.recording import RecordedText, StateRecorder
from infer.engine import Engine
from infer.learning import LearningStatus
from infer.request import Request
from train.batch import computing_in, pack_batch
from train.evaluation import CHAIN_DEPTH, simulate
from train.features.rows import RowFeatures, normalizer_before_labels
from train.step import Objective, as_arguments, plan_step
from train.unroll import Teacher
from train.updater import LocalUpdater
from train.world import World

HELD_OUT_EVERY = 5
HELD_OUT_SHARE = 4
"""A part of so many of the budget of tokens is for held-out answers."""
LESSON_TOKENS, LESSON_CONTEXT = 64, 256
"""Tokens that are learned in one pass, and those before them that it sees."""
LESSONS_PER_STEP = 4
MOST_VISITS = 4
"""So often is a lesson learned; then only new text brings new steps."""
STEPS_PER_TRIAL = 16
LEAST_ANSWERS = 6
"""Held-out answers without which nothing is decided."""
MOST_ANSWERS = 24
"""The newest held-out answers by which heads are compared."""
BETTER = 2.0
"""The z from which one head is taken to be better than another."""
LEAST_GAIN = 1.01
"""Times the accepted length, without which a change of the head is not worth what it costs those that are served."""
FALLEN = 3.0
"""Standard errors by which the acceptance of requests has to lie below that before a swap to raise an alarm."""
LEAST_AFTER_ALARM = 3
REST_ANSWERS = 64
"""Answers for which learning rests after a rollback."""
LEAST_TOKENS = 4096
_CANDIDATE = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """share: of the time that learning may take while requests run. num_tokens: with states, held at most for learning,
    and as many again of requests that run. lr: constant."""

    share: float = 0.05
    num_tokens: int = 32768
    lr: float = 2e-4

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 0.5:
            raise ValueError(f"learning may take a share of 0 to 0.5 of a busy server's time, got {self.share:g}")
        if self.num_tokens < LEAST_TOKENS:
            raise ValueError(f"learning needs room for at least {LEAST_TOKENS} tokens, got {self.num_tokens}")
        if not 0 < self.lr <= 0.1:
            raise ValueError(f"the learning rate must lie between 0 and 0.1, got {self.lr:g}")


@dataclass(eq=False, kw_only=True)
class Lesson:
    """Some tokens of an answer with what stands before them; only they are under the loss."""

    row: Rendered
    taps: torch.Tensor
    last: torch.Tensor
    normalizer: torch.Tensor | None = None
    visits: int = 0


@dataclass(eq=False, kw_only=True)
class Answer:
    """version: of the head that drafted it. rounds: that heads would take, by their version."""

    number: int
    version: int
    num_tokens: int
    lessons: list[Lesson]
    num_emitted: int = 0
    rounds: dict[int, int] = field(default_factory=dict)


class Shelf:
    """The newest answers within a number of tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self.answers: deque[Answer] = deque()
        self.num_tokens = 0

    def add(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.num_tokens += answer.num_tokens
        while self.num_tokens > self._most_tokens:
            self.num_tokens -= self.answers.popleft().num_tokens

    def clear(self) -> None:
        self.answers.clear()
        self.num_tokens = 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two heads on the same answers; the module says what z is. Above 0 the second is better."""

    num_answers: int
    length_before: float
    length_after: float
    z: float

    @classmethod
    def of(cls, answers: Sequence[Answer], before: int, after: int) -> Comparison:
        num_tokens = sum(answer.num_emitted for answer in answers)
        differences = [answer.rounds[before] - answer.rounds[after] for answer in answers]
        spread = math.sqrt(sum(one * one for one in differences))
        return cls(
            num_answers=len(answers),
            length_before=num_tokens / max(1, sum(answer.rounds[before] for answer in answers)),
            length_after=num_tokens / max(1, sum(answer.rounds[after] for answer in answers)),
            z=sum(differences) / spread if spread else 0.0,
        )

    def __str__(self) -> str:
        lengths = f"{self.length_before:.2f} -> {self.length_after:.2f} tokens a round"
        return f"{lengths} on {self.num_answers} held-out answers (z {self.z:+.1f})"


class Acceptance:
    """Mean accepted lengths of the requests that were served before the last change of the head and since."""

    LEAST, MOST = 8, 64

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=self.MOST)
        self.since: deque[float] = deque(maxlen=self.MOST)

    def turn(self) -> None:
        """The head has changed."""
        self.before, self.since = self.since, deque(maxlen=self.MOST)

    @property
    def has_fallen(self) -> bool:
        if min(len(self.before), len(self.since)) < self.LEAST:
            return False
        (mean_before, error_before), (mean, error) = _mean_and_error(self.before), _mean_and_error(self.since)
        return mean_before - mean > FALLEN * math.hypot(error_before, error)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Former:
    """The head before the last swap. is_original: it is the one that was loaded."""

    version: int
    weights: Mapping[str, torch.Tensor]
    calibration: Calibration | None
    is_original: bool


class OnlineLearner:
    """See the module. Made before the engine's first request; `source` is the folder of the head that drafts.

        engine = load_engine("runs/demo/best", max_length=2048)
        learner = OnlineLearner(engine, "runs/demo/best")
        async with AsyncEngine(engine, learner=learner) as serving: ...
        learner.save("runs/learned")

    With an `Engine` alone, call `learn` between its calls. A fault of learning (memory, a loss that is no number) ends
    the learning with one line to `notice`, and nothing else.
    """

    def __init__(
        self,
        engine: Engine,
        source: str | Path,
        settings: OnlineSettings | None = None,
        *,
        notice: Callable[[str], None] = _log.info,
    ) -> None:
        self.settings = settings or OnlineSettings()
        self._source, self._card = present_folder(Path(source)), read_card(source)
        self._notice = notice
        target = engine.target
        if target.is_spread:
            raise ValueError(
                f"{target.name} is spread over devices by a device_map, and learning needs the target on one device: "
                "load it whole, or serve without learning"
            )
        if engine.num_slots:
            raise ValueError("the engine has served already: let its head learn from the first request on")
        self._grower, self.head = _trained_part(engine.drafter)
        self._target = target
        taps = self.head.config.taps
        self._width = len(taps) * target.hidden_size
        self.recorder = StateRecorder((*taps, final_tap(target.num_layers)), most_tokens=self.settings.num_tokens)
        engine.drafter = HybridDrafter([*parts_of(engine.drafter), self.recorder])
        self._dtype = torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32
        lm_head_rows = target.lm_head_weight.detach().index_select(0, self.head.target_ids)
        self._teacher = Teacher(weight=lm_head_rows.to(self._dtype))
        self._train_settings = TrainSettings(steps=1)
        self._num_steps = self.head.num_depths or self._train_settings.ttt_steps
        self._scratch = self.head.twin().to(self.head.dtype).eval().requires_grad_(False)
        self._restart()
        held_out = self.settings.num_tokens // HELD_OUT_SHARE
        self._trained, self._held_out = Shelf(self.settings.num_tokens - held_out), Shelf(held_out)
        self._live = Acceptance()
        self._former: _Former | None = None
        self._is_original = True
        self._pieces: Iterator[bool] | None = self._work()
        self.fault: str | None = None
        self._debt_seconds = self._busy_seconds = self._idle_seconds = 0.0
        self._num_answers = self._num_held_out = self._num_learned_tokens = 0
        self._num_updates = self._num_visits = self._num_swaps = self._num_rollbacks = 0
        self._updates_tried = self._held_out_since = self._held_out_seen = self._rests_until = 0
        self._last: Comparison | None = None

    # What the engine's thread calls

    def after_step(self, seconds: float) -> None:
        """See `infer.learning.Learner`. What a piece took is earned before the next one, by the steps between."""
        share = self.settings.share
        self._debt_seconds = max(0.0, self._debt_seconds - seconds * share / (1 - share))
        if share and not self._debt_seconds:
            took, did_something = self._advance()
            self._busy_seconds += took
            self._debt_seconds = took if did_something else 0.0
        else:
            self._guarded(self._gather)

    def when_idle(self) -> bool:
        took, did_something = self._advance()
        self._idle_seconds += took
        return did_something

    def learn(self, seconds: float = math.inf) -> None:
        """Learn for so long, or until there is nothing left to learn; for those who have an `Engine` alone."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline and self.when_idle():
            pass

    def status(self) -> LearningStatus:
        last = self._last
        return LearningStatus(
            is_on=self.fault is None,
            num_answers=self._num_answers,
            num_held_out=self._num_held_out,
            num_tokens=self._trained.num_tokens + self._held_out.num_tokens,
            num_steps=self._num_updates,
            num_swaps=self._num_swaps,
            num_rollbacks=self._num_rollbacks,
            length_served=math.nan if last is None else last.length_before,
            length_learned=math.nan if last is None else last.length_after,
            busy_seconds=self._busy_seconds,
            idle_seconds=self._idle_seconds,
        )

    @property
    def has_learned(self) -> bool:
        """Whether the head that drafts is another than the one that was loaded."""
        return not self._is_original

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of memory that learning takes: for the copies of the head and what trains them, and at most for states."""
        weights = sum(parameter.numel() for parameter in self.head.parameters())
        kept = 3 * weights * self.head.dtype.itemsize  # to judge by, to try and to come back to
        states = (self._width + self._target.hidden_size) * self._target.dtype.itemsize
        return 16 * weights + kept + self._teacher.weight.nbytes, 2 * self.settings.num_tokens * states

    def save(self, folder: str | Path) -> Path:
        """Write the head that drafts as an augmented model's folder of its own, once the engine has stopped.

        It has no calibration, no acceptance figures and no certificate: those were of the head that was loaded.
        """
        check_out(folder)
        if not self.has_learned:
            raise ValueError("the head that drafts is the one that was loaded: there is nothing to save")
        adapter = self._source / ADAPTER_FOLDER
        return save_head(Path(folder), self.head, self._new_card(), add_files=partial(_copy_adapter, adapter))

    def _new_card(self) -> HeadCard:
        learned = {
            "from": self._source.resolve().name,
            "answers": self._num_answers - self._num_held_out,
            "tokens": self._num_learned_tokens,
            "held_out_answers": self._num_held_out,
            "steps": self._num_updates,
            "swaps": self._num_swaps,
            "rollbacks": self._num_rollbacks,
        }
        before = {name: value for name, value in self._card.training.items() if name != LORA}
        return HeadCard(
            target=self._card.target,
            family=self._card.family,
            drafter={name: value for name, value in self._card.drafter.items() if name != KEY},
            training={**before, "learned_while_serving": learned},
            vocabulary=self._card.vocabulary,
        )

    # Time and faults

    def _advance(self) -> tuple[float, bool]:
        """A piece of work, if there is one: the seconds that it took, and whether there was."""
        start = time.perf_counter()
        did_something = self._guarded(self._next_piece)
        return time.perf_counter() - start, bool(did_something)

    def _next_piece(self) -> bool:
        assert self._pieces is not None
        self._gather()
        return next(self._pieces)

    def _guarded(self, work: Callable[[], bool | None]) -> bool | None:
        if self.fault is not None:
            return None
        try:
            if self.recorder.fault is not None:
                raise self.recorder.fault
            with torch.inference_mode(mode=False), torch.enable_grad():
                return work()
        except Exception as error:
            self._stop(error)
            return None

    def _stop(self, error: Exception) -> None:
        """Learn no more. The head that drafts stays as it is."""
        self.fault = f"{type(error).__name__}: {error}"
        self.recorder.stop(error)
        self._pieces = None
        self._former = None
        self._trained.clear()
        self._held_out.clear()
        del self._objective, self._updater, self._twin
        self._notice(f"learning has ended, serving goes on: {' '.join(self.fault.split())[:300]}")

    # Text

    def _gather(self) -> None:
        """Take the answers that have ended since."""
        for request, text in self.recorder.take_finished():
            speculation = request.speculation
            if text.version == self.recorder.version and speculation.num_drafts:
                self._live.since.append(speculation.mean_accepted_length)
            lessons = lessons_of(request, text, width=self._width, num_steps=self._num_steps)
            if lessons:
                self._take(lessons, text)

    def _take(self, lessons: list[Lesson], text: RecordedText) -> None:
        answer = Answer(number=self._num_answers, version=text.version, num_tokens=text.num_rows, lessons=lessons)
        self._num_answers += 1
        if self._num_answers % HELD_OUT_EVERY:
            self._num_learned_tokens += sum(lesson.row.num_supervised for lesson in lessons)
            self._trained.add(answer)
            return
        self._num_held_out += 1
        self._held_out_since += answer.version == self.recorder.version
        self._held_out.add(answer)

    # Work, in pieces

    def _work(self) -> Iterator[bool]:
        """True after each piece, false while there is none."""
        while True:
            if self._former is not None and self._held_out_since >= self._held_out_seen + self._least_news:
                yield from self._look_back(self._former)
            elif self._num_answers < self._rests_until:
                yield False
            elif self._may_try and self._num_updates >= self._updates_tried + STEPS_PER_TRIAL:
                yield from self._try()
            elif lessons := self._next_lessons():
                yield from self._train(lessons)
            elif self._may_try and self._num_updates > self._updates_tried:
                yield from self._try()
            else:
                yield False

    @property
    def _least_news(self) -> int:
        """Held-out answers of the present head that must come before it is looked back."""
        return LEAST_AFTER_ALARM if self._live.has_fallen else LEAST_ANSWERS

    @property
    def _may_try(self) -> bool:
        """There is enough to judge by, and the last swap, if any, has been looked back at."""
        was_judged = self._former is None or self._held_out_seen > 0
        return was_judged and len(self._held_out.answers) >= LEAST_ANSWERS

    def _next_lessons(self) -> list[Lesson]:
        """Those learned least often, the newest first."""
        lessons = [
            lesson
            for answer in reversed(self._trained.answers)
            for lesson in answer.lessons
            if lesson.visits < MOST_VISITS
        ]
        chosen = sorted(lessons, key=lambda lesson: lesson.visits)[:LESSONS_PER_STEP]
        return chosen if len(chosen) == LESSONS_PER_STEP else []

    def _train(self, lessons: Sequence[Lesson]) -> Iterator[bool]:
        """A step of the optimiser: a piece for each lesson, and one for the update."""
        first = self._num_visits
        self._num_visits += len(lessons)
        numbered = [(first + place, lesson.row) for place, lesson in enumerate(lessons)]
        plan = plan_step(numbered, num_steps=self._num_steps, settings=self._train_settings)
        weights = plan.label_weights(self._train_settings)
        by_row = {id(lesson.row): lesson for lesson in lessons}
        passes = plan.passes(World(), 1)
        self._twin.train()
        for number, part in enumerate(passes, start=1):
            features = [self._features(by_row[id(row)]) for row in part.rows]
            batch = pack_batch(part.rows, features, device=self._target.device, dtype=self._dtype)
            with computing_in(self._dtype, self._target.device):
                loss, _ = self._updater.loss(**as_arguments(part, batch, weights))
            if not math.isfinite(float(loss.detach())):
                raise FloatingPointError("the loss is not finite")
            self._updater.backward(loss, is_last=number == len(passes))
            yield True
        if not math.isfinite(self._updater.update([self.settings.lr])):
            raise FloatingPointError("the gradients are not finite")
        for lesson in lessons:
            lesson.visits += 1
        self._num_updates += 1
        yield True

    def _features(self, lesson: Lesson) -> RowFeatures:
        if lesson.normalizer is None:
            with torch.no_grad():
                lesson.normalizer = normalizer_before_labels(
                    lesson.last, torch.tensor(lesson.row.loss_mask), self._target.lm_head_weight
                )
        return RowFeatures(taps=lesson.taps, last=lesson.last, log_normalizer=lesson.normalizer)

    def _try(self) -> Iterator[bool]:
        """Let the twin take over if it is better."""
        answers, version = list(self._held_out.answers)[-MOST_ANSWERS:], self.recorder.version
        candidate = {
            name: weight.detach().to(self.head.dtype, copy=True) for name, weight in self._twin.named_parameters()
        }
        yield from self._count_rounds(answers, version, dict(self.head.named_parameters()))
        yield from self._count_rounds(answers, _CANDIDATE, candidate)
        found = self._last = Comparison.of(answers, version, _CANDIDATE)
        for answer in answers:
            del answer.rounds[_CANDIDATE]
        self._updates_tried = self._num_updates
        if found.z >= BETTER and found.length_after >= LEAST_GAIN * found.length_before:
            self._swap(candidate, found)
        elif found.z <= -BETTER:
            self._restart()  # it has gone astray

    def _look_back(self, former: _Former) -> Iterator[bool]:
        """Let the former head come back if it is better on what has come since."""
        is_alarmed = self._live.has_fallen
        self._held_out_seen = self._held_out_since
        version = self.recorder.version
        answers = [answer for answer in self._held_out.answers if answer.version == version][-MOST_ANSWERS:]
        yield from self._count_rounds(answers, former.version, former.weights)
        yield from self._count_rounds(answers, version, dict(self.head.named_parameters()))
        found = Comparison.of(answers, former.version, version)
        if found.z <= -BETTER or (is_alarmed and found.z <= 0):
            self._roll_back(former, found)

    def _count_rounds(
        self, answers: Sequence[Answer], version: int, weights: Mapping[str, torch.Tensor]
    ) -> Iterator[bool]:
        """Note how many rounds a head would take over each answer: a piece for each lesson."""
        missing = [answer for answer in answers if version not in answer.rounds]
        if missing:
            _copy_weights(weights, self._scratch)
        for answer in missing:
            num_rounds = num_emitted = 0
            for lesson in answer.lessons:
                features = RowFeatures(taps=lesson.taps, last=lesson.last, log_normalizer=None)
                batch = pack_batch([lesson.row], [features], device=self._target.device, dtype=self.head.dtype)
                for one in simulate(self._scratch, batch, depth=CHAIN_DEPTH):
                    num_rounds += len(one.round_lengths)
                    num_emitted += sum(one.round_lengths)
                yield True
            answer.rounds[version], answer.num_emitted = num_rounds, num_emitted

    # The head that drafts

    def _swap(self, candidate: Mapping[str, torch.Tensor], found: Comparison) -> None:
        self._former = _Former(
            version=self.recorder.version,
            weights={name: weight.detach().clone() for name, weight in self.head.named_parameters()},
            calibration=self._grower.calibration,
            is_original=self._is_original,
        )
        self._install(candidate, calibration=None, is_original=False)
        self._num_swaps += 1
        self._notice(f"learning: the head changes after {self._num_updates} steps, {found}")

    def _roll_back(self, former: _Former, found: Comparison) -> None:
        self._install(former.weights, calibration=former.calibration, is_original=former.is_original)
        self._former = None
        self._restart()
        self._num_rollbacks += 1
        self._rests_until = self._num_answers + REST_ANSWERS
        self._notice(f"learning: the former head comes back, {found}; it rests for {REST_ANSWERS} answers")

    def _install(
        self, weights: Mapping[str, torch.Tensor], *, calibration: Calibration | None, is_original: bool
    ) -> None:
        """From the next round on, draft with these weights. A calibration is of the weights it was fitted with."""
        _copy_weights(weights, self.head)  # in place: views that decode take them from there
        self._grower.calibration = calibration
        self._is_original = is_original
        self.recorder.version += 1
        self._live.turn()
        self._held_out_since = self._held_out_seen = 0

    def _restart(self) -> None:
        """Train a new twin of the head that drafts."""
        self._twin = self.head.twin()
        self._objective = Objective(self._twin, self._teacher, self._train_settings)
        self._updater = LocalUpdater(
            self._objective, [list(self._twin.parameters())], OptimConfig(lr=self.settings.lr), World()
        )


def lessons_of(request: Request, text: RecordedText, *, width: int, num_steps: int) -> list[Lesson]:
    """What an answer teaches: its tokens in parts, each with those before it. `width`: of a row's taps."""
    if not text.num_rows:
        return []
    states = text.joined()
    token_ids = request.tokens_from(text.start)[: len(states)]
    first = max(1, len(request.prompt_ids) - text.start)
    lessons = []
    for begin in range(first, len(token_ids) - 1, LESSON_TOKENS):
        # A draft of depth d needs d + 1 tokens, so parts overlap: none is lost at their ends.
        end = min(len(token_ids), begin + LESSON_TOKENS + num_steps)
        rows = slice(max(0, begin - LESSON_CONTEXT), end)
        mask = [begin <= place for place in range(rows.start, end)]
        lessons.append(
            Lesson(
                row=Rendered(token_ids=token_ids[rows], loss_mask=mask),
                taps=states[rows, :width],
                last=states[rows, width:],
            )
        )
    return lessons


def check_out(folder: str | Path) -> None:
    """Learned heads are written beside what there is."""
    if present_folder(Path(folder)).exists():
        raise ValueError(f"{folder} is there already: give a new folder for the learned head")


def _trained_part(drafter: Drafter | None) -> tuple[TreeGrower, DraftHead]:
    """The one trained head that drafts."""
    found = []
    for part in parts_of(drafter):
        head = getattr(part.stepper, "head", None) if isinstance(part, TreeGrower) else None
        if isinstance(head, DraftHead):
            found.append((cast(TreeGrower, part), head))
    if len(found) != 1:
        name = "nothing" if drafter is None else drafter.name
        raise ValueError(f"learning needs one trained head that drafts; here {name} drafts, with {len(found)} of them")
    other = [str(one.dtype) for one in found[0][1].parameters() if not one.is_floating_point()]
    if other:
        raise ValueError(f"the head's weights are quantised ({other[0]}), and cannot go on learning")
    return found[0]


@torch.no_grad()
def _copy_weights(weights: Mapping[str, torch.Tensor], head: DraftHead) -> None:
    for name, parameter in head.named_parameters():
        parameter.copy_(weights[name])


def _copy_adapter(source: Path, folder: Path) -> None:
    """The adapter of a target that was trained along with the head belongs to both."""
    if source.is_dir():
        copytree(source, folder / source.name)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))

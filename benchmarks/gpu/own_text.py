"""Text of a target's own in big batches: what a head is trained on that is to draft for it.

A plain step of static shapes (`infer.graphs.StaticRound`) adds a token to each of B texts; some steps run without the
host looking. Tokens of a text that are not the target's to choose (its template, the first words of a question) are
*forced*: they take the place of what was drawn, so prompts need no forwards of their own. A finished text makes room
for the next one.

Shapes: B texts, K steps between two looks of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infer.chat import Rendered, end_of_user_turn_id, render_prompt, user_turn_prefix
from infer.repetition import is_looping
from infer.target import TargetModel
from train.corpus.openings import OPENINGS

NUM_STEPS = 16
"""Between two looks of the host: half of them are lost on each text that ends."""
TEMPERATURES, QUESTION_TEMPERATURE = (0.0, 0.7, 1.0), 0.9
"""Of answers, in turn; and of questions, which would be the same again and again if they were not sampled."""
LEAST_ANSWER = 8
MOST_QUESTION = 48
"""Tokens that a question may have beyond its first words."""

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Token ids around a question and its answer.

    before: what stands before a question; openings: first words of questions, which take turns; end_of_question: what
    ends one (None: the answer begins right after the opening); between: what then stands before the answer.
    """

    before: tuple[int, ...]
    openings: tuple[tuple[int, ...], ...]
    end_of_question: int | None
    between: tuple[int, ...]

    @classmethod
    def of(cls, target: TargetModel) -> Frame:
        """The target's chat template; without one, texts go on from the openings, without a tokenizer from random
        tokens."""
        tokenizer = target.tokenizer
        if tokenizer is None:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(3, target.vocab_size, (64, 4), generator=generator).tolist()
            return cls(before=(), openings=tuple(map(tuple, drawn)), end_of_question=None, between=())
        words = [opening for openings in OPENINGS.values() for opening in openings]
        openings = tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in words)
        if not getattr(tokenizer, "chat_template", None):
            begin = getattr(tokenizer, "bos_token_id", None)
            return cls(before=() if begin is None else (begin,), openings=openings, end_of_question=None, between=())
        before, end = user_turn_prefix(tokenizer), end_of_user_turn_id(tokenizer)
        prompt = render_prompt(tokenizer, [{"role": "user", "content": words[0]}])
        between = prompt[prompt.index(end, len(before)) + 1 :]
        return cls(before=tuple(before), openings=openings, end_of_question=end, between=tuple(between))


@dataclass(kw_only=True, eq=False)
class Text:
    """One text as it grows. tokens: known so far, of which the first `num_cached` are in the cache; those known beyond
    the root (`tokens[num_cached]`) are forced. answer_start: None while the question is written."""

    number: int
    answer_temperature: float
    tokens: list[int]
    num_cached: int = 0
    answer_start: int | None = None
    question_start: int = 0
    is_done: bool = False

    @property
    def temperature(self) -> float:
        return QUESTION_TEMPERATURE if self.answer_start is None else self.answer_temperature

    def forced(self, num_steps: int) -> list[int]:
        """Of the next steps, what each must give; -1 where the target chooses."""
        known = self.tokens[self.num_cached + 1 : self.num_cached + 1 + num_steps]
        return known + [-1] * (num_steps - len(known))


@dataclass(frozen=True, kw_only=True)
class Written:
    """Texts, with what they took; the last ones break off where the time was up. num_steps: of the whole batch;
    num_drawn: tokens that were drawn, those of texts left out included."""

    rows: list[Rendered]
    num_steps: int
    num_drawn: int
    num_left_out: int
    seconds: float
    is_captured: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class OwnText:
    """Writes texts of at most `max_length` tokens, `batch` at a time."""

    def __init__(
        self,
        target: TargetModel,
        *,
        batch: int,
        max_length: int,
        seed: int = 0,
        frame: Frame | None = None,
        notice: Notice = lambda line: None,
    ) -> None:
        self._target, self._batch, self._max_length, self._seed = target, batch, max_length, seed
        self._frame = Frame.of(target) if frame is None else frame
        longest = len(self._frame.before) + max(map(len, self._frame.openings)) + len(self._frame.between)
        if max_length < longest + LEAST_ANSWER:
            raise ValueError(
                f"max_length is {max_length}, but a text's frame alone takes {longest} tokens: raise it to "
                f"{longest + MOST_QUESTION + LEAST_ANSWER} or more"
            )
        self._stepper = Stepper(target, batch=batch, num_columns=max_length + NUM_STEPS + 1, notice=notice)
        self._numbers = iter(range(1 << 62))

    def write(self, *, seconds: float | None = None, tokens: int | None = None) -> Written:
        """Texts until so many seconds have passed or so many tokens are in finished ones; at least one is awaited."""
        assert seconds is not None or tokens is not None, "something must end it"
        start = time.perf_counter()
        texts = [self._begin() for _ in range(self._batch)]
        rows: list[Rendered] = []
        num_runs = num_drawn = num_left_out = num_tokens = 0
        while True:
            drawn = self._stepper.run(texts, seed=self._seed)
            num_runs += 1
            for place, (text, new) in enumerate(zip(texts, drawn, strict=True)):
                num_drawn += NUM_STEPS - (len(text.tokens) - text.num_cached - 1)
                self._read(text, new)
                if not text.is_done:
                    continue
                texts[place] = self._begin()
                row = self._row(text)
                if row is None:
                    num_left_out += 1
                else:
                    rows.append(row)
                    num_tokens += len(row.token_ids)
            spent = time.perf_counter() - start
            if rows and ((seconds is not None and spent >= seconds) or (tokens is not None and num_tokens >= tokens)):
                break
            if num_left_out > 256 + 20 * len(rows):
                raise ValueError(
                    f"of {num_left_out + len(rows)} texts {num_left_out} repeat themselves or have no answer: "
                    f"{self._target.name} does not write text that a head could learn from"
                )
        begun = [row for text in texts if (row := self._row(text)) is not None]  # else long texts would be too few
        return Written(
            rows=rows + begun,
            num_steps=num_runs * NUM_STEPS,
            num_drawn=num_drawn,
            num_left_out=num_left_out,
            seconds=time.perf_counter() - start,
            is_captured=self._stepper.is_captured,
        )

    def _begin(self) -> Text:
        number, frame = next(self._numbers), self._frame
        opening = frame.openings[number % len(frame.openings)]
        turn = number + number // len(frame.openings)  # so that an opening is answered in all ways
        tokens = [*frame.before, *opening]
        has_question = frame.end_of_question is not None
        return Text(
            number=number,
            answer_temperature=TEMPERATURES[turn % len(TEMPERATURES)] if has_question else 1.0,
            tokens=tokens,
            answer_start=None if has_question else len(tokens),
            question_start=len(tokens),
        )

    def _read(self, text: Text, new: Sequence[int]) -> None:
        """Take up the tokens of a run: new[i] is the token at `num_cached + 1 + i`, forced ones included."""
        num_known = len(text.tokens)
        text.tokens += new[num_known - text.num_cached - 1 :]
        text.num_cached += len(new)
        if text.answer_start is None:
            self._end_question(text, num_known)
        else:
            self._end_answer(text, max(num_known, text.answer_start))
        text.num_cached = min(text.num_cached, len(text.tokens) - 1)

    def _end_question(self, text: Text, first: int) -> None:
        end = self._frame.end_of_question
        assert end is not None
        last = text.question_start + MOST_QUESTION
        place = next((at for at in range(first, len(text.tokens)) if text.tokens[at] == end or at >= last), None)
        if place is None:
            return
        text.tokens[place:] = [end, *self._frame.between]
        text.num_cached = min(text.num_cached, place)  # what the cache holds from there on is of other tokens
        text.answer_start = len(text.tokens)

    def _end_answer(self, text: Text, first: int) -> None:
        stops = self._target.eos_ids
        place = next((at for at in range(first, len(text.tokens)) if text.tokens[at] in stops), None)
        if place is not None:
            del text.tokens[place + 1 :]
        del text.tokens[self._max_length :]
        text.is_done = place is not None or len(text.tokens) >= self._max_length

    def _row(self, text: Text) -> Rendered | None:
        """The text as a row whose answer is under the loss; None if there is nothing to be learnt from it."""
        start = text.answer_start
        if start is None or len(text.tokens) - start < LEAST_ANSWER or is_looping(text.tokens[start:]):
            return None
        mask = [place >= start for place in range(len(text.tokens))]
        return Rendered(token_ids=text.tokens, loss_mask=mask)


class Stepper:
    """Runs of K plain steps of all texts: one table goes to the device, K tokens of each text come back."""

    def __init__(self, target: TargetModel, *, batch: int, num_columns: int, notice: Notice) -> None:
        from infer.graphs.rounds import StaticRound
        from infer.graphs.shapes import RoundShape

        cache = target.new_cache(num_slots=batch, num_columns=num_columns)
        shape = RoundShape(batch=batch, nodes=0, depth=0, context=num_columns)
        self._round = StaticRound(target, cache, shape)
        self._inputs = self._round.inputs.on_device()
        device = target.device
        self._forced = torch.full((batch, NUM_STEPS), -1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros_like(self._forced)
        self._step = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self._place([Text(number=0, answer_temperature=0.0, tokens=[0], answer_start=0) for _ in range(batch)], seed=0)
        self._replay, self.is_captured = self._captured(device, notice)

    def run(self, texts: Sequence[Text], *, seed: int) -> list[list[int]]:
        """[B][K]: the tokens after each text's root."""
        self._place(texts, seed=seed)
        for _ in range(NUM_STEPS):
            self._replay()
        return self._tokens.tolist()

    def _place(self, texts: Sequence[Text], *, seed: int) -> None:
        from infer.noise import position_stream

        self._round.inputs.clear()
        for place, text in enumerate(texts):
            self._round.inputs.place(
                place,
                slot=place,
                num_cached=text.num_cached,
                token=text.tokens[text.num_cached],
                stream=position_stream(seed, text.number, 0),
                temperature=text.temperature,
            )
        self._round.inputs.upload()
        self._forced.copy_(torch.tensor([text.forced(NUM_STEPS) for text in texts]))
        self._step.zero_()

    @torch.inference_mode()
    def _advance(self) -> None:
        """One step, and its tokens as the next step's inputs; all on the device."""
        self._round.compute()
        place = self._step.clamp_max(NUM_STEPS - 1).expand(len(self._forced), 1)
        forced = self._forced.gather(1, place)
        drawn = self._round.tokens[:, None]
        token = torch.where(forced >= 0, forced, drawn)
        self._tokens.scatter_(1, place, token)
        self._inputs.tokens.copy_(token[:, 0])
        self._inputs.num_cached.add_(1)
        self._step.add_(1)

    def _captured(self, device: torch.device, notice: Notice) -> tuple[Callable[[], None], bool]:
        from infer.graphs.capture import captured

        try:
            return captured(self._advance, device), device.type == "cuda"
        except (ValueError, RuntimeError) as error:
            notice(f"no graph of a plain step: {str(error).splitlines()[0]}")
            return self._advance, False

"""Drafting with causal models: a smaller one beside the target, or the target itself made cheaper.

    another model       reads the text into a cache of its own, the prompt first (Leviathan et al. 2023, arXiv
                        2211.17192; Chen et al. 2023, arXiv 2302.01318). What a round added is read anew in the next,
                        so its cache always equals that of a fresh prefill
    the first layers    the target's own, its final norm and LM head behind them (Draft & Verify, Zhang et al. 2023,
                        arXiv 2309.08168; LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710), or behind them a trained
                        adapter (`heads.early_exit`)
    rounded weights     the target in int8 or int4 (`infer.quantize`)

The last two read the target's own cache: of each request the committed rows are there already, so nothing is ever
prefilled. The row of the token emitted last comes behind them and the rows of the tree behind that, where verification
writes its own.

How the tree grows from the logits is `infer.drafters.growing`'s business.

Shapes: R packed rows, B requests, F frontier nodes of all requests, C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from heads.early_exit import EarlyExitHead
from heads.vocab import DraftVocabulary, always_kept_ids
from infer import views
from infer.cache import SlotCache
from infer.calibration import Calibration
from infer.chat import encode_text
from infer.cost import median_milliseconds
from infer.drafters.base import Room
from infer.drafters.growing import TreeGrower
from infer.drafters.stepper import Frontier
from infer.quantize import quantized_copy
from infer.request import Request
from infer.rows import GrowingRows, RowGroup
from infer.target import TargetModel
from infer.tree import ROOT

_LONE_ROWS = 64
"""So many unread tokens are read in a forward of their own: beside others they would pad them all to their length."""


@dataclass
class _Memory:
    """What a model with a cache of its own has read of one request: `num_rows` tokens from position `start` on."""

    start: int = 0
    num_rows: int = 0


class ModelStepper:
    """See the module (`infer.drafters.stepper` says what a stepper is).

    model: its LM head has a row for each of `vocabulary`'s tokens. shares_cache: whether it is made of the target's
    layers, and runs on their cache. head: what makes logits of the last layer's states, instead of the model's own
    norm and LM head.
    """

    taps: tuple[int, ...] = ()
    max_depth = None

    def __init__(
        self,
        model: TargetModel,
        vocabulary: DraftVocabulary,
        *,
        name: str,
        shares_cache: bool,
        head: EarlyExitHead | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.shares_cache = shares_cache
        self.head = None if head is None else head.eval().requires_grad_(False)
        self.target_ids = vocabulary.target_ids.to(model.device)
        self.vocab_size = vocabulary.vocab_size
        self.begin_milliseconds = 0.0
        self.step_milliseconds = 0.0
        self._num_readable = len(model.embedding_weight)
        self._longest = model.max_length
        self._cache: SlotCache | None = None

    def open(self, room: Room) -> None:
        if self.shares_cache:
            assert room.cache is not None, "a drafter that shares the target's cache is given it"
            self._cache = room.cache
        else:
            self._cache = self._own_cache(room)
        if room.tree.adaptive and not self.step_milliseconds:
            # A round begins with the token emitted last, and with those before it that the model has not read.
            self.begin_milliseconds = self.measure(1 if self.shares_cache else 4, branch=room.tree.branch)
            self.step_milliseconds = self.measure(min(4, room.tree.beam), branch=room.tree.branch)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        """The text itself says what is new."""

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> ModelRound:
        return ModelRound(self, self.read(requests))

    def num_kept(self, request: Request) -> int:
        """All of it: what the model has not read of a text, it can."""
        return request.num_tokens

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        if self.shares_cache:
            return
        assert self._cache is not None
        theirs = self.memory(source)
        num_rows = min(num_tokens, 0 if theirs.start else theirs.num_rows)  # a text that outgrew the model begins anew
        if source.slot != request.slot:
            self._cache.copy(source.slot, request.slot, num_rows)
        self.memory(request).num_rows = num_rows

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def measure(self, width: int, *, branch: int, context: int = 128) -> float:
        """Milliseconds of a forward of `width` rows, the choice of candidates included, on this machine."""
        context = max(0, min(context, self.model.max_length - width))
        cache = self.model.new_cache(num_slots=1, num_columns=context + width)
        group = RowGroup(slot=0, prefix=context, tokens=[min(7, self._num_readable - 1)] * width)

        @torch.inference_mode()
        def step() -> None:
            logits = self._logits([group], cache).float()
            torch.softmax(logits, dim=-1).topk(min(branch, logits.shape[-1]))[1].tolist()

        return median_milliseconds(step, repeats=7)

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one."""
        return self.read([request])[0]

    def memory(self, request: Request) -> _Memory:
        memory = request.draft_state.setdefault(self.name, _Memory())
        assert isinstance(memory, _Memory)
        return memory

    def read(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run the model over the tokens that its cache does not hold yet; logits [B, C] after each request's last."""
        groups = [self._unread(request) for request in requests]
        short = [index for index, group in enumerate(groups) if len(group.tokens) < _LONE_ROWS]
        batches = [[index] for index in range(len(groups)) if index not in short]
        rows: dict[int, torch.Tensor] = {}
        for batch in [*batches, short] if short else batches:
            last_rows = [end - 1 for end in accumulate(len(groups[index].tokens) for index in batch)]
            logits = self.forward([groups[index] for index in batch], last_rows)
            rows.update(zip(batch, logits, strict=True))
        return torch.stack([rows[index] for index in range(len(groups))])

    def forward(self, groups: Sequence[RowGroup], logit_rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of the packed rows asked for (all if None)."""
        assert self._cache is not None
        return self._logits(groups, self._cache, logit_rows)

    def growing_rows(self, request: Request) -> GrowingRows:
        """The rows of a request's tree, behind those of its text."""
        prefix = request.num_tokens if self.shares_cache else self.memory(request).num_rows
        return GrowingRows(slot=request.slot, prefix=prefix)

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """`tokens`, but for the target's without an embedding here: rows that pad an LM head stand for no text."""
        return [token if token < self._num_readable else 0 for token in tokens]

    def _logits(
        self, groups: Sequence[RowGroup], cache: SlotCache, logit_rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        if self.head is None:
            return self.model.forward(groups, cache, logit_rows=logit_rows).logits
        states = self.model.forward(groups, cache, logit_rows=[0], taps=self.head.config.taps).taps
        assert states is not None
        return self.head.logits(states if logit_rows is None else states[list(logit_rows)])

    def _unread(self, request: Request) -> RowGroup:
        if self.shares_cache:
            return RowGroup(slot=request.slot, prefix=request.num_cached, tokens=request.uncached)
        memory = self.memory(request)
        if request.num_tokens - memory.start > self._longest:
            # The text outgrew the model's context: its later half is read again, as a text of its own.
            memory.start, memory.num_rows = request.num_tokens - (self._longest + 1) // 2, 0
        tokens = self.readable(request.tokens_from(memory.start + memory.num_rows))
        assert tokens, "a request is asked for a draft once after each commit"
        group = RowGroup(slot=request.slot, prefix=memory.num_rows, tokens=tokens)
        memory.num_rows += len(tokens)
        return group

    def _own_cache(self, room: Room) -> SlotCache:
        """Room for texts as far as the model's context goes, and for a tree behind each."""
        self._longest = self.model.max_length - room.tree.max_depth
        if self._longest < room.tree.max_depth:
            raise ValueError(
                f"the draft model {self.model.name} reads at most {self.model.max_length} tokens, which is too few to "
                f"draft {room.tree.max_depth} deep: lower max_depth, or take a draft model of longer context"
            )
        num_columns = min(room.num_columns, self._longest) + room.tree.max_depth * room.tree.beam
        return self.model.new_cache(num_slots=room.num_slots, num_columns=num_columns)


class ModelRound:
    """Logits of the roots [B, C], and the rows that each request's tree has so far."""

    def __init__(self, stepper: ModelStepper, root_logits: torch.Tensor) -> None:
        self._stepper = stepper
        self._root_logits = root_logits
        self._rows: dict[Request, GrowingRows] = {}

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        if depth == 0:
            assert all(list(frontier.nodes) == [ROOT] for frontier in frontiers)
            return self._root_logits[[frontier.index for frontier in frontiers]]
        groups = []
        for each in frontiers:
            if each.request not in self._rows:
                self._rows[each.request] = self._stepper.growing_rows(each.request)
            tokens = self._stepper.readable(each.tokens)
            groups.append(self._rows[each.request].add(each.nodes, each.parents, tokens, depth))
        return self._stepper.forward(groups)


class ModelDrafter(TreeGrower):
    """Trees grown from a causal model.

    In all its makers `vocab` is the number of tokens to draft among (None: all), `text` a file of text to choose them
    by, and `name` tells drafters of one hybrid apart.
    """

    stepper: ModelStepper

    def __init__(self, stepper: ModelStepper, *, calibration: Calibration | None = None) -> None:
        super().__init__(stepper, calibration=calibration)

    @classmethod
    def load(
        cls,
        source: str | Path,
        target: TargetModel,
        *,
        vocab: int | None = None,
        text: str | Path | None = None,
        name: str | None = None,
    ) -> ModelDrafter:
        """A model from a folder or a Hub name, in the target's precision and on its device."""
        model = TargetModel.load(source, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
        return cls.of_model(model, target, vocab=vocab, text=text, name=name)

    @classmethod
    def of_model(
        cls,
        model: TargetModel,
        target: TargetModel,
        *,
        vocab: int | None = None,
        text: str | Path | None = None,
        name: str | None = None,
    ) -> ModelDrafter:
        """Another model with the target's tokenizer; ValueError if it has not."""
        check_tokenizers(model, target)
        vocabulary = draft_vocabulary(target, vocab, text=text, num_tokens=model.vocab_size)
        model = _reduced(model, vocabulary)
        return cls(ModelStepper(model, vocabulary, name=name or f"model:{model.name}", shares_cache=False))

    @classmethod
    def first_layers(
        cls,
        num_layers: int,
        target: TargetModel,
        *,
        vocab: int | None = None,
        text: str | Path | None = None,
        name: str | None = None,
    ) -> ModelDrafter:
        """The target's own first layers."""
        vocabulary = draft_vocabulary(target, vocab, text=text)
        model = _reduced(target.truncated(num_layers), vocabulary)
        return cls(ModelStepper(model, vocabulary, name=name or f"layers:{num_layers}", shares_cache=True))

    @classmethod
    def rounded(
        cls,
        bits: int,
        target: TargetModel,
        *,
        vocab: int | None = None,
        text: str | Path | None = None,
        name: str | None = None,
        kernels: bool = True,
    ) -> ModelDrafter:
        """The target with its weights rounded (`kernels`: see `infer.quantize.quantized_copy`)."""
        vocabulary = draft_vocabulary(target, vocab, text=text)
        model = quantized_copy(_reduced(target, vocabulary), bits, kernels=kernels)
        return cls(ModelStepper(model, vocabulary, name=name or f"int{bits}", shares_cache=True))

    @classmethod
    def early_exit(
        cls,
        head: EarlyExitHead,
        target: TargetModel,
        *,
        calibration: Calibration | None = None,
        name: str = "early_exit",
    ) -> ModelDrafter:
        """The target's first layers and a trained head, which must be bound to the target's weights."""
        layers = target.truncated(head.config.exit_layer)
        # The head has its own norm and LM head. One row is left of the target's, whose result is dropped.
        layers = layers.view(views.with_output_rows(layers.model, torch.tensor([0])), num_layers=layers.num_layers)
        stepper = ModelStepper(layers, head.vocabulary, name=name, shares_cache=True, head=head)
        return cls(stepper, calibration=calibration)


def draft_vocabulary(
    target: TargetModel, size: int | None, *, text: str | Path | None = None, num_tokens: int | None = None
) -> DraftVocabulary:
    """The `size` tokens to draft among (None: all): special and byte tokens and the ends of texts, then the most
    frequent of the file `text`, then the lowest ids, which byte-pair vocabularies gave out first.

    num_tokens: rows of the draft model's LM head, beyond which it has no tokens; likewise beyond the tokenizer.
    """
    limit = min(target.vocab_size, num_tokens or target.vocab_size)
    if num_tokens is not None and num_tokens != target.vocab_size and target.tokenizer is not None:
        limit = min(limit, max(target.tokenizer.get_vocab().values()) + 1)
    if text is not None and (size is None or target.tokenizer is None):
        lacking = "a vocabulary size" if size is None else "a tokenizer"
        raise ValueError(f"draft tokens are chosen by the text {str(text)!r} only together with {lacking}: give one")
    if size is None:
        return DraftVocabulary(target_ids=torch.arange(limit), vocab_size=target.vocab_size)
    if not 1 <= size <= limit:
        raise ValueError(f"vocab={size}: give a number of draft tokens from 1 to {limit}")
    keep = set(target.eos_ids) if target.tokenizer is None else always_kept_ids(target.tokenizer, target.eos_ids)
    counts: Counter[int] = Counter()
    if text is not None:
        counts.update(encode_text(target.tokenizer, Path(text).read_text(encoding="utf-8")))
    return DraftVocabulary.from_counts(
        {token: count for token, count in counts.items() if token < limit},
        size=size,
        vocab_size=target.vocab_size,
        keep_ids={token for token in keep if token < limit},
    )


def check_tokenizers(model: TargetModel, target: TargetModel) -> None:
    """Raise ValueError unless token ids mean the same to both models, naming the first that does not."""
    problem = _first_difference(model, target)
    if problem is not None:
        raise ValueError(
            f"the draft model {model.name} cannot draft for {target.name}, whose tokenizer is another: {problem}. "
            "Take a draft model of the target's own family"
        )


def _first_difference(model: TargetModel, target: TargetModel) -> str | None:
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            return (
                f"it has {model.vocab_size} tokens and the target {target.vocab_size} (one has no tokenizer to compare)"
            )
        return None
    theirs, ours = _tokens_by_id(model.tokenizer), _tokens_by_id(target.tokenizer)
    for token_id in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(token_id), ours.get(token_id)
        if one != other:
            return f"token {token_id} is {_spelled(one)} to the draft model and {_spelled(other)} to the target"
    for role in ("bos_token_id", "eos_token_id", "unk_token_id"):
        one, other = getattr(model.tokenizer, role, None), getattr(target.tokenizer, role, None)
        if one != other:
            return f"{role} is {one} to the draft model and {other} to the target"
    return None


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _spelled(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def _reduced(model: TargetModel, vocabulary: DraftVocabulary) -> TargetModel:
    """The model with the draft vocabulary's rows of its LM head alone."""
    if len(vocabulary) == model.vocab_size:
        return model
    return model.view(views.with_output_rows(model.model, vocabulary.target_ids), num_layers=model.num_layers)

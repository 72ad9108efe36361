"""The engine: prefill, then rounds of draft, verify and commit, over any number of requests at once.

A request is in one of two states: waiting, or running in a cache slot. Every forward serves all running requests,
each with its own tree. Tokens do not depend on the trees: under the match rule they equal plain decoding's for the
same seed; under the rejection rules they follow the same law (`infer.exactness`).
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from infer.adaptation import Adaptation
from infer.cache import SlotAllocator, SlotCache
from infer.chat import Message, encode_text, render_prompt, token_id_list
from infer.cost import CostModel, cost_of
from infer.drafters.base import Drafter, DraftLimit, Room, TreeSettings
from infer.exactness import ANY_KIND, choose_rule
from infer.fixed import CHUNK, checked_row_width
from infer.noise import random_seed
from infer.request import Completion, Request, RequestLaw
from infer.rows import tree_group
from infer.sampling import SamplingError, SamplingParams
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot
from infer.verify import RULES, KeyedChance, Rule, Verdict, verify

if TYPE_CHECKING:
    from infer.tune.settings import Workload

MAX_PREFILL_ROWS = 4096

Prompt = str | Sequence[Message] | Sequence[int]
Observer = Callable[[Request, DraftTree, RequestLaw, Verdict], None]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What verification keeps of a round: accepted nodes, the tokens to emit, and, where the text runs into a row from
    which no token can be drawn, why."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    dead_end: str | None


class Engine:
    """Decodes prompts with `target`, sped up by `drafter` if there is one.

    max_requests: requests that run at once; more wait. max_length: most tokens of a request, prompt included (by
    default what the prompts at hand need). exactness, rule: what is promised and how trees are verified
    (`infer.exactness`); a request may ask for its own. row_width: rows of every forward where exactness is bitwise
    (by default 16; any number where the target's rows do not depend on each other, `TargetModel.is_row_invariant`).
    tree: bounds of the draft trees. cost: the machine's cost table (measured, or read from the user's cache folder,
    when first needed). observer: called with every verified tree, before its tokens are emitted.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None = None,
        *,
        max_requests: int = 32,
        max_length: int | None = None,
        exactness: str | None = None,
        rule: str | None = None,
        row_width: int | None = None,
        tree: TreeSettings | None = None,
        cost: CostModel | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(target, TargetModel):
            raise ValueError(
                f"target is {target!r:.80}: expected a TargetModel (TargetModel.load reads a folder or Hub name, "
                "TargetModel.wrap takes a model)"
            )
        if max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {max_requests}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.target = target
        self.drafter = drafter
        self.max_requests = max_requests
        self.max_length = max_length
        self.tree = tree or TreeSettings()
        self.rule = self._choose_rule(exactness, rule)
        self._is_bitwise = exactness == "bitwise"
        needs_width = row_width is not None or not (self._is_bitwise and target.is_row_invariant)
        self.row_width = checked_row_width(row_width, exactness, max_depth=self.tree.max_depth) if needs_width else None
        self.observer = observer
        self._cost = cost
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._cache: SlotCache | None = None
        self._slots = SlotAllocator(0)
        self.adaptation = Adaptation()
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0
        self.forward_seconds = 0.0
        self.commit_seconds = 0.0

    @property
    def exactness(self) -> str:
        """What is promised to requests that ask for nothing else."""
        return self._exactness_of(self.rule)

    @property
    def cost(self) -> CostModel:
        if self._cost is None:
            self._cost = cost_of(self.target)
        return self._cost if self.row_width is None else self._cost.in_steps_of(self.row_width)

    @property
    def _tree_cost(self) -> CostModel:
        """The costs that trees are fitted to; a fixed tree needs no table, so none is measured."""
        return self.cost if self.tree.adaptive else CostModel.free()

    def _round_cost(self, requests: Sequence[Request]) -> CostModel:
        """The costs at the batch and the mean context of a round."""
        context = sum(request.num_cached for request in requests) // len(requests)
        return self._tree_cost.at(context=context, batch=len(requests))

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Answer `prompts`, in their order.

        A prompt is a list of chat messages (rendered with the tokenizer's template), a text (encoded as it is), or
        token ids. The `n` samples of a prompt stand side by side. A request that fails alone (its filters leave no
        token) has the finish reason "error", and `error` says why. `progress` is called with the number of tokens that
        each step emitted.
        """
        requests = self.submit(prompts, params)
        try:
            while any(request.finish_reason is None for request in requests):
                num_tokens = self.step()
                if progress is not None:
                    progress(num_tokens)
        except BaseException:
            self.abort()
            raise
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[list[int]]:
        """Answer one prompt; yields the tokens of each round as they are accepted.

        Raises SamplingError, after what came before it, where no further token can be drawn.
        """
        if params.n != 1:
            raise ValueError(f"a stream has one sample, but n is {params.n}: use generate, or stream each with n=1")
        (request,) = self.submit([prompt], params)
        num_seen = 0
        try:
            while request.finish_reason is None or num_seen < len(request.output_ids):
                if num_seen == len(request.output_ids):  # else another reader's step has served this one too
                    self.step()
                block = request.output_ids[num_seen:]
                num_seen += len(block)
                if block:
                    yield block
            if request.error is not None:
                raise SamplingError(request.error)
        except GeneratorExit:  # the reader went away between two steps, where nothing else is touched
            self.abort([request])
            raise
        except BaseException:
            self.abort()
            raise

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """Queue prompts, `n` requests each; `step` answers them. All are checked before any is queued."""
        if isinstance(prompts, str):
            raise ValueError("prompts is one text: give a list of prompts, [text]")
        if len(prompts) and isinstance(prompts[0], Mapping) and "role" in prompts[0]:
            raise ValueError("prompts is one chat: give a list of chats, [[{'role': ..., 'content': ...}]]")
        each = _as_list(params, len(prompts))
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts were given {len(each)} sampling parameters: give one, or one each"
            )
        token_ids = [self._encode(index, prompt) for index, prompt in enumerate(prompts)]
        for index, (ids, one) in enumerate(zip(token_ids, each, strict=True)):
            self._check(index, ids, one)
        rules = [self._rule_for(index, one) for index, one in enumerate(each)]
        requests = [
            request
            for ids, rule, one in zip(token_ids, rules, each, strict=True)
            for request in self._create_samples(ids, rule, one)
        ]
        if requests:
            self._make_room(requests)
            self._waiting.extend(requests)
        return requests

    def step(self) -> int:
        """Prefill requests that found a slot, then one round over all that run; returns the tokens emitted."""
        admitted = self._admit()
        num_tokens = self._advance(admitted, [DraftTree.empty()] * len(admitted)) if admitted else 0
        if self._running:
            running = list(self._running)
            trees = self._draft(running)
            num_tokens += self._advance(running, trees)
            if self.drafter is not None and self.tree.adaptive:
                self.adaptation.learn(running, trees)
        return num_tokens

    def preempt(self, requests: Sequence[Request] | None = None) -> None:
        """Take the slots of running `requests` (all if None) away; they wait in front and resume: under the match rule
        with the tokens they would have had, under the others with tokens of the same law."""
        for request in reversed(list(self._running) if requests is None else requests):
            if request in self._running:
                self._release(request)
                request.restart()
                self._waiting.appendleft(request)

    @contextmanager
    def watched(self, observer: Observer) -> Iterator[None]:
        """Let `observer` see every verified tree within the block."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """Drop `requests` (all if None), running or waiting, and free their slots; their finish reason is "abort".

        A step that raised may have committed some requests and not others: then all must go.
        """
        for request in [*self._running, *self._waiting] if requests is None else requests:
            if request in self._running:
                self._finish(request)
            elif request in self._waiting:
                self._waiting.remove(request)
            else:
                continue
            request.end("abort")

    def _draft(self, requests: Sequence[Request]) -> list[DraftTree]:
        if self.drafter is None:
            return [DraftTree.empty()] * len(requests)
        start = time.perf_counter()
        limits = [self._limit(request) for request in requests]
        trees = self.adaptation.draft(
            self.drafter, requests, limits, self._round_cost(requests), adaptive=self.tree.adaptive
        )
        self.draft_seconds += time.perf_counter() - start
        return trees

    def _advance(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> int:
        """Verify a tree for each request in one forward, and commit what was accepted."""
        requests = list(requests)
        logits, states = self._forward(requests, trees)
        start = time.perf_counter()
        kept = [self._verify(request, tree, rows) for request, tree, rows in zip(requests, trees, logits, strict=True)]
        verified = time.perf_counter()
        num_tokens = sum(
            self._commit(request, each, rows) for request, each, rows in zip(requests, kept, states, strict=True)
        )
        self.verify_seconds += verified - start
        self.commit_seconds += time.perf_counter() - verified
        return num_tokens

    def _forward(
        self, requests: Sequence[Request], trees: Sequence[DraftTree]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Logits [1 + nodes, V] of each request's root and nodes, and tapped states of all its rows."""
        assert self._cache is not None
        start = time.perf_counter()
        groups = [
            tree_group(request.slot, request.num_cached, request.uncached, tree.tokens, tree.parents)
            for request, tree in zip(requests, trees, strict=True)
        ]
        logit_rows: list[int] = []
        first_row = 0
        for group, tree in zip(groups, trees, strict=True):
            first_row += len(group.tokens)
            logit_rows.extend(range(first_row - 1 - len(tree), first_row))
        taps = self.drafter.taps if self.drafter is not None else ()
        every_row = len(logit_rows) == first_row
        output = self.target.forward(
            groups,
            self._cache,
            logit_rows=None if every_row else logit_rows,
            taps=taps,
            row_width=self.row_width,
        )
        self.forward_seconds += time.perf_counter() - start
        logits = output.logits.split([1 + len(tree) for tree in trees])
        if output.taps is None:
            return list(logits), [None] * len(requests)
        return list(logits), list(output.taps.split([len(group.tokens) for group in groups]))

    def _verify(self, request: Request, tree: DraftTree, logits: torch.Tensor) -> _Kept:
        """What the request's rule keeps of its tree."""
        rule = request.rule
        if isinstance(tree.kind, OneHot) and not rule.accepts(tree):
            rule = RULES["match"]  # greedy drafts and lookups are one-hot, which the match walk verifies exactly
        law = RequestLaw(request, tree, logits)
        verdict = verify(rule, tree, law, KeyedChance(*request.identity, len(request.accepted_lengths)))
        tokens, dead_end = law.living_tokens(verdict)
        if request.params.logprobs is not None:
            request.record_logprobs(law, verdict.path, tokens)
        if self.observer is not None and dead_end is None:
            self.observer(request, tree, law, verdict)
        return _Kept(path=verdict.path, tokens=tokens, dead_end=dead_end)

    def _commit(self, request: Request, kept: _Kept, states: torch.Tensor | None) -> int:
        """Emit the kept tokens; keep cache rows and states of the accepted path only."""
        assert self._cache is not None
        num_chain = len(request.uncached)
        first_column = request.num_cached + num_chain  # of the tree: the one after the root's own
        num_kept = request.emit(kept.tokens) if kept.tokens else 0
        if request.finish_reason is None and kept.dead_end is not None:
            request.end("error", error=kept.dead_end)
        if request.finish_reason is not None:
            self._finish(request)
            return num_kept
        path = list(kept.path)
        self._cache.commit(request.slot, first_column, [first_column + node for node in path])
        request.num_cached = first_column + len(path)
        if self.drafter is not None:
            if states is not None:
                states = _rows_at(states, [*range(num_chain), *(num_chain + node for node in path)])
            self.drafter.observe(request, states)
        return num_kept

    def _limit(self, request: Request) -> DraftLimit:
        assert self._cache is not None
        num_columns_left = self._cache.num_columns - request.num_tokens
        depth = min(self.tree.max_depth, request.num_tokens_left - 1, num_columns_left)
        return DraftLimit(max_nodes=max(0, min(self.tree.max_nodes, num_columns_left)), max_depth=max(0, depth))

    def _admit(self) -> list[Request]:
        """Give slots to waiting requests, as many as one prefill can take.

        A forward pads every slot between the first and the last that it touches to the longest prompt.
        """
        if self._waiting and not self._running:
            self._make_room(())  # requests that came while others ran may need more slots than there were
        admitted: list[Request] = []
        num_rows = 0
        while self._waiting and self._slots.num_free:
            num_rows = max(num_rows, len(self._waiting[0].uncached))
            if admitted and num_rows * (self._slots.next_free - admitted[0].slot + 1) > MAX_PREFILL_ROWS:
                break
            request = self._waiting.popleft()
            request.slot = self._slots.take()
            if not request.output_ids:  # else it was preempted, and its time goes on
                request.started = time.perf_counter()
            admitted.append(request)
        self._running.extend(admitted)
        return admitted

    def _finish(self, request: Request) -> None:
        request.seconds = time.perf_counter() - request.started
        self._release(request)

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._slots.release(request.slot)
        self.adaptation.forget(request)
        if self.drafter is not None:
            self.drafter.close(request)

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Allocate the cache, or a larger one while nothing runs."""
        longest = max((len(request.prompt_ids) + request.params.max_tokens for request in requests), default=0)
        num_columns = self.max_length or longest
        if self.drafter is not None:  # a drafter that shares the cache writes more rows than verification
            num_columns += max(self.tree.max_nodes, self.tree.max_depth * self.tree.beam + 1)
        grain = 64 if self.row_width is None else CHUNK
        num_columns = -(-num_columns // grain) * grain
        num_slots = min(self.max_requests, len(requests) + len(self._running) + len(self._waiting))
        cache = self._cache
        if cache is not None and cache.num_columns >= num_columns and cache.num_slots >= num_slots:
            return
        if cache is not None:
            if self._running:
                if cache.num_columns < num_columns:
                    raise ValueError(
                        f"a request of {longest} tokens does not fit the running engine's slots of {cache.num_columns} "
                        "columns: build the engine with max_length"
                    )
                return  # more slots must wait until the running requests have left
            num_columns, num_slots = max(num_columns, cache.num_columns), max(num_slots, cache.num_slots)
        self._cache = None  # the old one goes before the new one comes
        self._cache = self.target.new_cache(num_slots=num_slots, num_columns=num_columns)
        self._slots = SlotAllocator(num_slots)
        if self.drafter is not None:
            room = Room(
                num_slots=num_slots, num_columns=num_columns, tree=self.tree, cost=self._tree_cost, cache=self._cache
            )
            self.drafter.open(room)

    def _choose_rule(self, exactness: str | None, rule: str | None) -> Rule:
        """The rule that keeps `exactness` with what this engine's drafter proposes."""
        kinds = ANY_KIND if self.drafter is None else self.drafter.kinds
        return choose_rule(exactness, rule, kinds=kinds, chain=self.tree.branch == 1)

    def _exactness_of(self, rule: Rule) -> str:
        return "bitwise" if self._is_bitwise and rule.exactness == "seed" else rule.exactness

    def _rule_for(self, index: int, params: SamplingParams) -> Rule:
        """The rule that a request asks for; the engine's if it asks for none."""
        if params.exactness == "bitwise" and not self._is_bitwise:
            raise ValueError(
                f"prompt {index} asks for exactness 'bitwise', which every forward of an engine must keep: "
                "build the engine with exactness='bitwise'"
            )
        if params.rule is None and params.exactness in (None, self.exactness, self.rule.exactness):
            return self.rule
        return self._choose_rule(params.exactness, params.rule)

    def _create_samples(self, prompt_ids: Sequence[int], rule: Rule, params: SamplingParams) -> list[Request]:
        """The `n` requests of a prompt: one seed, told apart by their sample index."""
        seed = random_seed() if params.seed is None else params.seed
        return [
            Request.create(
                prompt_ids,
                params,
                seed=seed,
                sample=sample,
                rule=rule,
                exactness=self._exactness_of(rule),
                target=self.target,
            )
            for sample in range(params.n)
        ]

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if (is_chat or isinstance(prompt, str)) and self.target.tokenizer is None:
            raise ValueError(f"prompt {index} is text, and this target was given no tokenizer: give token ids")
        if isinstance(prompt, str):
            return encode_text(self.target.tokenizer, prompt)
        if is_chat:
            return render_prompt(self.target.tokenizer, cast(Sequence[Message], prompt))
        try:
            return token_id_list(prompt)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"prompt {index} is {prompt!r:.80}: expected a text, a list of chat messages, or token ids"
            ) from error

    def _check(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt):
            raise ValueError(f"prompt {index} is empty: give at least one token")
        bad = next((token for token in prompt if not 0 <= token < self.target.vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"prompt {index} has token id {bad}: this target has ids 0 to {self.target.vocab_size - 1}"
            )
        limit = min(self.max_length or self.target.max_length, self.target.max_length)
        if len(prompt) + params.max_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and asks for {params.max_tokens} more, "
                f"but at most {limit} fit: shorten it or lower max_tokens"
            )


def _rows_at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Some rows, in ascending order; nothing is copied where they are the first ones."""
    if places[-1] == len(places) - 1:
        return rows[: len(places)]
    return rows.index_select(0, torch.tensor(places, device=rows.device))


def _as_list(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError(f"params is {params!r:.80}: expected SamplingParams, or a list with one for each prompt")
    return list(params)


def load_engine(
    head: str | Path,
    target: str | Path | TargetModel | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_requests: int = 32,
    max_length: int | None = None,
    exactness: str | None = None,
    rule: str | None = None,
    row_width: int | None = None,
    tree: TreeSettings | None = None,
    cost: CostModel | None = None,
    hybrid: bool | None = None,
    workload: Workload | None = None,
) -> Engine:
    """An engine from an augmented model's folder (or `none`, `ngram`, which need a target).

    `target` overrides the one that the head names; the adapter of a head that was trained along with it is merged in.
    `hybrid`: whether a lookup is beside a lone trained head (by default unless the tree is a chain). Without a `tree`,
    settings that `headstart tune` found on this machine are taken, for the `workload` that comes nearest (by default
    one greedy request), which may be not to draft. Raises ValueError if the head was trained for another target.
    """
    from infer.drafters import NO_DRAFT, adapter_of, load_drafter, resolve_target
    from infer.tune.settings import Workload, tuned_for

    choose_rule(exactness, rule)  # a mistake here is told before the target loads
    if not isinstance(target, TargetModel):
        source = resolve_target(head, target)
        target = TargetModel.load(source, dtype=dtype, device=device, adapter=adapter_of(head))
    if tree is None and rule is None:
        tuned, line = tuned_for(head, target, workload or Workload(), exactness=exactness)
        if tuned is not None:
            tree, rule = tuned.tree, tuned.engine_rule
            hybrid = tuned.hybrid if hybrid is None else hybrid
            head = head if tuned.speculate else NO_DRAFT
        elif line:
            warnings.warn(line, stacklevel=2)
    if hybrid is None:
        hybrid = tree is None or tree.branch > 1  # a lookup beside the head would make a tree of a chain
    return Engine(
        target,
        load_drafter(head, target, hybrid=hybrid),
        max_requests=max_requests,
        max_length=max_length,
        exactness=exactness,
        rule=rule,
        row_width=row_width,
        tree=tree,
        cost=cost,
    )

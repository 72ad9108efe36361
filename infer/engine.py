"""The engine: prefill, then rounds of draft, verify and commit, over any number of requests at once.

A request waits, or runs in a cache slot (`infer.scheduling`): first its prompt is prefilled, at once or in chunks
between the others' rounds, then every round serves all requests that decode, each with its own tree. Tokens do not
depend on the trees: under the match rule they equal plain decoding's for the same seed; under the rejection rules they
follow the same law (`infer.exactness`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from infer.adaptation import Adaptation
from infer.cache import SlotCache
from infer.cost import CostModel, cost_of
from infer.drafters.base import Drafter, DraftLimit, PrefixDrafter, Room, TreeSettings
from infer.exactness import ANY_KIND, choose_rule
from infer.fixed import CHUNK, checked_row_width
from infer.governor import Governor
from infer.graphs.capture import SyncError
from infer.graphs.serving import StaticRounds, static_rounds
from infer.intake import Intake, Prompt
from infer.machine import available_bytes
from infer.request import Completion, DraftBounds, Request, RequestLaw, RequestRound
from infer.rows import tree_group
from infer.sampling import SamplingError, SamplingParams
from infer.scheduling import Prefix, Sharing, SlotTable, WaitingLine, share_rows
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot
from infer.verify import RULES, KeyedChance, Rule, Verdict, verify

if TYPE_CHECKING:
    from infer.tune.settings import Workload

MAX_PREFILL_ROWS = 4096
LEAST_AWAITED = 32
"""Tokens of a prompt for whose rows it pays to wait where another request's are being computed."""
CHUNKS = tuple(1 << power for power in range(5, 12))
CHUNK_STEPS = 5.0
"""A chunk of a prompt takes about as long as so many plain steps: what a stream may be held up by a stranger's."""
MOST_DRAFT_FAULTS = 3
"""So many failures of a drafter in a row, and it is not asked again (where faults are isolated)."""

Observer = Callable[[Request, DraftTree, RequestLaw, Verdict], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What verification keeps of a round: accepted nodes, the tokens to emit, and, where the text runs into a row from
    which no token can be drawn, why."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    dead_end: str | None


_NOTHING = _Kept(path=(), tokens=(), dead_end=None)
"""Of the rows of a prompt that has more."""


class _PromptShare(NamedTuple):
    """A request whose prompt is being prefilled, and how many rows of it are next."""

    request: Request
    num_rows: int


class Engine:
    """Decodes prompts with `target`, sped up by `drafter` if there is one.

    max_requests: requests that run at once; more wait. max_length: most tokens of a request, prompt included (by
    default what the prompts at hand need). exactness, rule: what is promised and how trees are verified
    (`infer.exactness`); a request may ask for its own. row_width: rows of every forward where exactness is bitwise
    (by default 16, and 64 on a GPU; any number where the target's rows do not depend on each other,
    `TargetModel.is_row_invariant`). tree: bounds of the draft trees. cost: the machine's cost table (measured, or read
    from the user's cache folder, when first needed). observer: called with every verified tree, before its tokens are
    emitted.

    sharing: how requests of many callers share the engine. graphs: whether rounds run whole on the device, over static
    shapes, as CUDA graphs (`infer.graphs`): by default on CUDA, for the requests and models that they can serve; True
    has static rounds anywhere, and refuses models that cannot have them.
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
        sharing: Sharing | None = None,
        graphs: bool | None = None,
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
        self._intake = Intake(
            target,
            kinds=ANY_KIND if drafter is None else drafter.kinds,
            tree=self.tree,
            max_length=max_length,
            exactness=exactness,
            rule=rule,
        )
        needs_width = row_width is not None or not (exactness == "bitwise" and target.is_row_invariant)
        self.row_width = None
        if needs_width:
            self.row_width = checked_row_width(
                row_width, exactness, max_depth=self.tree.max_depth, device=target.device
            )
        self.observer = observer
        self._cost = cost
        self.share(sharing or Sharing())
        self.rounds: list[RequestRound] = []
        """What the last step did for each request that emitted."""
        self.num_prompt_rows = 0
        """Rows of prompts that the last step computed."""
        self._waiting = WaitingLine()
        self._running: list[Request] = []
        self._cache: SlotCache | None = None
        self._slots = SlotTable(0)
        self._num_draft_faults = 0
        self._graphs = graphs
        self._static: StaticRounds | None = None
        self.adaptation = Adaptation()
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0
        self.forward_seconds = 0.0
        self.commit_seconds = 0.0

    def share(self, sharing: Sharing) -> None:
        """From now on, serve as `sharing` says."""
        self.sharing = sharing
        self.governor = Governor() if sharing.follow_clock and self.drafter is not None else None
        self._chunk: int | None = None

    @property
    def rule(self) -> Rule:
        """How trees of requests that ask for nothing else are verified."""
        return self._intake.rule

    @property
    def exactness(self) -> str:
        """What is promised to requests that ask for nothing else."""
        return self._intake.exactness

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
        requests = [
            request
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
            for request in self.prepare(prompt, one, index=index)
        ]
        self.enqueue(requests)
        return requests

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: DraftBounds | None = None,
        owner: str = "",
        tag: str = "",
        index: int = 0,
    ) -> list[Request]:
        """The `n` requests of a prompt, checked, for `enqueue`. Touches nothing that runs, so other threads may call
        it. `index` names the prompt in errors."""
        return self._intake.prepare(prompt, params, draft=draft, owner=owner, tag=tag, index=index)

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Let prepared requests wait for a slot; `step` answers them."""
        if requests:
            self._make_room(requests)
            self._waiting.extend(requests)

    def reserve(self) -> None:
        """Allocate all slots now, `max_requests` of `max_length` tokens each, so that nothing is left to fail later."""
        if self.max_length is None:
            raise ValueError("slots can be reserved where max_length says how long they are: build the engine with it")
        if self._cache is None:
            num_columns = self._columns_for(self.max_length)
            self._check_memory(self.max_requests, num_columns)
            self._allocate(self.max_requests, num_columns)
        if self.sharing.prefill_chunk is not None:
            self._rows_of_a_chunk()
        if self.target.device.type == "cuda":
            self._capture_ahead()

    def _capture_ahead(self) -> None:
        """Capture the first rounds now, if no slot holds a text yet."""
        if self._static is None or self._running or self._slots.kept:
            return
        try:
            self._static.prepare()
        except SyncError as error:
            if self._graphs:
                raise
            self._go_on_without_graphs(error)

    def step(self) -> int:
        """Prefill requests that found a slot, then one round over all that decode; returns the tokens emitted.

        On kernels, prompts and the round share a forward: its weights are read once.
        """
        self.rounds, self.num_prompt_rows = [], 0
        self._admit()
        prompts = self._prompt_shares()
        num_tokens = 0
        if prompts and not (self._mixes and any(request.is_prefilled for request in self._running)):
            num_tokens, prompts = self._round((), prompts), []
        decoding = [request for request in self._running if request.is_prefilled]
        return num_tokens + (self._round(decoding, prompts) if decoding else 0)

    def _round(self, requests: Sequence[Request], prompts: Sequence[_PromptShare]) -> int:
        """Draft, verify and commit for `requests`, with rows of `prompts` beside; returns the tokens emitted."""
        start = time.perf_counter()
        depth = None if self.governor is None or not requests else self.governor.depth(len(requests))
        static, num_captured = None if prompts else self._static_for(requests, depth), self.num_captured
        trees = [] if static is not None and static.grows_trees else self._draft(requests, depth)
        if static is not None:
            num_tokens = self._run_static(static, requests, trees, depth)
        else:
            self.num_prompt_rows += sum(share.num_rows for share in prompts)
            num_tokens = self._advance(
                [*requests, *(share.request for share in prompts)],
                [*trees, *[DraftTree.empty()] * len(prompts)],
                [*[1] * len(requests), *(share.num_rows for share in prompts)],
            )
        if self.drafter is not None and self.tree.adaptive and depth != 0 and trees:
            self.adaptation.learn(requests, trees)
        if not prompts and self.num_captured == num_captured:  # a capture takes as long as hundreds of rounds
            self._show_governor(requests, depth, num_tokens, time.perf_counter() - start)
        return num_tokens

    def _show_governor(self, requests: Sequence[Request], depth: int | None, num_tokens: int, seconds: float) -> None:
        """Let it learn from a round at its depth; where not all draft, it would show nothing of that."""
        if self.governor is not None and all(map(self._drafts, requests)):
            self.governor.see(len(requests), depth, tokens=num_tokens, seconds=seconds)

    def _static_for(self, requests: Sequence[Request], depth: int | None) -> StaticRounds | None:
        """What runs a round of `requests` whole on the device, if that can be; an observer wants to see it here."""
        static = self._static
        if static is None or self.observer is not None or not requests:
            return None
        return static if static.can_serve(requests, drafts=self.is_drafting and depth != 0) else None

    def _run_static(
        self, static: StaticRounds, requests: Sequence[Request], trees: Sequence[DraftTree], depth: int | None
    ) -> int:
        """A round over static shapes, of trees of the host's or, where there are none, of its own; returns the tokens
        emitted."""
        start = time.perf_counter()
        try:
            done = static.run(requests, trees or None, depth=depth if self.is_drafting else 0)
        except BaseException as error:
            is_refusal = isinstance(error, SyncError) and not self._graphs
            if not is_refusal and not self._isolates(error):
                raise
            self._go_on_without_graphs(error)
            return self._advance(requests, trees or [DraftTree.empty()] * len(requests))
        computed = time.perf_counter()
        num_tokens = 0
        for request, served in zip(requests, done, strict=True):
            kept: _Kept | BaseException = _Kept(path=served.path, tokens=served.tokens, dead_end=None)
            if served.logits is not None:  # the text runs into a row of no use: find out why
                kept = self._verify(request, served.tree, served.logits)
            num_tokens += self._commit(request, served.tree, kept, 1, served.states, is_moved=True)
        self.forward_seconds += computed - start
        self.commit_seconds += time.perf_counter() - computed
        return num_tokens

    def _go_on_without_graphs(self, error: BaseException) -> None:
        _log.warning("rounds go on without graphs: %s", error, exc_info=None if isinstance(error, SyncError) else error)
        self._static = None

    @property
    def _mixes(self) -> bool:
        """Whether prompts share the forward of a round: not where all are padded to the longest."""
        return not self.target.pads_rows and self.row_width is None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose rows the slots hold: of requests that run, and of those that have left."""
        return sum(request.num_cached for request in self._running) + self._slots.num_kept_tokens

    @property
    def num_captured(self) -> int:
        """Shapes of static rounds that have been captured."""
        return 0 if self._static is None else self._static.num_captured

    @property
    def is_drafting(self) -> bool:
        """Whether there is a drafter, and it has not been given up after faults."""
        return self.drafter is not None and self._num_draft_faults < MOST_DRAFT_FAULTS

    def preempt(self, requests: Sequence[Request] | None = None) -> None:
        """Take the slots of running `requests` (all if None) away; they wait in front and resume: under the match rule
        with the tokens they would have had, under the others with tokens of the same law."""
        for request in reversed(list(self._running) if requests is None else requests):
            if request in self._running:
                self._release(request, keep=False)
                request.restart()
                self._waiting.put_first(request)

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

    def _draft(self, requests: Sequence[Request], depth: int | None) -> list[DraftTree]:
        """A tree for each request, at most `depth` deep."""
        if self.drafter is None or not self.is_drafting or depth == 0 or not requests:
            return [DraftTree.empty()] * len(requests)
        start = time.perf_counter()
        limits = [self._limit(request, depth) for request in requests]
        try:
            trees = self.adaptation.draft(
                self.drafter, requests, limits, self._round_cost(requests), adaptive=self.tree.adaptive
            )
            if self.adaptation.num_drafted:
                self._num_draft_faults = 0
        except BaseException as error:
            if not self._isolates(error):
                raise
            self._go_on_without_drafts(requests, error)
            trees = [DraftTree.empty()] * len(requests)
        self.draft_seconds += time.perf_counter() - start
        return trees

    def _go_on_without_drafts(self, requests: Sequence[Request], error: BaseException) -> None:
        """A drafter that raised may have half read the text of any request that it was asked about."""
        self._num_draft_faults += 1
        _log.error("drafting failed, so %d requests go on without drafts", len(requests), exc_info=error)
        for request in requests:
            request.draft = DraftBounds(enabled=False)
            request.draft_state.clear()
        if not self.is_drafting:
            _log.error(
                "drafting failed %d times in a row: from now on all requests are decoded plainly", MOST_DRAFT_FAULTS
            )

    def _prompt_shares(self) -> list[_PromptShare]:
        """Prompts that are not through, and what the next forward takes of them: all, or a chunk beside others."""
        prefilling = [request for request in self._running if not request.is_prefilled]
        wanted = [len(request.uncached) for request in prefilling]
        others_wait = len(prefilling) < len(self._running)
        if prefilling and others_wait and self.sharing.prefill_chunk is not None:
            wanted = share_rows(wanted, self._rows_of_a_chunk())
        shares = map(_PromptShare, prefilling, wanted)
        return [share for share in shares if share.num_rows]

    def _rows_of_a_chunk(self) -> int:
        asked = self.sharing.prefill_chunk
        if isinstance(asked, int):
            return asked
        if self._chunk is None:
            self._chunk = self.cost.most_rows(CHUNK_STEPS * self.cost.target_milliseconds(1), among=CHUNKS)
        return self._chunk

    def _advance(
        self, requests: Sequence[Request], trees: Sequence[DraftTree], num_rows: Sequence[int] | None = None
    ) -> int:
        """Verify a tree for each request in one forward, and commit what was accepted; returns the tokens emitted.

        num_rows: of each request's uncached tokens, as many as this forward takes (by default all). One that has more
        emits nothing yet.
        """
        requests = list(requests)
        num_rows = [len(request.uncached) for request in requests] if num_rows is None else num_rows
        try:
            logits, states = self._forward(requests, trees, num_rows)
        except BaseException as error:
            if not self._isolates(error):
                raise
            return self._advance_apart(requests, num_rows, error)
        start = time.perf_counter()
        kept = [
            self._verify(request, tree, rows) if count == len(request.uncached) else _NOTHING
            for request, tree, rows, count in zip(requests, trees, logits, num_rows, strict=True)
        ]
        verified = time.perf_counter()
        num_tokens = 0
        for request, tree, each, count, rows in zip(requests, trees, kept, num_rows, states, strict=True):
            num_tokens += self._commit(request, tree, each, count, rows)
        self.verify_seconds += verified - start
        self.commit_seconds += time.perf_counter() - verified
        return num_tokens

    def _advance_apart(self, requests: Sequence[Request], num_rows: Sequence[int], error: BaseException) -> int:
        """A forward that serves several has failed: find out for whom. It wrote to no row of a committed token."""
        if len(requests) == 1:
            self._fail(requests[0], error)
            return 0
        _log.warning("a forward over %d requests failed (%s): each is tried alone", len(requests), error)
        return sum(
            self._advance([request], [DraftTree.empty()], [count])
            for request, count in zip(requests, num_rows, strict=True)
        )

    def _isolates(self, error: BaseException) -> bool:
        """Whether `error` is only for the request that it came with. A panic of a library in Rust is no Exception."""
        return self.sharing.isolate_faults and not isinstance(error, KeyboardInterrupt | SystemExit)

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request for a fault of ours."""
        _log.error("a request failed", exc_info=error)
        self._finish(request)
        request.end("error", error=f"internal error: {type(error).__name__}", is_fault=True)

    def _forward(
        self, requests: Sequence[Request], trees: Sequence[DraftTree], num_rows: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Logits [1 + nodes, V] of each request's last row and nodes, and tapped states of all its rows."""
        assert self._cache is not None
        start = time.perf_counter()
        groups = [
            tree_group(request.slot, request.num_cached, request.uncached[:count], tree.tokens, tree.parents)
            for request, tree, count in zip(requests, trees, num_rows, strict=True)
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

    def _verify(self, request: Request, tree: DraftTree, logits: torch.Tensor) -> _Kept | BaseException:
        """What the request's rule keeps of its tree, or, where faults are isolated, what went wrong."""
        try:
            return self._keep(request, tree, logits)
        except BaseException as error:
            if not self._isolates(error):
                raise
            return error

    def _keep(self, request: Request, tree: DraftTree, logits: torch.Tensor) -> _Kept:
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

    def _commit(
        self,
        request: Request,
        tree: DraftTree,
        kept: _Kept | BaseException,
        num_rows: int,
        states: torch.Tensor | None,
        *,
        is_moved: bool = False,
    ) -> int:
        """Emit the kept tokens; keep cache rows and states of the accepted path only (`is_moved`: that is done)."""
        if isinstance(kept, BaseException):
            self._fail(request, kept)
            return 0
        assert self._cache is not None
        first_column = request.num_cached + num_rows  # of the tree: the one after the root's own
        num_kept = request.emit(kept.tokens) if kept.tokens else 0
        self._record(request, tree, kept.path, kept.tokens[:num_kept])
        request.is_prefilled = request.is_prefilled or num_kept > 0
        if request.finish_reason is None and kept.dead_end is not None:
            request.end("error", error=kept.dead_end)
        if request.finish_reason is not None:
            self._finish(request)
            return num_kept
        path = list(kept.path)
        if not is_moved:
            self._cache.commit(request.slot, first_column, [first_column + node for node in path])
        request.num_cached = first_column + len(path)
        if states is not None and not is_moved:
            states = _rows_at(states, [*range(num_rows), *(num_rows + node for node in path)])
        self._observe(request, states)
        return num_kept

    def _record(self, request: Request, tree: DraftTree, path: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        """Note what a round did, for those who count."""
        if token_ids:
            done = RequestRound(
                request=request, is_first=not request.is_prefilled, tree=tree, path=path, token_ids=token_ids
            )
            request.speculation.add(done)
            self.rounds.append(done)

    def _observe(self, request: Request, states: torch.Tensor | None) -> None:
        """Tell the drafter of new rows of a request that drafts."""
        if self.drafter is None or not self._drafts(request):
            return
        try:
            self.drafter.observe(request, states)
        except BaseException as error:
            if not self._isolates(error):
                raise
            self._go_on_without_drafts([request], error)

    def _drafts(self, request: Request) -> bool:
        return self.is_drafting and request.draft.enabled

    def _limit(self, request: Request, depth: int | None = None) -> DraftLimit:
        assert self._cache is not None
        num_columns_left = self._cache.num_columns - request.num_tokens
        own = request.draft
        nodes = (self.tree.max_nodes, own.max_nodes, num_columns_left)
        depths = (self.tree.max_depth, own.max_depth, depth, request.num_tokens_left - 1, num_columns_left)
        return DraftLimit(max_nodes=max(0, _least(nodes)), max_depth=max(0, _least(depths)))

    def _admit(self) -> list[Request]:
        """Give slots to waiting requests, as many as one prefill can take.

        A forward may pad every slot between the first and the last that it touches to the longest prompt.
        """
        if self._waiting and not self._running:
            self._make_room(())  # requests that came while others ran may need more slots than there were
        admitted: list[Request] = []
        num_rows = 0
        while self._slots.num_free and (request := self._waiting.next(self._running, self._waits_for_another)):
            num_rows = max(num_rows, len(request.uncached))
            if admitted and num_rows * (abs(self._slots.next_free - admitted[0].slot) + 1) > MAX_PREFILL_ROWS:
                break
            self._waiting.remove(request)
            self._settle(request)
            if not request.output_ids:  # else it was preempted, and its time goes on
                request.started = time.perf_counter()
            admitted.append(request)
            self._running.append(request)
        return admitted

    def _waits_for_another(self, request: Request) -> bool:
        """Whether the rows of a prompt are just being computed for another request that has the same."""
        return (
            self.sharing.reuse_prefixes
            and len(request.prompt_ids) >= LEAST_AWAITED
            and any(not other.is_prefilled and other.prompt_ids == request.prompt_ids for other in self._running)
        )

    def _settle(self, request: Request) -> None:
        """Give a request a slot, and the rows of another that begins alike."""
        prefix = None
        if self.sharing.reuse_prefixes:
            prefix = self._slots.longest_prefix(request.tokens_from(0), partial(self._num_usable, request))
        replaced = self._slots.take(request, prefix)
        if prefix is not None:
            self._take_over(request, prefix)
        if replaced is not None:
            self._forget(replaced)

    def _num_usable(self, request: Request, source: Request, num_shared: int) -> int:
        """How many rows of `source` a request can take over that shares so many tokens with it.

        One token is left to draw from. A drafter pairs a row's state with the token after it, so the last shared row
        is computed again, beside its new successor, and what the drafter has not read is too.
        """
        num_rows = min(num_shared, request.num_tokens - 1)
        if not self._drafts(request):
            return num_rows
        if not isinstance(self.drafter, PrefixDrafter):
            return 0
        return min(num_rows, num_shared - 1, self.drafter.num_kept(source))

    def _take_over(self, request: Request, prefix: Prefix) -> None:
        assert self._cache is not None
        if prefix.source.slot != request.slot:
            self._cache.copy(prefix.source.slot, request.slot, prefix.num_tokens)
        request.num_cached = request.num_reused = prefix.num_tokens
        if self._drafts(request) and isinstance(self.drafter, PrefixDrafter):
            self.drafter.adopt(request, prefix.source, prefix.num_tokens)

    def _finish(self, request: Request) -> None:
        request.finished_at = time.perf_counter()
        request.seconds = request.finished_at - request.started
        self._release(request, keep=self.sharing.reuse_prefixes and request.num_cached > 0)

    def _release(self, request: Request, *, keep: bool) -> None:
        """Free the slot of a request; `keep`: for requests that begin alike, its rows stay until the slot is needed."""
        self._running.remove(request)
        self._slots.release(request, keep=keep)
        self.adaptation.forget(request)
        request.noise.forget_before(request.num_tokens + self.tree.max_depth + 1)
        if not keep:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """The rows of a request are lost."""
        if self.drafter is not None:
            self.drafter.close(request)

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Allocate the cache, or a larger one while nothing runs."""
        longest = max((len(request.prompt_ids) + request.params.max_tokens for request in requests), default=0)
        num_columns = self._columns_for(self.max_length or longest)
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
        del cache  # it goes before a larger one comes
        self._allocate(num_slots, num_columns)

    def _columns_for(self, num_tokens: int) -> int:
        """Columns of a slot for a text of so many tokens."""
        if self.drafter is not None:  # a drafter that shares the cache writes more rows than verification
            num_tokens += max(self.tree.max_nodes, self.tree.max_depth * self.tree.beam + 1)
        grain = 64 if self.row_width is None else CHUNK
        return -(-num_tokens // grain) * grain

    def _check_memory(self, num_slots: int, num_columns: int) -> None:
        """Memory is handed out when it is first written to: too little would show in the middle of answers."""
        needed = self.target.new_cache(num_slots=1, num_columns=1).num_bytes * num_slots * num_columns
        free = available_bytes(self.target.device)
        if free is not None and needed > free:
            raise ValueError(
                f"{num_slots} requests of {self.max_length} tokens take {needed / 1e9:.3g} GB for keys and values, but "
                f"{free / 1e9:.3g} GB are free: lower max_requests or max_length"
            )

    def _allocate(self, num_slots: int, num_columns: int) -> None:
        for request in self._slots.kept:
            self._forget(request)
        self._cache = self._static = None  # the old one goes before the new one comes
        self._cache = self.target.new_cache(num_slots=num_slots, num_columns=num_columns)
        self._slots = SlotTable(num_slots, lowest_first=self.target.pads_rows)
        if self.drafter is not None:
            room = Room(
                num_slots=num_slots, num_columns=num_columns, tree=self.tree, cost=self._tree_cost, cache=self._cache
            )
            self.drafter.open(room)
        self._static = static_rounds(
            self.target,
            self.drafter,
            self._cache,
            self.tree,
            exactness=self.exactness,
            row_width=self.row_width,
            graphs=self._graphs,
        )


def _least(bounds: Sequence[int | None]) -> int:
    """The least of the bounds that there are."""
    return min(bound for bound in bounds if bound is not None)


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
    sharing: Sharing | None = None,
    graphs: bool | None = None,
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
        sharing=sharing,
        graphs=graphs,
    )

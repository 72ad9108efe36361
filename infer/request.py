"""A request on its way through the engine, what it leaves behind, and the law of its next token.

Positions count a request's own tokens (prompt first), never cache columns, so that its noise is the same alone, in a
batch, in any slot and after a restart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infer.noise import gumbel, position_key
from infer.sampling import Processor, SamplingError, SamplingParams, pick, probs
from infer.stopping import StopChecker
from infer.tree import ROOT, DraftTree
from infer.verify import Rule, Verdict

if TYPE_CHECKING:
    from infer.target import TargetModel


class TokenLogprobs(NamedTuple):
    """The log-probability of one emitted token under the target's own logits: before the request's filters, penalties
    and temperature.

    `top` holds (token id, log-probability) of the likeliest tokens, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class DraftBounds:
    """A request's own bounds of drafting, at most those of its engine (None takes the engine's). Its tokens cannot
    depend on them."""

    enabled: bool = True
    max_nodes: int | None = None
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"draft.enabled must be true or false, got {self.enabled!r}")
        for name in ("max_nodes", "max_depth"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"draft.{name} must be a whole number of at least 1, got {value!r}")
            if value is not None and not self.enabled:
                raise ValueError(f"draft.{name} is {value}, but drafting is off: give one of the two")


@dataclass(kw_only=True)
class Speculation:
    """What drafts have done for a request. Tokens are counted as they stand in the answer: what lies behind its end is
    not.

    num_rounds: rounds after the prefill. num_drafts: of them, those that verified at least one draft token.
    num_draft_tokens: nodes of all trees. num_accepted_tokens: nodes that stand in the answer.
    accepted_per_position[d]: rounds in which the node at depth d + 1 was accepted.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of a round that drafted, the target's own included: 1 + accepted / drafts (NaN without drafts)."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    def add(self, one: RequestRound) -> None:
        if one.is_first:
            return
        self.num_rounds += 1
        self.num_drafts += bool(one.num_nodes)
        self.num_draft_tokens += one.num_nodes
        self.num_accepted_tokens += one.num_accepted
        self.accepted_per_position += [0] * (one.num_accepted - len(self.accepted_per_position))
        for depth in range(one.num_accepted):
            self.accepted_per_position[depth] += 1


@dataclass(frozen=True, kw_only=True)
class RequestRound:
    """What one round did for one request.

    is_first: it is the end of a prefill, which drafts nothing. token_ids: what it emitted; num_accepted: of them, from
    the front, those that had been drafted. path: the nodes of `tree` that were accepted.
    """

    request: Request
    is_first: bool
    tree: DraftTree
    path: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_nodes(self) -> int:
        return len(self.tree)

    @property
    def depth(self) -> int:
        """Of the tree; 0 without one."""
        return max(self.tree.depths, default=0)

    @property
    def num_accepted(self) -> int:
        return min(len(self.path), self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt.

    `accepted_lengths[i]` counts the tokens that round `i` emitted, the target's own included, after truncation; round
    0 is the prefill, which emits one (as does the prefill of a request that resumes). `tokens_per_second` is this
    request's tokens over the time it was in the engine. `sample` tells the `n` answers to one prompt apart. `error` is
    set where `finish_reason` is "error"; `is_fault` where the cause was the engine's and not the request's.
    `num_reused_tokens` of the prompt were not computed, since another request had begun alike.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    num_rounds: int
    accepted_lengths: tuple[int, ...]
    seed: int
    seconds: float
    tokens_per_second: float
    sample: int = 0
    exactness: str = "seed"
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    speculation: Speculation = field(default_factory=Speculation)
    num_reused_tokens: int = 0
    is_fault: bool = False

    @property
    def lossless(self) -> bool:
        """Whether the tokens follow the target's law (`infer.exactness`)."""
        return self.exactness != "lossy"


class PositionNoise:
    """Gumbel noise [V] of a request's positions, made once a position and forgotten when the text has passed it."""

    def __init__(self, identity: tuple[int, int, int], *, vocab_size: int, device: torch.device) -> None:
        self.identity = identity
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, torch.Tensor] = {}

    def at(self, position: int) -> torch.Tensor:
        row = self._rows.get(position)
        if row is None:
            row = gumbel(position_key(*self.identity, position), self._vocab_size, self._device)
            self._rows[position] = row
        return row

    def forget_before(self, position: int) -> None:
        for stale in [old for old in self._rows if old < position]:
            del self._rows[stale]


@dataclass(eq=False, kw_only=True)
class Request:
    """State of one request. Once its prefill is over, all tokens but the last emitted (`uncached`) have rows in the
    target's cache.

    draft: its own bounds. owner: whose it is, for fair shares. tag: a domain, for statistics. submitted,
    first_token_at, finished_at: `time.perf_counter` then. started: when it first got a slot; num_reused: tokens whose
    rows it then took over from another.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    noise: PositionNoise
    processor: Processor
    stopper: StopChecker
    rule: Rule
    exactness: str
    sample: int = 0
    draft: DraftBounds = field(default_factory=DraftBounds)
    owner: str = ""
    tag: str = ""
    slot: int = -1
    num_cached: int = 0
    num_reused: int = 0
    is_prefilled: bool = False
    output_ids: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    draft_state: dict[str, Any] = field(default_factory=dict)  # one entry a drafter, owned by it
    submitted: float = field(default_factory=time.perf_counter)
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None
    seconds: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    is_fault: bool = False

    @classmethod
    def create(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        sample: int,
        rule: Rule,
        exactness: str,
        target: TargetModel,
        draft: DraftBounds | None = None,
        owner: str = "",
        tag: str = "",
    ) -> Request:
        vocab_size, device, eos_ids = target.vocab_size, target.device, target.eos_ids
        return cls(
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=seed,
            sample=sample,
            rule=rule,
            exactness=exactness,
            draft=draft or DraftBounds(),
            owner=owner,
            tag=tag,
            noise=PositionNoise((seed, sample, 0), vocab_size=vocab_size, device=device),
            processor=Processor(
                params,
                prompt_ids=prompt_ids,
                eos_ids=eos_ids,
                vocab_size=vocab_size,
                device=device,
                constraint=target.grammars.constraint(params, eos_ids=eos_ids),
            ),
            stopper=StopChecker(params, eos_ids=eos_ids, tokenizer=target.tokenizer),
        )

    @property
    def identity(self) -> tuple[int, int, int]:
        """(seed, sample, attempt): what all of a request's random numbers are keyed by, beside their place. A text cut
        and regenerated in another context would be another attempt; so far there is only the first."""
        return self.noise.identity

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens_from(self, position: int) -> list[int]:
        num_prompt = len(self.prompt_ids)
        if position >= num_prompt:
            return self.output_ids[position - num_prompt :]
        return [*self.prompt_ids[position:], *self.output_ids]

    @property
    def uncached(self) -> list[int]:
        """Tokens without rows in the cache: the whole prompt at first, then the token emitted last."""
        return self.tokens_from(self.num_cached)

    @property
    def num_tokens_left(self) -> int:
        return self.params.max_tokens - len(self.output_ids)

    def emit(self, tokens: Sequence[int]) -> int:
        """Append the tokens of a round up to the end of the answer, if it lies among them; returns how many stayed."""
        result = self.stopper.push(tokens)
        self.output_ids.extend(tokens[: result.num_kept])
        self.accepted_lengths.append(result.num_kept)
        del self.logprobs[len(self.output_ids) :]
        self.finish_reason, self.stop_reason = result.finish_reason, result.stop_reason
        self.noise.forget_before(self.num_tokens)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        return result.num_kept

    def record_logprobs(self, law: RequestLaw, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep the log-probabilities of `tokens`, which follow the root and the nodes of `path` (`emit` drops those
        beyond the end of the answer)."""
        assert self.params.logprobs is not None
        for node, token in zip((ROOT, *path), tokens, strict=False):
            row = torch.log_softmax(law.logits[node + 1].float(), dim=-1)
            values, ids = row.topk(min(self.params.logprobs, len(row)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            self.logprobs.append(TokenLogprobs(token, float(row[token]), top))

    def end(self, finish_reason: str, *, error: str | None = None, is_fault: bool = False) -> None:
        """End this request, and no other, from outside its text ("abort", "error"); what it has emitted stays."""
        self.stopper.close()
        self.finish_reason, self.error, self.is_fault = finish_reason, error, is_fault

    def restart(self) -> None:
        """Forget everything that lived in a slot; the text so far is prefilled again."""
        self.slot, self.num_cached, self.is_prefilled = -1, 0, False
        self.draft_state.clear()

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt_token_ids=self.prompt_ids,
            token_ids=tuple(self.output_ids),
            text=self.stopper.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_rounds=len(self.accepted_lengths),
            accepted_lengths=tuple(self.accepted_lengths),
            seed=self.seed,
            seconds=self.seconds,
            tokens_per_second=len(self.output_ids) / self.seconds if self.seconds else 0.0,
            sample=self.sample,
            exactness=self.exactness,
            error=self.error,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            speculation=self.speculation,
            num_reused_tokens=self.num_reused,
            is_fault=self.is_fault,
        )


class RequestLaw:
    """The target's next-token law at the nodes of a request's tree (`infer.verify.NodeLaw`).

    A node's logits are processed when the walk asks for them, along the node's own path. `logits` [N + 1, V]: the
    root's row first.

    A row from which no token can be drawn ends its request, but only if the text gets there. Until that is known
    token 0 stands in for what would follow, and `living_tokens` leaves it out again: the tokens before such a row
    keep their law, whatever stands behind them.
    """

    def __init__(self, request: Request, tree: DraftTree, logits: torch.Tensor) -> None:
        self.request = request
        self.tree = tree
        self.logits = logits
        self._dead: dict[int, str] = {}

    def scores(self, node: int) -> torch.Tensor:
        """Processed logits over temperature [V] float32, -inf for tokens that cannot follow."""
        path = [self.tree.tokens[index] for index in self.tree.path(node)]
        return self.request.processor.scores(self.logits[node + 1], [*self.request.output_ids, *path])

    def draw(self, node: int) -> int:
        try:
            scores = self.scores(node)
            if not self.request.params.greedy:
                depth = 0 if node == ROOT else self.tree.depths[node]
                scores = scores + self.request.noise.at(self.request.num_tokens + depth)
            return pick(scores)
        except SamplingError as error:
            self._dead[node] = str(error)
            return 0

    def probs(self, node: int) -> torch.Tensor:
        winner = 0
        try:
            scores = self.scores(node)
            winner = pick(scores)
            if not self.request.params.greedy:
                return probs(scores)
        except SamplingError as error:
            self._dead[node] = str(error)
        one_hot = torch.zeros(self.logits.shape[-1], device=self.logits.device)
        one_hot[winner] = 1.0
        return one_hot

    def living_tokens(self, verdict: Verdict) -> tuple[tuple[int, ...], str | None]:
        """A verdict's tokens up to the first row from which none can be drawn, and why that is (None: no such row)."""
        nodes = (ROOT, *verdict.path)
        tokens = verdict.tokens(self.tree)
        cut = next((index for index, node in enumerate(nodes) if node in self._dead), None)
        return (tokens, None) if cut is None else (tokens[:cut], self._dead[nodes[cut]])

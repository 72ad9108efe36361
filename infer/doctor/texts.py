"""What the doctor looks at a head with: short texts by the target's own hand, and what the target makes of them.

Half of the answers are greedy, half are sampled with fixed seeds: a head meets both when it drafts, and either kind
alone can flatter it. Features and logits come from one pass over each finished text, by the forward that also serves
decoding.

Shapes: R packed rows of all texts, A rows whose next token the target wrote, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from heads.base import final_tap
from heads.unroll import Batch
from infer.engine import Engine
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel

NUM_TEXTS = 16
MAX_TOKENS = 48
MIN_TOKENS = 4
"""Answers shorter than this have no row at the third depth to look at, and are left out."""
MAX_PROMPT_TOKENS = 384
SAMPLED_TEMPERATURE = 0.8
SEED = 0


@dataclass(frozen=True, kw_only=True)
class TargetText:
    """A prompt and the target's answer. params: what the answer was drawn with."""

    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.token_ids[: self.num_prompt]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.token_ids[self.num_prompt :]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Texts and the target's states and logits at them.

    states: of each tap, [R, H]. logits [A, V] float32, of the rows numbered `logit_rows` [A].
    """

    texts: tuple[TargetText, ...]
    num_layers: int
    states: dict[int, torch.Tensor]
    logits: torch.Tensor
    logit_rows: torch.Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(text.token_ids) for text in self.texts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The packed row at which each text begins."""
        lengths = self.lengths
        return tuple(sum(lengths[:i]) for i in range(len(lengths)))

    def has(self, taps: Sequence[int]) -> bool:
        return all(tap in self.states for tap in taps)

    def batch(self, taps: Sequence[int]) -> Batch:
        """The texts as training would hand them to a head that reads `taps`."""
        last = self.states[final_tap(self.num_layers)]
        device = last.device
        written = [index >= text.num_prompt for text in self.texts for index in range(len(text.token_ids))]
        return Batch(
            token_ids=torch.tensor([token for text in self.texts for token in text.token_ids], device=device),
            loss_mask=torch.tensor(written, device=device),
            lengths=self.lengths,
            taps=torch.cat([self.states[tap] for tap in taps], dim=-1),
            last=last,
            log_normalizer=last.new_zeros(len(last)),  # a matter of losses alone
        )

    def plan(self, num_depths: int) -> list[torch.Tensor]:
        """Rows at each step: those whose tokens, from the one beside the state to the one guessed, the target wrote."""
        plan = []
        for step in range(num_depths):
            rows = [
                start + row
                for start, text in zip(self.starts, self.texts, strict=True)
                for row in range(text.num_prompt - 1, len(text.token_ids) - 2 - step)
            ]
            plan.append(torch.tensor(rows, dtype=torch.int64, device=self.logits.device))
        return plan

    def text_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[Q]: the number of the text that each packed row lies in."""
        starts = torch.tensor(self.starts, device=rows.device)
        return torch.searchsorted(starts, rows, right=True) - 1


def write_texts(
    target: TargetModel, prompts: Iterable[Sequence[int]], *, num_texts: int = NUM_TEXTS, max_tokens: int = MAX_TOKENS
) -> list[TargetText]:
    """Answers of the target to the first prompts that are short enough, plainly decoded: every other one sampled."""
    longest = min(MAX_PROMPT_TOKENS, target.max_length - max_tokens)
    fitting = [prompt for prompt in prompts if 0 < len(prompt) <= longest][:num_texts]
    if not fitting:
        raise ValueError(
            f"no prompt has at most {longest} tokens, which is what {target.name} has room for: give shorter ones"
        )
    params = [
        SamplingParams(temperature=SAMPLED_TEMPERATURE * (index % 2), seed=SEED + index, max_tokens=max_tokens)
        for index in range(len(fitting))
    ]
    completions = Engine(target, max_requests=len(fitting)).generate(fitting, params)
    texts = [
        TargetText(
            token_ids=(*completion.prompt_token_ids, *completion.token_ids),
            num_prompt=len(completion.prompt_token_ids),
            params=one,
        )
        for completion, one in zip(completions, params, strict=True)
        if len(completion.token_ids) >= MIN_TOKENS
    ]
    if not texts:
        raise ValueError(f"{target.name} answers every prompt in fewer than {MIN_TOKENS} tokens: give other prompts")
    return texts


@torch.inference_mode()
def gather_evidence(target: TargetModel, texts: Sequence[TargetText], taps: Iterable[int]) -> Evidence:
    """The target's states at `taps` (those that exist) and after its final norm, and its logits over the answers."""
    final = final_tap(target.num_layers)
    wanted = sorted({tap for tap in taps if 0 <= tap <= final} | {final})
    states: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    logit_rows: list[int] = []
    start = 0
    for text in texts:
        length = len(text.token_ids)
        cache = target.new_cache(num_slots=1, num_columns=length)
        rows = range(text.num_prompt - 1, length - 1)
        output = target.forward(
            [RowGroup(slot=0, prefix=0, tokens=text.token_ids)], cache, logit_rows=list(rows), taps=wanted
        )
        assert output.taps is not None
        states.append(output.taps.float())
        logits.append(output.logits.float())
        logit_rows.extend(start + row for row in rows)
        start += length
    parts = torch.cat(states).split(target.hidden_size, dim=-1)
    return Evidence(
        texts=tuple(texts),
        num_layers=target.num_layers,
        states=dict(zip(wanted, parts, strict=True)),
        logits=torch.cat(logits),
        logit_rows=torch.tensor(logit_rows, device=target.device),
    )

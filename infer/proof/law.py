"""Do the tokens of speculative decoding have the probabilities that the stock model gives them?

Answers are drawn with the draft, each with a seed of its own, and then read once by transformers' own model: no code
of the engine's between the weights and the probabilities. See `infer.proof.statistics` for the tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.proof.equality import locate
from infer.proof.statistics import Floats, Transform, independence, surprise, transform, uniformity
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel

NUM_TESTS = 3
"""Each sample is tested for uniformity, surprise and independence."""


@dataclass(frozen=True, kw_only=True)
class LawSample:
    """Answers at one temperature under one rule: their transform, and disjoint pairs of neighbours in it [N, 2]."""

    rule: str
    temperature: float
    transform: Transform
    pairs: Floats
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return len(self.transform.uniforms)

    def results(self) -> dict[str, tuple[float, float]]:
        """The statistic and p of each test."""
        return {
            "uniformity": uniformity(self.transform.uniforms),
            "surprise": surprise(self.transform),
            "independence": independence(self.pairs),
        }


def draw_answers(
    engine: Engine,
    prompts: Sequence[EvalPrompt],
    *,
    temperature: float,
    num_tokens: int,
    max_tokens: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """As many answers of `max_tokens` tokens as `num_tokens` takes. Each has a seed of its own: answers that share a
    seed share their noise, and would not be independent."""
    count = -(-num_tokens // max_tokens)
    params = [
        SamplingParams(temperature=temperature, seed=seed + index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(count)
    ]
    texts = [prompts[index % len(prompts)].token_ids for index in range(count)]
    return engine.generate(texts, params, progress=progress)


def judge(
    target: TargetModel, completions: Sequence[Completion], *, rule: str, temperature: float, seed: int
) -> LawSample:
    """Transform the answers by the stock model's probabilities at `temperature`."""
    rng = np.random.default_rng(seed)
    parts = []
    with target.stock() as model, torch.inference_mode():
        takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        for completion in completions:
            ids = [*completion.prompt_token_ids, *completion.token_ids]
            tokens = torch.tensor(completion.token_ids, device=target.device)
            num_rows = len(tokens) + 1  # from the prompt's last token on
            keep = {"logits_to_keep": num_rows} if takes_rows else {}
            logits = model(input_ids=torch.tensor([ids], device=target.device), use_cache=False, **keep).logits[0]
            parts.append(transform(logits[-num_rows:-1] / temperature, tokens, rng.random(len(tokens))))
    return LawSample(
        rule=rule,
        temperature=temperature,
        transform=Transform.join(parts),
        pairs=np.concatenate([_pairs(part.uniforms) for part in parts]),
        num_accepted=sum(_num_accepted(completion) for completion in completions),
    )


def _pairs(uniforms: Floats) -> Floats:
    """Pairs of neighbours [N, 2] that do not overlap."""
    return uniforms[: len(uniforms) // 2 * 2].reshape(-1, 2)


def _num_accepted(completion: Completion) -> int:
    return sum(locate(completion.accepted_lengths, index)[2] for index in range(len(completion.token_ids)))

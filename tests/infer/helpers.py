"""What tests of decoding share: requests, plain decoding to compare with, drafts, and models on disk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import HeadCard, TargetReference, save_head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.vocab import DraftVocabulary
from infer.drafters import DraftLimit
from infer.engine import Engine
from infer.proof.statistics import chi_square_tail
from infer.request import Completion
from infer.sampling import CONSTRAINTS, SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer


def sampling(temperature: float = 0.0, **changes: Any) -> SamplingParams:
    """24 tokens with seed 3. End tokens are ignored, unless a constraint needs them to end the answer."""
    ignore_eos = not any(name in changes for name in CONSTRAINTS)
    defaults = {"temperature": temperature, "seed": 3, "max_tokens": 24, "ignore_eos": ignore_eos}
    return SamplingParams(**{**defaults, **changes})


def plain(target: TargetModel, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """Plain decoding's answer to a prompt alone."""
    return Engine(target).generate([prompt], params)[0]


def plain_ids(target: TargetModel, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    return plain(target, prompt, params).token_ids


def random_tree(rng: random.Random, vocab_size: int, limit: DraftLimit, right: Sequence[int]) -> DraftTree:
    """A random tree that holds the right continuation with some probability, as any child."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path = {ROOT: 0}
    for _ in range(rng.randint(0, min(12, limit.max_nodes))):
        candidates = [node for node in range(-1, len(tokens)) if _depth(parents, node) < limit.max_depth]
        if not candidates:
            break
        parent = rng.choice(candidates)
        depth = on_path.get(parent)
        token = rng.randrange(vocab_size)
        if depth is not None and depth < len(right) and rng.random() < 0.6:
            token = right[depth]
        if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
            continue
        tokens.append(token)
        parents.append(parent)
        if depth is not None and depth < len(right) and token == right[depth]:
            on_path[len(tokens) - 1] = depth + 1
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot())


def _depth(parents: list[int], node: int) -> int:
    return 0 if node == ROOT else 1 + _depth(parents, parents[node])


def random_head(target: TargetModel, *, seed: int = 0, draft_vocab_size: int = 64) -> Eagle3Head:
    """A head with random weights, ready to run. It drafts the lowest odd token ids."""
    vocab_size = target.vocab_size
    config = Eagle3Config.for_target(target.config, draft_vocab_size=draft_vocab_size, vocab_size=vocab_size)
    odd = dict.fromkeys(range(1, vocab_size, 2), 1)
    vocabulary = DraftVocabulary.from_counts(odd, size=draft_vocab_size, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle3Head(config, vocabulary).bind(target.weights)


def small_target(tiny_model: Callable[..., Any], *, seed: int = 0) -> TargetModel:
    """A target over 8 tokens, whose law can be counted."""
    none = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    return TargetModel.wrap(tiny_model("llama", seed=seed, vocab_size=8, **none))


def chance_of_answers(engine: Engine) -> tuple[list[Completion], float]:
    """1,500 short answers of an engine over a `small_target`, and the chance of a chi-square as large as theirs if the
    two tokens after the prefill's follow the target's law (over the cells that expect more than 4; seeds fixed)."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(1500)]
    completions = engine.generate([[5, 3, 1]] * len(params), params)
    counts = torch.zeros(8, 8)
    for completion in completions:
        counts[completion.token_ids[1], completion.token_ids[2]] += 1
    prompts = torch.tensor([[5, 3, 1, x, y] for x in range(8) for y in range(8)])
    with engine.target.stock() as model, torch.inference_mode():
        probs = torch.softmax(model(input_ids=prompts).logits, dim=-1).view(8, 8, 5, 8)
    first, second, third = probs[0, 0, 2], probs[:, 0, 3], probs[:, :, 4]
    expected = torch.einsum("x,xy,xyz->yz", first, second, third) * len(params)
    cells = expected > 4
    found = (((counts - expected) ** 2 / expected)[cells]).sum().item()
    return completions, chi_square_tail(found, int(cells.sum()))


@dataclass(frozen=True)
class Folders:
    """Models on disk: a target, another of the same shape, a random head for the first, and a file of prompts."""

    target: Path
    other: Path
    head: Path
    prompts: Path


def write_folders(root: Path, texts: Sequence[tuple[str, str]], *, drafter: Mapping[str, Any] | None = None) -> Folders:
    """`texts`: (domain, message) of each prompt. `drafter`: the drafter's settings on the head's card."""
    folders = Folders(target=root / "target", other=root / "other", head=root / "head", prompts=root / "prompts.jsonl")
    tokenizer = toy_tokenizer()
    for seed, folder in enumerate((folders.target, folders.other)):
        model = make_tiny_model(
            "llama", seed=seed, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=1
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    target = TargetModel.load(folders.target, dtype="float32")
    reference = TargetReference(
        name="target",
        fingerprint=target.fingerprint,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )
    save_head(folders.head, random_head(target), HeadCard(target=reference, drafter=dict(drafter or {})))
    lines = [json.dumps({"domain": d, "messages": [{"role": "user", "content": text}]}) for d, text in texts]
    folders.prompts.write_text("\n".join(lines) + "\n")
    return folders

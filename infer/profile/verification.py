"""What verification costs by sampling parameters, on a tree of which the walk accepts a path."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from infer.chat import token_id_list
from infer.cost import median_milliseconds
from infer.request import Request, RequestLaw
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import RULES, KeyedChance, verify

_TEXT = """The tide had gone out further than anyone remembered, and the boats lay on their sides in the mud. Old men
came down to look at it, said little, and went home again. By noon the first children had walked out to the island,
carrying their shoes, and found that the lighthouse door was open and the lamp inside still warm."""
VERIFIED_NODES, VERIFIED_PATH = 32, 2
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3}
VERIFIED_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_p 0.9, flat": {"temperature": 8.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, **_PENALTIES},
    "no repeated 3-gram": {"temperature": 0.8, "no_repeat_ngram_size": 3},
    "all of these": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, **_PENALTIES},
}


@torch.inference_mode()
def measure_verification(target: TargetModel, *, repeats: int = 7) -> dict[str, float]:
    """Milliseconds to verify a tree of `VERIFIED_NODES` nodes of which the walk accepts `VERIFIED_PATH`, by sampling
    parameters: processing, noise (which a drafter may have made already) and draws at every node visited."""
    prompt = _some_text(target)
    cache = target.new_cache(num_slots=1, num_columns=len(prompt))
    logits = target.forward([RowGroup(slot=0, prefix=0, tokens=prompt)], cache).logits[-1 - VERIFIED_NODES :]
    times = {}
    for name, values in VERIFIED_PARAMS.items():
        params = SamplingParams(seed=0, ignore_eos=True, **values)
        request = Request.create(prompt, params, seed=0, sample=0, rule=RULES["match"], exactness="seed", target=target)
        request.output_ids.extend(prompt)
        tree = _tree_with_accepted_path(request, logits)
        law = RequestLaw(request, tree, logits)
        times[name] = median_milliseconds(partial(_verify_afresh, request, tree, law), repeats=repeats)
    return times


def _some_text(target: TargetModel) -> list[int]:
    """64 tokens: of English where there is a tokenizer, so that the target's rows are as flat as those of real text."""
    tokens = [] if target.tokenizer is None else token_id_list(target.tokenizer(_TEXT))
    tokens = [token for token in tokens if token < target.vocab_size]
    return (tokens + list(range(min(64, target.vocab_size))))[:64]


def _verify_afresh(request: Request, tree: DraftTree, law: RequestLaw) -> None:
    request.noise.forget_before(request.num_tokens + VERIFIED_NODES)
    verdict = verify(request.rule, tree, law, KeyedChance(0, 0, 0, 0))
    assert len(verdict.path) == VERIFIED_PATH


def _tree_with_accepted_path(request: Request, logits: torch.Tensor) -> DraftTree:
    """The tokens that the target would draw, for `VERIFIED_PATH` nodes, and wrong ones below the last of them."""
    tokens: list[int] = []
    for _ in range(VERIFIED_PATH):
        tree = DraftTree.chain(tuple(tokens))
        tokens.append(RequestLaw(request, tree, logits).draw(len(tokens) - 1))
    chain = DraftTree.chain(tuple(tokens))
    drawn = RequestLaw(request, chain, logits).draw(VERIFIED_PATH - 1)
    wrong = [token for token in range(VERIFIED_NODES + 1) if token != drawn][: VERIFIED_NODES - VERIFIED_PATH]
    parents = (ROOT, *range(VERIFIED_PATH - 1), *[VERIFIED_PATH - 1] * len(wrong))
    return DraftTree(tokens=(*tokens, *wrong), parents=parents, kind=OneHot())

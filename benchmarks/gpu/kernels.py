"""The kernels of static rounds against their references, on the device, over odd shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.elementwise import check_elementwise
from benchmarks.gpu.session import Session
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.tree_attention import DEEPEST, check_tree_attention, random_parents
from infer.kernels.gpu import runs_triton
from infer.kernels.gpu.match_walk import Walk, draw, match_walk, match_walk_reference
from infer.noise import gumbel_rows


def check_kernels(session: Session) -> None:
    session.machine["kernels"] = "Triton" if runs_triton(session.device) else "PyTorch fallbacks"
    _check_noise(session)
    _check_walks(session)
    check_elementwise(session)
    check_tree_attention(session)


def _check_noise(session: Session) -> None:
    """The device's noise is the CPU's: a difference of the last bit, once in very many values, is allowed."""
    num_keys = 16
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(1 << 62), 1 << 62, (num_keys,), generator=generator)
    token_ids = torch.arange(session.sizes.noise_values // num_keys)
    expected = gumbel_rows(keys, token_ids)
    found = gumbel_rows(keys.to(session.device), token_ids.to(session.device)).cpu()
    num_differing = int((found != expected).sum())
    worst = float(((found - expected) / expected).abs().max())
    passed = num_differing <= 1 + expected.numel() // 1_000_000 and worst < 1e-6
    session.check(
        "noise, device against CPU",
        passed,
        f"{num_differing} of {expected.numel()} values differ, relative difference at most {worst:.1e}",
    )


def walk_cases(sizes: Sizes) -> Iterator[tuple[int, int, int, torch.dtype]]:
    """Requests, rows of each, vocabulary, dtype of the logits."""
    vocabs = (1, 97, 1000, 32003, 128256) if sizes.noise_values > 1 << 16 else (1, 97, 1000)
    batches, num_rows = (1, 3, 8), (1, 2, 9, 33)
    for index in range(sizes.kernel_cases):
        dtype = (torch.float32, torch.bfloat16)[index % 2]
        yield batches[index % 3], num_rows[index % 4], vocabs[index % len(vocabs)], dtype


def _check_walks(session: Session) -> None:
    generator = torch.Generator().manual_seed(0)
    num_same = num_cases = num_accepted = 0
    for num_requests, num_rows, vocab, dtype in walk_cases(session.sizes):
        if session.is_late("kernels"):
            session.skip("kernels", f"out of time after {num_cases} match walks")
            break
        inputs = random_walk_inputs(num_requests, num_rows, vocab, dtype, session.device, generator)
        expected = match_walk_reference(*inputs, depth=DEEPEST)
        found = match_walk(*inputs, depth=DEEPEST)
        num_cases += 1
        num_same += is_same_walk(found, expected)
        num_accepted += int(expected.counts.sum())
    detail = f"{num_same}/{num_cases} cases equal the reference, {num_accepted} nodes accepted"
    session.check("match walk", num_same == num_cases and num_accepted > 0, detail)


WalkInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_walk_inputs(
    num_requests: int,
    num_rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> WalkInputs:
    """Logits, tokens, parents, keys and temperatures of trees half of whose nodes are what the target draws; every now
    and then a row from which nothing can be drawn."""
    logits = 4 * torch.randn((num_requests * num_rows, vocab), generator=generator)
    if vocab % 2:
        logits[int(torch.randint(len(logits), (1,), generator=generator))] = math.nan
    keys = torch.randint(-(1 << 62), 1 << 62, (num_requests * num_rows,), generator=generator)
    temperatures = torch.tensor([0.0, 1.0, 0.3, 1.7] * 2)[:num_requests]
    chooser = np.random.default_rng(int(keys[0]) & 0xFFFF)
    parents = torch.full((num_requests, num_rows), -1, dtype=torch.int32)
    for request in range(num_requests):
        num_nodes = num_rows - 1 - (request % 2 if num_rows > 2 else 0)  # some leave a place without a node
        parents[request, 1 : 1 + num_nodes] = torch.tensor(random_parents(chooser, num_nodes), dtype=torch.int32)
    logits, keys, temperatures = logits.to(device, dtype), keys.to(device), temperatures.to(device)
    drawn, _ = draw(logits, keys.view(num_requests, num_rows), temperatures)
    tokens = torch.randint(vocab, (num_requests, num_rows), generator=generator).to(device)
    parents = parents.to(device)
    is_right = (torch.rand((num_requests, num_rows), generator=generator) < 0.5).to(device)
    tokens = torch.where(is_right, drawn.gather(1, parents.clamp_min(0).long()), tokens)
    return logits, tokens, parents, keys, temperatures


def is_same_walk(found: Walk, expected: Walk) -> bool:
    """Tokens count where they could be drawn."""
    sound = expected.sound
    return (
        torch.equal(found.paths, expected.paths)
        and torch.equal(found.counts, expected.counts)
        and torch.equal(found.sound, sound)
        and torch.equal(found.tokens[sound], expected.tokens[sound])
    )

"""Shared fixtures: the real demonstration target, and tiny random models of each supported family."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infer.machine import cache_folder

REPOSITORY = Path(__file__).resolve().parent.parent

# One thread unless asked otherwise: on busy cores, OpenMP threads wait for each other at each small step.
torch.set_num_threads(int(os.environ.get("HEADSTART_TEST_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost tables of toy models, measured beside other tests, must not reach the user's cache folder. Compiled kernels
    are kept there, named by all that they were made from: making them takes longer than most tests."""
    own, kernels = tmp_path_factory.mktemp("cache") / "headstart", cache_folder() / "headstart" / "kernels"
    own.mkdir()
    with contextlib.suppress(OSError):  # a folder that cannot be written to: then they are made anew
        kernels.mkdir(parents=True, exist_ok=True)
        (own / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own.parent))
        yield


_COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Wider than the usual 0.02, so that the logits of a random model are far from uniform.
    "initializer_range": 0.3,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_COMMON, **_GROUPED}),
    "qwen2": ("Qwen2", {**_COMMON, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**_COMMON, **_GROUPED}),
    "gemma": ("Gemma", {**_COMMON, **_GROUPED}),
    "gemma2": (
        "Gemma2",
        {
            **_COMMON,
            **_GROUPED,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "initializer_range": 0.15,
        },
    ),
    # Six layers hold one full-attention layer among sliding ones in Gemma-3; three layers name theirs.
    "gemma3": (
        "Gemma3",
        {
            **_COMMON,
            **_GROUPED,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "initializer_range": 0.15,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoX", {**_COMMON, "use_parallel_residual": True}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 128,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "initializer_range": 0.3,
        },
    ),
}
# Families whose text-only configuration or model class is not called <Family>Config / <Family>ForCausalLM.
_CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}
_MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The converted SmolLM2-135M-Instruct folder; `make test` fetches it."""
    folder = Path(os.environ.get("HEADSTART_SMOLLM2", REPOSITORY / "models" / "smollm2-135m"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model in {folder}; run `headstart fetch smollm2-135m` or set HEADSTART_SMOLLM2")
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., transformers.PreTrainedModel]:
    """`tiny_model(kind, seed=0, **config)`: a fresh random stock model in float32, in eval mode."""
    return make_tiny_model


def make_tiny_model(kind: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    family, settings = _FAMILIES[kind]
    config_class = getattr(transformers, _CONFIG_CLASSES.get(family, f"{family}Config"))
    model_class = getattr(transformers, _MODEL_CLASSES.get(family, f"{family}ForCausalLM"))
    settings = {**settings, **overrides}
    if "layer_types" in settings and "layer_types" not in overrides:
        kinds = settings["layer_types"]
        num_layers = settings["num_hidden_layers"]
        settings["layer_types"] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: transformers.PreTrainedModel = model_class(config_class(**settings))
    assert model.dtype == torch.float32
    model.train(False)
    return model


@pytest.fixture(scope="session")
def tiny_kinds() -> tuple[str, ...]:
    """The families that `tiny_model` can make."""
    return tuple(_FAMILIES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What breaks the law, and that the tests of this run saw it: one line a planted fault, nothing measured anew."""
    findings = {
        finding["name"]: (finding, report.passed)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, finding in report.user_properties
        if name == "planted fault"
    }
    if not findings:
        return
    from infer.proof.faults import FAULTS

    terminalreporter.section("planted faults (total variation from plain sampling)")
    for fault in FAULTS:
        finding, passed = findings.get(fault.name, ({}, False))
        found = f"{finding['total_variation']:.4f}" if "total_variation" in finding else "-"
        verdict = "caught" if passed else "NOT CAUGHT" if finding else "did not run"
        terminalreporter.line(f"{found:<6}  {verdict:<11}  {fault.name}")

"""The methods that `peers.py` compares: how each becomes an engine, or why it cannot.

A maker raises PeerError, a line that says what is missing and how to get it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import vllm_acceptance as vllm
from benchmarks.llamacpp import LlamaCpp, LlamaServer, precision_of
from benchmarks.peers_engines import EnginePeer, Peer, PeerError, RunnerPeer, StockPeer
from benchmarks.peers_report import PLAIN, STOCK
from heads.checkpoint import CONFIG_FILE, read_json
from infer.bench import LOOKUP_TOKENS
from infer.cli import common
from infer.drafters import adapter_of, head_folder, load_drafter, resolve_target
from infer.engine import Engine
from infer.machine import dtype_name

if TYPE_CHECKING:
    from infer.target import TargetModel

VLLM_RUNNER = Path(__file__).with_name("peers_vllm.py")
VLLM, LLAMACPP, LLAMACPP_QUANTISED = "vllm", "llamacpp", "llamacpp_q"
NGRAM = {"tokens": 5, "shortest": 2, "longest": 4}
"""The n-gram lookup of vLLM (tokens proposed, lengths matched) and of llama.cpp, which matches one length."""
KV_GIBIBYTES = "1"
LENGTH_STEP = 512


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all engines are made from. `max_length` holds the longest prompt and answer."""

    args: argparse.Namespace
    target: TargetModel
    max_length: int

    def engine(self, head: str) -> Engine:
        """As the commands make it; it drafts also where tuning found that nothing pays."""
        return common.build_engine(
            self.args, self.target, head=head, max_requests=1, max_length=self.max_length, drafts=True
        )

    @cached_property
    def trained_head(self) -> Path:
        """The head's folder."""
        folder = head_folder(self.args.head)
        if folder is None or str(folder) != str(self.args.head):
            raise PeerError(f"HEAD is {self.args.head}, which is not one trained head: there is none to load")
        return folder.resolve()

    @cached_property
    def target_folder(self) -> Path:
        """The target's folder, for engines that load it themselves."""
        if self.args.adapter is not None or adapter_of(self.args.head) is not None:
            raise PeerError("the target here has an adapter, which this engine is not given")
        folder = Path(resolve_target(self.args.head, self.args.target))
        if not folder.is_dir():
            raise PeerError(f"the target {folder} is no local folder: download it and name its folder with --target")
        return folder.resolve()

    def check_weights(self) -> None:
        """For engines that hold the folder's weights as they are: so must we."""
        if self.target.quantization:
            raise PeerError(f"the target here is in {self.target.quantization}, and this engine's would not be")

    @property
    def dtype(self) -> str:
        return dtype_name(self.target.dtype)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()


def _absent(what: str, folder: Path | None, option: str, way: str) -> str:
    where = f"is not in {folder}" if folder else f"has no folder ({option} was not given)"
    return f"{what} {where}; make it with: python benchmarks/peers.py {way}"


# In this process.


def _stock(setup: Setup) -> Peer:
    return StockPeer(setup.target)


def _prompt_lookup(setup: Setup) -> Peer:
    return StockPeer(setup.target, lookup_tokens=LOOKUP_TOKENS)


def _assisted(setup: Setup) -> Peer:
    name = setup.args.assistant
    if name is None:
        raise PeerError(
            "no assistant was given: name a smaller model with the target's tokens by --assistant FOLDER, or the "
            "target's own first N layers by --assistant layers:N"
        )
    if name.startswith("layers:"):
        return StockPeer(setup.target, counts=False, early_exit=int(name.removeprefix("layers:")))
    from transformers import AutoModelForCausalLM

    assistant = AutoModelForCausalLM.from_pretrained(name, dtype=setup.target.dtype).eval()
    if assistant.config.vocab_size != setup.target.vocab_size:
        raise PeerError(
            f"the assistant {name} has {assistant.config.vocab_size} tokens and the target {setup.target.vocab_size}: "
            "it must have the target's"
        )
    return StockPeer(setup.target, assistant=assistant)


def _plain(setup: Setup) -> Peer:
    return EnginePeer(setup.engine("none"))


def _head(setup: Setup) -> Peer:
    if setup.args.head == "none":
        raise PeerError("no HEAD was given")
    return EnginePeer(setup.engine(setup.args.head))


def _head_alone(setup: Setup) -> Peer:
    """Without the lookup that joins a trained head elsewhere: what other engines do with it."""
    settings, args = setup.engine(str(setup.trained_head)), setup.args
    return EnginePeer(
        Engine(
            setup.target,
            load_drafter(setup.trained_head, setup.target, hybrid=False),
            max_requests=1,
            max_length=setup.max_length,
            exactness=args.exactness,
            rule=args.rule,
            row_width=args.row_width,
            tree=settings.tree,
            cost=settings.cost,
        )
    )


def _head_suffix(setup: Setup) -> Peer:
    return EnginePeer(setup.engine(f"{setup.trained_head}+suffix"))


# vLLM.


def _vllm(speculative: Callable[[Setup], dict[str, Any] | None], name: str) -> Callable[[Setup], Peer]:
    def make(setup: Setup) -> Peer:
        args = setup.args
        if args.env is None or vllm.installed_version(args.env) is None:
            raise PeerError(_absent("vLLM", args.env, "--env", "--make-env .vllm-env"))
        setup.check_weights()
        job = {
            "package": vllm.PACKAGE,
            "target": str(setup.target_folder),
            "dtype": setup.dtype,
            "max_length": vllm_length(setup),
            "stop_token_ids": sorted(setup.target.eos_ids),
            "eager": args.vllm_eager,
            "speculative": speculative(setup),
        }
        variables = vllm.runner_variables(args.env, setup.threads)
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = KV_GIBIBYTES
        command = [str(vllm.python_of(args.env)), str(VLLM_RUNNER)]
        return RunnerPeer(name, command, job, variables=variables, weights=setup.dtype, reason=vllm.reason_in)

    return make


def vllm_length(setup: Setup) -> int:
    """Room for the last chains too, else vLLM shortens them. In steps, as it compiles anew for each length."""
    needed: int = setup.max_length + max(setup.args.draft_tokens, NGRAM["tokens"]) + 1
    limit = max(setup.target.max_length, needed)
    return min(-(-needed // LENGTH_STEP) * LENGTH_STEP, limit)


def _vllm_ngram(setup: Setup) -> dict[str, Any]:
    return {
        "method": "ngram",
        "num_speculative_tokens": NGRAM["tokens"],
        "prompt_lookup_min": NGRAM["shortest"],
        "prompt_lookup_max": NGRAM["longest"],
    }


def _vllm_head(setup: Setup) -> dict[str, Any]:
    config = read_json(setup.trained_head / CONFIG_FILE)
    vllm.check_form(config, vllm.NATIVE)
    return {
        "method": vllm.guess_method(config),
        "model": str(setup.trained_head),
        "num_speculative_tokens": setup.args.draft_tokens,
    }


# llama.cpp.


def _llamacpp(
    options: Callable[[Setup, LlamaCpp], Sequence[str]], *, quantised: bool = False
) -> Callable[[Setup], Peer]:
    def make(setup: Setup) -> Peer:
        folder = setup.args.llamacpp
        if folder is None or not LlamaCpp(folder=folder).is_made:
            raise PeerError(_absent("llama.cpp", folder, "--llamacpp", "--make-llamacpp .llamacpp"))
        made, target = LlamaCpp(folder=folder), setup.target_folder
        if quantised:
            model = made.original(target)
        else:
            setup.check_weights()
            model = made.convert(target, target.name, dtype=setup.dtype)
        return LlamaServer(
            made,
            model,
            weights=precision_of(model.name) if quantised else setup.dtype,
            max_length=setup.max_length + setup.args.draft_tokens + NGRAM["tokens"],
            threads=setup.threads,
            options=options(setup, made),
        )

    return make


def _llamacpp_ngram(setup: Setup, made: LlamaCpp) -> Sequence[str]:
    size, tokens = str(NGRAM["shortest"]), str(NGRAM["tokens"])
    options = ["--spec-ngram-simple-size-n", size, "--spec-ngram-simple-size-m", tokens]
    return ["--spec-type", "ngram-simple", *options]


def _llamacpp_head(setup: Setup, made: LlamaCpp) -> Sequence[str]:
    method = vllm.guess_method(read_json(setup.trained_head / CONFIG_FILE))
    if method != "eagle3":
        raise PeerError(f"llama.cpp takes EAGLE-3 heads, and this one is {method}")
    head = made.convert(setup.trained_head, f"{setup.target.name}-head", dtype=setup.dtype, target=setup.target_folder)
    options = ["--spec-draft-n-max", str(setup.args.draft_tokens), "--threads-draft", str(setup.threads)]
    return ["--model-draft", str(head), "--spec-type", "draft-eagle3", *options]


# All of them.


@dataclass(frozen=True, kw_only=True)
class Method:
    """`baseline`: the method that is this engine without a draft. is_here: it runs in this process."""

    title: str
    baseline: str
    make: Callable[[Setup], Peer]
    is_here: bool = True


def _elsewhere(title: str, baseline: str, make: Callable[[Setup], Peer]) -> Method:
    return Method(title=title, baseline=baseline, make=make, is_here=False)


METHODS: Mapping[str, Method] = {
    STOCK: Method(title="transformers' generate", baseline=STOCK, make=_stock),
    "prompt_lookup": Method(title="the same, with its n-gram lookup", baseline=STOCK, make=_prompt_lookup),
    "assisted": Method(title="the same, with --assistant", baseline=STOCK, make=_assisted),
    PLAIN: Method(title="this engine without a draft", baseline=PLAIN, make=_plain),
    "head": Method(title="with HEAD (a trained head is joined by the n-gram lookup)", baseline=PLAIN, make=_head),
    "head_alone": Method(title="with the trained head and no lookup", baseline=PLAIN, make=_head_alone),
    "head+suffix": Method(title="with the trained head and the suffix lookup", baseline=PLAIN, make=_head_suffix),
    VLLM: _elsewhere("vLLM", VLLM, _vllm(lambda setup: None, "vllm")),
    "vllm_ngram": _elsewhere("vLLM with its n-gram lookup", VLLM, _vllm(_vllm_ngram, "vllm_ngram")),
    "vllm_head": _elsewhere("vLLM with the trained head", VLLM, _vllm(_vllm_head, "vllm_head")),
    LLAMACPP: _elsewhere("llama.cpp", LLAMACPP, _llamacpp(lambda setup, made: ())),
    "llamacpp_ngram": _elsewhere("llama.cpp with its n-gram lookup", LLAMACPP, _llamacpp(_llamacpp_ngram)),
    "llamacpp_head": _elsewhere("llama.cpp with the trained head", LLAMACPP, _llamacpp(_llamacpp_head)),
    LLAMACPP_QUANTISED: _elsewhere(
        "llama.cpp, weights quantised", LLAMACPP_QUANTISED, _llamacpp(lambda setup, made: (), quantised=True)
    ),
    "llamacpp_q_ngram": _elsewhere(
        "the same with its n-gram lookup", LLAMACPP_QUANTISED, _llamacpp(_llamacpp_ngram, quantised=True)
    ),
    "llamacpp_q_head": _elsewhere(
        "the same with the trained head", LLAMACPP_QUANTISED, _llamacpp(_llamacpp_head, quantised=True)
    ),
}

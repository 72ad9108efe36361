"""Decoding here beside other engines, in one run: transformers, vLLM and llama.cpp, plain and with their own drafts.

    python benchmarks/peers.py --make-env .vllm-env --make-llamacpp .llamacpp      # once, from the network
    python benchmarks/peers.py runs/demo/best --env .vllm-env --llamacpp .llamacpp
    python benchmarks/peers.py runs/demo/best --methods stock plain head --limit 2 --temperature 0 1 --json peers.json

Every engine gets the same token ids, end tokens, longest answer and number of threads. All are loaded first; then each
answers a prompt before the next prompt is taken, in an order that rotates, while the others are idle (what they use
meanwhile is measured). What is not installed is left out, and a line says how to get it.

What cannot be made equal is said beside the table: versions, the precision of weights, and at a temperature the random
numbers. Chains of vLLM and llama.cpp have `--draft-tokens` tokens; our trees are as they always are.

Limits: CPU, batch size 1.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import vllm_acceptance as vllm
from benchmarks.llamacpp import LlamaCpp
from benchmarks.peers_engines import Answer, EnginePeer, Peer, PeerError
from benchmarks.peers_methods import LLAMACPP, LLAMACPP_QUANTISED, METHODS, NGRAM, Method, Setup
from benchmarks.peers_report import Answers, Report, ending_notes, make_rows, noise_notes, text
from infer.bench import LOOKUP_TOKENS, ids_hash
from infer.cli import common
from infer.evaluate import EvalPrompt, render_prompts
from infer.machine import load_average, machine_facts
from infer.sampling import SamplingParams

WARM_TOKENS = 16
SETTLE_SECONDS = 0.3
"""Wait before each answer: OpenMP's threads spin on for a while behind their last work."""


class Comparison:
    """The engines that are there, and why the others are not."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self.methods = methods
        self.peers: dict[str, Peer] = {}
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor() as pool:  # ending takes a process seconds
            list(pool.map(lambda peer: peer.close(), self.peers.values()))

    def load(self, setup: Setup, prompt: Sequence[int]) -> None:
        """Engines of this process first, while it is quiet (they measure what forwards cost here); processes load side
        by side. Each answers once, untimed."""
        params = SamplingParams(
            temperature=max(setup.args.temperature), seed=0, max_tokens=min(WARM_TOKENS, setup.args.max_tokens)
        )
        for is_here in (True, False):
            batch = [name for name, method in self.methods.items() if method.is_here == is_here]
            for name in batch:
                with self._skipping(name):
                    self.peers[name] = self.methods[name].make(setup)
            for name in batch:
                if name in self.peers:
                    with self._skipping(name):
                        self.peers[name].wait()
                        self.peers[name].answer(prompt, params)
                        common.note(f"loaded {name}")

    def answer(self, index: int, prompt: EvalPrompt, params: SamplingParams, progress: Callable[[], None]) -> Answers:
        """Every engine's answer to one prompt, in an order that the prompt's number rotates."""
        names = list(self.peers)
        start = index % max(len(names), 1)
        answers: dict[str, Answer] = {}
        idle_shares: dict[str, float] = {}
        for name in (*names[start:], *names[:start]):
            with self._skipping(name):
                time.sleep(SETTLE_SECONDS)
                before = self._others_seconds(name)
                answers[name] = self.peers[name].answer(prompt.token_ids, params)
                idle_shares[name] = max(self._others_seconds(name) - before, 0.0) / answers[name].seconds
            progress()
        return Answers(
            index=index,
            domain=prompt.domain,
            temperature=params.temperature,
            by_method=answers,
            idle_shares=idle_shares,
        )

    @contextlib.contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """What is missing, does not load or does not answer leaves the comparison with its reason; the others go on.
        (What our own engine refuses is a mistake in the arguments, and ends the run.)"""
        faults: tuple[type[Exception], ...] = (PeerError,) if self.methods[name].is_here else (ValueError, OSError)
        try:
            yield
        except faults as error:
            self.skipped[name] = " ".join(str(error).split())
            common.note(f"skipped {name}: {self.skipped[name]}")
            self._close(name)

    def _close(self, name: str) -> None:
        peer = self.peers.pop(name, None)
        if peer is not None:
            peer.close()

    def _others_seconds(self, name: str) -> float:
        return sum(peer.idle_seconds() for other, peer in self.peers.items() if other != name)


def compare(args: argparse.Namespace) -> Report:
    """Load everything that is there, let it answer, and count."""
    from tqdm import tqdm

    load = load_average()
    chats = common.read_chats(args)
    target = common.load_target(args)
    machine = {**machine_facts(), "load": load}  # of before, when nothing of this ran
    prompts = render_prompts(target.tokenizer, chats, raw=args.raw)
    longest = max((prompt.token_ids for prompt in prompts), key=len)
    setup = Setup(args=args, target=target, max_length=len(longest) + args.max_tokens)
    with Comparison({name: METHODS[name] for name in METHODS if name in args.methods}) as comparison:
        comparison.load(setup, longest)
        if not comparison.peers:
            raise ValueError("there is nothing to compare: none of the methods asked for can run here")
        answers = []
        with tqdm(
            total=len(comparison.peers) * len(prompts) * len(args.temperature), unit=" runs", disable=None
        ) as bar:
            for temperature in args.temperature:
                for index, prompt in enumerate(prompts):
                    params = SamplingParams(temperature=temperature, seed=args.seed + index, max_tokens=args.max_tokens)
                    answers.append(comparison.answer(index, prompt, params, lambda: bar.update(1)))
        peers = comparison.peers
        return Report(
            machine=machine,
            target=target.name,
            head=str(args.head),
            settings=settings_of(setup, prompts, peers),
            versions={name: peer.versions for name, peer in peers.items()},
            rows=make_rows(
                answers,
                baselines={name: METHODS[name].baseline for name in peers},
                weights={name: peer.weights for name, peer in peers.items()},
            ),
            answers=answers,
            skipped=comparison.skipped,
            notes=[
                *engine_notes(peers),
                *ending_notes(answers, eos_ids=frozenset(target.eos_ids), max_tokens=args.max_tokens),
                *noise_notes(answers, load=load),
            ],
        )


def settings_of(setup: Setup, prompts: Sequence[EvalPrompt], peers: Mapping[str, Peer]) -> dict[str, Any]:
    args = setup.args
    return {
        "num_prompts": len(prompts),
        "first_prompt_hash": ids_hash(prompts[0].token_ids),
        "temperatures": args.temperature,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "dtype": setup.dtype,
        "forward": setup.target.forward_kind,
        "threads": setup.threads,
        "trees": {name: asdict(peer.engine.tree) for name, peer in peers.items() if isinstance(peer, EnginePeer)},
        "exactness": args.exactness,
        "draft_tokens": args.draft_tokens,
        "ngram": NGRAM,
        "prompt_lookup_num_tokens": LOOKUP_TOKENS,
        "assistant": args.assistant,
        "vllm_compiled": not args.vllm_eager,
    }


def engine_notes(peers: Mapping[str, Peer]) -> list[str]:
    """What no setting made equal."""
    notes = []
    quantised = [name for name in peers if METHODS[name].baseline == LLAMACPP_QUANTISED]
    if quantised:
        notes.append(
            f"{', '.join(quantised)}: weights in {peers[quantised[0]].weights}, fewer bytes a token than all others "
            "read; that is another task"
        )
    if any(name.startswith(LLAMACPP) for name in peers):
        notes.append("llama.cpp keeps keys and values in float16 (its default)")
    return notes


def make_parser() -> argparse.ArgumentParser:
    titles = "\n".join(f"  {name:<17} {method.title}" for name, method in METHODS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"methods:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common.add_engine_arguments(parser, head_required=False)
    common.add_measurement_arguments(parser, limit=1)
    common.add_tree_arguments(parser)
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="M", help="(default: all)"
    )
    group.add_argument("--assistant", metavar="MODEL", help="of `assisted`: a folder, or layers:N of the target's own")
    group.add_argument(
        "--draft-tokens", type=int, default=3, metavar="K", help="chains of vLLM and llama.cpp with a head (default: 3)"
    )
    group.add_argument("--env", type=Path, metavar="FOLDER", help="vLLM's environment")
    group.add_argument("--make-env", type=Path, metavar="FOLDER", help="install vLLM there first, and use it")
    group.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile the model, as it does")
    group.add_argument("--llamacpp", type=Path, metavar="FOLDER", help="the folder that llama.cpp was built in")
    group.add_argument("--make-llamacpp", type=Path, metavar="FOLDER", help="build it there first, and use it")
    common.add_json_argument(parser)
    parser.set_defaults(device="cpu")
    return parser


def check(args: argparse.Namespace) -> None:
    """Mistakes, before anything loads."""
    for name in ("draft_tokens", "max_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.device != "cpu":
        raise ValueError(f"--device {args.device}: the other engines are CPU builds, so all run on the cpu")
    layers = (args.assistant or "").partition("layers:")[2]
    if (args.assistant or "").startswith("layers:") and not (layers.isdecimal() and int(layers) > 0):
        raise ValueError(f"--assistant {args.assistant}: expected a folder, or a number of layers as in layers:8")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        check(args)
        if args.make_env is not None:
            vllm.make_environment(args.make_env)
        if args.make_llamacpp is not None:
            LlamaCpp(folder=args.make_llamacpp).make()
        args.env, args.llamacpp = args.env or args.make_env, args.llamacpp or args.make_llamacpp
        if args.head == "none" and (args.make_env or args.make_llamacpp):
            return 0  # asked to make, and nothing to measure with
        common.warn_if_busy()
        report = compare(args)
        print(text(report))
        common.write_json(args.json, report.to_dict())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the other processes would outlive this one
    sys.exit(main())

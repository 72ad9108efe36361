"""`headstart demo`: the whole path on a small real model, from nothing to a faster model.

Runs the other commands one after another, prints each as a user would type it, and skips what is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

MODEL = "smollm2-135m"
RECIPE = "smollm2-135m-eagle3-demo"
NUM_CONVERSATIONS = 400
SAMPLE_PROMPT = "What should I pack for a weekend trip to the mountains?"

HELP = f"""\
Fetch a small instruct model, let it write its own training conversations, train an EAGLE-3 head on
them, and compare decoding with and without it. Ten to fifteen minutes on two CPU cores. Run again, it goes
on where it stopped. Leaves runs/demo with the head, its curves and bench.json (target: {MODEL})."""

EXAMPLE = "headstart demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversations", type=int, default=NUM_CONVERSATIONS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="minutes of training (default: the recipe's)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds runs (default: runs)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of data sets (default: data)")


def run(args: argparse.Namespace) -> int:
    from heads.checkpoint import recover_folder

    if args.conversations < 50:
        raise ValueError(f"--conversations must be at least 50 to leave some held out, got {args.conversations}")
    start = time.monotonic()
    target = Path("models") / MODEL
    data = args.data / f"{MODEL}-demo.jsonl"
    folder = args.runs / "demo"
    head, bench = folder / "best", folder / "bench.json"
    train = ["train", RECIPE, "name=demo", f"data.train={data}", "--runs", str(args.runs)]
    if args.minutes is not None:
        train.insert(2, f"train.minutes={args.minutes:g}")  # settings stand before options
    if recover_folder(folder / "last").is_dir():
        train.append("--resume")

    _step("1. The target: a 135M-parameter instruct model")
    _command("fetch", MODEL)
    _step("2. Training text: the target writes its own conversations")
    _command("synth", "--target", str(target), "--out", str(data), "--num", str(args.conversations))
    _step("3. The draft head")
    if _is_finished(folder) and head.is_dir() and args.minutes is None:
        print(f"{folder} is finished")
    else:
        _command(*train)
    _step("4. The same tokens, sooner: plain decoding against the head, interleaved")
    if bench.is_file() and bench.stat().st_mtime > (head / "model.safetensors").stat().st_mtime:
        print(f"{bench} is up to date: delete it to measure again, or run")
        print(f"  headstart bench {head}")
    else:
        _command("bench", str(head), "--limit", "2", "--max-tokens", "96", "--json", str(bench))
    _step("5. A sample: what the head guessed and the target accepted is green")
    _command("generate", str(head), "--prompt", SAMPLE_PROMPT, "--show-accepted")
    print(f"\nDone in {(time.monotonic() - start) / 60:.1f} minutes. Next:")
    print(f'  headstart generate {head} --prompt "Why is the sky blue?"')
    print(f"  headstart report {folder}")
    return 0


def _is_finished(folder: Path) -> bool:
    """Whether the run used up its budget: an interrupted one leaves a summary too."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary["status"] != "interrupted")


def _step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _command(*arguments: str) -> None:
    """Run a command of this distribution in a process of its own, which gives its memory back."""
    print(f"$ headstart {shlex.join(arguments)}", flush=True)
    # -P: the working folder must not provide modules, as for the installed command.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-P", "-m", "headstart", *arguments], env=environment, check=False)
    if result.returncode == 130:
        raise KeyboardInterrupt
    if result.returncode:
        raise ValueError(
            f"`headstart {arguments[0]}` failed; run the demo again once it is mended: finished steps stay"
        )

"""Does decoding keep its promise on this machine's accelerator, and how far from the memory floor is it?

    python benchmarks/gpu_check.py [--target models/smollm2-135m] [--device cuda] [--json FILE] [--markdown FILE]

One script for a machine with nothing but torch, transformers, safetensors, numpy and pyyaml; run it from the source
tree, no installation needed. In turn: memory bandwidth; kernels and attention against references; graph replays against
the same rounds computed eagerly, and answers in graphs against ordinary rounds'; token equality of every kind of draft
in float32 and bfloat16; targets spread over device, memory and disk (with accelerate) or quantised (with bitsandbytes);
decoding speed; plain steps of random layers in 8B and 70B shapes; rounds against plain steps over nodes, depth, batch
and context; a head trained in the minutes that remain, and decoding with it. `benchmarks/gpu/` holds the parts.

One table at the end, which begins with the project's targets: reached, missed or not measured. Exit status 1 if a check
failed (a missed target is no failure). A part that cannot run says why, and the rest goes on. `--minutes` bounds the
whole; what is left undone is listed.

Limits: times are medians of synchronised wall clocks, in one process. Where the folder of `--target` is missing, a
random model of the same shape stands in: its times and its equality count, the acceptance of drafts on its text means
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.attention import check_attention
from benchmarks.gpu.decoding import train_and_decode
from benchmarks.gpu.graphs import check_graphs
from benchmarks.gpu.kernels import check_kernels
from benchmarks.gpu.layers import measure_layers
from benchmarks.gpu.machine import describe_machine, measure_bandwidth
from benchmarks.gpu.placement import check_placement
from benchmarks.gpu.report import as_json, markdown, table
from benchmarks.gpu.rounds import measure_rounds
from benchmarks.gpu.session import PARTS, CannotRun, Session, first_line
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.speed import measure_speed
from benchmarks.gpu.tokens import check_bitwise, check_tokens


def run_parts(session: Session, parts: Sequence[str]) -> None:
    actions: dict[str, Callable[[Session], None]] = {
        "bandwidth": measure_bandwidth,
        "kernels": check_kernels,
        "attention": check_attention,
        "graphs": check_graphs,
        "float32": lambda session: check_tokens(session, "float32"),
        "bfloat16": lambda session: check_tokens(session, "bfloat16"),
        "bitwise": check_bitwise,
        "placement": check_placement,
        "speed": measure_speed,
        "layers": measure_layers,
        "rounds": measure_rounds,
        "training": train_and_decode,
    }
    for part in PARTS:
        if part not in parts:
            continue
        print(f"{part} ({time.perf_counter() - session.started:.0f} s)", file=sys.stderr, flush=True)
        if session.is_late(part):
            session.skip(part, "out of time")
            continue
        try:
            actions[part](session)
        except (CannotRun, torch.OutOfMemoryError) as error:
            session.skip(part, first_line(error))
        except Exception as error:  # whatever broke one part, the others are worth their minutes
            traceback.print_exc()
            session.check(f"{part} runs", False, f"{type(error).__name__}: {first_line(error)}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--target", type=Path, default=Path("models/smollm2-135m"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1 or cpu")
    parser.add_argument("--reduced", action="store_true", help="tiny sizes and a random target: tests this script")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="start nothing new after this (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the report here too")
    parser.add_argument("--markdown", type=Path, help="write the README's table here")
    parsed = parser.parse_args(arguments)
    for path in (parsed.json, parsed.markdown):  # told now, and not after eight minutes
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent} to write {path.name} to")
    if torch.device(parsed.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {parsed.device}: torch {torch.__version__} sees no GPU; use --device cpu")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: its checks are about exactness
    has_target = (options.target / "config.json").is_file()
    session = Session(
        device=device,
        sizes=Sizes.reduced() if options.reduced else Sizes(),
        target_path=options.target,
        random_target=options.reduced or not has_target,
        started=time.perf_counter(),
        seconds=60 * options.minutes,
        machine=describe_machine(device),
    )
    if not has_target and not options.reduced:
        session.skip("real target", f"no model in {options.target}: a random Llama of its shape stands in")
    run_parts(session, options.only)
    session.machine["seconds"] = round(time.perf_counter() - session.started, 1)
    print("\n".join(f"{name}: {value}" for name, value in session.machine.items()))
    print()
    print(table(session))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(session), indent=2) + "\n", encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(markdown(session), encoding="utf-8")
    return 0 if all(each.passed for each in session.checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())

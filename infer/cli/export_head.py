"""`headstart export`: a head in the form that another project loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from heads.checkpoint import present_folder, read_card
from heads.foreign import FORMATS, list_of_forms, new_folder, write_foreign
from infer.adapter import is_adapted
from infer.cli import common

HELP = f"""\
Write a head as another project loads it. Weights keep their bits, and draft logits stay what they
were; the card stays behind. What the form cannot say is refused, and then nothing is written. The
forms are

{list_of_forms()}"""

EXAMPLE = """\
headstart export runs/demo/best --to vllm --out exported/vllm
headstart export runs/smollm2-135m-hass/best --to vllm-eagle1 --out exported/vllm
headstart export runs/smollm2-135m-medusa/best --to vllm-medusa --out exported/vllm
headstart export runs/demo/best --to speculators --out exported/speculators --target models/smollm2-135m"""

_CARRIERS = " or ".join(name for name, form in FORMATS.items() if form.may_carry_embedding)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", type=Path, help="an augmented model's folder")
    parser.add_argument(
        "--to", dest="form", metavar="FORM", required=True, choices=tuple(FORMATS), help="the form, as above"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help=f"with --to {_CARRIERS}: put a copy of this target's embedding in, which the project's own library wants "
        "and servers do not need",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for the target (default: auto)")


def run(args: argparse.Namespace) -> int:
    new_folder(args.out)
    card = read_card(args.head)
    weights = None
    if args.target is not None:
        from infer.target import TargetModel

        common.quiet_loading()
        target = TargetModel.load(args.target, dtype="float32", device=args.device)
        target.check_card(card)
        weights = target.weights
    adapted = is_adapted(card, present_folder(args.head))
    write_foreign(args.out, args.head, args.form, weights=weights)
    common.note(f"{FORMATS[args.form].title}: {FORMATS[args.form].conventions}")
    if adapted:
        common.note(
            f"warning: the head was trained along with {card.target.name}, and its adapter stays behind: serve it "
            "beside that target with the adapter merged in, not beside the original"
        )
    print(args.out)
    return 0

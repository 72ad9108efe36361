"""`headstart export`: a head in the form that another project loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from heads.checkpoint import CONFIG_FILE, present_folder, read_card, read_json
from heads.foreign import FORMATS, list_of_forms, new_folder, write_foreign
from infer.adapter import is_adapted, write_merged_target
from infer.cli import common
from infer.drafters import resolve_target

MERGED = "merged-target"

HELP = f"""\
Write a head as another project loads it. Weights keep their bits, and draft logits stay what they
were; the card stays behind. What the form cannot say is refused, and then nothing is written. The
forms are

{list_of_forms()}
  a head that was trained along with its target
    {MERGED}  the target with the head's adapter merged in, to be served beside the head"""

EXAMPLE = """\
headstart export runs/demo/best --to vllm --out exported/vllm
headstart export runs/smollm2-135m-hass/best --to vllm-eagle1 --out exported/vllm
headstart export runs/smollm2-135m-medusa/best --to vllm-medusa --out exported/vllm
headstart export runs/smollm2-135m-dflash/best --to speculators-dspark --out exported/dspark
headstart export runs/smollm2-135m-medusa2/best --to merged-target --out exported/target
headstart export runs/demo/best --to speculators --out exported/speculators --target models/smollm2-135m"""

_CARRIERS = " or ".join(name for name, form in FORMATS.items() if form.may_carry_embedding)
_COPIERS = ", ".join(name for name, form in FORMATS.items() if form.written_copies)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", type=Path, help="an augmented model's folder")
    parser.add_argument(
        "--to", dest="form", metavar="FORM", required=True, choices=(*FORMATS, MERGED), help="the form, as above"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help=f"with --to {_CARRIERS}: put a copy of this target's embedding in, which the project's own library wants "
        f"and servers do not need; with --to {MERGED}, {_COPIERS}: where the original target is (default: what the "
        "head names)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for the target (default: auto)")


def run(args: argparse.Namespace) -> int:
    new_folder(args.out)
    if args.form == MERGED:
        common.quiet_loading()
        print(write_merged_target(args.out, args.head, resolve_target(args.head, args.target)))
        return 0
    card = read_card(args.head)
    weights = None
    if args.target is not None or FORMATS[args.form].written_copies:
        from infer.target import TargetModel

        common.quiet_loading()
        target = TargetModel.load(resolve_target(args.head, args.target), dtype="float32", device=args.device)
        target.check_card(card)
        weights = target.weights
    adapted = is_adapted(card, present_folder(args.head))
    write_foreign(args.out, args.head, args.form, weights=weights)
    common.note(f"{FORMATS[args.form].title}: {FORMATS[args.form].conventions}")
    config = read_json(present_folder(args.head) / CONFIG_FILE)
    if config.get("markov_rank") and not config.get("markov_table"):
        common.note("the correction by the token before is written as a table of all tokens, which drafts the same")
    if adapted:
        common.note(
            f"warning: the head was trained along with {card.target.name}, and its adapter stays behind: serve it "
            f"beside that target with the adapter merged in (--to {MERGED}), not beside the original"
        )
    print(args.out)
    return 0

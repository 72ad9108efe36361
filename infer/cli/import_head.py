"""`headstart import`: another project's draft head as an augmented model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from heads.base import TargetSizes
from heads.checkpoint import HeadCard, save_head
from heads.foreign import FORMATS, list_of_forms, new_folder, read_foreign, read_foreign_config
from infer.cli import common
from infer.machine import dtype_name

HELP = f"""\
Turn a draft head of another project into an augmented model folder, for the target that it was
trained for. Weights keep their bits, and draft logits stay what they were. Whatever would make the
head compute something else is refused by name, and then nothing is written. The forms are

{list_of_forms()}"""

EXAMPLE = """\
headstart import downloads/eagle3-llama-3.1-8b --target meta-llama/Llama-3.1-8B-Instruct --out heads/llama
headstart import downloads/eagle-vicuna-7b --target lmsys/vicuna-7b-v1.3 --out heads/vicuna
headstart import downloads/medusa-vicuna-7b --target lmsys/vicuna-7b-v1.3 --out heads/medusa --from medusa
headstart import checkpoint --target models/smollm2-135m --out heads/smollm2 --from specforge"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="the checkpoint's folder (config.json and weights)")
    parser.add_argument("--target", required=True, metavar="MODEL", help="its target: a local folder or a Hub name")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--from",
        dest="form",
        metavar="FORM",
        choices=tuple(FORMATS),
        help="the checkpoint's form, as above (default: what its config shows)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for the target (default: auto)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the target while it is looked at (default: float32; the others take half the memory)",
    )


def run(args: argparse.Namespace) -> int:
    from infer.target import TargetModel

    out = new_folder(args.out)
    name, _ = read_foreign_config(args.source, args.form)
    common.quiet_loading()
    target = TargetModel.load(args.target, dtype=args.dtype, device=args.device)
    imported = read_foreign(
        args.source, name, target=target.reference, weights=target.weights, sizes=TargetSizes.of(target.config)
    )
    card = HeadCard(target=target.reference, family=FORMATS[name].family, training=imported.origin)
    save_head(out, imported.head, card, dtype=imported.dtype)
    config = imported.head.config
    common.note(
        f"{FORMATS[name].title}: taps {list(config.taps)}, {config.draft_vocab_size:,} of {config.vocab_size:,} "
        f"tokens, {dtype_name(imported.dtype)}, for {target.name}"
    )
    for line in imported.notes:
        common.note(f"warning: {line}")
    print(out)
    return 0

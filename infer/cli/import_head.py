"""`headstart import`: another project's draft head as an augmented model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from heads.base import TargetSizes
from heads.checkpoint import HeadCard, described, save_head
from heads.foreign import FORMATS, list_of_forms, new_folder, read_foreign, read_foreign_config
from heads.lora import HEAD_ADAPTER_FOLDER, import_head_adapter
from heads.lora import WEIGHTS_FILE as ADAPTER_WEIGHTS
from infer.cli import common
from infer.machine import dtype_name

HELP = f"""\
Turn a draft head of another project into an augmented model folder, for the target that it was
trained for. Weights keep their bits, and draft logits stay what they were. Whatever would make the
head compute something else is refused by name, and then nothing is written. The forms are

{list_of_forms()}

A LoRA adapter of a head ({HEAD_ADAPTER_FOLDER}/ of one that was trained with head.lora_rank) becomes a
head again with the head that it was trained on (--base)."""

EXAMPLE = """\
headstart import downloads/eagle3-llama-3.1-8b --target meta-llama/Llama-3.1-8B-Instruct --out heads/llama
headstart import downloads/eagle-vicuna-7b --target lmsys/vicuna-7b-v1.3 --out heads/vicuna
headstart import downloads/medusa-vicuna-7b --target lmsys/vicuna-7b-v1.3 --out heads/medusa --from medusa
headstart import downloads/dspark_qwen3_4b_block7 --target Qwen/Qwen3-4B --out heads/dspark
headstart import checkpoint --target models/smollm2-135m --out heads/smollm2 --from specforge
headstart import runs/finetuned/best/head_adapter --base runs/demo/best --out heads/finetuned"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="the checkpoint's folder (config.json and weights)")
    parser.add_argument("--target", metavar="MODEL", help="its target: a local folder or a Hub name")
    parser.add_argument(
        "--base", type=Path, metavar="HEAD", help="SRC is the LoRA adapter of a head: the head that it was trained on"
    )
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
    if args.base is not None:
        return _import_adapter(args, out)
    if (args.source / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{args.source} is the LoRA adapter of a head: give the head that it was trained on (--base)")
    if args.target is None:
        raise ValueError("a head belongs to a target: give it with --target (a local folder or a Hub name)")
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


def _import_adapter(args: argparse.Namespace, out: Path) -> int:
    weights = None
    if args.target is not None:
        from infer.target import TargetModel

        common.quiet_loading()
        weights = TargetModel.load(args.target, dtype=args.dtype, device=args.device).weights
    card = import_head_adapter(args.source, args.base, out, weights=weights)
    common.note(f"{args.base} with the adapter merged in, for {described(card.target)}")
    print(out)
    return 0

"""`headstart audit`: test every promise of lossless decoding on a head and its target."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from infer.audit import QUICK_TOKENS, AuditSettings, audit, refuse_no_draft
from infer.cli import common
from infer.drafters import resolve_target, trained_head
from infer.evaluate import render_prompts
from infer.proof.certificate import Check, save_page, save_to_card

HELP = """\
Test what decoding with HEAD promises: the exact laws of the verification rules, planted faults that
must show, token ids against plain decoding's in float32 and bfloat16, and the probabilities of what is
emitted against transformers' own model. The result is a certificate; the exit status is 0 if every
check passed and 1 if not."""

EXAMPLE = """\
headstart audit runs/demo/best --json audit.json --page audit.html
headstart audit runs/demo/best --quick"""

_WHOLE = AuditSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD", help="an augmented model's folder, or 'ngram' (lookup only)")
    common.add_target_arguments(parser)
    group = parser.add_argument_group("how much is tried")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"tokens of the float32 comparison; the others go with it (default: {_WHOLE.num_tokens}, of which "
        f"{_WHOLE.min_accepted} must have been drafted and accepted)",
    )
    size.add_argument("--quick", action="store_true", help=f"a first look: --tokens {QUICK_TOKENS}")
    common.add_prompts_arguments(group, limit=None)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another seed tries other answers (default: 0)")
    common.add_json_argument(parser)
    parser.add_argument(
        "--page", type=common.output_file, metavar="FILE", help="write a page to read: HTML, or Markdown for FILE.md"
    )
    parser.add_argument("--save", action="store_true", help="keep the outcome on the head's card")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    refuse_no_draft(args.head)
    if args.save:
        trained_head(args.head, purpose="with a card for --save to write to")
    settings = _settings(args)
    chats = common.read_chats(args)
    source = resolve_target(args.head, args.target)
    common.quiet_loading()
    console = Console()
    with _Bars(console) as bars:
        certificate = audit(
            source,
            args.head,
            prompts=lambda target: render_prompts(target.tokenizer, chats, raw=args.raw),
            settings=settings,
            device=args.device,
            loading=common.loading_arguments(args),
            progress=bars,
        )
    failed = [check.name for check in certificate.checks if not check.passed]
    minutes = certificate.facts["seconds"] / 60
    if failed:
        console.print(f"\n[red]Not passed[/red]: {', '.join(failed)} ({minutes:.1f} minutes).", soft_wrap=True)
    else:
        console.print(f"\n[green]Passed[/green]: all {len(certificate.checks)} checks ({minutes:.1f} minutes).")
    common.write_json(args.json, certificate.to_dict())
    if args.page is not None:
        save_page(args.page, certificate)
        common.note(f"wrote {args.page}")
    if args.save:
        save_to_card(Path(args.head), certificate)
        common.note(f"the card of {args.head} now says so")
    return 1 if failed else 0


def _settings(args: argparse.Namespace) -> AuditSettings:
    if args.tokens is not None and args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {args.tokens}")
    num_tokens = QUICK_TOKENS if args.quick else args.tokens or _WHOLE.num_tokens
    return AuditSettings.scaled(num_tokens, seed=args.seed)


class _Bars:
    """A bar for the check that runs, and a paragraph for each that has ended."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.bar: Any = None
        self.started = 0.0

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def start(self, check: str, total: int, unit: str) -> None:
        from tqdm import tqdm

        self.started = time.perf_counter()
        self.bar = tqdm(total=total, desc=check, unit=f" {unit}", disable=None, leave=False)

    def advance(self, amount: int) -> None:
        if self.bar is not None:
            # A draft that is seldom right takes more tokens than were planned.
            self.bar.total = max(self.bar.total or 0, self.bar.n + amount)
            self.bar.update(amount)

    def done(self, check: Check) -> None:
        self._close()
        word = "[green]passed[/green]" if check.passed else "[red]NOT passed[/red]"
        seconds = time.perf_counter() - self.started
        self.console.print(f"{word}  [bold]{check.name}[/bold] ({seconds:.0f} s)", highlight=False)
        for line in check.detail.splitlines():
            self.console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

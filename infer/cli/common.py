"""What the commands that decode share: the same names for the same things, and the way from arguments to an
engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.checkpoint import CARD_FILE, present_folder, read_card
from infer.drafters.base import TreeSettings
from infer.sampling import SamplingParams
from infer.verify import RULES, find_rule

if TYPE_CHECKING:
    from rich.table import Table

    from infer.engine import Engine
    from infer.target import TargetModel

HEAD_HELP = "an augmented model's folder, 'ngram' (lookup only) or 'none'"


def add_engine_arguments(parser: argparse.ArgumentParser, *, head_required: bool = True) -> None:
    """HEAD and where the target comes from."""
    if head_required:
        parser.add_argument("head", metavar="HEAD", help=HEAD_HELP)
    else:
        parser.add_argument("head", metavar="HEAD", nargs="?", default="none", help=f"{HEAD_HELP} (default: none)")
    group = parser.add_argument_group("target")
    group.add_argument(
        "--target", metavar="MODEL", help="a local folder or a Hub name (default: the one that HEAD names)"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="precision; auto takes what is faster here. Answers are exactly plain decoding's in float32",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Bounds of the draft trees. What is not given comes from the head's card, or is the default."""
    group = parser.add_argument_group("draft tree")
    group.add_argument("--nodes", type=int, metavar="N", help="most draft tokens verified in a round")
    group.add_argument("--depth", type=int, metavar="D", help="longest draft path")
    group.add_argument("--chain", type=int, metavar="K", help="draft a plain chain of K tokens instead of a tree")
    group.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="take fewer nodes where the machine's cost table says that they do not pay",
    )
    group.add_argument(
        "--rule",
        default="match",
        choices=sorted(RULES),
        help="verification rule (default: match, whose answers equal plain decoding's token for token)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How a request draws its tokens and when it ends."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default)")
    group.add_argument("--seed", type=int, metavar="N", help="prompt i is drawn with seed N + i (default: random)")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated"
    )


def add_prompts_arguments(parser: argparse.ArgumentParser, *, limit: int | None) -> None:
    """The prompts of a measurement."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines {"messages": [...]}, with a "domain" if you like (default: the set that comes with headstart)',
    )
    shown = "all" if limit is None else str(limit)
    group.add_argument(
        "--limit", type=int, default=limit, metavar="N", help=f"first N prompts of each domain (default: {shown})"
    )
    group.add_argument("--raw", action="store_true", help="encode the texts without the chat template")
    group.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="one or more temperatures; 0 is greedy (default)",
    )
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i is drawn with seed N + i")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as JSON")


def sampling_params(args: argparse.Namespace, *, index: int = 0) -> SamplingParams:
    """Parameters of prompt `index`."""
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=None if args.seed is None else args.seed + index,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )


def tree_settings(
    args: argparse.Namespace, saved: Mapping[str, Any] | None = None, *, adaptive: bool | None = None
) -> TreeSettings:
    """Arguments over the head's own settings (`saved`, of which other entries are left alone) over the
    defaults.

    `adaptive` is the command's own choice, which only the user's overrules.
    """
    known = {item.name for item in fields(TreeSettings)}
    values = {name: value for name, value in (saved or {}).items() if name in known}
    if adaptive is not None:
        values["adaptive"] = adaptive
    if args.adaptive is not None:
        values["adaptive"] = args.adaptive
    settings = TreeSettings(**values)
    if args.chain is not None:
        if args.nodes is not None or args.depth is not None:
            raise ValueError("--chain already says how many tokens are drafted: leave out --nodes and --depth")
        return TreeSettings.chain(args.chain, adaptive=settings.adaptive)
    if args.nodes is not None:
        settings = replace(settings, max_nodes=args.nodes)
    if args.depth is not None:
        settings = replace(settings, max_depth=args.depth)
    if find_rule(args.rule).needs_chain:
        return TreeSettings.chain(min(settings.max_depth, settings.max_nodes), adaptive=settings.adaptive)
    return settings


def load_target(args: argparse.Namespace) -> TargetModel:
    """The target that the arguments name; says on stderr what was loaded."""
    from infer.drafters import resolve_target
    from infer.target import TargetModel

    source = resolve_target(args.head, args.target)
    quiet_loading()
    target = TargetModel.load(source, dtype=args.dtype, device=args.device)
    dtype = str(target.dtype).removeprefix("torch.")
    note(f"target {target.name}, {dtype} on {target.device}")
    return target


def quiet_loading() -> None:
    """Switch off transformers' bars, which a load of a second does not need."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


def build_engine(
    args: argparse.Namespace,
    target: TargetModel,
    *,
    head: str | None = None,
    max_requests: int,
    max_length: int | None = None,
    adaptive: bool | None = None,
) -> Engine:
    """An engine over a loaded target, with the tree that arguments and card ask for. `head` overrides
    HEAD."""
    from infer.engine import load_engine

    head = args.head if head is None else head
    if max_requests < 1:
        raise ValueError(f"--batch must be at least 1, got {max_requests}")
    return load_engine(
        head,
        target,
        max_requests=max_requests,
        max_length=max_length,
        rule=args.rule,
        tree=tree_settings(args, saved_settings(head), adaptive=adaptive),
    )


def saved_settings(head: str) -> Mapping[str, Any]:
    """The drafter settings on a head's card; none for drafters without a folder."""
    folder = present_folder(Path(head))
    return read_card(folder).drafter if (folder / CARD_FILE).is_file() else {}


def plain_table(title: str, first: str, columns: Sequence[str]) -> Table:
    """An unboxed table, narrow enough for 80 columns: a name, then numbers."""
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), collapse_padding=True
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def write_json(path: Path | None, value: Any) -> None:
    """Write a result where --json asks for it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    note(f"wrote {path}")


def note(line: str) -> None:
    """A line for the person at the terminal, out of the way of the command's output."""
    print(line, file=sys.stderr, flush=True)

"""What the commands that decode share: the same names for the same things, and the way from arguments to an
engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heads.checkpoint import CARD_FILE, described, present_folder, read_card
from infer.chat import token_id_list
from infer.drafters.base import TreeSettings
from infer.drafters.spec import NO_DRAFT
from infer.exactness import EXACTNESS, choose_rule
from infer.fuse import WAYS
from infer.machine import NOISY_LOAD, dtype_name, load_average
from infer.placement import MAPS, QUANTIZATIONS
from infer.prompts import EvaluationPrompt, load_prompts
from infer.sampling import MAX_LOGPROBS, SamplingParams
from infer.verify import RULES

if TYPE_CHECKING:
    from rich.table import Table

    from infer.engine import Engine
    from infer.target import TargetModel
    from infer.tune.settings import TunedSetting

AUTO = "auto"
HEAD_HELP = "an augmented model's folder, a drafter (see `headstart drafters`), or 'none'"


def add_engine_arguments(parser: argparse.ArgumentParser, *, head_required: bool = True) -> None:
    """HEAD and where the target comes from."""
    if head_required:
        parser.add_argument("head", metavar="HEAD", help=HEAD_HELP)
    else:
        parser.add_argument("head", metavar="HEAD", nargs="?", default="none", help=f"{HEAD_HELP} (default: none)")
    group = add_target_arguments(parser)
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="precision; auto is bfloat16, but for CPUs without kernels for it, where the faster of it and float32 is "
        "measured. Answers are exactly plain decoding's in float32",
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which target, and where it runs."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "--target", metavar="MODEL", help="a local folder or a Hub name (default: the one that HEAD names)"
    )
    group.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a LoRA adapter (peft's form) to merge into the target: their sum is what is served",
    )
    group.add_argument(
        "--relative",
        action="store_true",
        help="let a head of another version of the target draft (same sizes, same tokens): fewer drafts are accepted, "
        "answers stay the target's",
    )
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="round the target to int8 or int4 (on a GPU by bitsandbytes): another target, smaller and faster",
    )
    group.add_argument("--device-map", choices=MAPS, help="spread a target over devices, memory and disk (accelerate)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument(
        "--threads",
        type=thread_count,
        metavar="N",
        help="CPU threads, or auto to measure which number is fastest here (default: torch's, one a core)",
    )
    group.add_argument(
        "--forward",
        default="auto",
        choices=("auto", *WAYS),
        help="how the target is computed: by torch's operations (eager), on a CPU with weights laid out for them "
        "(packed) or on headstart's kernels (kernels), on a GPU with fused operations (triton); auto takes the "
        "fastest that this machine has",
    )
    return group


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Bounds of the draft trees, and how they are verified. Bounds that are not given come from `headstart tune`, else
    from the head's card, or are the default."""
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
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run whole rounds on the device, as CUDA graphs (default: on a GPU, where the model allows it)",
    )
    add_exactness_arguments(parser)


def add_exactness_arguments(parser: argparse.ArgumentParser) -> None:
    """What the answers promise, and the rule that keeps it."""
    group = parser.add_argument_group("exactness")
    group.add_argument(
        "--exactness",
        choices=EXACTNESS,
        help="seed (default): plain decoding's tokens for the same seed; bitwise: also in bfloat16; "
        "distribution: same probabilities, other tokens; lossy: no promise",
    )
    group.add_argument("--rule", choices=sorted(RULES), help="verification rule (default: what the exactness implies)")
    group.add_argument(
        "--row-width",
        type=int,
        metavar="N",
        help="rows of every forward, with --exactness bitwise (default: 16, on a GPU 64)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How a request draws its tokens and when it ends."""
    _add_law_arguments(parser.add_argument_group("sampling"))
    _add_penalty_arguments(parser.add_argument_group("penalties and bans"))
    _add_end_arguments(parser.add_argument_group("end of the answer"))
    _add_constraint_arguments(parser.add_argument_group("what the answer may be (one of these)"))


def _add_law_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 is off (default)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 is off (default)")
    group.add_argument("--seed", type=int, metavar="N", help="prompt i is drawn with seed N + i (default: random)")
    group.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help=f"write each token's log-probability, and the K likeliest's (0 to {MAX_LOGPROBS}), to the --json file",
    )


def _add_penalty_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is off (default)")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0 is off (default)")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0 is off (default)")
    group.add_argument(
        "--no-repeat-ngram-size", type=int, default=0, metavar="N", help="write no N tokens twice; 0 is off (default)"
    )
    group.add_argument(
        "--logit-bias",
        type=_bias_entry,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="add VALUE to the logit of token ID (-inf bans it); may be repeated",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="never write the tokens that TEXT encodes to, with or without a space before it; may be repeated",
    )


def _add_end_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before N tokens (default: 0)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated"
    )
    group.add_argument(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end the answer at token ID; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def _add_constraint_arguments(group: argparse._ArgumentGroup) -> None:
    constraint = group.add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="FILE_OR_TEXT", help="JSON of this schema")
    constraint.add_argument("--regex", metavar="REGEX", help="a text that this regular expression matches as a whole")
    constraint.add_argument(
        "--grammar", metavar="FILE_OR_TEXT", help="a text of this Lark grammar (as llguidance reads it)"
    )


def add_prompts_arguments(group: argparse._ArgumentGroup, *, limit: int | None) -> None:
    """Which prompts, and how they are rendered (read by `read_chats`)."""
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


def add_measurement_arguments(
    parser: argparse.ArgumentParser, *, limit: int | None, temperatures: Sequence[float] = (0.0,)
) -> None:
    """The prompts of a measurement, and how they are answered."""
    group = parser.add_argument_group("prompts")
    add_prompts_arguments(group, limit=limit)
    shown = " ".join(f"{temperature:g}" for temperature in temperatures)
    group.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=list(temperatures),
        metavar="T",
        help=f"one or more temperatures; 0 is greedy (default: {shown})",
    )
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i is drawn with seed N + i")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results to FILE as JSON")


def sampling_params(args: argparse.Namespace, *, index: int = 0) -> SamplingParams:
    """Parameters of prompt `index`, but for the bad words, which need a tokenizer (`bad_words`)."""
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=None if args.seed is None else args.seed + index,
        n=args.n,
        logprobs=args.logprobs,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        no_repeat_ngram_size=args.no_repeat_ngram_size,
        logit_bias=dict(args.logit_bias) or None,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        json_schema=_file_or_text("--json-schema", args.json_schema, sign="{"),
        regex=args.regex,
        grammar=_file_or_text("--grammar", args.grammar, sign=":"),
    )


def bad_words(args: argparse.Namespace, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of the words not to be written, as they stand at the beginning of a text and within one."""
    for word in args.bad_word:
        if not word.strip():
            raise ValueError(f"--bad-word {word!r} is empty: give some text")
    spellings = [spelling for word in args.bad_word for spelling in (word, f" {word}")]
    encoded = (tokenizer(spelling, add_special_tokens=False, verbose=False) for spelling in spellings)
    return tuple(dict.fromkeys(tuple(token_id_list(ids)) for ids in encoded))


def _bias_entry(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-1.5") from None


def _file_or_text(option: str, value: str | None, *, sign: str) -> str | None:
    """What the file named `value` holds, or `value` itself, which as a text contains `sign`."""
    if value is None:
        return None
    try:
        is_file = Path(value).is_file()
    except OSError:  # a text too long for a path
        is_file = False
    if is_file:
        return Path(value).read_text(encoding="utf-8")
    if sign not in value:
        raise ValueError(f"{option} {value!r:.80} is neither a file nor a text (which would hold a {sign!r})")
    return value


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
    if choose_rule(args.exactness, args.rule, chain=settings.branch == 1).needs_chain:
        return TreeSettings.chain(min(settings.max_depth, settings.max_nodes), adaptive=settings.adaptive)
    return settings


def read_chats(args: argparse.Namespace) -> list[EvaluationPrompt]:
    """The prompts that the arguments choose."""
    from infer.evaluate import limit_per_domain

    return limit_per_domain(load_prompts(args.prompts), args.limit)


def load_target(args: argparse.Namespace) -> TargetModel:
    """The target that the arguments name; says on stderr what was loaded."""
    from infer.drafters import adapter_of, head_cards, resolve_target
    from infer.target import RelativeTarget, TargetModel

    source, adapter = resolve_target(args.head, args.target), adapter_of(args.head)
    quiet_loading()
    if isinstance(args.threads, int):
        torch.set_num_threads(args.threads)
    target = TargetModel.load(source, dtype=args.dtype, device=args.device, **loading_arguments(args))
    name = described(target.reference)
    note(f"target {name}, {dtype_name(target.dtype)} on {target.device}, {target.forward_kind} forward")
    if target.quantization:
        note(
            f"its weights take {target.num_weight_bytes / 1e6:.0f} MB: answers are those of {name}, not of the whole "
            "target, and so are those of baselines (transformers runs the same rounded layers)"
        )
    if args.threads == AUTO:
        note(_choose_threads(target))
    for notice in filter(None, map(target.relation, head_cards(args.head))):
        note(notice)
    warnings.filterwarnings("ignore", category=RelativeTarget)  # it was said above
    if adapter is not None:
        note(
            f"the head was trained along with its target, which is {adapter.base_name} no more: "
            "answers, and what they are compared with, are the adapted target's"
        )
    return target


def thread_count(text: str) -> int | str:
    """The type of --threads."""
    if text == AUTO:
        return text
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads: give 1 or more, or {AUTO}")
    most = os.cpu_count() or 1
    if int(text) > most:
        raise argparse.ArgumentTypeError(f"{text} threads were asked for, but this machine has {most} processors")
    return int(text)


def _choose_threads(target: TargetModel) -> str:
    from infer.threads import choose_threads

    times = choose_threads(target)
    measured = ", ".join(f"{count}: {milliseconds:.1f} ms" for count, milliseconds in times.items())
    return f"threads {torch.get_num_threads()} ({measured or 'not on a CPU'})"


def loading_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """How the target is loaded, as `TargetModel.load` takes it. The adapter is the one that HEAD brings, or the one
    that is asked for."""
    from infer.drafters import adapter_of

    own = adapter_of(args.head)
    if own is not None and args.adapter is not None:
        raise ValueError(
            f"{args.head} was trained along with its target and brings its adapter: leave out --adapter {args.adapter}"
        )
    return {
        "adapter": own or args.adapter,
        "quantization": args.quantization,
        "device_map": args.device_map,
        "takes_relatives": args.relative,
        "forward": args.forward,
    }


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
    drafts: bool = False,
    batch: int | None = None,
) -> Engine:
    """An engine over a loaded target, with the tree that arguments, tuning and card ask for. `head` overrides HEAD.
    `drafts`: draft also where tuning found that nothing pays, since drafts are what the command measures. `batch`: the
    requests that share a round, for tuned settings (by default as many as there may be)."""
    from infer.engine import load_engine

    head = args.head if head is None else head
    if max_requests < 1:
        raise ValueError(f"--batch must be at least 1, got {max_requests}")
    tuned = tuned_setting(args, target, head, batch=batch or max_requests)
    saved = {**saved_settings(head), **({} if tuned is None else asdict(tuned.tree))}
    tree = tree_settings(args, saved, adaptive=adaptive)
    rule, hybrid = args.rule, None
    if tuned is not None:
        rule = tuned.engine_rule
        hybrid = tuned.hybrid if args.chain is None else None
        asked = (args.nodes, args.depth, args.chain) != (None, None, None)
        head = head if tuned.speculate or asked or drafts else NO_DRAFT
    return load_engine(
        head,
        target,
        max_requests=max_requests,
        max_length=max_length,
        exactness=args.exactness,
        rule=rule,
        row_width=args.row_width,
        tree=tree,
        graphs=args.graphs,
        hybrid=hybrid,
    )


def tuned_setting(args: argparse.Namespace, target: TargetModel, head: str, *, batch: int) -> TunedSetting | None:
    """What `headstart tune` found for the arguments' workload on this machine; says on stderr what it is. None beside a
    rule of the user's own, which it may not suit."""
    from infer.tune.settings import Workload, tuned_for

    if args.rule is not None:
        return None
    temperature = getattr(args, "temperature", 0.0)
    if isinstance(temperature, list):
        temperature = temperature[0]
    workload = Workload(batch=batch, temperature=temperature)
    tuned, line = tuned_for(head, target, workload, exactness=args.exactness)
    if line:
        note(line)
    return tuned


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


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write: what cannot be written is told before the work, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it, such as {path / 'out.json'}")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {existing} is no folder that can be written to")
    return path


def exactness_line(exactness: str, rule: str) -> str:
    """What the answers of a measurement promise."""
    if exactness == "lossy":
        return f"NOT lossless: rule {rule} changes what the target would say."
    return f"Exactness {exactness} (rule {rule})."


def write_json(path: Path | None, value: Any) -> None:
    """Write a result where --json asks for it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    note(f"wrote {path}")


def warn_if_busy() -> None:
    """Other work beside a measurement makes its times noisy."""
    load = load_average()
    if load is not None and load > NOISY_LOAD:
        note(f"warning: the load average is {load:.1f}: other work is running, and times will be noisy")


def note(line: str) -> None:
    """A line for the person at the terminal, out of the way of the command's output."""
    print(line, file=sys.stderr, flush=True)

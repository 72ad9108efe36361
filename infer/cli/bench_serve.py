"""`headstart bench serve`: a server under load, drafted decoding beside plain decoding."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.cli import common
from infer.prompts import EvaluationPrompt
from infer.serve.child import started_server
from infer.serve.client import Client, find_model
from infer.serve.load import Job, LoadResult, chat_job, run_load
from infer.serve.load_report import (
    AS_SERVED,
    DEFINITIONS,
    DRAFTED,
    PLAIN,
    Level,
    Percentiles,
    ServeReport,
    plot,
    rows_of,
)
from infer.serve.settings import KEY_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

HELP = """\
Put a server under load: so many requests at once, or so many a second, streamed. Every load is run
without drafts and with them in turn, on one server and with the same prompts and seeds, so that the
ratio compares like with like. The server is started for it, or is the one at --url (any that speaks
OpenAI's API; drafts are only switched where it is headstart's)."""

EXAMPLE = """\
headstart bench serve runs/demo/best
headstart bench serve runs/demo/best --concurrency 1 4 16 64 --max-tokens 64 --json serve.json --picture serve.png
headstart bench serve ngram --target models/smollm2-135m --rate 0.5 2 --requests 30
headstart bench serve --url http://127.0.0.1:8000 --concurrency 8"""

_NOTABLE_CLIENT_SHARE = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser)
    group = parser.add_argument_group("load")
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="requests at once, one load each: a new one is sent when one ends (default: 1 4 16, or none with --rate)",
    )
    group.add_argument(
        "--rate",
        type=float,
        nargs="+",
        default=[],
        metavar="R",
        help="requests a second on average, at random times, whatever has been answered",
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help="requests of a load (default: twice what is sent at once, at least 8)"
    )
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="loads of each kind, in turn (default: 3)")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="request i is drawn with seed N + i")
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds a request may take (default: 300)"
    )
    common.add_prompts_arguments(parser.add_argument_group("prompts"), limit=None)
    common.add_json_argument(parser)
    parser.add_argument(
        "--picture", type=common.output_file, metavar="FILE", help="draw throughput and latency against the load"
    )


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """HEAD and everything that is handed on to `headstart serve`, or the server that runs already."""
    group = parser.add_argument_group("a server that runs already")
    group.add_argument("--url", help="its address; without it one is started")
    group.add_argument("--api-key", metavar="KEY", help=f"its key (default: the environment's {KEY_VARIABLE})")
    group.add_argument("--model", metavar="NAME", help="which of its models (default: its first)")
    _add_engine_arguments(parser)
    group = parser.add_argument_group("the server that is started")
    group.add_argument(
        "--max-requests", type=int, metavar="N", help="answers decoded at once (default: the most sent at once)"
    )
    group.add_argument(
        "--max-length", type=int, default=1024, metavar="N", help="most tokens of prompt and answer (default: 1024)"
    )
    group.add_argument(
        "--prefix-reuse",
        action="store_true",
        help="let it take over prompts that it has computed before (it repeats them: times to the first token would be "
        "those of a warm cache)",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_engine_arguments(parser, head_required=False)
    common.add_tree_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    _check(args)
    common.warn_if_busy()
    prompts = mixed(common.read_chats(args))
    with _server(args) as url:
        client = Client(url, api_key=args.api_key or os.environ.get(KEY_VARIABLE))
        report = asyncio.run(measure(client, prompts, args))
    if not report.rows:
        raise ValueError("nothing was measured")
    console = Console()
    for table in tables(report):
        console.print(table, "")
    for line in lines(report):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    common.write_json(args.json, report.to_dict())
    if args.picture is not None:
        plot(report, args.picture)
        common.note(f"wrote {args.picture}")
    return 130 if report.interrupted else 1 if report.errors else 0


def _check(args: argparse.Namespace) -> None:
    if args.concurrency is None:
        args.concurrency = [] if args.rate else [1, 4, 16]
    for name, values in (("--concurrency", args.concurrency), ("--rate", args.rate)):
        if any(not value > 0 for value in values):
            raise ValueError(f"{name} must be above 0, got {' '.join(map(str, values))}")
    for name in ("requests", "rounds", "max_tokens", "timeout", "max_requests", "max_length"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if args.raw:
        raise ValueError("--raw: chats are rendered by the server, with its template: leave it out")
    if args.url is not None and args.head != "none":
        raise ValueError(f"--url is a server that has its own target and drafter: leave out {args.head}")


def levels_of(args: argparse.Namespace) -> list[Level]:
    rates = [Level(rate=rate) for rate in args.rate]
    return [*(Level(concurrency=number) for number in dict.fromkeys(args.concurrency)), *dict.fromkeys(rates)]


def mixed(prompts: Sequence[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """The prompts with their domains in turn, so that a few of them are of several."""
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for prompt in prompts:
        places.append(seen[prompt.domain])
        seen[prompt.domain] += 1
    return [prompt for _, prompt in sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model that is measured, and the ways of decoding that its server can be asked for."""

    name: str
    drafter: str
    ways: tuple[str, ...]

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Served:
        ours = model.get("headstart")
        if ours is None:
            return cls(name=model["id"], drafter="unknown", ways=(AS_SERVED,))
        drafter = ours.get("drafter") or "none"
        return cls(name=model["id"], drafter=drafter, ways=(PLAIN,) if drafter == "none" else (PLAIN, DRAFTED))

    def fields(self, way: str) -> dict[str, Any]:
        """What a request says beside OpenAI's fields."""
        return {} if way == AS_SERVED else {"draft": way == DRAFTED, "acceptance": True}


async def measure(client: Client, prompts: Sequence[EvaluationPrompt], args: argparse.Namespace) -> ServeReport:
    """All loads, in turn; stops with what there is at Ctrl-C."""
    served = Served.of(await find_model(client, args.model))
    levels: dict[Level, dict[str, list[LoadResult]]] = {}
    interrupted = False
    for level in levels_of(args):
        rounds: dict[str, list[LoadResult]] = {way: [] for way in served.ways}
        levels[level] = rounds
        await _warm_up(client, prompts, served, level, args)
        for way in turns(served.ways, args.rounds):
            load = await _load(client, jobs(prompts, served, level, way, args), level, args)
            interrupted = load.interrupted
            if not interrupted or (load.answers and not rounds[way]):
                rounds[way].append(load)
            common.note(_progress(level, way, load))
            if interrupted:
                break
        if interrupted:
            break
    settings = {
        name: getattr(args, name) for name in ("rounds", "max_tokens", "temperature", "seed", "timeout", "max_requests")
    }
    return ServeReport(
        model=served.name, drafter=served.drafter, rows=rows_of(levels), settings=settings, interrupted=interrupted
    )


def turns(ways: Sequence[str], num_rounds: int) -> Iterator[str]:
    """The ways in turn; every second round the other way about, so that none is always first."""
    for number in range(num_rounds):
        yield from ways if number % 2 == 0 else reversed(ways)


def jobs(
    prompts: Sequence[EvaluationPrompt], served: Served, level: Level, way: str, args: argparse.Namespace
) -> list[Job]:
    """The requests of a load: the prompts over and over, each time with another seed."""
    count = args.requests or max(8, 2 * (level.concurrency or 8))
    return [
        chat_job(
            number,
            prompts[number % len(prompts)].messages,
            model=served.name,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed + number,
            **served.fields(way),
        )
        for number in range(count)
    ]


async def _load(client: Client, work: Sequence[Job], level: Level, args: argparse.Namespace) -> LoadResult:
    return await run_load(
        client, work, concurrency=level.concurrency, rate=level.rate, seed=args.seed, timeout=args.timeout
    )


async def _warm_up(
    client: Client, prompts: Sequence[EvaluationPrompt], served: Served, level: Level, args: argparse.Namespace
) -> None:
    """A short load of each kind that is not counted: first forwards of a width, cost tables, pages of memory."""
    short = argparse.Namespace(
        **{**vars(args), "max_tokens": min(8, args.max_tokens), "requests": level.concurrency or 2}
    )
    for way in served.ways:
        load = await run_load(
            client, jobs(prompts, served, level, way, short), concurrency=level.concurrency or 2, timeout=args.timeout
        )
        if load.interrupted:
            raise KeyboardInterrupt
        failed = [answer for answer in load.answers if answer.error is not None]
        if len(failed) == len(load.answers):
            raise ValueError(f"{client.url} answers no request: {failed[0].error}, {failed[0].message}")


def _progress(level: Level, way: str, load: LoadResult) -> str:
    num_tokens = sum(answer.num_tokens for answer in load.answers)
    failed = sum(answer.error is not None for answer in load.answers)
    errors = f", {failed} failed" if failed else ""
    return f"{level}, {way}: {num_tokens / load.seconds:.1f} tokens/s, {len(load.answers)} requests{errors}"


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """The address of the server to measure: that of --url, or one that runs as long as the block."""
    if args.url is not None:
        yield args.url
        return
    num_requests = args.max_requests or max(args.concurrency, default=16)
    own = ["--port", "0", "--max-requests", str(num_requests), "--max-length", str(args.max_length)]
    keyed = {**os.environ, KEY_VARIABLE: args.api_key} if args.api_key else None
    if not args.prefix_reuse:
        own.append("--no-prefix-reuse")
    with started_server([*engine_options(args), *own], notice=common.note, environment=keyed) as server:
        yield server.url


def engine_options(args: argparse.Namespace) -> list[str]:
    """HEAD, and the options of the engine that differ from their defaults, as `headstart serve` reads them."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_engine_arguments(parser)
    options = [str(args.head)]
    for action in parser._actions:
        value = getattr(args, action.dest)
        if not action.option_strings or value == action.default:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            options.append(action.option_strings[0 if value else 1])
        elif action.nargs == 0:
            options.append(action.option_strings[0])
        else:
            options += [action.option_strings[0], str(value)]
    return options


def tables(report: ServeReport) -> list[Table]:
    """Throughput and what drafts did, then latencies."""
    columns = ["tokens/s", "x plain", "x alone", "drafted", "accepted", "identical"]
    if report.errors:
        columns.append("failed")
    speeds = common.plain_table(f"{report.model}, drafts by {report.drafter}", "", columns)
    latencies = common.plain_table("milliseconds", "", ("TTFT 50", "95", "99", "ITL 50", "95", "99", "answer 50"))
    for row in report.rows:
        name, figures = f"{row.level}, {row.way}", row.figures
        cells = [
            f"{figures.tokens_per_second:.1f}",
            _number(row.ratio),
            _number(row.scaling),
            _share(figures.drafted_share),
            _number(figures.accepted_length),
            _share(row.identical),
            str(sum(figures.errors.values()) or ""),
        ]
        speeds.add_row(name, *cells[: len(columns)])
        latencies.add_row(
            name, *_milliseconds(figures.ttft_ms), *_milliseconds(figures.itl_ms), f"{figures.answer_ms.p50:.0f}"
        )
    return [speeds, latencies]


def lines(report: ServeReport) -> list[str]:
    """What a reader of the tables should know."""
    result = []
    if report.interrupted:
        result.append("Interrupted: these are the figures of what was done.")
    if report.errors:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(report.errors.items()))
        result.append(f"Failed requests, left out of all figures: {kinds}.")
    if len({row.way for row in report.rows}) == 1:
        way = report.rows[0].way
        why = "takes no word on drafts" if way == AS_SERVED else "has no drafter"
        result.append(f"There is nothing to compare with: the server {why}.")
    reused = max(row.figures.reused_share for row in report.rows)
    if reused >= 0.01:
        result.append(
            f"Up to {reused:.0%} of prompt tokens were not computed anew: rounds repeat their prompts, so times to the "
            "first token are those of a warm cache (headstart serve --no-prefix-reuse keeps it cold)."
        )
    share = max(row.figures.client_share for row in report.rows)
    heavy = ", which may hold the server up" if share > _NOTABLE_CLIENT_SHARE else ""
    result.append(f"The client took at most {share:.0%} of a processor{heavy}.")
    return [*result, *(f"{definition}." for definition in DEFINITIONS)]


def _milliseconds(values: Percentiles) -> list[str]:
    return [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"

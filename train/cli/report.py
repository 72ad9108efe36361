"""`headstart report`: what a training run did, again; or several runs, and what more data would give."""

from __future__ import annotations

import argparse
from pathlib import Path

from infer.cli.common import output_file

HELP = "summarise training runs, finished or not, as text, picture and page"
EXAMPLE = """\
headstart report runs/smollm2-135m-eagle3-demo
headstart report runs/250 runs/500 runs/1000 runs/2000 --html more-data.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder; several are compared")
    parser.add_argument("--html", type=output_file, help="the page's file (default: report.html in the run's folder)")
    parser.add_argument("--json", type=output_file, help="write the summary to this file")


def run(args: argparse.Namespace) -> int:
    return _report(args) if len(args.runs) == 1 else _compare(args)


def _report(args: argparse.Namespace) -> int:
    from infer.cli.common import write_json
    from train.reports.html import write_report
    from train.reports.picture import plot_run
    from train.reports.report import describe_run, report_values

    (folder,) = args.runs
    print(describe_run(folder))
    picture = plot_run(folder)
    print(f"curves: {picture}" if picture else "no curves: nothing was evaluated, or matplotlib is not installed")
    print(f"page: {write_report(folder, args.html)}")
    write_json(args.json, report_values(folder))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from infer.cli.common import write_json
    from train.reports.html import write_comparison
    from train.reports.report import comparison_values, describe_runs

    print(describe_runs(args.runs))
    if args.html is not None:
        print(f"page: {write_comparison(args.runs, args.html)}")
    write_json(args.json, comparison_values(args.runs))
    return 0

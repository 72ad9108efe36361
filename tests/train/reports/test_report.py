"""A report of any run: finished, going on, killed, of an older form, or of none."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headstart import main
from infer.evaluate import AcceptanceReport, Trace
from train.reports.charts import Series, line_chart, ticks
from train.reports.html import run_page, write_report
from train.reports.metrics import MetricsFile
from train.reports.page import Heat, table
from train.reports.picture import plot_run
from train.reports.report import describe_run, report_values
from train.reports.samples import Sample, marks
from train.reports.story import Story
from train.reports.table import AcceptanceTable

TRACES = [
    Trace(
        domain=domain,
        temperature=temperature,
        num_prompt_tokens=length,
        num_tokens=7,
        round_lengths=(1, 3, 2),
        looping=False,
    )
    for domain in ("chat", "code & <more>")
    for temperature in (0.0, 0.7)
    for length in (20, 300)
]


def old_evaluation(step: int, length: float) -> dict[str, Any]:
    """As the first headstart wrote them."""
    return {
        "step": step,
        "epoch": 0.1 * step,
        "tokens": 1000 * step,
        "train_seconds": 10.0 * step,
        "accepted_length": length,
        "acceptance": json.loads(json.dumps(AcceptanceReport.of(TRACES).to_dict())),
        "agreement": [0.4, 0.3],
        "overlap": [0.4, 0.3],
        "seconds": 5.0,
    }


def new_evaluation(step: int, length: float) -> dict[str, Any]:
    sample = Sample(
        prompt="<b>Say</b> hi",
        domain="chat",
        temperature=0.0,
        pieces=(("Hel", 0), ("lo", 1), (" <script>", 2), ("!", 0)),
    )
    bins = [{"num_observations": 5, "predicted": 0.25, "observed": 0.2}]
    return old_evaluation(step, length) | {
        "standard_error": 0.05,
        "standard_errors": {"0": 0.05, "0.7": 0.06},
        "acceptance_table": AcceptanceTable.of(TRACES).to_list(),
        "calibration": {"0": {"calibration_error": 0.05, "bins": bins}},
        "samples": [sample.to_dict()],
        "parity": {"decoded_length": 2.0, "simulated_length": 2.0, "num_rounds": 9, "first_depth": None},
        "speed": {"speedup": 1.2, "tokens_per_second": 12.0, "plain_tokens_per_second": 10.0},
        "seconds_by_part": {"decoding": 3.0, "speed": 2.0},
        "warnings": [],
    }


def training(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 0.1 * step,
        "tokens": 1000 * step,
        "train_seconds": 10.0 * step,
        "loss": 2.0,
        "lr": 1e-3,
        "gradient_norm": 1.0,
        "tokens_per_second": 100.0,
        "loss_by_depth": [1.0] if step < 3 else [1.0, 2.0],
        "overlap_by_depth": [0.4] if step < 3 else [0.4, 0.3],
    }


def killed(folder: Path, *, new: bool = True, num_evaluations: int = 5) -> Path:
    """No summary, the last line half written."""
    metrics = MetricsFile(folder)
    for step in range(1, num_evaluations + 1):
        shares = {"features_share": 0.25, "head_share": 0.5, "update_share": 0.05, "peak_rss_gb": 1.5} if new else {}
        metrics.write("train", training(step) | shares)
        length = 1.2 + 0.1 * step
        metrics.write("evaluation", new_evaluation(step, length) if new else old_evaluation(step, length))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"event": "train", "st')
    return folder


class Checker(HTMLParser):
    """Balanced tags, and nothing that would be fetched or run."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def checked(page: str) -> list[str]:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert "http" not in page
    assert not [numbers for numbers in re.findall(r'(?:points|d|x|y)="([^"]*)"', page) if "nan" in numbers]
    return checker.headings


def test_a_page_tells_the_whole_story(tmp_path: Path) -> None:
    """Every part of a run that measured everything, in one file that fetches nothing; text is text, not markup."""
    headings = checked(run_page(Story.read(killed(tmp_path))))
    assert headings == [
        "How it went",
        "Acceptance of the best head",
        "Can it be believed",
        "Answers of the best head",
        "What twice the data would give",
        "Time and memory",
        "Data, plan and outcome",
        "Again",
    ]
    page = run_page(Story.read(tmp_path))
    assert '<mark class="d1" title="draft position 1">lo</mark>' in page
    assert "&lt;script&gt;" in page
    assert "code &amp; &lt;more&gt;" in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("new", [True, False])
def test_a_killed_run_can_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], new: bool) -> None:
    """Without a summary, with a broken last line, with figures that older runs did not have."""
    folder = killed(tmp_path / "run", new=new)
    assert main(["report", str(folder), "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "going on, or killed" in text
    assert "best head: step 5" in text
    checked((folder / "report.html").read_text())
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["step"] == 5
    assert values["best"]["accepted_length"] == pytest.approx(1.7)
    assert values["last"]["step"] == 5
    assert [one["figure"] for one in values["outlook"]] == ["accepted length", "agreement at depth 1"]
    assert not list(folder.glob(".*.new"))


def test_a_run_that_has_evaluated_nothing_yet_can_be_reported(tmp_path: Path) -> None:
    MetricsFile(tmp_path).write("train", training(1))
    assert "nothing was evaluated yet" in describe_run(tmp_path)
    assert plot_run(tmp_path) is None
    checked(write_report(tmp_path, tmp_path / "elsewhere" / "page.html").read_text())
    assert report_values(tmp_path)["best"] is None


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        describe_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="nothing to report yet"):
        describe_run(tmp_path)


def test_whether_a_run_ended_is_told_by_its_last_line(tmp_path: Path) -> None:
    """A summary of an earlier end does not make a resumed run a finished one."""
    metrics = MetricsFile(tmp_path)
    metrics.write("train", training(1))
    (tmp_path / "summary.json").write_text(json.dumps({"name": "x", "step": 2, "status": "stopped early"}))
    assert Story.read(tmp_path).status == "stopped early"
    assert Story.read(tmp_path).position["step"] == 2
    metrics.write("resume", {"step": 2})
    metrics.write("train", training(3))
    assert Story.read(tmp_path).status.startswith("going on, or killed")
    metrics.write("end", {"status": "failed", "error": "ValueError: no"})
    assert Story.read(tmp_path).status == "failed"
    assert Story.read(tmp_path).warnings == ["ended by an error: ValueError: no"]
    (tmp_path / "summary.json").write_text('{"name": "x"')
    assert Story.read(tmp_path).status == "failed", "half a summary is none"


@pytest.mark.parametrize(("last", "verdict"), [(1.66, "within the noise"), (1.4, "training on made it worse")])
def test_best_and_last_are_compared(tmp_path: Path, last: float, verdict: str) -> None:
    """A loss that falls on while the accepted length does not: the summary says which head to use, and why."""
    metrics = MetricsFile(tmp_path)
    for step, length in enumerate((1.5, 1.7, last), start=1):
        metrics.write("evaluation", new_evaluation(step, length))
    text = describe_run(tmp_path)
    assert "best head: step 2" in text
    assert f"last head: step 3, accepted length {last:.3f}" in text
    assert verdict in text


def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(killed(tmp_path / str(number))) for number in range(2)]
    assert main(["report", *folders, "--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "x.json")]) == 0
    assert "no prediction:" in capsys.readouterr().out
    checked((tmp_path / "page.html").read_text())
    assert json.loads((tmp_path / "x.json").read_text())["reason"]


def test_every_token_of_an_answer_is_marked() -> None:
    """Rounds of 3, 1 and 2 tokens after the prefill's: drafts by their position, and the target's own after them."""
    assert marks([3, 1, 2]) == [0, 1, 2, 0, 0, 1, 0]
    assert marks([]) == [0]


def test_the_cross_table_survives_json() -> None:
    cells = AcceptanceTable.of(TRACES)
    assert AcceptanceTable.from_list(json.loads(json.dumps(cells.to_list()))) == cells
    assert list(dict.fromkeys(cell.domain for cell in cells.cells)) == ["chat", "code & <more>"]
    assert len(list(cells.rows())) == 2 * len(cells.cells)


def test_charts_take_what_there_is() -> None:
    """No points, one point, equal points, negative values: a drawing without numbers that are none."""
    assert "nothing was measured" in line_chart([Series(name="x", points=[])], x_name="x", y_name="y")
    for points in ([(1.0, 2.0)], [(1.0, 0.0), (1.0, 0.0)], [(0.0, -5.0), (1e9, 7.0)]):
        drawn = line_chart([Series(name="x", points=points)], x_name="x", y_name="y")
        assert "nan" not in drawn
        assert drawn.startswith("<svg")
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-3, 12) == pytest.approx([-2.5, 0, 2.5, 5, 7.5, 10])
    assert "50.0%" in table(("a", "b"), [("x", Heat(0.5))])

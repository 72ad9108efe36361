"""`benchmarks/gpu_check.py`, on the CPU and at reduced size: it runs as a file, keeps its format, notices a fault."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import kernels, tree_attention
from benchmarks.gpu.report import markdown
from benchmarks.gpu.rounds import Point, round_points
from benchmarks.gpu.session import PARTS, Session
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.verdicts import verdicts
from infer import rows as packed_rows
from infer.graphs import rows as static_rows
from infer.graphs.rounds import StaticRound
from infer.kernels.gpu import elementwise
from infer.kernels.gpu.match_walk import Walk
from infer.kernels.gpu.tree_attention import TreeRows
from infer.rows import PackedRows, RowGroup

REDUCED = ["--reduced", "--device", "cpu"]


@pytest.fixture(scope="module")
def gpu_check(repository: Path) -> ModuleType:
    """The script as a module; it lies outside the packages."""
    spec = importlib.util.spec_from_file_location("gpu_check", repository / "benchmarks" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report(gpu_check: ModuleType, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`report("attention", ...)`: exit status and JSON of a reduced run of some parts."""

    def run(*parts: str, minutes: float = 8.0) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "report.json"
        status = gpu_check.main([*REDUCED, "--json", str(path), "--minutes", str(minutes), "--only", *parts])
        return status, json.loads(path.read_text(encoding="utf-8"))

    return run


def test_reduced_run_as_a_file(repository: Path, tmp_path: Path) -> None:
    """As on a GPU machine: from the source tree, nothing installed, no search path. Every part runs, every check passes
    and the report has its format. (Times are not looked at.)"""
    path, page = tmp_path / "report.json", tmp_path / "table.md"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "benchmarks/gpu_check.py", *REDUCED, "--json", str(path), "--markdown", str(page)]
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) == {"machine", "verdicts", "checks", "timings", "skipped"}
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["bandwidth_gb_s"] > 0
    assert [skipped["part"] for skipped in report["skipped"]] == ["placement"]  # of a target on disk alone
    _check_format(report, result.stdout)
    _check_contents(report)
    written = page.read_text(encoding="utf-8")
    titles = [line.strip("| ").split()[:3] for line in written.splitlines() if line.startswith("| ")]
    for beginning in ("target | status", "plain step |", "nodes | depth", "batch | T"):
        assert beginning.split() in titles


def _check_format(report: dict[str, Any], table: str) -> None:
    for check in report["checks"]:
        assert set(check) == {"name", "passed", "detail"}
        assert check["passed"] is True
        assert f"pass  {check['name']}" in table
    for timing in report["timings"]:
        assert set(timing) == {"name", "value", "unit", "floor", "detail", "figures"}
        assert timing["value"] > 0
        assert timing["unit"] in ("ms", "tokens/s", "GB/s")
    for verdict in report["verdicts"]:
        assert set(verdict) == {"target", "status", "value"}
        assert f"{verdict['status']:12}  {verdict['target']}" in table
    # Layers of no size worth naming say nothing about those of an 8B model; tokens are tokens.
    assert [verdict["status"] for verdict in report["verdicts"]] == ["not measured", "not measured", "reached"]


def _check_contents(report: dict[str, Any]) -> None:
    names = [check["name"] for check in report["checks"]]
    for dtype in ("float32", "bfloat16"):
        assert f"attention, {dtype}" in names
        assert sum(name.startswith(f"tokens, {dtype}, ") for name in names) == 6 + (dtype == "bfloat16")
        assert sum(name.startswith(f"tokens in graphs, {dtype}, ") for name in names) == 3 + (dtype == "bfloat16")
        assert sum(name.startswith(f"graph replay, {dtype}, ") for name in names) == 6
    for dtype in ("float32", "bfloat16", "float16"):
        for name in ("tree attention", "path attention", "norm", "sum and norm", "gate", "rotation into the cache"):
            assert f"{name}, {dtype}" in names
        assert f"path attention, {dtype}: to the bit wherever a path lies" in names
    assert {"match walk", "noise, device against CPU"} <= set(names)
    measured = " ".join(timing["name"] for timing in report["timings"])
    for name in ("plain step, 8 requests", "round, 32 nodes", "n-gram", "UPPER BOUND", "8 rows at context 16"):
        assert name in measured
    for name in ("plain step, 1 request at context 64", "round of 8 nodes, depth 3, 1 request", "invariant mode"):
        assert name in measured
    for name in ("training an EAGLE-3 head", "trained head, speculative, 2 requests, T = 1"):
        assert name in measured


def test_attention_that_ignores_ancestors_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node sees the whole tree: the reference and the tokens both notice, and the exit status says so."""
    attend = packed_rows.attend

    def blind(query: torch.Tensor, layer: int, rows: PackedRows, **kwargs: Any) -> torch.Tensor:
        if not isinstance(rows, PackedRows):  # the probe that learns a model's shapes
            return attend(query, layer, rows, **kwargs)
        groups = [_without_ancestors(group) for group in rows.groups]
        return attend(query, layer, PackedRows(groups, rows.cache), **kwargs)

    monkeypatch.setattr(packed_rows, "attend", blind)
    status, found = report("attention", "float32")
    assert status == 1
    failed = {check["name"] for check in found["checks"] if not check["passed"]}
    assert {"attention, float32", "attention, bfloat16", "tokens, float32, scripted tree, half right"} <= failed
    assert "tokens, float32, plain" not in failed


def _without_ancestors(group: RowGroup) -> RowGroup:
    if group.ancestors is None:
        return group
    return RowGroup(
        slot=group.slot,
        prefix=group.prefix,
        tokens=group.tokens,
        depths=group.depths,
        ancestors=np.ones_like(group.ancestors),
        offset=group.offset,
        offset_depths=group.offset_depths,
    )


def test_attention_that_reads_beyond_its_columns_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column too many, where the cache holds NaN: no tolerance lets NaN pass."""
    attend = packed_rows.attend

    def greedy(query: torch.Tensor, layer: int, rows: PackedRows, **kwargs: Any) -> torch.Tensor:
        rows.length = min(rows.length + 1, rows.cache.num_columns)
        rows.bias = lambda *_: None  # type: ignore[method-assign]
        return attend(query, layer, rows, **kwargs)

    monkeypatch.setattr(packed_rows, "attend", greedy)
    status, found = report("attention")
    assert status == 1
    assert not any(check["passed"] for check in found["checks"])
    assert all("nan" in check["detail"] for check in found["checks"])


def test_tree_kernel_that_ignores_ancestors_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = tree_attention.tree_attention

    def blind(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: TreeRows, **kwargs: Any) -> Any:
        everyone = dataclasses.replace(rows, ancestors=torch.full_like(rows.ancestors, -1))
        return attend(query, keys, values, everyone, **kwargs)

    monkeypatch.setattr(tree_attention, "tree_attention", blind)
    _, found = report("kernels")
    assert _failed(found) == {f"tree attention, {dtype}" for dtype in ("float32", "bfloat16", "float16")}


def test_path_kernel_that_depends_on_its_batch_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bit of rows that share a forward with others: far below the tolerance of values, but not the same."""
    attend = tree_attention.path_attention

    def shifting(query: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
        output = attend(query, *arguments, **kwargs)
        return output if query.shape[1] == 1 else output * (1 + torch.finfo(output.dtype).eps)

    monkeypatch.setattr(tree_attention, "path_attention", shifting)
    _, found = report("kernels")
    bitwise = {
        f"path attention, {dtype}: to the bit wherever a path lies" for dtype in ("float32", "bfloat16", "float16")
    }
    assert _failed(found) == bitwise


def test_walk_that_stops_early_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = kernels.match_walk

    def short(*arguments: Any, depth: int) -> Walk:
        found = walk(*arguments, depth=depth)
        return dataclasses.replace(found, counts=found.counts.clamp_max(2))

    monkeypatch.setattr(kernels, "match_walk", short)
    _, found = report("kernels")
    assert _failed(found) == {"match walk"}


def test_rotation_that_writes_beside_its_columns_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotated queries are right, and so is every row, but for its place."""
    store = elementwise.rotate_and_store

    def misplaced(projected: Any, cosines: Any, sines: Any, keys: Any, values: Any, columns: Any) -> torch.Tensor:
        return store(projected, cosines, sines, keys, values, columns - columns % 2)

    monkeypatch.setattr(elementwise, "rotate_and_store", misplaced)
    _, found = report("kernels")
    assert _failed(found) == {f"rotation into the cache, {dtype}" for dtype in ("float32", "bfloat16", "float16")}


def test_replay_of_stale_inputs_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that froze what it was captured with gives the same whatever is placed."""

    def frozen(static: StaticRound, **kwargs: Any) -> Callable[[], None]:
        static.compute()
        return lambda: None

    monkeypatch.setattr(StaticRound, "capture", frozen)
    _, found = report("graphs")
    replays = {check["name"] for check in found["checks"] if check["name"].startswith("graph replay")}
    assert len(replays) == 12
    assert replays <= _failed(found)


def test_invariant_mode_that_varies_is_a_missed_target(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that depends on where a path lies: plain and drafted tokens part, and the verdict says so."""
    attend = static_rows.path_attention

    def placed(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any, **kwargs: Any) -> Any:
        output = attend(query, keys, values, rows, **kwargs)
        return output * (1 + 0.02 * (rows.tails.double().var(dim=1) % 7).to(output.dtype))[:, None, None]

    monkeypatch.setattr(static_rows, "path_attention", placed)
    status, found = report("graphs")
    assert status == 1
    assert _failed(found) == {"tokens in graphs, bfloat16, invariant mode"}
    assert found["verdicts"][-1]["status"] == "missed"


def _failed(found: dict[str, Any]) -> set[str]:
    return {check["name"] for check in found["checks"] if not check["passed"]}


@pytest.fixture
def session() -> Session:
    return Session(
        device=torch.device("cpu"),
        sizes=Sizes(),
        target_path=Path("nowhere"),
        random_target=True,
        started=0.0,
        seconds=60.0,
        machine={"cpu": "a CPU", "torch": "2", "transformers": "5"},
    )


@pytest.mark.parametrize(
    ("step_ms", "ratio", "tokens", "expected"),
    [
        (5.0, 1.45, (90, 90), ["reached"] * 3),
        (5.01, 1.46, (89, 90), ["missed"] * 3),
    ],
)
def test_verdicts_at_their_bounds(
    session: Session, step_ms: float, ratio: float, tokens: tuple[int, int], expected: list[str]
) -> None:
    """The worst context counts, other shapes and batches do not."""
    for context, milliseconds in ((1024, 4.1), (8192, step_ms)):
        figures = {"what": "plain step", "shape": "8B", "batch": 1, "context": context}
        session.time("plain", milliseconds, "ms", floor=4.0, figures=figures)
    session.time("plain", 99.0, "ms", floor=4.0, figures={**figures, "shape": "70B"})
    point = {"what": "round", "shape": "8B", "batch": 1, "context": 1024, "nodes": 32, "depth": 6, "plain_ms": 4.1}
    session.time("round", 6.0, "ms", figures={**point, "ratio": ratio})
    session.time("round", 60.0, "ms", figures={**point, "batch": 8, "ratio": 9.0})
    session.equality = tokens
    assert [verdict.status for verdict in verdicts(session)] == expected
    assert "| 32    | 9.00    |" in markdown(session)


def test_rounds_begin_with_the_most_telling() -> None:
    """The first combination is what the project's target is about; all of them follow, none twice, no tree deeper than
    it has nodes."""
    points = round_points(Sizes())
    assert points[0] == Point(batch=1, context=1024, nodes=32, depth=6)
    assert len(set(points)) == len(points) == 3 * 3 * (1 + 4 * 8)
    assert all(point.depth <= point.nodes for point in points)
    nearest = points[1 : 1 + 3 + 7 + 2 + 2]  # one node cannot be six deep
    assert all(sum(a != b for a, b in zip(point, points[0], strict=True)) == 1 for point in nearest)


def test_shares_of_the_minutes_rise_to_all_of_them() -> None:
    shares = list(PARTS.values())
    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0


def test_a_broken_part_does_not_stop_the_rest(
    gpu_check: ModuleType, report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash is a failed check with its reason; what cannot run here is listed; later parts run all the same."""

    def crash(session: Any) -> None:
        raise RuntimeError("planted")

    def refuse(session: Any) -> None:
        raise gpu_check.CannotRun("needs a better machine")

    monkeypatch.setattr(gpu_check, "measure_bandwidth", crash)
    monkeypatch.setattr(gpu_check, "measure_layers", refuse)
    status, found = report("bandwidth", "attention", "layers")
    assert status == 1
    assert [check["name"] for check in found["checks"] if not check["passed"]] == ["bandwidth runs"]
    assert "planted" in found["checks"][0]["detail"]
    assert found["checks"][1]["passed"]
    assert found["skipped"] == [{"part": "layers", "reason": "needs a better machine"}]


def test_what_the_minutes_do_not_allow_is_listed(report: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    _, found = report("attention", "speed", minutes=0.0)
    assert [skipped["part"] for skipped in found["skipped"]] == ["attention", "speed"]
    assert found["checks"] == found["timings"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_is_a_clear_error(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "sees no GPU; use --device cpu" in capsys.readouterr().err

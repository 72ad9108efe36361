"""`benchmarks/gpu_check.py`, on the CPU and at reduced size: it runs as a file, keeps its format, notices a fault."""

from __future__ import annotations

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

from infer import attention
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
    path = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "benchmarks/gpu_check.py", *REDUCED, "--json", str(path)]
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) == {"machine", "checks", "timings", "skipped"}
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["bandwidth_gb_s"] > 0
    assert [skipped["part"] for skipped in report["skipped"]] == ["placement"]  # of a target on disk alone
    for check in report["checks"]:
        assert set(check) == {"name", "passed", "detail"}
        assert check["passed"] is True
        assert f"pass  {check['name']}" in result.stdout
    names = [check["name"] for check in report["checks"]]
    for dtype in ("float32", "bfloat16"):
        assert f"attention, {dtype}" in names
        assert sum(name.startswith(f"tokens, {dtype}, ") for name in names) == 6 + (dtype == "bfloat16")
    for timing in report["timings"]:
        assert set(timing) == {"name", "value", "unit", "floor", "detail"}
        assert timing["value"] > 0
        assert timing["unit"] in ("ms", "tokens/s", "GB/s")
    measured = " ".join(timing["name"] for timing in report["timings"])
    for name in ("plain step, 8 requests", "round, 32 nodes", "n-gram", "UPPER BOUND", "8 rows at context 64"):
        assert name in measured


def test_attention_that_ignores_ancestors_fails(
    report: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node sees the whole tree: the reference and the tokens both notice, and the exit status says so."""
    attend = attention.attend

    def blind(query: torch.Tensor, layer: int, rows: PackedRows, **kwargs: Any) -> torch.Tensor:
        if not isinstance(rows, PackedRows):  # the probe that learns a model's shapes
            return attend(query, layer, rows, **kwargs)
        groups = [_without_ancestors(group) for group in rows.groups]
        return attend(query, layer, PackedRows(groups, rows.cache), **kwargs)

    monkeypatch.setattr(attention, "attend", blind)
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
    attend = attention.attend

    def greedy(query: torch.Tensor, layer: int, rows: PackedRows, **kwargs: Any) -> torch.Tensor:
        rows.length = min(rows.length + 1, rows.cache.num_columns)
        rows.bias = lambda *_: None  # type: ignore[method-assign]
        return attend(query, layer, rows, **kwargs)

    monkeypatch.setattr(attention, "attend", greedy)
    status, found = report("attention")
    assert status == 1
    assert not any(check["passed"] for check in found["checks"])
    assert all("nan" in check["detail"] for check in found["checks"])


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

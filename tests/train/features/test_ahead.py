"""Features begun early: which are used, in which order streams are asked, and that nothing changes but the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import RunConfig
from infer.chat import Rendered
from tests.train.training_fixtures import Stopped, run, tiny_recipe, tiny_target, write_chats
from train.features import RowFeatures
from train.features.ahead import FeaturesAhead, NoStreams, overlaps
from train.reports.metrics import read_metrics

LOGGED = ("loss", "gradient_norm", "lr", "loss_by_depth", "overlap_by_depth")


class Source:
    """Features that say what they are of; writes down what it was asked for, and where."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.place = "main"

    def get(self, row: Rendered) -> RowFeatures:
        return self.get_many([row])[0]

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        self.log.append(f"{self.place} computes {[row.token_ids[0] for row in rows]}")
        states = [torch.full((1, 1), float(row.token_ids[0])) for row in rows]
        return [RowFeatures(taps=one, last=one, log_normalizer=None) for one in states]

    def flush(self) -> None:
        pass


class FakeStreams:
    """Writes down in which order a GPU's streams would be asked."""

    def __init__(self, log: list[str], source: Source) -> None:
        self.log, self.source = log, source
        self.num_events = 0

    @contextmanager
    def within(self) -> Iterator[None]:
        self.source.place = "side"
        yield
        self.source.place = "main"

    def record(self) -> int:
        assert self.source.place == "side", "an event behind the features is one of their own stream"
        self.num_events += 1
        self.log.append(f"record {self.num_events}")
        return self.num_events

    def wait(self, event: int) -> None:
        assert self.source.place == "main"
        self.log.append(f"wait {event}")

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        self.log.append(f"lend {[float(tensor) for tensor in tensors]}")

    def finish(self) -> None:
        self.log.append("finish")


def rows_of(*numbers: int) -> list[Rendered]:
    return [Rendered(token_ids=[number], loss_mask=[True]) for number in numbers]


def asked(kind: type[FeaturesAhead]) -> list[str]:
    """What is asked of streams and source for two passes, the second one begun while the first one trains."""
    log: list[str] = []
    source = Source(log)
    ahead = kind(source, FakeStreams(log, source))
    first, second = rows_of(1, 2), rows_of(3)
    assert [float(one.last) for one in ahead.get_many(first)] == [1.0, 2.0]
    log.append("train")
    ahead.begin(second)
    assert [float(one.last) for one in ahead.get_many(second)] == [3.0]
    log.append("train")
    ahead.settle()
    return log


ORDER = [
    "side computes [1, 2]",
    "record 1",
    "wait 1",
    "lend [1.0, 1.0, 2.0, 2.0]",
    "train",
    "side computes [3]",
    "record 2",
    "wait 2",
    "lend [3.0, 3.0]",
    "train",
    "finish",
]


def test_streams_are_asked_in_this_order() -> None:
    """Features are made on their own stream, an event stands behind them, and before they are read the head's stream
    waits for that event and the allocator learns who reads them."""
    assert asked(FeaturesAhead) == ORDER


def test_a_read_without_waiting_would_show() -> None:
    class Hasty(FeaturesAhead):
        def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
            if self._features is None:
                self.begin(rows)
            features, self._features = self._features, None
            assert features is not None
            return features

    assert asked(Hasty) != ORDER


def test_other_rows_than_those_begun_are_computed_anew() -> None:
    """Even such as are equal: what was begun for other rows is dropped."""
    log: list[str] = []
    ahead = FeaturesAhead(Source(log), NoStreams())
    ahead.begin(rows_of(1))
    assert float(ahead.get_many(rows_of(2))[0].last) == 2.0
    assert float(ahead.get_many(rows_of(1))[0].last) == 1.0
    assert log == ["main computes [1]", "main computes [2]", "main computes [1]"]


def recipe(folder: Path, name: str, **changes: Any) -> RunConfig:
    data = folder / "chats.jsonl"
    settings: dict[str, Any] = {
        "optim__batch_size": 2,
        "optim__accumulation": 2,
        "train__steps": 6,
        "train__feature_cache": False,
        "train__num_evaluations": 1,
        "eval__prompts": 1,
        **changes,
    }
    return tiny_recipe(data if data.exists() else write_chats(data), name=name, **settings)


def figures_of(folder: Path, name: str) -> list[list[Any]]:
    return [[one[key] for key in LOGGED] for one in read_metrics(folder / name) if one["event"] == "training"]


def weights_of(folder: Path, name: str) -> bytes:
    return (folder / name / "last" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__feature_cache": True},
        {"train__steps": None, "train__epochs": 1.0},
        {"data__streaming": True, "data__shuffle_block": 6, "data__scan_rows": 20},
    ],
    ids=["online", "cached", "epochs", "stream"],
)
def test_not_a_number_changes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Weights and logged figures, to the bit."""
    target = tiny_target()
    for name, overlap in (("plain", None), ("ahead", True)):
        run(recipe(tmp_path, name, train__overlap=overlap, **changes), tmp_path, target)
    assert figures_of(tmp_path, "plain") == figures_of(tmp_path, "ahead")
    assert weights_of(tmp_path, "plain") == weights_of(tmp_path, "ahead")


@pytest.mark.usefixtures("every_notice")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_killed_run_goes_on_with_or_without_it(tmp_path: Path, streaming: bool) -> None:
    """What was begun early is no part of a run's state, and of a stream the rows read early are read again."""
    target = tiny_target()
    changes: dict[str, Any] = {"train__save_every": 2}
    if streaming:
        changes |= {"data__streaming": True, "data__shuffle_block": 6, "data__scan_rows": 20}
    run(recipe(tmp_path, "plain", **changes), tmp_path, target)
    with pytest.raises(Stopped):
        run(recipe(tmp_path, "killed", train__overlap=True, **changes), tmp_path, target, stop_at=3)
    run(recipe(tmp_path, "killed", train__overlap=streaming, **changes), tmp_path, target, resume=True)
    assert weights_of(tmp_path, "killed") == weights_of(tmp_path, "plain")


def test_every_row_is_computed_once_a_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning early costs no forward: the last step begins nothing."""
    counts = []
    for overlap in (False, True):
        target = tiny_target()
        computed: list[int] = []
        features = target.features

        def counted(rows: Any, taps: Any, features: Any = features, computed: list[int] = computed, **more: Any) -> Any:
            computed.extend(len(row) for row in rows)
            return features(rows, taps, **more)

        monkeypatch.setattr(target, "features", counted)
        run(recipe(tmp_path, f"overlap-{overlap}", train__overlap=overlap), tmp_path, target)
        counts.append(sorted(computed))
    assert counts[0] == counts[1]


def test_states_that_are_not_finite_are_named_late_too(tmp_path: Path) -> None:
    """Nobody waits for the flags of features begun early; they are looked at when the loss is not finite."""
    target = tiny_target()
    with torch.no_grad():
        next(target.final_norm.parameters()).fill_(float("inf"))
    for overlap in (False, True):
        config = recipe(tmp_path, f"broken-{overlap}", train__overlap=overlap, head__init="random")
        with pytest.raises(ValueError, match=r"the target's states of a row of .* are not finite"):
            run(config, tmp_path, target)


def test_where_it_is_on() -> None:
    """On a GPU that holds the whole target; what cannot be is refused where it was asked for."""
    target = tiny_target()
    assert not overlaps(None, target)
    assert overlaps(True, target)
    assert not overlaps(False, target)
    target.device = torch.device("cuda")
    assert overlaps(None, target)
    target.model.hf_device_map = {"": 0}
    assert not overlaps(None, target)
    with pytest.raises(ValueError, match=r"train\.overlap=null"):
        overlaps(True, target)
    with pytest.raises(ValueError, match=r"target\.features, target\.sharded or target\.device_map"):
        overlaps(True, object())

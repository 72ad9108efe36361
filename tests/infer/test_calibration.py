"""Calibrated shares: the fit recovers what was planted, the drafter uses it, and no token depends on it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.checkpoint import read_card, update_card
from infer.calibration import (
    BIN_EDGES,
    KEY,
    Calibration,
    Observation,
    ProposalLog,
    Reliability,
    ShareMap,
    calibrate,
    candidates_on_the_way,
    fit_map,
)
from infer.cli import calibrate as command
from infer.drafters import HeadDrafter, HybridDrafter, TreeSettings, load_drafter
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from tests.infer.helpers import Folders, random_head, write_folders

FIXED = TreeSettings(max_nodes=12, max_depth=3, branch=4, beam=2, adaptive=False)
PROMPTS = [[5, 17, 3], [9, 9, 8, 7, 9, 9, 8], list(range(20, 60)), [4], [8, 8], [30, 31, 32]]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


def planted(share_map: ShareMap, count: int) -> list[Observation]:
    """Candidates that come true as often as `share_map` makes of their shares."""
    chance = torch.Generator().manual_seed(0)
    shares = torch.sigmoid(torch.randn(count, generator=chance, dtype=torch.float64) * 2 - 1)
    ranks = torch.randint(0, 8, (count,), generator=chance)
    depths = torch.randint(1, 5, (count,), generator=chance)
    reached = torch.rand(count, generator=chance, dtype=torch.float64) < share_map(shares, ranks, depths)
    return [Observation(*row) for row in zip(*(c.tolist() for c in (shares, ranks, depths, reached)), strict=True)]


def test_the_fit_recovers_a_planted_map():
    """30,000 candidates: each coefficient within 0.1, four to eight times its standard error."""
    truth = ShareMap(intercept=-0.8, slope=0.6, rank=-0.3, depth=0.1)
    found = fit_map(planted(truth, 30_000))
    for name in ("intercept", "slope", "rank", "depth"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), abs=0.1)


def test_shares_that_are_right_are_left_alone_and_few_observations_change_little():
    found = fit_map(planted(ShareMap(), 30_000))
    shares = torch.tensor([0.02, 0.3, 0.9])
    torch.testing.assert_close(found(shares, torch.zeros(3), 1), shares, atol=0.03, rtol=0)
    few = fit_map([Observation(0.9, 0, 1, False)])
    assert few.intercept == pytest.approx(0, abs=0.3)
    assert few.slope == pytest.approx(1, abs=0.5)


def test_the_order_of_shares_is_kept_even_where_they_mislead():
    """Shares that are wrong the other way round are flattened, never turned over."""
    upside_down = [one._replace(share=1 - one.share) for one in planted(ShareMap(), 5_000)]
    found = fit_map(upside_down)
    assert 0 < found.slope < 0.1
    shares = torch.linspace(0.001, 0.999, 50)
    assert bool((found(shares, torch.zeros(50), 1).diff() > 0).all())


def test_maps_are_finite_at_the_ends():
    calibrated = ShareMap(intercept=-1.0, slope=0.5)(torch.tensor([0.0, 1e-38, 1.0]), torch.arange(3), 2)
    assert bool(((calibrated > 0) & (calibrated < 1)).all())
    with pytest.raises(ValueError, match="slope of a calibration must be above 0"):
        ShareMap(slope=-1.0)
    with pytest.raises(ValueError, match="rank of a calibration must be a finite number, got nan"):
        ShareMap(rank=math.nan)


def test_the_map_of_the_nearest_temperature_is_used():
    """Greedy requests take the map of temperature 0 alone, for their shares hold no noise."""
    zero, warm, hot = ShareMap(slope=0.1), ShareMap(slope=0.2), ShareMap(slope=0.3)
    calibration = Calibration(maps={0.0: zero, 0.7: warm, 1.0: hot})
    for temperature, expected in ((0.0, zero), (1e-7, zero), (0.1, warm), (0.84, warm), (0.86, hot), (2.0, hot)):
        assert calibration.map_for(SamplingParams(temperature=temperature)) is expected
    assert Calibration(maps={0.7: warm}).map_for(SamplingParams()) is None
    assert Calibration(maps={0.0: zero}).map_for(SamplingParams(temperature=1.0)) is None
    with pytest.raises(ValueError, match="temperatures of at least 0"):
        Calibration(maps={-1.0: zero})


def test_a_calibration_survives_its_card():
    calibration = Calibration(maps={0.0: ShareMap(intercept=-0.25), 0.7: ShareMap(slope=0.5, rank=-0.1, depth=0.05)})
    card = json.loads(json.dumps({"max_nodes": 7, KEY: calibration.to_dict()}))
    assert Calibration.from_card(card) == calibration
    assert Calibration.from_card({"max_nodes": 7}) is None
    for broken in ([], {}, {"maps": [{"slope": 1.0}]}, {"maps": [{"temperature": 0, "slop": 1.0}]}, {"maps": "x"}):
        with pytest.raises(ValueError, match=r"calibration on the head's card is broken .*: run headstart calibrate"):
            Calibration.from_card({KEY: broken})


def test_reliability_by_hand():
    """Two bins: 0.25 said twice and right once, 0.85 said twice and right twice."""
    seen = [(0.25, True), (0.25, False), (0.85, True), (0.85, True)]
    found = Reliability.of([Observation(share, 0, 1, reached) for share, reached in seen])
    assert [one.num_observations for one in found.bins] == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 0]
    assert len(found.bins) == len(BIN_EDGES) + 1
    assert found.calibration_error == pytest.approx((2 * 0.25 + 2 * 0.15) / 4)
    assert found.brier == pytest.approx((0.75**2 + 0.25**2 + 2 * 0.15**2) / 4)
    assert found.log_loss == pytest.approx(-(math.log(0.25) + math.log(0.75) + 2 * math.log(0.85)) / 4)


def test_candidates_are_seen_down_to_the_token_that_none_of_them_is():
    """Root: 5 (0.5), 6 (0.25); below 6: 7 (0.125), 8 (0.0625). The round goes 6, 9: both lists are seen, the one below
    5 is not. Candidates cut before the verification are in the proposal all the same."""
    proposed = DraftTree(
        tokens=(5, 6, 7, 8, 7),
        parents=(ROOT, ROOT, 1, 1, 0),
        values=(0.5, 0.25, 0.125, 0.0625, 0.4),
        kind=OneHot(),
    )
    assert list(candidates_on_the_way(proposed, [6, 9])) == [
        Observation(0.5, 0, 1, False),
        Observation(0.25, 1, 1, True),
        Observation(0.5, 0, 2, False),
        Observation(0.25, 1, 2, False),
    ]
    assert next(candidates_on_the_way(proposed, [9])) == Observation(0.5, 0, 1, False)
    assert list(candidates_on_the_way(DraftTree.empty(), [9])) == []


def trees_of(drafter: HeadDrafter, engine: Engine, params: SamplingParams) -> list[DraftTree]:
    """The trees proposed in the first round after the prefill."""
    requests = engine.submit(PROMPTS, params)
    engine._advance(engine._admit(), [DraftTree.empty()] * len(requests))
    trees = drafter.propose(requests, [engine._limit(request) for request in requests])
    engine.abort()
    return trees


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_drafter_maps_its_shares(target, temperature):
    """A tree one deep: each value is the map of the value without it, at its rank; drawn children keep theirs."""
    share_map = ShareMap(intercept=-0.5, slope=0.7, rank=-0.2)
    calibration = Calibration(maps={0.0: share_map, 1.0: share_map})
    shallow = TreeSettings(max_nodes=8, max_depth=1, branch=6, adaptive=False)
    for rule in ("match", "recursive", "greedy_set"):
        values = []
        for each in (None, calibration):
            drafter = HeadDrafter(random_head(target), calibration=each)
            engine = Engine(target, drafter, tree=shallow, rule=rule)
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)
            values.append(torch.tensor([tree.values for tree in trees_of(drafter, engine, params)]))
        raw, found = values
        is_drawn = rule != "match" and temperature > 0
        expected = raw if is_drawn else share_map(raw, torch.arange(raw.shape[1]), 1)
        torch.testing.assert_close(found, expected)


def test_depth_counts_from_the_root(target):
    """With a map of depth alone, values fall by the same factor of odds at each level, whatever the share."""
    drafter = HeadDrafter(random_head(target), calibration=Calibration(maps={0.0: ShareMap(slope=1e-9, depth=-1.0)}))
    engine = Engine(target, drafter, tree=FIXED)
    for tree in trees_of(drafter, engine, SamplingParams(max_tokens=8, ignore_eos=True)):
        for node, parent in enumerate(tree.parents):
            share = tree.values[node] / (1.0 if parent == ROOT else tree.values[parent])
            assert share == pytest.approx(1 / (1 + math.exp(tree.depths[node] - 1)), rel=1e-4)


@pytest.mark.parametrize("adaptive", [False, True])
def test_calibrating_changes_trees_and_no_token(target, adaptive):
    """From observation to use, on the tiny model: a random head is never sure again, held-out prompts are told better,
    and the answers are plain decoding's. The engine is left as it was, but for the calibration."""
    drafter = HeadDrafter(random_head(target))
    engine = Engine(target, drafter, tree=FIXED, max_requests=3)
    calibration, report = calibrate(
        engine, drafter, PROMPTS, temperatures=[0.0, 0.9], max_tokens=24, progress=lambda num_tokens: None
    )
    assert drafter.calibration is calibration
    assert (engine.drafter, engine.observer) == (drafter, None)
    assert set(calibration.maps) == {0.0, 0.9}
    assert (report.num_fitted, report.num_held_out) == (3, 3)
    assert report.improves
    for one in report.comparisons:
        assert one.after.log_loss < one.before.log_loss
        assert abs(one.lengths_after.predicted - one.lengths_after.accepted) < abs(
            one.lengths_before.predicted - one.lengths_before.accepted
        )
        assert one.before.num_observations == one.after.num_observations > 50
    json.dumps(report.to_dict())
    tree = TreeSettings(max_nodes=12, max_depth=3, branch=4, beam=2, adaptive=adaptive)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)
        expected = [one.token_ids for one in Engine(target).generate(PROMPTS, params)]
        assert [one.token_ids for one in Engine(target, drafter, tree=tree).generate(PROMPTS, params)] == expected


def test_a_log_is_a_drafter_like_the_one_it_watches(target):
    drafter = HeadDrafter(random_head(target))
    log = ProposalLog(drafter)
    for name in ("name", "kinds", "taps", "spent_milliseconds"):
        assert getattr(log, name) == getattr(drafter, name)
    engine = Engine(target, log, tree=FIXED)
    engine.observer = log.verified
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=10, ignore_eos=True)
    (answer,) = engine.generate([PROMPTS[0]], params)
    assert answer.token_ids == Engine(target).generate([PROMPTS[0]], params)[0].token_ids
    assert len(log.watched[5].predicted_lengths) == answer.num_rounds - 1
    assert not log._proposed


def test_too_little_to_calibrate_on_is_refused(target):
    drafter = HeadDrafter(random_head(target))
    engine = Engine(target, drafter, tree=FIXED)
    with pytest.raises(ValueError, match="got 1 prompts and 1 temperatures"):
        calibrate(engine, drafter, PROMPTS[:1], temperatures=[0.0], max_tokens=4)
    with pytest.raises(ValueError, match="take more prompts, or longer answers"):
        calibrate(engine, drafter, PROMPTS, temperatures=[0.0], max_tokens=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    texts = [("a", "abc abc"), ("b", "one two"), ("a", "x"), ("b", "y z")]
    return write_folders(tmp_path_factory.mktemp("calibration"), texts, drafter={"max_nodes": 7})


def run_command(folders: Folders, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    common = ["--target", str(folders.target), "--prompts", str(folders.prompts), "--dtype", "float32"]
    return command.run(parser.parse_args([*common, "--max-tokens", "16", *arguments]))


def test_the_command_writes_the_card_and_drafters_read_it(folders, tmp_path, capsys):
    """A dry run leaves the card alone; a run adds the calibration to the other settings; heads load with it."""
    head, target = str(folders.head), TargetModel.load(folders.target, dtype="float32")
    assert run_command(folders, head, "--dry-run") == 0
    assert read_card(head).drafter == {"max_nodes": 7}
    assert load_drafter(head, target, hybrid=False).calibration is None
    assert run_command(folders, head, "--temperature", "0", "0.8", "--json", str(tmp_path / "c.json")) == 0
    assert "temperature 0.8" in capsys.readouterr().out
    written = json.loads((tmp_path / "c.json").read_text())
    card = read_card(head)
    assert card.drafter == {"max_nodes": 7, KEY: {"maps": written["maps"]}}
    assert [entry["temperature"] for entry in written["maps"]] == [0.0, 0.8]
    assert written["comparisons"][1]["lengths_after"]["num_rounds"] > 0
    for hybrid in (False, True):
        drafter = load_drafter(head, target, hybrid=hybrid)
        drafter = drafter.drafters[0] if isinstance(drafter, HybridDrafter) else drafter
        assert drafter.calibration == Calibration.from_card(card.drafter)


def test_the_command_replaces_a_broken_calibration(folders):
    """The error that a broken one raises elsewhere says to run the command again."""
    broken = {"max_nodes": 7, KEY: {"maps": "x"}}
    update_card(folders.head, drafter=broken)
    with pytest.raises(ValueError, match="run headstart calibrate again"):
        load_drafter(folders.head, TargetModel.load(folders.target, dtype="float32"))
    assert run_command(folders, str(folders.head), "--temperature", "0") == 0
    assert set(read_card(folders.head).drafter[KEY]) == {"maps"}
    assert Calibration.from_card(read_card(folders.head).drafter) is not None


def test_the_command_needs_a_head(folders):
    with pytest.raises(ValueError, match="'ngram' is not one trained head to calibrate"):
        run_command(folders, "ngram")

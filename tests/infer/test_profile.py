"""The profile: floors that are bounds, and rounds of a real engine whose parts add up. Nothing here asserts a wall
time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.block import BlockHead
from infer.cli.profile import summary, tables
from infer.cost import CostModel, cost_path, spread_rows
from infer.drafters import HybridDrafter, NgramDrafter, TreeSettings
from infer.drafters.model import ModelDrafter
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.profile import (
    PARTS,
    ForwardWork,
    ProfileReport,
    RoundPart,
    RoundProfile,
    Speeds,
    Work,
    measure_bandwidth,
    measure_forwards,
    measure_matmuls,
    measure_multiplication,
    measure_rounds,
    plot,
    profile,
    weight_matrices,
)
from infer.profile.drafts import DraftRows, draft_work
from infer.profile.floors import WorkCounter, layer_windows
from infer.rows import tree_group
from infer.target import TargetModel
from tests.head_families import VARIANTS, tiny_head
from tests.infer.helpers import plain_ids, random_head, sampling

SPEEDS = Speeds(bytes_per_second=1e9, operations_per_second=1e9)
TREE = TreeSettings(max_nodes=6, max_depth=3, branch=3, beam=2, adaptive=False)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 30)), [9, 9, 8]]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"), name="tiny")


def counted(target: TargetModel, groups: list[Any]) -> Work:
    """What a forward of the stock modules multiplies, product by product."""
    cache = target.new_cache(num_slots=len(groups), num_columns=max(group.num_columns for group in groups))
    with WorkCounter() as counter:
        target.forward(groups, cache)
    return counter.work


def test_a_floor_is_the_longer_of_reading_and_multiplying() -> None:
    """By hand: 2 MB at 1 GB/s take 2 ms, 3 million operations at 1 G/s take 3 ms."""
    floor = Work(num_bytes=2e6, num_operations=3e6).floor(SPEEDS)
    assert (floor.reading_milliseconds, floor.multiplying_milliseconds) == pytest.approx((2.0, 3.0))
    assert (floor.milliseconds, floor.bound) == (floor.multiplying_milliseconds, "arithmetic")
    twice = (Work(num_bytes=2e6) + Work(num_bytes=2e6)).floor(SPEEDS)
    assert (twice.milliseconds, twice.bound) == (pytest.approx(4.0), "bandwidth")


@pytest.mark.parametrize("batch", [1, 3])
def test_work_of_a_forward_is_what_its_products_read_and_multiply(tiny_model: Callable[..., Any], batch: int) -> None:
    """The formula against every product of a real forward, exactly: one row a request, where no row is masked. Norms,
    which the formula counts among the weights, are no products."""
    target = TargetModel.wrap(tiny_model("llama"), forward="eager")
    groups = spread_rows(batch, batch=batch, context=11)
    work, found = ForwardWork(target).of(groups), counted(target, groups)
    num_norm_bytes = sum(each.nbytes for each in target.model.parameters() if each.ndim == 1)
    assert work.num_bytes - num_norm_bytes == found.num_bytes
    assert work.num_operations == found.num_operations


def test_work_of_a_tree_leaves_out_what_its_rows_do_not_see(tiny_model: Callable[..., Any]) -> None:
    """A floor counts pairs that are seen; the stock attention multiplies masked ones too. By hand: 3 rows of a chain
    see 1, 2 and 3 of their own, 2 siblings below it 4 each, and all of them 10 before."""
    target = TargetModel.wrap(tiny_model("llama"), forward="eager")
    group = tree_group(0, 10, [5, 6, 7], [8, 9], [-1, -1])
    seen = 5 * 10 + (1 + 2 + 3) + (4 + 4)
    work = ForwardWork(target).of([group])
    config = target.config
    per_pair = 4 * config.num_attention_heads * config.head_dim
    weights = sum(matrix.numel() for matrix in weight_matrices(target.model))
    assert work.num_operations == 2 * 5 * weights + target.num_layers * per_pair * seen
    assert work.num_operations < counted(target, [group]).num_operations


def test_windows_bound_what_is_read(tiny_model: Callable[..., Any]) -> None:
    """Gemma-3's sliding layers read no more of a long context than of one as long as their window."""
    target = TargetModel.wrap(tiny_model("gemma3"))
    assert layer_windows(target) == [8, None, 8]
    work = ForwardWork(target)
    near, far = (work.of(spread_rows(1, batch=1, context=context)) for context in (8, 108))
    full_layer = 100 * target.new_cache(num_slots=1, num_columns=1).num_bytes // target.num_layers
    assert far.num_bytes - near.num_bytes == full_layer


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "gpt2"])
def test_every_weight_matrix_is_multiplied_once(tiny_model: Callable[..., Any], kind: str) -> None:
    """The matmul floor covers the bytes that a forward reads: all but norms, biases and looked-up
    embeddings."""
    target = TargetModel.wrap(tiny_model(kind), forward="eager")
    assert measure_matmuls(target, repeats=1) > 0
    matrices = weight_matrices(target.model)
    vectors = sum(p.nbytes for p in target.model.parameters() if p.dim() == 1)
    positions = sum(p.nbytes for name, p in target.model.named_parameters() if name.endswith("wpe.weight"))
    assert sum(matrix.nbytes for matrix in matrices) == target.num_weight_bytes - vectors - positions
    if kind == "llama":
        assert len(matrices) == 3 * 4 + 1  # q/k/v and gate/up are one each


def test_speeds_are_measured_in_the_models_dtype() -> None:
    """Both dtypes give a figure, for any size that holds at least one row."""
    for dtype in (torch.float32, torch.bfloat16):
        assert measure_bandwidth(dtype, torch.device("cpu"), num_bytes=1, repeats=1) > 0
        assert measure_multiplication(dtype, torch.device("cpu"), size=8, repeats=1) > 0


def test_forwards_by_batch_context_and_width(target: TargetModel) -> None:
    """Every place is there once, with its own floor; a context that its positions do not hold is taken as far as they
    go."""
    costs = measure_forwards(target, SPEEDS, widths=(1, 4, 8), contexts=(8, 16, 1000), batches=(1, 2), repeats=1)
    places = [(each.batch, each.context, each.width) for each in costs]
    assert places == [
        *((1, context, width) for context in (8, 16, 256 - 8) for width in (1, 4, 8)),
        *((2, context, width) for context in (8, 16, 256 - 4) for width in (4, 8)),
    ]
    floors = {place: each.floor.milliseconds for place, each in zip(places, costs, strict=True)}
    assert floors[1, 8, 1] < floors[1, 8, 4] < floors[1, 16, 4]
    assert floors[2, 8, 4] < floors[2, 16, 4]


def rounds_of(engine: Engine, **settings: Any) -> RoundProfile:
    return measure_rounds(engine, PROMPTS, SPEEDS, **{"num_rounds": 8, "max_tokens": 24, **settings})


def drafters(target: TargetModel) -> dict[str, Any]:
    head = head_drafter(random_head(target), target)
    return {
        "head": head,
        "hybrid": HybridDrafter([head_drafter(random_head(target), target), NgramDrafter()]),
        "lookup": NgramDrafter(),
        "layers": ModelDrafter.first_layers(2, target),
        "none": None,
    }


NETWORK = {"draft: begin", "draft: steps"}
ALWAYS = {"packing rows", "target forward", "verification", "commit", "host"}
DRAFTING = {"draft: tree building", "fitting"}
EXPECTED = {
    "head": ALWAYS | DRAFTING | NETWORK,
    "hybrid": ALWAYS | DRAFTING | NETWORK | {"draft: lookup"},
    "lookup": ALWAYS | {"draft: lookup", "fitting"},
    "layers": ALWAYS | DRAFTING | NETWORK,
    "none": ALWAYS,
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_parts_of_a_round_add_up(target: TargetModel, name: str, batch: int) -> None:
    """To rounding, since what no part claims is the host's; and no part is negative, so none is counted twice."""
    engine = Engine(target, drafters(target)[name], tree=TREE, cost=CostModel.free(), max_requests=3)
    found = rounds_of(engine, batch=batch)
    assert {part.name for part in found.parts} == EXPECTED[name]
    assert [part.name for part in found.parts] == [part for part in PARTS if part in EXPECTED[name]]
    assert sum(part.milliseconds for part in found.parts) == pytest.approx(found.milliseconds)
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert min(part.milliseconds for part in found.parts) >= 0
    assert found.num_rounds + found.num_resting == 8
    assert found.tokens >= 1
    floors = {part.name for part in found.parts if part.floor is not None}
    assert floors == {"target forward"} | (NETWORK & EXPECTED[name])


def test_a_round_is_what_the_engine_was_asked_for(target: TargetModel) -> None:
    """A tree of fixed size: its nodes and a root for each request, and a step for each depth below the first."""
    engine = Engine(target, drafters(target)["head"], tree=TREE, cost=CostModel.free(), max_requests=3)
    for batch in (1, 2):
        found = rounds_of(engine, batch=batch, temperature=0.8)
        assert found.width == batch * (1 + TREE.max_nodes)
        assert found.num_steps == TREE.max_depth - 1
        assert (found.batch, found.temperature) == (batch, 0.8)


def test_an_engine_is_left_as_it_was(target: TargetModel) -> None:
    """Its target, drafter and network are its own again, nothing runs, and it still answers as plain decoding does."""
    for name in ("head", "hybrid"):
        drafter = drafters(target)[name]
        parts = getattr(drafter, "drafters", (drafter,))
        steppers = [getattr(part, "stepper", None) for part in parts]
        engine = Engine(target, drafter, tree=TREE, cost=CostModel.free())
        rounds_of(engine)
        assert engine.target is target
        assert engine.drafter is drafter
        assert getattr(drafter, "drafters", (drafter,)) == parts
        assert [getattr(part, "stepper", None) for part in parts] == steppers
        (answer,) = engine.generate([PROMPTS[0]], sampling(0.8))
        assert answer.token_ids == plain_ids(target, PROMPTS[0], sampling(0.8))


def test_bitwise_rounds_are_measured_too(target: TargetModel) -> None:
    engine = Engine(target, drafters(target)["head"], tree=TREE, exactness="bitwise", cost=CostModel.free())
    found = rounds_of(engine)
    assert sum(part.milliseconds for part in found.parts) == pytest.approx(found.milliseconds)


def test_mistakes_are_told(target: TargetModel) -> None:
    engine = Engine(target, max_requests=2)
    with pytest.raises(ValueError, match="max_requests=2"):
        rounds_of(engine, batch=3)
    with pytest.raises(ValueError, match="at least one"):
        measure_rounds(engine, [], SPEEDS)
    with pytest.raises(ValueError, match="num_rounds"):
        rounds_of(engine, num_rounds=0)
    with pytest.raises(ValueError, match="let answers be longer"):
        rounds_of(engine, max_tokens=2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_of_every_head(target: TargetModel, variant: str) -> None:
    """A step reads no more than all weights of the head and an LM head, and multiplies at least its rows by the draft
    vocabulary. Bounds, for what a step reads is the family's business."""
    drafter = head_drafter(tiny_head(variant, target), target)
    rows = DraftRows(begin=3, step=4, batch=2, context=0)
    work = draft_work(drafter.stepper, rows)
    assert work is not None
    head = drafter.stepper.head
    lm_head_bytes = target.lm_head_weight.nbytes
    most = sum(each.nbytes for each in head.parameters()) + lm_head_bytes + target.num_weight_bytes
    bounded = [(work.begin, rows.batch), (work.step, rows.step)]
    if isinstance(head, BlockHead):  # all depths are made at once, and a step adds what the token before says
        bounded = [(work.begin, rows.batch * head.num_depths)]
        rank = head.config.markov_rank
        assert work.step.num_operations >= 2 * rows.step * rank * len(drafter.stepper.target_ids)
        assert (work.step.num_bytes > 0) == (rank > 0)
    for one, num_rows in bounded:
        assert 0 < one.num_bytes <= most
        assert one.num_operations >= 2 * num_rows * target.hidden_size * len(drafter.stepper.target_ids)


def test_a_recurrent_step_reads_its_weights_once(target: TargetModel) -> None:
    """All matrices of the head but the fusion of the target's states, which begins a round."""
    stepper = head_drafter(random_head(target), target).stepper
    rows = DraftRows(begin=1, step=1, batch=1, context=0)
    work = draft_work(stepper, rows)
    assert work is not None
    head = stepper.head
    norms = sum(each.nbytes for each in head.parameters() if each.ndim == 1)
    assert work.step.num_bytes == stepper.num_step_bytes - norms
    assert work.begin.num_bytes - work.step.num_bytes == head.fc.weight.nbytes
    longer = draft_work(stepper, DraftRows(begin=1, step=1, batch=1, context=10))
    assert longer is not None
    key_bytes = 2 * head.config.num_key_value_heads * head.config.head_dim * head.dtype.itemsize
    assert longer.step.num_bytes - work.step.num_bytes == 10 * key_bytes


@pytest.fixture(scope="module")
def report(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> ProfileReport:
    engine = Engine(target, drafters(target)["hybrid"], tree=TREE, cost=CostModel.free(), max_requests=2)
    return profile(
        target,
        widths=(1, 4),
        contexts=(8, 16),
        batches=(1, 2),
        repeats=1,
        stream_bytes=1 << 16,
        engine=engine,
        prompts=PROMPTS,
        max_tokens=16,
        num_rounds=4,
    )


def test_a_report_is_complete(report: ProfileReport) -> None:
    """Its JSON says what was measured, with floors and what they are bound by."""
    values = json.loads(json.dumps(report.to_dict()))
    assert [(each["batch"], each["context"], each["width"]) for each in values["forwards"]] == [
        (1, 8, 1),
        (1, 8, 4),
        (1, 16, 1),
        (1, 16, 4),
        (2, 8, 4),
        (2, 16, 4),
    ]
    assert all(each["floor"]["bound"] in ("bandwidth", "arithmetic") for each in values["forwards"])
    assert [each["batch"] for each in values["rounds"]] == [1, 2]
    assert values["draft"]["name"] == "eagle3"
    for name in ("bandwidth_floor_milliseconds", "matmul_floor_milliseconds", "bandwidth_gigabytes_per_second"):
        assert values[name] > 0
    expected = values["weight_megabytes"] / values["bandwidth_gigabytes_per_second"]  # MB over GB/s is ms
    assert values["bandwidth_floor_milliseconds"] == pytest.approx(expected)


def test_a_report_is_drawn(report: ProfileReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "plots" / "profile.png")
    assert (tmp_path / "plots" / "profile.png").stat().st_size > 10_000


def test_a_report_fits_a_terminal(report: ProfileReport) -> None:
    """Every table of the defaults within 80 columns."""
    from rich.console import Console

    console = Console(width=200, record=True)
    for table in tables(report):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.rstrip().splitlines())) <= 80
    for part in EXPECTED["hybrid"]:
        assert part in text


def test_parts_worth_a_look_are_named(report: ProfileReport) -> None:
    """Over 15 % of a round, the target's forward aside, largest first."""
    shares = {"draft: steps": 0.2, "target forward": 0.4, "verification": 0.25, "commit": 0.15}
    parts = [RoundPart(name=name, milliseconds=1, median_milliseconds=1, share=each) for name, each in shares.items()]
    (first, *_) = report.rounds
    changed = RoundProfile(**{**vars(first), "parts": tuple(parts)})
    assert [part.name for part in changed.notable] == ["verification", "draft: steps"]
    (line,) = summary(ProfileReport(**{**vars(report), "rounds": (changed,)}))[-1:]
    assert "verification 25 %" in line
    assert "commit" not in line
    quiet = RoundProfile(**{**vars(first), "parts": tuple(parts[1:2])})
    (line,) = summary(ProfileReport(**{**vars(report), "rounds": (quiet,)}))[-1:]
    assert "no part takes more than 15 %" in line


def test_only_standard_widths_make_the_machines_table(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of a few widths must not become what trees are fitted to; without an engine there are no rounds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("infer.cost.load_average", lambda: 0.0)
    few = profile(target, NgramDrafter(), widths=(1, 4), contexts=(8,), repeats=1, stream_bytes=1 << 16)
    assert not cost_path(target).exists()
    assert (few.rounds, few.draft) == ((), None)
    assert not few.is_kept
    assert profile(target, contexts=(8,), repeats=1, stream_bytes=1 << 16).is_kept
    assert cost_path(target).is_file()

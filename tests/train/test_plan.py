"""The plan of a run: sizes against real ones, refusals that name what to change, and time by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headstart
from configs.loading import load_config, parse_config
from configs.schema import DeepSpeedConfig, RunConfig
from heads.checkpoint import save_head
from heads.registry import FAMILIES
from infer.target import TargetModel
from tests.toy_tokenizer import toy_tokenizer
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from train.corpus.dataset import load_data
from train.features import OnlineFeatures
from train.plan import Plan, Resources, make_plan
from train.plan.calibration import Rates
from train.plan.describe import describe
from train.plan.needs import DEVICE, DiskNeeds, feature_bytes_per_token, peak_bytes
from train.plan.resources import Gpu
from train.plan.sizes import HeadSize, TargetSize
from train.plan.timing import budget_of, times_of
from train.plan.workload import Workload
from train.reports.story import PLAN_FILE
from train.setup import make_head
from train.trainer import train

GB = 10**9
ROOMY = Resources(memory=10**15, gpus=(), disk=10**15, cores=2)
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl")


def plan_of(config: RunConfig, **options: Any) -> Plan:
    options = {"resources": ROOMY, "calibrated": False, **options}
    return make_plan(config, **options)


def config_folder(tmp_path: Path, values: dict[str, Any]) -> Path:
    """A model's folder with nothing in it but the configuration."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


# Sizes


def test_targets_are_counted_exactly(
    tiny_model: Callable[..., transformers.PreTrainedModel], tiny_kinds: tuple[str, ...]
) -> None:
    """Every family: the count without memory is that of the model itself, tied matrices counted once."""
    for kind in tiny_kinds:
        model = tiny_model(kind)
        size = TargetSize.of(model.config)
        assert size.parameters == sum(parameter.numel() for parameter in model.parameters()), kind
        assert size.weight_bytes(4) == sum(parameter.nbytes for parameter in model.parameters()), kind
        assert size.vocab_size == model.get_output_embeddings().weight.shape[0]
        assert size.is_tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("values", "parameters", "bytes_per_token"),
    [(LLAMA_8B, 8_030_261_248, 32 << 10), (LLAMA_70B, 70_553_706_496, 64 << 10)],
)
def test_large_targets_are_counted_without_loading(
    tmp_path: Path, data: Path, values: dict[str, Any], parameters: int, bytes_per_token: int
) -> None:
    """Public figures: Llama 3.1's parameters, and four states of 2h bytes a token for EAGLE-3."""
    config = tiny_recipe(
        data, target__model=str(config_folder(tmp_path, values)), head__taps=None, target__dtype="bfloat16"
    )
    plan = plan_of(config)
    assert plan.problems == []
    assert plan.target is not None
    assert plan.disk is not None
    assert plan.target.parameters == parameters
    ids_mask_normalizer = 4 + 1 + 4
    assert plan.disk.feature_bytes_per_token == bytes_per_token + ids_mask_normalizer
    assert plan.device_bytes > parameters * 2
    assert "tokens are estimated by letters" in plan.notes[0]
    assert "about" in describe(plan)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_are_counted_exactly(target: TargetModel, data: Path, family: str, tmp_path: Path) -> None:
    """Parameters of a head made for training, and the bytes of its file; and again when it is gone on from."""
    config = tiny_recipe(data, head__type=family, head__taps=None, head__draft_vocab_size=None)
    run_data = load_data(config.data, target.tokenizer, seed=0, max_prompt_tokens=100)
    head = make_head(config, target, run_data)
    size = HeadSize.of(config.head, target.config, target.vocab_size, {})
    assert size.parameters == size.trained == sum(parameter.numel() for parameter in head.parameters())
    assert size.taps == tuple(head.config.taps)
    assert size.num_depths == head.num_depths
    from heads.checkpoint import HeadCard

    folder = save_head(tmp_path / "head", head, HeadCard(target=target.reference, family=family))
    on_disk = (folder / "model.safetensors").stat().st_size
    assert size.stored_bytes <= on_disk <= size.stored_bytes + 8192  # names and shapes stand before the numbers
    again = HeadSize.of(replace(config.head, init_from=str(folder)), target.config, target.vocab_size, {})
    assert (again.parameters, again.stored_bytes) == (size.parameters, size.stored_bytes)
    adapted = HeadSize.of(
        replace(config.head, init_from=str(folder), lora_rank=4), target.config, target.vocab_size, {}
    )
    assert adapted.parameters == size.parameters
    assert 0 < adapted.trained < size.trained


@pytest.mark.parametrize("feature_dtype", ["target", "bfloat16", "int8"])
@pytest.mark.parametrize("teacher", ["full", "draft"])
@pytest.mark.parametrize(("head_type", "taps"), [("eagle3", (1, 2, 4)), ("eagle1", None), ("medusa", None)])
def test_feature_bytes_are_those_of_the_store(
    target: TargetModel, data: Path, feature_dtype: str, teacher: str, head_type: str, taps: tuple[int, ...] | None
) -> None:
    config = tiny_recipe(
        data, head__type=head_type, head__taps=taps, train__feature_dtype=feature_dtype, train__teacher=teacher
    )
    size = TargetSize.of(target.config)
    head = HeadSize.of(config.head, target.config, target.vocab_size, {})
    online = OnlineFeatures(
        target, head.taps, feature_dtype=config.train.feature_dtype, with_normalizer=teacher == "full"
    )
    assert feature_bytes_per_token(config, size, head, target.dtype) == online.bytes_per_token


def test_checkpoints_take_what_was_planned(tmp_path: Path) -> None:
    """Bytes of a real run's folders within 5 %, and of its features (what is kept is the tokens visited)."""
    target = tiny_target(hidden_size=128, intermediate_size=256)
    config = tiny_recipe(write_chats(tmp_path / "chats.jsonl"), train__steps=4, train__num_evaluations=1)
    plan = plan_of(config, target=target)
    train(config, runs_folder=tmp_path / "runs", target=target, notice=lambda line: None)
    assert plan.disk is not None
    folder = tmp_path / "runs" / "tiny"
    assert _folder_bytes(folder / "last") == pytest.approx(plan.disk.checkpoint, rel=0.05)
    assert _folder_bytes(folder / "best") == pytest.approx(plan.disk.best, rel=0.05)
    assert _folder_bytes(folder) <= plan.disk.checkpoints + plan.disk.saving + 5_000_000
    features = _folder_bytes(tmp_path / "runs" / ".features")
    assert plan.disk.features == pytest.approx(
        features, rel=0.3, abs=20_000
    )  # by the mean length of rows, plus headers


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_rows_and_tokens_are_those_of_the_run(target: TargetModel, data: Path) -> None:
    config = tiny_recipe(data, train__steps=None, train__epochs=2.0)
    run_data = load_data(config.data, target.tokenizer, seed=0, max_prompt_tokens=target.max_length - 8)
    plan = plan_of(config, target=target)
    assert plan.work is not None
    assert plan.budget is not None
    assert (plan.work.num_rows, plan.work.num_tokens) == (len(run_data.rows), run_data.num_tokens)
    assert plan.budget.steps == -(-2 * len(run_data.rows) // config.optim.batch_size)
    assert plan.budget.by == "train.epochs"


# Memory


def test_stages_share_out_what_they_say(target: TargetModel, data: Path) -> None:
    """Over four processes: the optimiser's state from stage 1 on, gradients from 2, weights in 3."""
    config = tiny_recipe(data, optim__accumulation=2)
    head = plan_of(config, target=target).head
    assert head is not None
    parts: dict[int | None, dict[str, int]] = {}
    for stage in (None, 0, 1, 2, 3):
        changed = replace(config, deepspeed=DeepSpeedConfig(stage=stage))
        plan = plan_of(changed, target=target, processes=4)
        assert plan.problems == []
        parts[stage] = {item.name: item.num_bytes for item in plan.memory}
    whole = head.parameters * 4
    assert parts[None] == parts[0]
    assert parts[0]["head: optimiser state"] == 2 * whole
    assert parts[1]["head: optimiser state"] == pytest.approx((2 + 1) * whole / 4, abs=8)  # with float32 masters
    assert parts[1]["head: gradients"] == whole
    assert parts[2]["head: gradients"] == pytest.approx(whole / 4, abs=4)
    assert parts[3]["head: weights"] == pytest.approx(whole / 4, abs=4)
    assert parts[3]["head: whole weights during a pass"] == whole


def test_of_what_passes_the_largest_counts(target: TargetModel, data: Path) -> None:
    plan = plan_of(tiny_recipe(data), target=target)
    here = [item for item in plan.memory if item.where == DEVICE]
    stays = sum(item.num_bytes for item in here if not item.passing)
    assert peak_bytes(here, DEVICE) == stays + max(item.num_bytes for item in here if item.passing)
    assert plan.host_bytes == plan.device_bytes  # without a GPU all of it is in one memory
    two = plan_of(tiny_recipe(data), target=target, processes=2)
    assert two.host_bytes == 2 * two.device_bytes


@pytest.mark.parametrize(
    ("head_type", "head", "train_settings", "rows"),
    [
        ("peagle", {}, {"ttt_keep": 0.5}, 1 + 0.5 + 0.25 + 0.125),  # a place behind a root for each depth but the first
        ("peagle", {"num_depths": 1}, {}, 1),
        ("dflash", {}, {"root_share": 0.25}, 1 + 0.25 * 5),  # all of a root's five places
        ("dflash", {"sample_from_anchor": True, "num_depths": 2}, {"ttt_keep": 0.5}, 1 + 2),
        ("medusa", {}, {}, 4),
    ],
)
def test_places_are_counted_among_the_rows_of_a_pass(
    data: Path, target: TargetModel, head_type: str, head: dict[str, Any], train_settings: dict[str, Any], rows: float
) -> None:
    """By hand; and a further layer takes as much again of its numbers and of its attention."""
    changes = {f"head__{name}": value for name, value in head.items()}
    changes |= {f"train__{name}": value for name, value in train_settings.items()}
    config = tiny_recipe(data, head__type=head_type, head__taps=None, **changes)

    def size(**more: Any) -> HeadSize:
        return HeadSize.of(config.head, target.config, target.vocab_size, {**head, **more})

    shares = {"root_share": config.train.root_share, "keep_share": config.train.ttt_keep}
    assert 1 + size().further_rows(size().num_depths or 1, **shares) == pytest.approx(rows)
    if head_type == "medusa":
        return
    one, two, three = (size(num_layers=count) for count in (1, 2, 3))
    assert three.width_per_token - two.width_per_token == two.width_per_token - one.width_per_token > 0
    assert one.attention_heads * 3 == three.attention_heads
    plan = plan_of(config, target=target)
    assert plan.problems == []


# What cannot be


@pytest.mark.parametrize(
    ("changes", "resources", "words"),
    [
        ({}, {"memory": 10 * GB}, ("memory: ", "target.features", "are needed and 10.0 GB are free")),
        ({"target__dtype": "float32"}, {"memory": 30 * GB}, ("target.dtype=bfloat16",)),
        (
            {},
            {"memory": 10**15, "gpus": (Gpu(name="H", free=16 * GB, total=16 * GB),)},
            ("a GPU (H): ", "target.quantization=int4", "target.device_map=auto"),
        ),
        (
            {"head__draft_vocab_size": None},
            {"memory": 10**15, "gpus": (Gpu(name="H", free=26 * GB, total=30 * GB),)},
            ("head: optimiser state", "head.draft_vocab_size", "deepspeed.offload_optimizer"),
        ),
        (
            {"optim__batch_size": 64, "data__max_length": 8192, "train__ttt_steps": 7},
            {"memory": 60 * GB},
            ("a pass of the head", "a smaller optim.batch_size", "train.ttt_steps"),
        ),
        ({}, {"disk": GB}, ("disk: ", "train.keep_checkpoints=0", "head.draft_vocab_size")),
        ({"target__device": "cuda"}, {}, ("target.device is cuda, but there is no GPU here",)),
        ({"data__max_length": 200_000}, {}, ("data.max_length is 200000", "positions for 131072 tokens")),
        ({"head__taps": (1, 2, 40)}, {}, ("tap 40 does not exist: the target has 32 layers",)),
        ({"head__num_heads": 4}, {}, ("head.num_heads is 4, but a head of type eagle3 has no such setting",)),
        ({"target__features": "nowhere"}, {}, ("target.features is nowhere",)),
        ({"data__train": ("none.jsonl",)}, {}, ("no conversations file at none.jsonl",)),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(
    tmp_path: Path, changes: dict[str, Any], resources: dict[str, Any], words: tuple[str, ...]
) -> None:
    """An 8B target on machines of all kinds, by its configuration alone: one line a problem."""
    long_chats = write_chats(tmp_path / "chats.jsonl")
    if "optim__batch_size" in changes:
        rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 8000}]}] * 4
        long_chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "target__model": str(config_folder(tmp_path, LLAMA_8B)),
        "target__dtype": "bfloat16",
        "head__taps": None,
        "head__draft_vocab_size": 32000,
        **changes,
    }
    plan = plan_of(tiny_recipe(long_chats, **settings), resources=replace(ROOMY, **resources))
    assert len(plan.problems) == 1, plan.problems
    assert "\n" not in plan.problems[0]
    for word in words:
        assert word in plan.problems[0]
    assert describe(plan)


def test_the_same_target_fits_where_there_is_room(tmp_path: Path, data: Path) -> None:
    settings: dict[str, Any] = {
        "target__model": str(config_folder(tmp_path, LLAMA_8B)),
        "head__taps": None,
        "head__draft_vocab_size": 32000,
    }
    config = tiny_recipe(data, **settings)
    gpu = Gpu(name="H", free=78 * GB, total=80 * GB)
    plan = plan_of(config, resources=replace(ROOMY, memory=64 * GB, gpus=(gpu,)))
    assert plan.problems == []
    assert plan.target_dtype == "bfloat16"
    four_bit = tiny_recipe(data, **settings, target__quantization="int4")
    small = replace(ROOMY, memory=64 * GB, gpus=(replace(gpu, free=16 * GB),))
    assert plan_of(config, resources=small).problems
    assert plan_of(four_bit, resources=small).problems == []


def on_a_card(
    tmp_path: Path, values: dict[str, Any], *, free: int = 84 * GB, processes: int = 1, **changes: Any
) -> Plan:
    """Rows of 2,048 tokens for an EAGLE-3 head of 32,000 tokens, on an 80 GB card (86e9 bytes, some of them taken)."""
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 1800}]}
    data = tmp_path / "long.jsonl"
    data.write_text(40 * (json.dumps(row) + "\n"))
    settings = {
        "target__model": str(config_folder(tmp_path, values)),
        "head__taps": None,
        "head__draft_vocab_size": 32000,
        "data__max_length": 2048,
        "optim__accumulation": 8,
        **changes,
    }
    gpu = Gpu(name="H", free=free, total=86 * GB)
    resources = replace(ROOMY, memory=256 * GB, gpus=(gpu,))
    return plan_of(tiny_recipe(data, **settings), resources=resources, processes=processes)


def test_an_8b_target_fits_an_80_gb_card(tmp_path: Path) -> None:
    """With which batch is told, and is where the room ends; its states are computed beside the head's pass."""
    plan = on_a_card(tmp_path, LLAMA_8B)
    assert plan.problems == []
    assert plan.largest_batch is not None
    assert plan.largest_batch >= 4
    assert f"room up to optim.batch_size={plan.largest_batch}, with rows of up to 2,048 tokens" in describe(plan)
    at_most = on_a_card(tmp_path, LLAMA_8B, optim__batch_size=plan.largest_batch)
    assert at_most.problems == []
    assert at_most.device_bytes <= 0.95 * 84 * GB
    (problem,) = on_a_card(tmp_path, LLAMA_8B, optim__batch_size=plan.largest_batch + 1).problems
    assert problem.endswith(f"There would be room with optim.batch_size={plan.largest_batch}")


def test_a_70b_target_is_sent_elsewhere(tmp_path: Path) -> None:
    """Its weights alone are more than the card: over CPU memory, or shared out among as many cards as it takes."""
    plan = on_a_card(tmp_path, LLAMA_70B)
    (problem,) = plan.problems
    assert plan.largest_batch == 0
    assert "room for not even one conversation" in describe(plan)
    assert "target: all weights takes 141.1 GB" in problem
    assert "There would be room with target.device_map=auto" in problem
    words = re.search(r"target\.sharded=true on (\d+) such GPUs, a process on each \(ZeRO-3\)", problem)
    assert words is not None
    enough = int(words[1])
    assert on_a_card(tmp_path, LLAMA_70B, processes=enough, target__sharded=True, optim__batch_size=1).problems == []
    assert on_a_card(tmp_path, LLAMA_70B, processes=enough - 1, target__sharded=True, optim__batch_size=1).problems
    assert on_a_card(tmp_path, LLAMA_70B, target__device_map="auto").problems == []


def test_fewer_bits_are_named_where_they_are_enough(tmp_path: Path) -> None:
    (problem,) = on_a_card(tmp_path, LLAMA_8B, free=28 * GB).problems
    assert "target.quantization=int4" in problem.partition("There would be room with")[2]
    small = on_a_card(tmp_path, LLAMA_8B, free=28 * GB, target__quantization="int4", optim__batch_size=1)
    assert small.problems == []


def test_what_goes_on_beside_the_pass_is_counted(tmp_path: Path) -> None:
    """Features of two passes, and the target's forward at the same time as the head's; without overlap neither."""
    beside, after = (on_a_card(tmp_path, LLAMA_8B, train__overlap=overlap) for overlap in (None, False))
    one, two = ({item.name: item for item in plan.memory} for plan in (after, beside))
    forward = one["the target's forward over a conversation"]
    assert forward.passing
    assert not two["the target's forward over a conversation, beside the head's pass"].passing
    features = one["features of a pass's conversations"].num_bytes
    assert two["features of a pass's conversations, and of the next one's"].num_bytes == 2 * features
    assert beside.device_bytes == after.device_bytes + features + forward.num_bytes


def test_a_disk_too_small_for_the_cache(target: TargetModel, data: Path) -> None:
    """The budget that would fit is named; the cache is taken as far as its budget goes, and the rest is told."""
    config = tiny_recipe(data, train__feature_cache_gb=8.0)
    whole = plan_of(config, target=target).disk
    assert whole is not None
    tight = replace(ROOMY, disk=round((whole.total - whole.features / 2) / 0.9))
    (problem,) = plan_of(config, target=target, resources=tight).problems
    assert "train.feature_cache_gb=" in problem
    assert "train.feature_dtype=int8" in problem
    part = plan_of(tiny_recipe(data, train__feature_cache_gb=whole.features / 4e9), target=target)
    assert part.problems == []
    assert "the feature cache holds 25% of the rows visited" in part.notes[0]
    assert part.disk is not None
    assert part.disk.features == pytest.approx(whole.features / 4, rel=1e-3)


def test_processes_need_something_to_do(target: TargetModel, data: Path) -> None:
    (problem,) = plan_of(tiny_recipe(data), target=target, processes=3).problems
    assert "raise optim.accumulation to 2" in problem
    config = tiny_recipe(data)
    sharded = replace(config, target=replace(config.target, sharded=True), deepspeed=DeepSpeedConfig(stage=0))
    (problem,) = plan_of(sharded, target=target).problems
    assert "target.sharded shares the target out among processes" in problem


def test_a_vocabulary_too_small_for_what_is_kept(target: TargetModel, data: Path) -> None:
    (problem,) = plan_of(tiny_recipe(data, head__draft_vocab_size=100), target=target).problems
    assert "260 special, chat and byte tokens are always kept" in problem


# Time

RATES = Rates(features=100.0, first_steps=50.0, all_steps=25.0, decoding=20.0, decoding_alone=10.0, peak_memory_bytes=0)
WORK = Workload(
    num_rows=40,
    num_tokens=4000,
    tokens_in_memory=4000,
    num_labels=2000,
    mean_length=100.0,
    longest=200,
    held_out_tokens=750,
    max_prompt=50,
    is_counted=True,
)


def disk(features_share: float) -> DiskNeeds:
    return DiskNeeds(
        feature_bytes_per_token=1,
        features=0,
        features_share=features_share,
        checkpoint=0,
        best=0,
        checkpoints=0,
        saving=0,
    )


def recipe(**changes: Any) -> RunConfig:
    train_settings = {"ttt_start": 0.4, "ttt_steps": 3, "num_evaluations": 2, **changes}
    return parse_config({"name": "x", "train": train_settings, "eval": {"prompts": 3, "max_tokens": 20}})


def test_time_of_steps_and_epochs_by_hand() -> None:
    """120 visits of 40 rows at 100 tokens: all features once (half of them again at every visit), 40 % of the visits at
    the first rate; 2 evaluations of 3 x 20 tokens together, the same alone twice, and the held-out text."""
    for config in (recipe(steps=60), recipe(epochs=3), recipe(steps=60, epochs=30)):
        for share, features in ((1.0, 40.0), (0.5, 40.0 + 80 * 0.5), (0.0, 120.0)):
            budget = budget_of(config, WORK, RATES, disk(share), speedup=1.0)
            assert (budget.visits, budget.steps, budget.epochs, budget.tokens) == (120, 60, 3.0, 12000)
            times = times_of(config, WORK, budget, RATES, disk(share), speedup=1.0)
            assert times.features == pytest.approx(features)
            assert times.training == pytest.approx(12000 * (0.4 / 50 + 0.6 / 25))
            assert times.evaluations == pytest.approx(2 * (60 / 20 + 2 * 60 / 10 + 750 / 75))
    halved = times_of(recipe(steps=60), WORK, budget, RATES, disk(1.0), speedup=2.0)
    assert halved.features == pytest.approx(20.0)


def test_minutes_are_used_up() -> None:
    config = recipe(minutes=5)
    assert budget_of(config, WORK, None, disk(1.0), speedup=1.0).visits is None
    budget = budget_of(config, WORK, RATES, disk(0.5), speedup=1.0)
    times = times_of(config, WORK, budget, RATES, disk(0.5), speedup=1.0)
    assert times.features + times.training == pytest.approx(300, rel=0.01)
    assert budget.by == "train.minutes"
    assert budget_of(recipe(minutes=5, steps=2), WORK, RATES, disk(0.5), speedup=1.0).by == "train.steps"


def test_a_calibration_measures_and_leaves_nothing(target: TargetModel, data: Path, tmp_path: Path) -> None:
    """The random state of the caller included; and with it the plan has a time."""
    config = tiny_recipe(data)
    before = torch.random.get_rng_state()
    weights = {name: parameter.clone() for name, parameter in target.model.named_parameters()}
    plan = plan_of(config, target=target, calibrated=True, runs_folder=tmp_path / "runs")
    assert plan.problems == []
    assert plan.rates is not None
    assert all(value > 0 for value in (plan.rates.features, plan.rates.first_steps, plan.rates.all_steps))
    assert plan.times is not None
    assert plan.times.total > 0
    assert "training" in describe(plan)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(weights[name], parameter) for name, parameter in target.model.named_parameters())
    assert not (tmp_path / "runs").exists()


def test_a_refused_plan_is_not_calibrated(target: TargetModel, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot fit must not be loaded to find that out."""
    monkeypatch.setattr("train.plan.plan.calibrate", lambda *args: pytest.fail("calibrated"))
    plan = plan_of(tiny_recipe(data), target=target, calibrated=True, resources=replace(ROOMY, memory=1000))
    assert plan.problems


# This machine, and the command


def test_what_is_free_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without psutil, and with the folder of runs not there yet."""
    here = Resources.here(tmp_path / "not" / "yet")
    assert here.memory is not None
    assert here.memory > 0
    assert here.disk > 0
    assert here.cores >= 1
    monkeypatch.setattr("train.plan.resources.importlib.import_module", _refuse_import)
    without = Resources.here(tmp_path)
    assert without.memory is not None
    assert without.memory == pytest.approx(here.memory, rel=0.5)
    assert "cores" in without.describe()


def _refuse_import(name: str) -> None:
    raise ImportError(name)


@pytest.fixture
def recipe_file(target: TargetModel, tmp_path: Path, data: Path) -> Path:
    folder = tmp_path / "target"
    with target.stock() as model:
        model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: planned\ntarget: {{model: {folder}, dtype: float32}}\n"
        f"data: {{train: {data}, max_length: 128, max_repeat_fraction: 1.0, holdout_fraction: 0.2}}\n"
        "head: {draft_vocab_size: null, taps: [1, 2, 4]}\ntrain: {steps: 4, ttt_steps: 2}\neval: {max_tokens: 8}\n"
    )
    assert load_config(path).name == "planned"
    return path


def test_the_command_plans_and_refuses(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "plan.json"
    assert headstart.main(["plan", str(recipe_file), "--json", str(out)]) == 0
    values = json.loads(out.read_text())
    assert values["target"]["parameters"] > 0
    assert values["times"]["total"] > 0
    assert values["disk"]["total"] > 0
    printed = capsys.readouterr().out
    for word in ("Plan of planned", "target:", "head:", "data:", "budget:", "memory", "disk:", "time:"):
        assert word in printed
    assert not (tmp_path / "runs").exists()
    assert headstart.main(["plan", str(recipe_file), "--no-calibrate", "--keep"]) == 0
    kept = json.loads((tmp_path / "runs" / "planned" / PLAN_FILE).read_text())
    assert kept["budget"]["tokens"] == values["budget"]["tokens"]
    bad = ["plan", str(recipe_file), "data.max_length=5000", "head.taps=[1,2,9]", "--no-calibrate", "--json", str(out)]
    assert headstart.main(bad) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headstart: error: ")]
    assert len(errors) == 2
    assert len(json.loads(out.read_text())["problems"]) == 2
    assert headstart.main(["plan", str(recipe_file), "--processes", "0"]) == 2
    assert headstart.main(["plan", str(recipe_file), "train.stepz=3"]) == 2

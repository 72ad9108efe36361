"""Whole training runs on a tiny target: what they leave behind, and that stopping them changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.loading import load_config, write_config
from heads.checkpoint import load_head, read_card
from heads.eagle3 import Eagle3Head
from infer.chat import Rendered
from infer.evaluate import AcceptanceReport, Trace
from infer.target import TargetModel
from tests.train.training_fixtures import Stopped, run, tiny_recipe, tiny_target, write_chats
from train.batch import pack_batch
from train.checkpoints import Checkpoints, step_of, write_checksums
from train.corpus.dataset import load_data
from train.corpus.order import VisitOrder
from train.features import RowFeatures
from train.reports.metrics import read_metrics
from train.reports.report import describe_run

pytestmark = pytest.mark.usefixtures("every_notice")

STEPS = 12


def report_of(accepted_length: int) -> AcceptanceReport:
    trace = Trace(
        domain="all",
        temperature=0.0,
        num_prompt_tokens=1,
        num_tokens=1 + accepted_length,
        round_lengths=(accepted_length,),
        looping=False,
    )
    return AcceptanceReport.of([trace])


def scripted(lengths: Sequence[int]) -> Any:
    remaining = list(lengths)
    return lambda target, head: report_of(remaining.pop(0))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different


def target_hash(target: TargetModel) -> str:
    digest = hashlib.sha256()
    for tensor in target.model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_a_run_leaves_what_it_promises(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Checkpoints, figures and summary; the target is bit for bit what it was and in none of the files."""
    before = target_hash(target)
    summary = run(tiny_recipe(chats), tmp_path, target)
    assert target_hash(target) == before
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    folder = tmp_path / "tiny"
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "best", "last", "metrics.jsonl", "summary.json"}
    assert summary["status"] == "finished"
    assert summary["step"] == STEPS
    card = read_card(folder / "best")
    assert card.target.fingerprint == target.fingerprint
    assert card.acceptance["accepted_length"] >= 1
    own = sum(tensor.nbytes for tensor in weights(folder / "last").values())
    state = torch.load(folder / "last" / "trainer.pt", weights_only=True)
    moments = [tensor for one in state["optimizer"]["state"].values() for tensor in one.values()]
    assert sum(tensor.nbytes for tensor in moments) < 2.05 * own
    events = [record["event"] for record in read_metrics(folder)]
    assert events.count("train") == STEPS
    assert events.count("evaluation") == 2
    assert "accepted length = tokens emitted in draft rounds" in describe_run(folder)


def test_training_teaches(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Overlap on held-out text rises well above its start in some dozens of steps, at both depths."""
    config = tiny_recipe(chats, train__steps=80, train__num_evaluations=8, train__ttt_start=0.0, optim__lr=3e-3)
    run(config, tmp_path, target)
    overlap = [record["overlap"] for record in read_metrics(tmp_path / "tiny") if record["event"] == "evaluation"]
    assert overlap[-1][0] > overlap[0][0] + 0.05
    assert overlap[-1][1] > overlap[0][1]


@pytest.mark.parametrize("stop", [1, 5, 8])
@pytest.mark.parametrize(
    "changes", [{}, {"train__ttt_keep": 0.5, "optim__accumulation": 2, "optim__schedule": "cosine"}]
)
def test_resumed_run_equals_an_uninterrupted_one(
    target: TargetModel, chats: Path, tmp_path: Path, stop: int, changes: dict[str, Any]
) -> None:
    """Weights, optimiser state, learning rates and row order, bit for bit, from any checkpoint."""
    config = tiny_recipe(chats, train__save_every=1, **changes)
    run(config, tmp_path / "whole", target)
    with pytest.raises(Stopped):
        run(config, tmp_path / "parts", target, stop_at=stop + 1)
    notices: list[str] = []
    run(config, tmp_path / "parts", target, resume=True, notices=notices)
    assert any(notice.startswith(f"resumed at step {stop}") for notice in notices)
    whole, parts = tmp_path / "whole" / "tiny", tmp_path / "parts" / "tiny"
    assert_same_weights(whole / "last", parts / "last")
    assert_same_weights(whole / "best", parts / "best")
    states = [torch.load(folder / "last" / "trainer.pt", weights_only=True)["optimizer"] for folder in (whole, parts)]
    for one, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    curves = [
        [(r["step"], r["lr"], r["loss"]) for r in read_metrics(folder) if r["event"] == "train"]
        for folder in (whole, parts)
    ]
    assert curves[0] == curves[1]


def test_accumulated_batches_weigh_every_label_alike(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Two batches of two summed give the step of one batch of four (up to the order of float32 sums)."""
    results = []
    for name, size, accumulation in (("one", 4, 1), ("two", 2, 2)):
        config = tiny_recipe(
            chats,
            name=name,
            train__steps=1,
            train__ttt_start=0.0,
            optim__batch_size=size,
            optim__accumulation=accumulation,
        )
        run(config, tmp_path, target)
        (record,) = [r for r in read_metrics(tmp_path / name) if r["event"] == "train"]
        results.append((record["loss"], record["gradient_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_best_survives_a_restart(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """A worse head once became the best because the best value lived in memory alone."""
    config = tiny_recipe(chats, train__eval_every=3, train__save_every=1)
    with pytest.raises(Stopped):
        run(config, tmp_path, target, stop_at=5, evaluate=scripted([3]))
    best = weights(tmp_path / "tiny" / "best")
    run(config, tmp_path, target, resume=True, evaluate=scripted([2, 2, 1]))
    assert read_card(tmp_path / "tiny" / "best").training["step"] == 3
    assert all(
        torch.equal(a, b) for a, b in zip(best.values(), weights(tmp_path / "tiny" / "best").values(), strict=True)
    )


def test_patience_stops_a_run_that_no_longer_improves(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    config = tiny_recipe(chats, train__eval_every=2, train__patience=2)
    summary = run(config, tmp_path, target, evaluate=scripted([2, 3, 2, 1]))
    assert summary["status"] == "stopped early"
    assert summary["step"] == 8
    assert summary["best"]["step"] == 4


def test_interruption_saves_and_can_be_resumed(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Ctrl-C or SIGTERM ends the step at hand, then the run, with a checkpoint and a summary that says so."""
    config = tiny_recipe(chats)
    pressed = []

    def press(target: TargetModel, head: Eagle3Head) -> AcceptanceReport:
        if not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return report_of(1)

    summary = run(config, tmp_path, target, evaluate=press)
    assert summary["status"] == "interrupted"
    assert summary["step"] == 6
    assert run(config, tmp_path, target, resume=True, evaluate=press)["status"] == "finished"


def test_other_settings_data_or_target_do_not_resume(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """What cannot be the same run is refused and the difference named; a longer budget is fine."""
    run(tiny_recipe(chats), tmp_path, target)
    with pytest.raises(ValueError, match=r"other settings \(optim.lr\)"):
        run(tiny_recipe(chats, optim__lr=5e-4), tmp_path, target, resume=True)
    other = write_chats(tmp_path / "other.jsonl", seed=1)
    with pytest.raises(ValueError, match="data hash was"):
        run(tiny_recipe(other), tmp_path, target, resume=True)
    with pytest.raises(ValueError, match="target fingerprint was"):
        run(tiny_recipe(chats), tmp_path, tiny_target(seed=1), resume=True)
    assert run(tiny_recipe(chats, train__steps=STEPS + 2), tmp_path, target, resume=True)["step"] == STEPS + 2


def test_an_existing_run_is_not_overwritten(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    run(tiny_recipe(chats, train__steps=1), tmp_path, target)
    with pytest.raises(ValueError, match="already holds a run"):
        run(tiny_recipe(chats, train__steps=1), tmp_path, target)
    with pytest.raises(ValueError, match="nothing to resume"):
        run(tiny_recipe(chats, name="fresh"), tmp_path, target, resume=True)
    shutil.rmtree(tmp_path / "tiny" / "checkpoints", ignore_errors=True)
    shutil.rmtree(tmp_path / "tiny" / "last")  # killed in its first evaluation: advice to resume would lead nowhere
    with pytest.raises(ValueError, match="died before its first checkpoint"):
        run(tiny_recipe(chats, train__steps=1), tmp_path, target)


def test_warm_start_takes_over_head_and_vocabulary(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    run(tiny_recipe(chats, head__draft_vocab_size=262), tmp_path, target)
    start = tmp_path / "tiny" / "best"
    config = tiny_recipe(
        chats, name="second", head__init_from=str(start), head__taps=None, train__steps=1, optim__lr=1e-12
    )
    run(config, tmp_path, target)
    first, second = load_head(start)[0], load_head(tmp_path / "second" / "last")[0]
    assert second.vocabulary.target_ids.tolist() == first.vocabulary.target_ids.tolist()
    torch.testing.assert_close(second.fc.weight, first.fc.weight)
    with pytest.raises(ValueError, match=r"head.taps is \[1, 2, 3\]"):
        run(tiny_recipe(chats, name="third", head__init_from=str(start), head__taps=(1, 2, 3)), tmp_path, target)
    with pytest.raises(ValueError, match="other weights"):
        run(config, tmp_path / "elsewhere", tiny_target(seed=1))


def test_different_data_gives_a_different_vocabulary(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """A map under a fixed name was once reused for another data set, or when none was asked for."""
    other = tmp_path / "other.jsonl"
    messages = [{"role": "user", "content": "say hi"}, {"role": "assistant", "content": "hihihi ho"}]
    other.write_text(
        "".join(
            json.dumps({"messages": [{**messages[0], "content": f"say hi {n}"}, messages[1]]}) + "\n" for n in range(9)
        )
    )
    maps = []
    for name, data, size in (("a", chats, 262), ("b", other, 262), ("c", chats, None)):
        run(tiny_recipe(data, name=name, head__draft_vocab_size=size, train__steps=1), tmp_path, target)
        head, card = load_head(tmp_path / name / "last")
        maps.append((len(head.vocabulary), head.vocabulary.provenance.data_hash))
        assert card.vocabulary["target_fingerprint"] == target.fingerprint
    assert [size for size, _ in maps] == [262, 262, 264]
    assert maps[0][1] != maps[1][1]


def test_training_diverging_is_an_error_that_names_the_rows(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are not touched by a step that is not finite, and the last checkpoint stays."""
    config = tiny_recipe(chats, train__save_every=1)
    with pytest.raises(Stopped):
        run(config, tmp_path, target, stop_at=3)
    saved = weights(tmp_path / "tiny" / "last")

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor(float("nan"))

    monkeypatch.setattr("torch.nn.utils.get_total_norm", broken)
    with pytest.raises(ValueError, match=r"step 2 has loss .* on rows .*chats.jsonl:\d+"):
        run(config, tmp_path, target, resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(saved.values(), weights(tmp_path / "tiny" / "last").values(), strict=True)
    )


def test_visit_order_covers_every_row_once_an_epoch() -> None:
    """From any point on, the order is that of an uninterrupted run, epochs differ, and nothing is lost or repeated."""
    order = VisitOrder(50, seed=4)
    epochs = [[order[visit] for visit in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    resumed = VisitOrder(50, seed=4)
    assert [resumed[visit] for visit in range(37, 110)] == [order[visit] for visit in range(37, 110)]
    assert [VisitOrder(50, seed=5)[visit] for visit in range(50)] != epochs[0]


def test_every_conversation_is_accounted_for(target: TargetModel, chats: Path) -> None:
    config = tiny_recipe(chats, data__min_label_tokens=24)
    data = load_data(config.data, target.tokenizer, seed=0)
    account = data.account
    total = account["rows"] + account["held_out"] + account["dropped_few_labels"] + account["dropped_repetitive"]
    assert total == account["conversations_read"] == 40
    assert account["dropped_few_labels"] > 0
    assert not {tuple(row.token_ids) for row in data.rows} & {tuple(row.token_ids) for row in data.held_out}
    prompts = {prompt.token_ids for prompt in data.prompts}
    assert all(
        tuple(row.token_ids[: len(prompt)]) == prompt
        for row, prompt in zip(data.held_out, (p.token_ids for p in data.prompts), strict=True)
    )
    assert prompts


_WORKER = """
import sys
from pathlib import Path
from configs.loading import load_config
from tests.train.training_fixtures import tiny_target
from train.trainer import train
train(load_config(sys.argv[1]), runs_folder=Path(sys.argv[2]), resume=sys.argv[3] == "resume", target=tiny_target(),
      notice=lambda text: print(text, flush=True))
"""


NUM_KILLS = 22


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(
    target: TargetModel, chats: Path, tmp_path: Path, repository: Path
) -> None:
    """kill -9 again and again, in the middle of steps, saves and evaluations: the end is bit for bit that of a run left
    alone, and nothing else is left lying about.
    """
    config = tiny_recipe(chats, train__steps=600, train__save_every=1, train__eval_every=15, train__log_every=50)
    write_config(config, tmp_path / "recipe.yaml")
    run(config, tmp_path / "whole", target)
    chance = random.Random(7)
    num_kills = 0
    for _ in range(3 * NUM_KILLS):
        mode = "resume" if (tmp_path / "parts" / "tiny" / "last").exists() else "fresh"
        if mode == "fresh":
            shutil.rmtree(tmp_path / "parts", ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path / "recipe.yaml"), str(tmp_path / "parts"), mode],
            cwd=repository,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()  # it has loaded its checkpoint
        if num_kills < NUM_KILLS:
            time.sleep(chance.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        process.communicate()
        num_kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert num_kills == NUM_KILLS
    assert not list((tmp_path / "parts" / "tiny").glob(".*"))
    assert_same_weights(tmp_path / "whole" / "tiny" / "last", tmp_path / "parts" / "tiny" / "last")


def test_a_damaged_checkpoint_costs_a_few_steps_and_no_more(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Resume says what it passes over, goes on from the state before it, and ends bit for bit as it would have."""
    config = tiny_recipe(chats, train__save_every=3)
    run(config, tmp_path / "whole", target)
    with pytest.raises(Stopped):
        run(config, tmp_path / "parts", target, stop_at=8)
    weights_file = tmp_path / "parts" / "tiny" / "last" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:1000])
    notices: list[str] = []
    run(config, tmp_path / "parts", target, resume=True, notices=notices)
    assert "model.safetensors is truncated or damaged" in notices[0]
    assert any(text.startswith("resumed at step 3 ") for text in notices)
    assert_same_weights(tmp_path / "whole" / "tiny" / "last", tmp_path / "parts" / "tiny" / "last")


def test_a_full_disk_does_not_end_a_run(
    target: TargetModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves that fail are told and tried again; what was saved before stays, and the last save must succeed."""
    import heads.checkpoint

    write, failing = heads.checkpoint.save_file, [False]

    def full(tensors: Any, path: Path, **settings: Any) -> None:
        if failing[0]:
            Path(path).write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        write(tensors, path, **settings)

    def watch(target: TargetModel, head: Eagle3Head) -> AcceptanceReport:
        failing[0] = not failing[0]  # the first evaluation's save fails, the second one's does not
        return report_of(1)

    monkeypatch.setattr("heads.checkpoint.save_file", full)
    config = tiny_recipe(chats, train__save_every=2)
    notices: list[str] = []
    summary = run(config, tmp_path, target, evaluate=watch, notices=notices)
    assert summary["status"] == "finished"
    told = [text for text in notices if "could not be saved" in text]
    assert any("the best head" in text for text in told)
    assert any("a checkpoint" in text for text in told)
    assert read_card(tmp_path / "tiny" / "best").training["step"] == STEPS
    failing[0] = True
    with pytest.raises(OSError, match="No space left"):
        run(tiny_recipe(chats, name="never"), tmp_path, target, evaluate=lambda target, head: report_of(1))
    assert not (tmp_path / "never" / "last").exists()
    assert not list((tmp_path / "never").glob(".*"))


def test_a_copied_run_is_a_run_of_its_own(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """Under another name it goes on with the same steps, and under another id of the tracker's."""
    run(tiny_recipe(chats, train__steps=4), tmp_path, target)
    state_file = tmp_path / "tiny" / "last" / "trainer.pt"
    state = torch.load(state_file, weights_only=True)
    state["run_id"] = "kept"
    torch.save(state, state_file)
    shutil.copytree(tmp_path / "tiny", tmp_path / "copy")
    for name in ("tiny", "copy"):
        place = tmp_path / name / "last"
        write_checksums(place, key=state["key"], step=4, but=("headstart.json", "checksums.json"))
    seen = {}
    for name in ("tiny", "copy"):
        run(tiny_recipe(chats, name=name, train__steps=6), tmp_path, target, resume=True)
        seen[name] = torch.load(tmp_path / name / "last" / "trainer.pt", weights_only=True)["run_id"]
    assert seen == {"tiny": "kept", "copy": None}


@pytest.mark.parametrize("damage", ["no card", "truncated weights"])
def test_a_damaged_best_head_is_told_before_a_step_is_made(
    target: TargetModel, chats: Path, tmp_path: Path, damage: str
) -> None:
    """Found at the first evaluation it would cost the steps since the last checkpoint, in every attempt again."""
    run(tiny_recipe(chats, train__steps=2), tmp_path, target, evaluate=scripted([2] * 2))
    best = tmp_path / "tiny" / "best"
    if damage == "no card":
        (best / "headstart.json").unlink()
    else:
        os.truncate(best / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"best.*ove.* away, and the run goes on"):
        run(tiny_recipe(chats, train__steps=4), tmp_path, target, resume=True, evaluate=scripted([]))
    shutil.rmtree(best)
    summary = run(tiny_recipe(chats, train__steps=4), tmp_path, target, resume=True, evaluate=scripted([2] * 2))
    assert summary["step"] == 4


def test_rows_beyond_the_targets_last_position_are_refused(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    longest = target.max_length
    with pytest.raises(
        ValueError, match=rf"data\.max_length is {longest + 1}, but tiny has positions for {longest} tok"
    ):
        run(tiny_recipe(chats, data__max_length=longest + 1), tmp_path, target)
    with pytest.raises(
        ValueError, match=rf"eval\.max_tokens is {longest}, but tiny has positions for {longest} tokens"
    ):
        run(tiny_recipe(chats, eval__max_tokens=longest), tmp_path, target)
    assert not (tmp_path / "tiny").exists()


def test_the_end_of_a_run_is_saved_once(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """The earlier state that is kept is an earlier one, not a second copy of the last."""
    config = tiny_recipe(chats, train__save_every=4)
    run(config, tmp_path, target)
    assert [step for step, _ in Checkpoints(tmp_path / "tiny").former()] == [8]
    assert step_of(tmp_path / "tiny" / "last") == STEPS


def test_states_beyond_float16_are_told_as_such() -> None:
    row = Rendered(token_ids=[1, 2], loss_mask=[False, True])
    features = RowFeatures(taps=torch.full((2, 4), 7e4), last=torch.zeros(2, 4), log_normalizer=None)
    with pytest.raises(ValueError, match=r"beyond the range of float16 .*train\.dtype=bfloat16"):
        pack_batch([row], [features], device="cpu", dtype=torch.float16)
    assert pack_batch([row], [features], device="cpu", dtype=torch.bfloat16).taps.isfinite().all()


def test_a_warm_up_longer_than_the_run_is_told(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    run(tiny_recipe(chats, optim__warmup_steps=50), tmp_path, target, notices=notices)
    assert any("optim.warmup_steps=1" in text for text in notices)
    quiet: list[str] = []
    run(tiny_recipe(chats, name="other"), tmp_path, target, notices=quiet)
    assert not any("warmup_steps" in text for text in quiet)


def test_a_run_goes_on_by_its_own_config_alone(target: TargetModel, chats: Path, tmp_path: Path) -> None:
    """`headstart train runs/NAME/config.yaml --resume`: no setting need be given again."""
    config = tiny_recipe(chats)
    run(config, tmp_path / "whole", target)
    with pytest.raises(Stopped):
        run(replace(config, train=replace(config.train, save_every=1)), tmp_path / "parts", target, stop_at=5)
    own = load_config(tmp_path / "parts" / "tiny" / "config.yaml")
    run(own, tmp_path / "parts", target, resume=True)
    assert_same_weights(tmp_path / "whole" / "tiny" / "last", tmp_path / "parts" / "tiny" / "last")

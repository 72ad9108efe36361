"""A head that learns from what it serves: tokens never change, acceptance rises, what goes wrong is undone or ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import train.online as online
from heads.base import DraftHead, final_tap
from heads.checkpoint import CARD_FILE, HeadCard, load_head, save_head
from heads.registry import FAMILIES, family_of_head
from infer.async_engine import AsyncEngine
from infer.calibration import Calibration, ShareMap
from infer.cost import CostModel
from infer.drafters import HybridDrafter, NgramDrafter, TreeSettings
from infer.drafters.recording import StateRecorder
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.request import Completion
from infer.rows import RowGroup
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.target import TargetModel
from tests.head_families import tiny_head
from tests.infer.helpers import sampling
from train.online import OnlineLearner, OnlineSettings

TREE = TreeSettings.chain(3)
SETTINGS = OnlineSettings(num_tokens=8192, lr=3e-3, share=0.5)
PATIENCE = 120.0


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


class Scene:
    """A tiny head on disk, an engine that drafts with it, and what learns."""

    def __init__(
        self,
        target: TargetModel,
        folder: Path,
        *,
        family: str = "eagle3",
        settings: OnlineSettings = SETTINGS,
        head: DraftHead | None = None,
        tree: TreeSettings = TREE,
        lookup: bool = False,
        **engine: Any,
    ) -> None:
        self.head = head or tiny_head(family, target)
        self.folder = save_head(
            folder / "head",
            self.head,
            HeadCard(
                target=target.reference,
                family=family_of_head(self.head),
                acceptance={"accepted_length": 2.0},
                training={"run": "first"},
                certificate={"passed": True},
            ),
        )
        drafter: Any = head_drafter(self.head, target)
        if lookup:
            drafter = HybridDrafter([drafter, NgramDrafter()])
        sharing = Sharing.among_callers(follow_clock=False)
        defaults = {"max_requests": 3, "max_length": 160, "tree": tree, "cost": CostModel.free(), "sharing": sharing}
        self.engine = Engine(target, drafter, **{**defaults, **engine})
        self.said: list[str] = []
        self.learner = OnlineLearner(self.engine, self.folder, settings, notice=self.said.append)

    def serve(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seconds: float = 0.0
    ) -> list[Completion]:
        """Answers, a few at a time as they come in, with as much learning between as there is work."""
        done: list[Completion] = []
        for start in range(0, len(prompts), 3):
            done += self.engine.generate(prompts[start : start + 3], params)
            self.learner.learn()
        return done


def prompts_of(rng: random.Random, number: int) -> list[list[int]]:
    return [[rng.randrange(3, 128) for _ in range(rng.randint(2, 12))] for _ in range(number)]


def length_of(answers: Sequence[Completion]) -> float:
    drafts = sum(answer.speculation.num_drafts for answer in answers)
    return 1 + sum(answer.speculation.num_accepted_tokens for answer in answers) / drafts


def same_weights(one: DraftHead, other: DraftHead) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_recorded_states_are_those_of_the_text(target: TargetModel, tmp_path: Path) -> None:
    """What decoding computed of an answer, over rounds, trees and a prefix taken over, is what one forward over its
    text gives, to the rounding of sums in another order."""
    scene = Scene(target, tmp_path, tree=TreeSettings(max_nodes=8, max_depth=3, adaptive=False))
    recorder = scene.learner.recorder
    prompt = list(range(5, 37))
    scene.engine.generate([prompt], sampling(max_tokens=20))
    scene.engine.generate([[*prompt, 9, 8]], sampling(max_tokens=20))
    taps = (*scene.head.config.taps, final_tap(target.num_layers))
    taken = recorder.take_finished()
    assert len(taken) == 2
    assert taken[1][0].num_reused == len(prompt) - 1
    for request, text in taken:
        states = text.joined()
        assert not states.is_inference()
        assert len(states) == request.num_cached - text.start
        tokens = request.tokens_from(0)[: request.num_cached]
        cache = target.new_cache(num_slots=1, num_columns=len(tokens))
        expected = target.forward([RowGroup(slot=0, prefix=0, tokens=tokens)], cache, taps=taps).taps
        assert expected is not None
        assert torch.allclose(states, expected[text.start :], atol=1e-4)
        assert text.start == max(0, len(request.prompt_ids) - recorder._most_rows // 4)
    assert recorder.take_finished() == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_same_through_swaps(target: TargetModel, tmp_path: Path, temperature: float) -> None:
    """Eight callers at a time, with learning between the rounds and a change of the head after every few: each gets
    what an engine without drafts gives."""
    rng = random.Random(1)
    prompts = prompts_of(rng, 4) * 8
    params = [sampling(temperature, seed=seed, max_tokens=20) for seed in range(len(prompts))]
    expected = Engine(target).generate(prompts, params)
    scene = Scene(target, tmp_path, lookup=True, tree=TreeSettings(max_nodes=8, max_depth=3, adaptive=False))
    learner, installed = scene.learner, 0

    def shake() -> None:
        nonlocal installed
        installed += 1
        weights = {name: torch.randn_like(one) for name, one in scene.head.named_parameters()}
        learner._install(weights, calibration=None, is_original=False)

    async def work() -> list[Completion]:
        async with AsyncEngine(scene.engine, learner=learner) as serving:
            step = learner.after_step

            def after_step(seconds: float) -> None:
                step(seconds)
                if rng.random() < 0.1:
                    shake()

            learner.after_step = after_step  # type: ignore[method-assign]
            gate = asyncio.Semaphore(8)

            async def one(prompt: list[int], param: SamplingParams) -> Completion:
                async with gate:
                    (answer,) = await serving.generate(prompt, param)
                    return answer

            return await asyncio.gather(*map(one, prompts, params))

    answers = asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert installed > 3
    assert learner.fault is None
    assert learner.status().num_steps > 0


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "eagle3" else pytest.mark.slow) for name in FAMILIES]
)
def test_acceptance_rises_on_repeated_traffic(target: TargetModel, tmp_path: Path, family: str) -> None:
    """A random head guesses one token in a hundred; on six prompts asked again and again any family learns to do better
    than that, by figures of requests that the learner does not choose."""
    scene = Scene(target, tmp_path, family=family)
    traffic = prompts_of(random.Random(2), 6) * 6
    params = sampling(max_tokens=40)
    answers = [scene.serve(traffic, params) for _ in range(4)]
    status = scene.learner.status()
    assert scene.learner.fault is None
    assert status.num_swaps > 0, scene.said
    assert length_of(answers[-1]) > length_of(answers[0]) + 0.15, scene.said
    assert status.num_held_out == len(traffic) * 4 // online.HELD_OUT_EVERY
    assert any("the head changes" in line for line in scene.said)


def test_held_out_answers_are_never_trained_on(target: TargetModel, tmp_path: Path, monkeypatch: Any) -> None:
    """Every fifth answer is only judged by, and every other one only trained on."""
    scene = Scene(target, tmp_path)
    trained: list[online.Lesson] = []
    judged: list[online.Answer] = []
    train_step, count = scene.learner._train, scene.learner._count_rounds
    monkeypatch.setattr(scene.learner, "_train", lambda lessons: trained.extend(lessons) or train_step(lessons))
    monkeypatch.setattr(
        scene.learner, "_count_rounds", lambda answers, *rest: judged.extend(answers) or count(answers, *rest)
    )
    scene.serve(prompts_of(random.Random(3), 60), sampling(max_tokens=40))
    assert trained
    assert judged
    assert {id(one) for one in trained}.isdisjoint(id(one) for answer in judged for one in answer.lessons)
    assert all((answer.number + 1) % online.HELD_OUT_EVERY == 0 for answer in judged)
    assert max(lesson.visits for lesson in trained) <= online.MOST_VISITS


def test_what_is_held_is_bounded(target: TargetModel, tmp_path: Path, monkeypatch: Any) -> None:
    """Tokens with states stay within the budget, and so do those of requests that nobody takes."""
    monkeypatch.setattr(online, "LEAST_TOKENS", 1024)
    settings = OnlineSettings(num_tokens=1024)
    scene = Scene(target, tmp_path, settings=settings)
    params = sampling(max_tokens=40)
    prompts = prompts_of(random.Random(4), 60)
    scene.engine.generate(prompts, params)
    recorder = scene.learner.recorder
    most_rows = settings.num_tokens // 32
    waiting = [text.num_rows for text in recorder._texts.values()]
    assert sum(waiting) <= settings.num_tokens + 3 * most_rows
    assert max(waiting) <= most_rows
    for start in range(0, 60, 3):
        scene.engine.generate(prompts[start : start + 3], params)
        scene.learner.after_step(0.0)
        assert scene.learner.status().num_tokens <= settings.num_tokens
    learner = scene.learner
    held = [answer for shelf in (learner._trained, learner._held_out) for answer in shelf.answers]
    assert len(held) < 60
    assert sum(answer.num_tokens for answer in held) == learner.status().num_tokens
    assert learner._held_out.num_tokens <= settings.num_tokens // online.HELD_OUT_SHARE


def test_a_worse_twin_is_not_taken(target: TargetModel, tmp_path: Path) -> None:
    """Weights that went astray lose the comparison, and training starts anew from the head that drafts."""
    scene = Scene(target, tmp_path)
    learner = scene.learner
    traffic = prompts_of(random.Random(2), 6) * 6
    scene.serve(traffic, sampling(max_tokens=40))
    assert learner.status().num_swaps
    before = {name: weight.clone() for name, weight in scene.head.named_parameters()}
    num_swaps = learner.status().num_swaps
    with torch.no_grad():
        for parameter in learner._twin.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for _ in learner._try():
        pass
    assert learner.status().num_swaps == num_swaps
    assert all(torch.equal(weight, before[name]) for name, weight in scene.head.named_parameters())
    assert learner._last is not None
    assert learner._last.z < -online.BETTER
    assert same_weights(learner._twin, scene.head.twin())


@pytest.mark.parametrize("back_to_first", [False, True])
def test_a_bad_swap_is_rolled_back(target: TargetModel, tmp_path: Path, *, back_to_first: bool) -> None:
    """A head that is worse on what comes after it took over goes again, with the calibration that belongs to the one
    before; learning rests."""
    scene = Scene(target, tmp_path)
    learner = scene.learner
    traffic = prompts_of(random.Random(2), 6) * 6
    if not back_to_first:
        scene.serve(traffic * 2, sampling(max_tokens=40))
    else:
        scene.head.load_state_dict(trained_weights(target, tmp_path / "other", traffic))
    calibration = Calibration(maps={0.0: ShareMap(intercept=0.1)})
    learner._grower.calibration = calibration
    before = {name: weight.clone() for name, weight in scene.head.named_parameters()}
    was_learned = learner.has_learned
    assert was_learned != back_to_first
    bad = {name: torch.randn_like(weight) for name, weight in before.items()}
    learner._swap(bad, online.Comparison(num_answers=0, length_before=1.0, length_after=2.0, z=9.0))
    assert learner.has_learned
    assert learner._grower.calibration is None
    scene.serve(traffic, sampling(max_tokens=40))
    status = learner.status()
    assert status.num_rollbacks == 1
    assert learner.has_learned == was_learned
    assert learner._grower.calibration is calibration
    assert all(torch.equal(weight, before[name]) for name, weight in scene.head.named_parameters())
    num_steps = learner.status().num_steps
    scene.serve(traffic[:9], sampling(max_tokens=40))
    assert learner.status().num_steps == num_steps, "learning rests after a rollback"


def trained_weights(target: TargetModel, folder: Path, traffic: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    scene = Scene(target, folder)
    scene.serve([*traffic] * 2, sampling(max_tokens=40))
    assert scene.learner.has_learned
    return scene.head.state_dict()


def test_other_traffic_alone_brings_nothing_back(target: TargetModel, tmp_path: Path) -> None:
    """Text that is drafted worse than before raises the alarm, but both heads are held against it: the one that serves
    it as well as the former stays."""
    scene = Scene(target, tmp_path)
    learner = scene.learner
    learner._live.before.extend([3.0, 3.1, 2.9, 3.0] * 4)
    same = {name: weight.clone() for name, weight in scene.head.named_parameters()}
    learner._former = online._Former(version=-2, weights=same, calibration=None, is_original=True)
    with torch.no_grad():  # the former head was worse
        for weight in same.values():
            weight.copy_(torch.randn_like(weight))
    scene.head.load_state_dict(trained_weights(target, tmp_path / "other", prompts_of(random.Random(2), 6) * 6))
    learner._live.since.extend([1.2, 1.3, 1.1, 1.2] * 4)
    assert learner._live.has_fallen
    scene.serve(prompts_of(random.Random(2), 6) * 4, sampling(max_tokens=40))
    assert learner._held_out_seen or learner.status().num_swaps
    assert learner.status().num_rollbacks == 0


def test_later_requests_take_nothing_over_from_the_former_head(target: TargetModel, tmp_path: Path) -> None:
    """A head's own rows of a text are of its weights: after a change they are computed anew, once."""
    scene = Scene(target, tmp_path)
    prompt = list(range(5, 45))
    reused = []
    for change in (False, False, True, False):
        if change:
            learner = scene.learner
            weights = {name: weight + 0.01 for name, weight in scene.head.named_parameters()}
            learner._install(weights, calibration=None, is_original=False)
        (answer,) = scene.engine.generate([prompt], sampling(max_tokens=8))
        reused.append(answer.num_reused_tokens)
    assert reused == [0, 39, 0, 39]


def test_learning_keeps_to_its_share(target: TargetModel, tmp_path: Path, monkeypatch: Any) -> None:
    """By a clock of its own: pieces of 1 s beside steps of 0.5 s, at a share of 20 %, are 4 s of steps apart."""
    settings = OnlineSettings(num_tokens=8192, share=0.2)
    learner = Scene(target, tmp_path, settings=settings).learner
    pieces = []
    monkeypatch.setattr(learner, "_advance", lambda: (pieces.append(0), (1.0, True))[1])
    for _ in range(800):
        learner.after_step(0.5)
    assert len(pieces) == pytest.approx(100, abs=1)
    assert learner.status().busy_seconds == pytest.approx(100, abs=1)
    learner.settings = OnlineSettings(share=0.0)
    pieces.clear()
    learner._debt_seconds = 0.0
    for _ in range(10):
        learner.after_step(0.5)
    assert pieces == []


@pytest.mark.parametrize("fault", ["loss", "memory", "recorder"])
def test_a_fault_ends_learning_and_nothing_else(
    target: TargetModel, tmp_path: Path, monkeypatch: Any, fault: str
) -> None:
    """A loss that is no number, or memory that is not there: one line, and answers go on, drafted."""
    scene = Scene(target, tmp_path)
    learner = scene.learner
    prompts = prompts_of(random.Random(6), 24)
    expected = Engine(target).generate(prompts, sampling())

    def out_of_memory(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    if fault == "loss":
        with torch.no_grad():
            next(learner._twin.parameters()).fill_(float("nan"))
    elif fault == "memory":
        monkeypatch.setattr(learner._updater, "backward", out_of_memory)
    else:
        monkeypatch.setattr("infer.drafters.recording.RecordedText.add", out_of_memory)
    answers = scene.serve(prompts, sampling())
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert not learner.status().is_on
    assert len(scene.said) == 1
    assert "learning has ended" in scene.said[0]
    assert scene.engine.is_drafting
    assert answers[-1].speculation.num_drafts
    assert learner.status().num_tokens == 0


def test_saving(target: TargetModel, tmp_path: Path) -> None:
    """The learned head goes to a folder of its own, with where it came from and nothing of the texts; nothing else is
    written, and the head that was loaded stays on disk as it is."""
    scene = Scene(target, tmp_path)
    before = {path: path.read_bytes() for path in scene.folder.iterdir()}
    with pytest.raises(ValueError, match="nothing to save"):
        scene.learner.save(tmp_path / "learned")
    scene.serve(prompts_of(random.Random(2), 6) * 10, sampling(max_tokens=40))
    assert {path.name for path in tmp_path.iterdir()} == {"head"}
    folder = scene.learner.save(tmp_path / "learned")
    assert {path: path.read_bytes() for path in scene.folder.iterdir()} == before
    loaded, card = load_head(folder, target.weights)
    assert same_weights(loaded, scene.head)
    learned = card.training["learned_while_serving"]
    assert card.training["run"] == "first"
    assert learned["from"] == "head"
    assert learned["tokens"] > 0
    assert learned["swaps"] == scene.learner.status().num_swaps
    assert not card.acceptance
    assert not card.certificate
    assert set(json.loads((folder / CARD_FILE).read_text())) == {
        "headstart_version",
        "target",
        "head",
        "drafter",
        "acceptance",
        "training",
    }
    with pytest.raises(ValueError, match="there already"):
        scene.learner.save(folder)


def test_what_cannot_learn_is_refused(target: TargetModel, tmp_path: Path) -> None:
    scene = Scene(target, tmp_path)
    with pytest.raises(ValueError, match="one trained head that drafts; here ngram drafts"):
        OnlineLearner(Engine(target, NgramDrafter()), scene.folder)
    with pytest.raises(ValueError, match="one trained head that drafts; here nothing drafts"):
        OnlineLearner(Engine(target), scene.folder)
    scene.engine.generate([[5, 6]], sampling(max_tokens=2))
    with pytest.raises(ValueError, match="has served already"):
        OnlineLearner(scene.engine, scene.folder)
    for wrong in ({"share": 0.9}, {"num_tokens": 10}, {"lr": 0.0}):
        with pytest.raises(ValueError, match="learning"):
            OnlineSettings(**wrong)  # type: ignore[arg-type]


def test_static_rounds_serve_a_head_that_learns(target: TargetModel, tmp_path: Path) -> None:
    """Where rounds run over static shapes, trees come from the host, which sees new weights at once."""
    scene = Scene(target, tmp_path, graphs=True)
    traffic = prompts_of(random.Random(2), 6) * 6
    expected = Engine(target).generate(traffic, sampling(max_tokens=40))
    answers = [scene.serve(traffic, sampling(max_tokens=40)) for _ in range(2)]
    for each in answers:
        assert [answer.token_ids for answer in each] == [answer.token_ids for answer in expected]
    assert scene.engine.num_captured
    assert scene.learner.status().num_swaps
    assert length_of(answers[-1]) > length_of(answers[0])


def test_an_idle_engine_learns_and_then_sleeps(target: TargetModel, tmp_path: Path) -> None:
    """With nothing to serve the engine's thread works through what was served, and stops when that is learned."""
    scene = Scene(target, tmp_path, settings=OnlineSettings(num_tokens=8192, share=0.0))

    async def work() -> None:
        async with AsyncEngine(scene.engine, learner=scene.learner) as serving:
            prompts = prompts_of(random.Random(7), 10)
            await asyncio.gather(*(serving.generate(prompt, sampling(max_tokens=30)) for prompt in prompts))
            num_steps = -1
            while num_steps < (num_steps := scene.learner.status().num_steps) or not num_steps:
                await asyncio.sleep(0.3)
            assert not serving._learns
            await serving.generate([5, 6, 7], sampling(max_tokens=3))

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    status = scene.learner.status()
    assert status.idle_seconds > 0
    assert status.busy_seconds == 0
    assert scene.learner.fault is None


def test_the_recorder_drafts_nothing(target: TargetModel) -> None:
    """It is beside those that draft, and takes no part."""
    recorder = StateRecorder((1,), most_tokens=4096)
    assert recorder.kinds == ()
    hybrid = HybridDrafter([NgramDrafter(), recorder])
    assert hybrid.kinds == NgramDrafter().kinds
    (answer,) = Engine(target, hybrid, tree=TREE).generate([[5, 6, 7]], sampling())
    assert answer.token_ids == Engine(target).generate([[5, 6, 7]], sampling())[0].token_ids

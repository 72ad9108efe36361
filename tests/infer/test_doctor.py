"""The doctor: a sound head passes, and every way of damaging one is found and named.

Heads are fitted for a moment to a tiny target's own answers, the ones that the doctor then looks at: what is tested is
the doctor, and it needs heads that know something.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import headstart
from heads.base import DraftHead
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, save_head
from heads.registry import FAMILIES
from heads.vocab import DraftVocabulary
from infer.chat import render_prompt, tokenizer_hash
from infer.cli.doctor import _by_turns
from infer.doctor import Report, Verdict, examine
from infer.doctor.texts import Evidence, gather_evidence, write_texts
from infer.drafters.block import BlockRound
from infer.drafters.head import PathStepper, RecurrentStepper
from infer.drafters.stepper import Frontier
from infer.prompts import EvaluationPrompt
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer

NUM_LAYERS = 4
VOCAB_SIZE = 264
DRAFT_VOCAB_SIZE = 176
TEXTS = ("abc", "one two", "red fish", "x y z", "hello", "a bird", "stone", "river", "blue tree", "seven")
PROMPTS = [render_prompt(toy_tokenizer(), [{"role": "user", "content": text}], raw=True) for text in TEXTS]
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"taps": (1, 2, 4)},
    "eagle1": {},
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "prefix_layer": True},
    "peagle": {"taps": (1, 2, 4), "markov_rank": 8},
    "dflash": {"taps": (1, 2, 4), "markov_rank": 8},
    "early_exit": {"exit_layer": 3},
}


def tiny_target(seed: int = 0) -> TargetModel:
    model = make_tiny_model(
        "llama", seed=seed, vocab_size=VOCAB_SIZE, num_hidden_layers=NUM_LAYERS, initializer_range=0.5
    )
    model.generation_config.eos_token_id = 3
    with torch.no_grad():  # a real LM head has strong and weak directions
        model.lm_head.weight *= torch.logspace(0.3, -0.6, model.config.hidden_size)
    return TargetModel.wrap(model, toy_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return gather_evidence(target, write_texts(target, PROMPTS), range(NUM_LAYERS + 2))


@dataclass(frozen=True)
class Made:
    head: DraftHead
    folder: Path


def make_head(
    family: str, target: TargetModel, evidence: Evidence, root: Path, *, num_steps: int = 150, **settings: Any
) -> Made:
    """A head of a family with a reduced vocabulary, fitted to the evidence, and saved."""
    kind = FAMILIES[family]
    counts: dict[int, int] = {}
    for text in evidence.texts:
        for token in text.answer:
            counts[token] = counts.get(token, 0) + 1
    vocabulary = DraftVocabulary.from_counts(counts, size=DRAFT_VOCAB_SIZE, vocab_size=VOCAB_SIZE, keep_ids=[3])
    config = kind.config.for_target(
        target.config,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        vocab_size=VOCAB_SIZE,
        **{**FAMILY_SETTINGS[family], **settings},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = kind.head(config, vocabulary).bind(target.weights)
    for parameter in head.parameters():  # from the target's LM head, and random but for that
        if parameter.shape == (DRAFT_VOCAB_SIZE, target.hidden_size):
            parameter.data = target.lm_head_weight[head.target_ids].clone()
    fit(head, evidence, num_steps)
    folder = root / family
    save_head(folder, head, HeadCard(target=target.reference, family=family))
    return Made(head=head.eval(), folder=folder)


def fit(head: DraftHead, evidence: Evidence, num_steps: int) -> None:
    """Cross-entropy against the target's own distribution, at all depths that the head has, up to five."""
    plan = evidence.plan(min(5, head.num_depths or 5))
    batch = evidence.batch(head.config.taps)
    probs = torch.softmax(evidence.logits, dim=-1).clone()
    labels = [
        probs[torch.searchsorted(evidence.logit_rows, rows + 1 + step)][:, head.target_ids]
        for step, rows in enumerate(plan)
    ]
    clones = {name: getattr(batch, name).clone() for name in ("token_ids", "loss_mask", "taps", "last")}
    batch = type(batch)(lengths=batch.lengths, log_normalizer=batch.log_normalizer.clone(), **clones)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    for _ in range(num_steps):
        loss = torch.zeros(())
        for label, answer in zip(labels, head.unroll(batch, plan), strict=True):
            loss = loss + functional.cross_entropy(answer.logits(), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def sound(target: TargetModel, evidence: Evidence, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_head("eagle3", target, evidence, tmp_path_factory.mktemp("sound"))


def look(folder: Path, target: TargetModel, *, quick: bool = True) -> Report:
    return examine(folder, target, PROMPTS, quick=quick)


def damaged(
    made: Made,
    tmp_path: Path,
    *,
    tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A copy of a head's folder with its weights or its configuration changed."""
    folder = tmp_path / "damaged"
    shutil.copytree(made.folder, folder)
    if tensors is not None:
        weights = load_file(folder / WEIGHTS_FILE)
        tensors(weights)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_FILE)
    if config is not None:
        values = json.loads((folder / CONFIG_FILE).read_text())
        config(values)
        (folder / CONFIG_FILE).write_text(json.dumps(values))
    return folder


def failing(report: Report) -> dict[str, str]:
    """What failed, by check."""
    return {finding.check: finding.finding for finding in report.failed}


def test_a_sound_head_passes_every_check(sound: Made, target: TargetModel) -> None:
    """No check may cry wolf, the readings of single tensors included. (The toy's vocabulary leaves out bytes that it
    never writes, which is worth a warning.)"""
    report = look(sound.folder, target, quick=False)
    assert failing(report) == {}
    assert report.passed
    assert [finding.check for finding in report.findings if finding.verdict is not Verdict.OK] == ["vocabulary"]
    assert report["other readings"].figures["overlap"] > 0.3, "the head knows too little to tell anything"
    assert report["train/decode parity"].figures["num_tensors"] > 1000
    assert report["rounds foretold"].figures["num_rounds"] > 50


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "eagle3"])
def test_every_family_passes_and_its_damage_is_named(
    family: str, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    """The doctor knows heads by their base classes alone. A map of a family's own form is found out when it is one id
    off; where the LM head is the target's, any map fits, and a matrix is negated instead."""
    # A block that reads the target's states as keys alone takes longer to learn anything.
    made = make_head(family, target, evidence, tmp_path, num_steps=300 if family == "dflash" else 80)
    report = look(made.folder, target, quick=False)
    assert failing(report) == {}
    assert report["agreement"].figures["agreement"][0] > 0.3
    assert report["train/decode parity"].figures["num_tensors"] > 100
    assert report["rounds foretold"].figures["num_rounds"] > 20

    change, named = {
        "eagle1": (negate("layers.0.mlp.down_proj.weight"), "layers.0.mlp.down_proj.weight negated"),
        "dflash": (negate("fc.weight"), "fc.weight negated"),
        "early_exit": (negate("adapter.down_proj.weight"), "adapter.down_proj.weight negated"),
    }.get(family, (shift_map, "the map's ids lowered by one"))
    report = look(damaged(made, tmp_path, tensors=change), target, quick=False)
    assert named in failing(report)["other readings"]


def shift_map(tensors: dict[str, torch.Tensor]) -> None:
    """Every draft token stands for the target token after its own."""
    if "token_map" in tensors:
        tensors["token_map"] += 1
        return
    tensors["d2t"] += 1
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_are_all_tried(family: str) -> None:
    """A new family needs its settings here."""
    assert family in FAMILY_SETTINGS


def set_taps(values: dict[str, Any], taps: list[int]) -> None:
    values["eagle_aux_hidden_state_layer_ids"] = taps
    values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in taps]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda values: set_taps(values, [2, 3, 5]), "taps [1, 2, 4]"),
        (lambda values: values.update(norm_before_residual=True), "norm_before_residual = false"),
        (lambda values: values.update(norm_output=True), "norm_output = false"),
        (lambda values: values.update(rope_theta=100.0), "the target's rotary embeddings (rope_theta 10000)"),
    ],
    ids=["taps one off", "residual flag", "output norm flag", "rope base"],
)
def test_a_wrong_configuration_is_named(
    config: Callable[[dict[str, Any]], None], named: str, sound: Made, target: TargetModel, tmp_path: Path
) -> None:
    """The weights are better in the reading that they were trained in, and the doctor says in which."""
    report = look(damaged(sound, tmp_path, config=config), target)
    finding = report["other readings"]
    assert finding.verdict is Verdict.FAIL
    assert f"with {named}" in finding.finding, "named first, not among those that are better too"
    (right,) = [one for one in finding.figures["readings"] if one["name"] == named]
    # The sound head's own figures, which the right reading has again.
    assert right["overlap"] == pytest.approx(look(sound.folder, target)["other readings"].figures["overlap"], abs=1e-6)


def test_taps_changed_in_one_file_contradict_the_other(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    report = look(damaged(sound, tmp_path, config=lambda values: set_taps(values, [2, 3, 5])), target)
    assert "headstart.json says taps = [1, 2, 4]" in failing(report)["card"]


def test_taps_that_are_named_twice_must_agree(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    """The two keys count layers differently; equal lists in both are the classic mistake."""

    def same_lists(values: dict[str, Any]) -> None:
        values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = values["eagle_aux_hidden_state_layer_ids"]

    report = look(damaged(sound, tmp_path, config=same_lists), target)
    assert "names its taps twice and differently" in failing(report)["files"]
    assert report["other readings"].verdict is Verdict.UNTESTED


ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


def negate(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: -tensors[name]})


def exchange(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({first: tensors[second], second: tensors[first]})


def to_pairs(tensors: dict[str, torch.Tensor]) -> None:
    """As converters leave q and k whose rotary embeddings turn neighbouring features."""
    for name in (f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"):
        rows = tensors[name].unflatten(0, (-1, 2, 4))  # heads of 8 features: two halves of 4
        tensors[name] = rows.transpose(1, 2).flatten(0, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (negate(f"{MLP}.down_proj.weight"), f"{MLP}.down_proj.weight negated"),
        (negate("fc.weight"), "fc.weight negated"),
        (
            lambda tensors: tensors.update(
                {f"{ATTENTION}.o_proj.weight": tensors[f"{ATTENTION}.o_proj.weight"].T.contiguous()}
            ),
            f"{ATTENTION}.o_proj.weight transposed",
        ),
        (
            exchange(f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"),
            f"{MLP}.gate_proj.weight and {MLP}.up_proj.weight exchanged",
        ),
        (
            exchange(f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"),
            f"{ATTENTION}.k_proj.weight and {ATTENTION}.v_proj.weight exchanged",
        ),
        (to_pairs, "query and key rows reordered from pairs to halves"),
        (shift_map, "the map's ids lowered by one"),
    ],
)
def test_a_damaged_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], None], named: str, sound: Made, target: TargetModel, tmp_path: Path
) -> None:
    """Undoing the damage makes the head better, and nothing else does as much. (Negating what a product has on its
    other side undoes it too, so the name is one of those shown.)"""
    finding = look(damaged(sound, tmp_path, tensors=change), target, quick=False)["other readings"]
    assert finding.verdict is Verdict.FAIL
    assert named in finding.finding
    best = finding.figures["readings"][0]["overlap"]
    (right,) = [one for one in finding.figures["readings"] if one["name"] == named]
    assert right["overlap"] == pytest.approx(best, abs=1e-6)


def random_lm_head(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std()


def permute_map(tensors: dict[str, torch.Tensor]) -> None:
    order = torch.randperm(DRAFT_VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    tensors["d2t"] = ids[order] - torch.arange(DRAFT_VOCAB_SIZE)


@pytest.mark.parametrize(
    ("change", "check", "named"),
    [
        (random_lm_head, "LM head", "lm_head.weight looks like random numbers"),
        (
            lambda tensors: tensors["midlayer.hidden_norm.weight"].zero_(),
            "tensors",
            "the norm midlayer.hidden_norm.weight is all zeros",
        ),
        (lambda tensors: tensors["norm.weight"].mul_(1e6), "tensors", "the norm norm.weight has entries of"),
        (lambda tensors: tensors["fc.weight"].zero_(), "tensors", "fc.weight is all zeros"),
        (lambda tensors: tensors["fc.weight"][3, 5:6].fill_(torch.nan), "files", "fc.weight holds non-finite values"),
        (lambda tensors: tensors.pop("norm.weight"), "files", "missing norm.weight [32]"),
        (permute_map, "files", "draft vocabulary must be strictly ascending"),
        (lambda tensors: tensors["d2t"].zero_(), "files", "d2t is all zeros"),
    ],
)
def test_a_useless_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], Any],
    check: str,
    named: str,
    sound: Made,
    target: TargetModel,
    tmp_path: Path,
) -> None:
    """What cannot be undone is at least found where it is, without a look at any text."""
    report = look(damaged(sound, tmp_path, tensors=change), target)
    assert named in failing(report)[check]


def test_rows_of_an_lm_head_out_of_order_are_found(target: TargetModel, evidence: Evidence, tmp_path: Path) -> None:
    """A head that began with the target's LM head still has its rows, so their order can be read from them."""
    made = make_head("medusa", target, evidence, tmp_path, num_steps=0)

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        order = torch.randperm(DRAFT_VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][order]

    finding = failing(look(damaged(made, tmp_path, tensors=shuffle), target))["LM head"]
    assert "the rows of lm_heads.0.weight are the target's for other tokens" in finding
    assert "lm_heads.1.weight" not in finding


@pytest.mark.parametrize("name", ["embed_tokens.weight", "midlayer.embed_tokens.weight"])
def test_an_embedding_of_another_model_is_refused(name: str, sound: Made, target: TargetModel, tmp_path: Path) -> None:
    """A right copy is no fault, rounded to bfloat16 or not; headstart uses the target's in any case."""
    for dtype in (torch.float32, torch.bfloat16):
        right = target.embedding_weight.detach().to(dtype)
        folder = damaged(
            sound, tmp_path / str(dtype), tensors=lambda tensors, right=right: tensors.update({name: right})
        )
        assert failing(look(folder, target)) == {}
    other = tiny_target(seed=1).embedding_weight.detach()  # the row of the padding token is zero in both
    report = look(damaged(sound, tmp_path, tensors=lambda tensors: tensors.update({name: other})), target)
    assert failing(report)["lent weights"].startswith(f"{name} is not the target's embedding: 263 of 264 rows differ")


def test_a_lent_lm_head_that_was_saved_must_be_the_targets(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    """Medusa heads of blocks alone keep a copy of it for other programs; headstart overwrites it without a word."""
    made = make_head("medusa", target, evidence, tmp_path, original_lm_head=True, num_steps=0)
    assert look(made.folder, target)["lent weights"].verdict is Verdict.OK
    report = look(damaged(made, tmp_path, tensors=negate("lm_heads.0.weight")), target)
    assert "lm_heads.0.weight is not the target's own" in failing(report)["lent weights"]


def test_a_tied_flag_beside_an_lm_head_is_found(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    report = look(damaged(sound, tmp_path, config=lambda values: values.update(tie_word_embeddings=True)), target)
    assert "tie_word_embeddings = true" in failing(report)["lent weights"]


def test_another_target_is_found(sound: Made, tmp_path: Path) -> None:
    """By its fingerprint, and by how little the head knows of it."""
    report = look(sound.folder, tiny_target(seed=1))
    assert "tiny has other weights or another tokenizer" in failing(report)["target"]
    assert "no better than always guessing" in failing(report)["agreement"]
    assert "counted for another target" not in failing(report).get("vocabulary", "")


def test_a_map_that_was_counted_for_another_target_is_found(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    folder = damaged(sound, tmp_path)
    card = json.loads((folder / "headstart.json").read_text())
    assert target.reference.tokenizer_hash == tokenizer_hash(target.tokenizer)
    card["head"]["vocabulary"]["tokenizer_hash"] = "of another tokenizer"
    (folder / "headstart.json").write_text(json.dumps(card))
    assert "tokenizer hash is of another tokenizer" in failing(look(folder, target))["vocabulary"]


def test_a_head_that_fell_behind_its_card_is_found(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    """Noise in all weights costs acceptance and nothing else; the card remembers what it was."""

    def noise(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.ndim == 2:
                tensor += torch.randn(tensor.shape, generator=generator) * tensor.std()

    folder = damaged(sound, tmp_path, tensors=noise)
    card = json.loads((folder / "headstart.json").read_text())
    card["acceptance"] = {"overlap": look(sound.folder, target)["agreement"].figures["overlap"]}
    (folder / "headstart.json").write_text(json.dumps(card))
    finding = look(folder, target)["agreement"]
    assert finding.verdict is Verdict.FAIL
    assert "the card says an overlap of" in finding.finding
    card_of_sound = damaged(sound, tmp_path / "sound")
    (card_of_sound / "headstart.json").write_text(json.dumps(card))
    assert failing(look(card_of_sound, target)) == {}


def test_a_head_that_was_never_trained_fails(target: TargetModel, evidence: Evidence, tmp_path: Path) -> None:
    """It knows no more than that some token is frequent, and no reading of it is called the right one."""
    report = look(make_head("eagle3", target, evidence, tmp_path, num_steps=0).folder, target)
    assert "no better than always guessing" in failing(report)["agreement"]
    assert "too weak to tell" in report["other readings"].finding


def test_states_of_another_position_are_found(target: TargetModel, evidence: Evidence, tmp_path: Path) -> None:
    """A head whose training paired each token with the states of one position earlier drafts well, for those who pair
    them so."""
    shifted = Evidence(
        texts=evidence.texts,
        num_layers=evidence.num_layers,
        states={tap: states.roll(1, 0) for tap, states in evidence.states.items()},
        logits=evidence.logits,
        logit_rows=evidence.logit_rows,
    )
    finding = failing(look(make_head("medusa", target, shifted, tmp_path).folder, target))["other readings"]
    assert "with the states of the position before the one beside each token" in finding


def normed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RecurrentStepper.forward
    monkeypatch.setattr(
        RecurrentStepper, "forward", lambda self, groups, states: self.head.norm(forward(self, groups, states))
    )


def positions_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted rows one position further on than they are; the text's rows are right."""
    from infer.rows import GrowingRows

    add = GrowingRows.add

    def shifted(self: GrowingRows, *args: Any) -> Any:
        group = add(self, *args)
        vars(group)["depths"] = [depth + 1 for depth in group.depths or ()]
        return group

    monkeypatch.setattr(GrowingRows, "add", shifted)


def states_of_the_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft step goes on from the fused states again, and not from the head's own."""
    from infer.drafters.head import _RecurrentRound

    logits = _RecurrentRound.logits

    def restarted(self: Any, frontiers: Any, depth: int) -> Any:
        vars(self).setdefault("first", self._states)
        self._states = vars(self)["first"]
        return logits(self, frontiers, depth)

    monkeypatch.setattr(_RecurrentRound, "logits", restarted)


@pytest.mark.parametrize(
    ("fault", "depth", "tensor"),
    [
        (normed_twice, 1, "norm"),
        (positions_off, 2, "midlayer.self_attn.o_proj"),
        (states_of_the_wrong_row, 3, "state read"),
    ],
)
def test_a_decode_loop_that_computes_something_else_is_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    depth: int,
    tensor: str,
    sound: Made,
    target: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults in decoding alone, which change no token: the depth and the tensor at which it leaves training are named.
    (A norm applied twice once left a head that looked good in training with a tenth of its acceptance.)"""
    fault(monkeypatch)
    report = look(sound.folder, target)
    assert f"part at depth {depth}: {tensor} differs" in failing(report)["train/decode parity"]
    assert report["other readings"].verdict is Verdict.OK  # the head itself is as sound as ever


def test_a_path_head_drafted_at_the_wrong_depth_is_found(
    target: TargetModel, evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_head("medusa", target, evidence, tmp_path)
    draft_logits = PathStepper.draft_logits
    monkeypatch.setattr(
        PathStepper, "draft_logits", lambda self, roots, path, depth: draft_logits(self, roots, path, max(0, depth - 1))
    )
    assert "part at depth 2: drafted state differs" in failing(look(made.folder, target))["train/decode parity"]


def test_a_correction_by_another_token_is_found(
    target: TargetModel, evidence: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that drafts in one pass, corrected by the root's token at every depth."""
    made = make_head("peagle", target, evidence, tmp_path)
    asked = BlockRound._asked

    def corrected_by_roots(self: BlockRound, frontiers: Sequence[Frontier], depth: int) -> Any:
        rows, _ = asked(self, frontiers, depth)
        return rows, [self._root_tokens[frontier.index] for frontier in frontiers for _ in frontier.nodes]

    monkeypatch.setattr(BlockRound, "_asked", corrected_by_roots)
    finding = failing(look(made.folder, target))["train/decode parity"]
    assert "part at depth 2: what the LM head reads differs" in finding


def test_rounds_that_draft_other_tokens_than_the_logits_say_are_found(
    sound: Made, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors may be right and the draft still wrong: here the drafter maps draft tokens by a shifted map."""
    from infer.drafters.growing import TreeGrower

    made = TreeGrower.__init__

    def mapped(self: TreeGrower, stepper: Any, **settings: Any) -> None:
        made(self, stepper, **settings)
        self._target_id_list = [*self._target_id_list[1:], self._target_id_list[0]]

    monkeypatch.setattr(TreeGrower, "__init__", mapped)
    report = look(sound.folder, target)
    assert list(failing(report)) == ["rounds foretold"]
    assert "tokens foretold, 1 decoded" in failing(report)["rounds foretold"]


def test_a_half_precision_target_is_looked_at_too(tmp_path: Path) -> None:
    """The head runs in float32 on states in bfloat16, so that parity holds to float32's rounding all the same; rounds
    are not compared, since answers may leave the texts."""
    model = tiny_target().model.to(torch.bfloat16)
    half = TargetModel.wrap(model, toy_tokenizer(), name="tiny")
    evidence = gather_evidence(half, write_texts(half, PROMPTS), range(NUM_LAYERS + 2))
    report = look(make_head("hydra", half, evidence, tmp_path, num_steps=80).folder, half)
    assert failing(report) == {}
    assert report["train/decode parity"].verdict is Verdict.OK
    assert report["rounds foretold"].verdict is Verdict.UNTESTED


@pytest.fixture(scope="module")
def on_disk(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder, and the prompts to whose answers the head was fitted."""
    root = tmp_path_factory.mktemp("disk")
    tiny_target().model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in TEXTS]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def test_the_command_prints_and_writes_its_findings(
    sound: Made, on_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 for a sound head and 1 for a damaged one; the file holds every finding and every reading."""
    target = ["--target", str(on_disk / "target"), "--prompts", str(on_disk / "prompts.jsonl")]
    path = tmp_path / "doctor.json"
    command = ["doctor", "--quick", "--raw", "--limit", "10", *target, "--json", str(path)]
    assert headstart.main([*command, str(sound.folder)]) == 0
    shown = capsys.readouterr().out
    values = json.loads(path.read_text())
    assert values["passed"]
    assert values["findings"][0]["check"] == "files"
    assert "Sound: no check fails, 1 warning" in shown
    assert len(values["findings"][-3]["figures"]["readings"]) > 10

    folder = damaged(sound, tmp_path, config=lambda values: values.update(norm_before_residual=True))
    assert headstart.main([*command, str(folder)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "with norm_before_residual = false" in shown
    assert "correct the flag" in shown
    assert not json.loads(path.read_text())["passed"]


def test_texts_are_of_all_domains() -> None:
    """Only the first prompts are answered, so domains take turns, in the order of the file."""
    domains = ["a", "a", "a", "b", "c", "b"]
    chats = [
        EvaluationPrompt(domain=domain, messages=({"role": "user", "content": str(i)},))
        for i, domain in enumerate(domains)
    ]
    assert [chat.messages[0]["content"] for chat in _by_turns(chats)] == ["0", "3", "4", "1", "5", "2"]


def test_what_is_no_head_is_a_mistake_of_the_user(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, as for every command: nothing was looked at."""
    assert headstart.main(["doctor", "ngram", "--target", str(on_disk / "target")]) == 2
    assert "is not one trained head to look over" in capsys.readouterr().err
    assert headstart.main(["doctor", str(on_disk), "--target", str(on_disk / "target")]) == 2
    assert "headstart.json" in capsys.readouterr().err


def test_a_folder_without_its_weights_fails(sound: Made, target: TargetModel, tmp_path: Path) -> None:
    folder = damaged(sound, tmp_path)
    (folder / WEIGHTS_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    finding = failing(look(folder, target))["files"]
    assert f"the folder lacks {WEIGHTS_FILE}" in finding
    assert "pytorch_model.bin is not read" in finding


@pytest.mark.slow
def test_the_demonstration_head_and_damaged_copies(smollm2_path: Path, repository: Path, tmp_path: Path) -> None:
    """On a real head, if one has been trained: sound as it is, and each kind of damage found."""
    folder = repository / "runs" / "demo" / "best"
    if not folder.is_dir():
        pytest.skip(f"no head in {folder}; run `headstart demo`")
    from infer.evaluate import limit_per_domain, render_prompts
    from infer.prompts import load_prompts

    target = TargetModel.load(smollm2_path, dtype="float32")
    chats = limit_per_domain(load_prompts(), 1)
    prompts = [prompt.token_ids for prompt in render_prompts(target.tokenizer, chats)]
    made = Made(head=torch.nn.Module(), folder=folder)  # type: ignore[arg-type]
    assert failing(examine(folder, target, prompts, quick=True)) == {}
    flag = damaged(made, tmp_path / "flag", config=lambda values: values.update(norm_before_residual=True))
    assert "norm_before_residual" in failing(examine(flag, target, prompts, quick=True))["other readings"]
    lm_head = damaged(
        made,
        tmp_path / "lm_head",
        tensors=lambda tensors: tensors["lm_head.weight"].copy_(tensors["lm_head.weight"].roll(1, 0)),
    )
    assert "lm_head.weight" in failing(examine(lm_head, target, prompts, quick=True))["LM head"]

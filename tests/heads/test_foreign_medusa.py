"""Medusa heads of other projects: equal draft logits on both sides of a conversion, and refusals by name.

The references below compute logits from the files alone, by each project's public description, in plain torch, on the
state that a hook takes behind the target's final norm. They share no code with headstart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from heads.base import TargetWeights
from heads.checkpoint import CONFIG_FILE, HeadCard, TargetReference, load_head, save_head
from heads.foreign import FORMATS, Imported, detect_format, read_foreign, write_foreign
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model
from tests.heads.path_heads import randomize

LAYERS, VOCABULARY, HIDDEN, HEADS = 3, 128, 32, 3
FILES = {"medusa": "medusa_lm_head.safetensors", "vllm-medusa": "model.safetensors"}
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A target, and for a text its states behind the final norm [T, H], by a hook and as headstart taps them."""

    reference: TargetReference
    weights: TargetWeights
    hooked: torch.Tensor
    tapped: torch.Tensor


@pytest.fixture(scope="module")
def world() -> World:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    hooked: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_hook(lambda module, args, out: hooked.append(out[0]))
    with torch.no_grad():
        result = model(torch.arange(3, 14)[None], output_hidden_states=True)
    handle.remove()
    reference = TargetReference(
        name="someone/tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    weights = TargetWeights(
        embedding=model.get_input_embeddings().weight.detach(), lm_head=model.get_output_embeddings().weight.detach()
    )
    return World(reference, weights, hooked[0], result.hidden_states[-1][0])


def make_head(world: World, **changes: Any) -> MedusaHead:
    config = MedusaConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        taps=(LAYERS + 1,),
        num_heads=HEADS,
        num_layers=2,
    )
    config = replace(config, **changes)
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, VOCABULARY, 3), 1), size=config.draft_vocab_size, vocab_size=VOCABULARY
    )
    head = MedusaHead(config, vocabulary)
    randomize(head)
    return head.bind(world.weights)


def exported(tmp_path: Path, world: World, name: str, **changes: Any) -> Path:
    saved = save_head(tmp_path / "head", make_head(world, **changes), HeadCard(target=world.reference, family="medusa"))
    return write_foreign(tmp_path / name, saved, name)


def read(folder: Path, world: World, name: str | None = None) -> Imported:
    return read_foreign(folder, name, target=world.reference, weights=world.weights)


def read_config(folder: Path) -> Config:
    values: Config = json.loads((folder / CONFIG_FILE).read_text())
    return values


def edit_config(folder: Path, change: Callable[[Config], Any]) -> None:
    config = read_config(folder)
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def weights_file(folder: Path) -> Path:
    return next(folder / file for file in FILES.values() if (folder / file).is_file())


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(weights_file(folder))
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights_file(folder))


def own_logits(head: Any, world: World) -> list[torch.Tensor]:
    """[T, V] of each depth, -inf where there is no draft token."""
    result = []
    with torch.no_grad():
        for depth in range(head.num_depths):
            path = torch.zeros(len(world.tapped), depth + 1, dtype=torch.int64)
            everywhere = torch.full((len(world.tapped), VOCABULARY), -math.inf)
            everywhere[:, head.target_ids] = head.logits(head.draft(world.tapped, path, depth), depth)
            result.append(everywhere)
    return result


def assert_same_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Logits of a few units, sums of 32 products in float32: 1e-4 is a hundred times what two orders of summation make
    of them, and a thousandth of what a swapped or missing tensor does. Tokens that are not drafted may have logits on
    the other side, but never the largest."""
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        drafted = here.isfinite()
        assert there[drafted].std() > 0.5
        torch.testing.assert_close(here[drafted], there[drafted], rtol=0, atol=1e-4)
        outside = there.masked_fill(drafted, -math.inf).amax(-1)
        assert bool((outside < there.masked_fill(~drafted, -math.inf).amax(-1) - 0.5).all())


# The other side.


class ResBlock(nn.Module):
    """FasterDecoding's, whose object is repeated over the layers of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


def public_heads(*, num_layers: int, own_lm_head: bool) -> nn.ModuleList:
    """`medusa_head` as that project's models make it, with its shared block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        heads = nn.ModuleList(
            nn.Sequential(
                *([ResBlock()] * num_layers),
                *([nn.Linear(HIDDEN, VOCABULARY, bias=False)] if own_lm_head else []),
            )
            for _ in range(HEADS)
        )
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.3)
    return heads


def medusa_logits(folder: Path, world: World) -> list[torch.Tensor]:
    """From the files: 'head.layer.linear' for the blocks, 'head.L.weight' for the LM head, or the target's for all."""
    config, tensors = read_config(folder), load_file(weights_file(folder))
    num_layers = config["medusa_num_layers"]
    result = []
    for head in range(config["medusa_num_heads"]):
        states = world.hooked
        for layer in range(num_layers):
            wide = states @ tensors[f"{head}.{layer}.linear.weight"].T + tensors[f"{head}.{layer}.linear.bias"]
            states = states + wide * wide.sigmoid()
        result.append(states @ tensors.get(f"{head}.{num_layers}.weight", world.weights.lm_head).T)
    return result


def vllm_logits(folder: Path, world: World) -> list[torch.Tensor]:
    """From the files, with vLLM's defaults for missing keys, its dropped prefix and its map of the vocabulary, which it
    reads if `truncated_vocab_size` is smaller."""
    config = read_config(folder)
    tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in load_file(weights_file(folder)).items()}
    truncated = config.get("truncated_vocab_size") or config["vocab_size"]
    token_map = tensors["token_map"] if truncated < config["vocab_size"] else None
    result = []
    for head in range(config["num_heads"]):
        states = world.hooked
        for layer in range(config["num_hidden_layers"]):
            wide = states @ tensors[f"blocks.{head}.layers.{layer}.weight"].T
            if config.get("medusa_fc_bias", False):
                wide = wide + tensors[f"blocks.{head}.layers.{layer}.bias"]
            states = states + wide * wide.sigmoid()
        if config.get("original_lm_head", False):
            lm_head = tensors["lm_head.weight"] if "lm_head.weight" in tensors else tensors["lm_heads.0.weight"]
        else:
            lm_head = tensors[f"lm_heads.{head}.weight"]
        if token_map is None:
            assert len(lm_head) == config["vocab_size"]
            result.append(states @ lm_head.T)
            continue
        assert len(token_map) == truncated
        if len(lm_head) > len(token_map):
            lm_head = lm_head[token_map]
        everywhere = torch.full((len(states), config["vocab_size"]), -math.inf)
        everywhere[:, token_map] = states @ lm_head.T
        result.append(everywhere)
    return result


REFERENCES: dict[str, Callable[[Path, World], list[torch.Tensor]]] = {
    "medusa": medusa_logits,
    "vllm-medusa": vllm_logits,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {}),
    ("medusa", {"num_layers": 1, "num_heads": 5}),
    ("medusa", {"original_lm_head": True}),
    ("vllm-medusa", {}),
    ("vllm-medusa", {"draft_vocab_size": 40}),
    ("vllm-medusa", {"original_lm_head": True, "draft_vocab_size": 40, "num_layers": 1}),
    ("vllm-medusa", {"block_bias": False}),
]
EVERY_CASE = pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{name} {changes}" for name, changes in CASES])


@EVERY_CASE
def test_both_sides_draft_alike(name: str, changes: dict[str, Any], world: World, tmp_path: Path) -> None:
    """The exported file by its own project's reading, and imported again, as the head that it was."""
    head = make_head(world, **changes)
    folder = exported(tmp_path, world, name, **changes)
    theirs = REFERENCES[name](folder, world)
    assert_same_logits(own_logits(head, world), theirs)
    imported = read(folder, world)
    assert (imported.origin["imported_from"], imported.dtype) == (name, torch.float32)
    assert imported.head.config == head.config
    assert_same_logits(own_logits(imported.head, world), theirs)


@EVERY_CASE
def test_there_and_back_is_the_identity(name: str, changes: dict[str, Any], world: World, tmp_path: Path) -> None:
    """Bit for bit, tensors and configuration."""
    first = exported(tmp_path, world, name, **changes)
    imported = read(first, world)
    saved = save_head(tmp_path / "again", imported.head, HeadCard(target=world.reference, family="medusa"))
    second = write_foreign(tmp_path / "second", saved, name)
    before, after = load_file(weights_file(first)), load_file(weights_file(second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read_config(first) == read_config(second)
    reloaded, _ = load_head(saved, world.weights)
    assert_same_logits(own_logits(reloaded, world), own_logits(imported.head, world))


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("own_lm_head", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_files_of_the_public_code_are_read(
    num_layers: int, own_lm_head: bool, file: str, world: World, tmp_path: Path
) -> None:
    """Made by modules as that code makes them, in both layouts: the shared block is in the file once a place. Which
    layout it is, is said."""
    heads = public_heads(num_layers=num_layers, own_lm_head=own_lm_head)
    if file.endswith(".pt"):
        torch.save(heads.state_dict(), tmp_path / file)
    else:  # which refuses tensors that share memory
        save_file({name: tensor.clone() for name, tensor in heads.state_dict().items()}, tmp_path / file)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": num_layers, "transformers_version": "4.31.0"}
    config |= {"base_model_name_or_path": "somewhere/Tiny"} | ({} if own_lm_head else {"version": "2"})
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    imported = read(tmp_path, world)
    with torch.no_grad():
        states = [head(world.hooked) for head in heads]
        expected = states if own_lm_head else [state @ world.weights.lm_head.T for state in states]
    assert_same_logits(own_logits(imported.head, world), expected)
    (note,) = imported.notes
    assert ("LM head of its own" if own_lm_head else "use the target's LM head") in note
    assert isinstance(imported.head, MedusaHead)
    assert imported.head.config.original_lm_head == (not own_lm_head)


def test_both_sides_of_a_doubtful_version_are_pointed_out(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "medusa")
    edit_config(folder, lambda config: config.update(version="2", base_model_name_or_path="someone/other"))
    notes = read(folder, world).notes
    assert len(notes) == 3
    assert "version 2, which usually means the other layout" in notes[1]
    assert "its target is someone/other; it is imported for someone/tiny" in notes[2]


# What vLLM accepts beside what is written here.


@pytest.mark.parametrize("original_lm_head", [False, True])
def test_our_own_reduced_files_are_read(original_lm_head: bool, world: World, tmp_path: Path) -> None:
    """As they lie in an augmented folder, with LM heads of the draft vocabulary alone: smaller, but vLLM's loader trips
    over the form that it documents. What is exported it loads; there the map is beside a full vocabulary."""
    folder = exported(tmp_path, world, "vllm-medusa", draft_vocab_size=40, original_lm_head=original_lm_head)
    config, tensors = read_config(folder), load_file(weights_file(folder))
    assert (config["truncated_vocab_size"], config["vocab_size"], len(tensors["token_map"])) == (128, 128, 40)
    assert tensors["lm_heads.0.weight"].shape == (128, 32)
    expected = vllm_logits(folder, world)
    (tmp_path / "head" / "headstart.json").unlink()
    assert read_config(tmp_path / "head")["truncated_vocab_size"] == 40
    assert load_file(weights_file(tmp_path / "head"))["lm_heads.0.weight"].shape == (40, 32)
    imported = read(tmp_path / "head", world)
    assert_same_logits(own_logits(imported.head, world), expected)
    assert_same_logits(own_logits(imported.head, world), vllm_logits(tmp_path / "head", world))


def shuffle_map(tensors: Tensors) -> None:
    """Of a file whose LM heads follow the map."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(8))
    for name in tensors:
        if name.startswith("lm_heads"):
            tensors[name] = tensors[name][tensors["token_map"][order]]
    tensors["token_map"] = tensors["token_map"][order]


def whole_lm_heads(tensors: Tensors) -> None:
    """Of which vLLM takes the map's rows."""
    for name in tensors:
        if name.startswith("lm_heads"):
            whole = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))
            whole[tensors["token_map"]] = tensors[name][tensors["token_map"]]
            tensors[name] = whole


def whole_lm_heads_and_shuffled_map(tensors: Tensors) -> None:
    whole_lm_heads(tensors)
    tensors["token_map"] = tensors["token_map"][torch.randperm(40, generator=torch.Generator().manual_seed(8))]


def put_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"medusa_heads.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    "change",
    [shuffle_map, whole_lm_heads, whole_lm_heads_and_shuffled_map, put_prefix],
    ids=lambda change: change.__name__,
)
def test_other_spellings_of_vllm_are_read(change: Callable[[Tensors], None], world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "vllm-medusa", draft_vocab_size=40)
    expected = own_logits(read(folder, world).head, world)
    edit_config(folder, lambda config: config.update(truncated_vocab_size=config.pop("draft_vocab_size")))
    edit_tensors(folder, change)
    assert_same_logits(vllm_logits(folder, world), expected)
    assert_same_logits(own_logits(read(folder, world).head, world), expected)


def test_the_shared_lm_head_of_vllm_may_be_called_as_its_parameter_or_lack(world: World, tmp_path: Path) -> None:
    """And it must be the target's: one that was trained would be lost when the head is lent its target's."""
    folder = exported(tmp_path, world, "vllm-medusa", original_lm_head=True)
    expected = vllm_logits(folder, world)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("lm_heads.0.weight")}))
    assert_same_logits(own_logits(read(folder, world).head, world), expected)
    edit_tensors(folder, lambda t: t["lm_head.weight"][5].mul_(1.1))
    with pytest.raises(ValueError, match=r"lm_heads\.0\.weight .* not the target's \(1 of 128 rows differ\)"):
        read(folder, world)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    assert_same_logits(own_logits(read(folder, world).head, world), expected)


# Faults.


@EVERY_CASE
def test_every_tensor_counts_under_its_own_name(
    name: str, changes: dict[str, Any], world: World, tmp_path: Path
) -> None:
    """Left out, renamed, reshaped, not a number, or one more than there should be: refused, saying which. (The LM head
    that a head shares with its target may lack: it is the target's.)"""
    folder = exported(tmp_path, world, name, **changes)
    whole = load_file(weights_file(folder))
    for key, tensor in whole.items():
        rest = {other: value for other, value in whole.items() if other != key}
        faults = {
            rf"{key} has shape|\b{key}\b.*expected": rest | {key: tensor[..., :-1].contiguous()},
            rf"\b{key}\b": rest | {key: torch.full_like(tensor.float(), math.nan)},
        }
        if not (changes.get("original_lm_head") and key == "lm_heads.0.weight"):
            faults[rf"(missing|lacks) {key}"] = rest
            faults[rf"(missing|lacks) {key}|unknown {key}x|{key}x"] = rest | {f"{key}x": tensor}
        for message, tensors in faults.items():
            save_file(tensors, weights_file(folder))
            with pytest.raises(ValueError, match=message):
                read(folder, world)
    for extra in ("0.0.linear.scale", "norm.weight", "blocks.0.layers.9.weight", "blocks.9.layers.0.weight"):
        save_file(whole | {extra: torch.zeros(HIDDEN)}, weights_file(folder))
        with pytest.raises(ValueError, match=rf"unknown {extra} \[32\]"):
            read(folder, world)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["head", name])


MEDUSA_FAULTS: list[tuple[str, Callable[[Config], Any], str]] = [
    (
        "medusa",
        lambda c: c.update(medusa_num_heads=2),
        r"2\.0\.linear\.\w+ is of head 2, .*medusa_num_heads is 2.*2 where",
    ),
    ("medusa", lambda c: c.update(medusa_num_heads=4), r"missing 3\.2\.weight \[128, 32\]"),
    ("medusa", lambda c: c.update(medusa_num_layers=1), r"0\.1\.linear\.\w+ is of layer 1.*medusa_num_layers is 1"),
    ("medusa", lambda c: c.update(medusa_num_layers=3), r"0\.2\.weight is an LM head behind 2 layers.*is 3"),
    ("medusa", lambda c: c.pop("medusa_num_heads"), "medusa_num_heads is None, expected a whole number"),
    ("medusa", lambda c: c.update(medusa_num_layers=0), "medusa_num_layers is 0, expected a whole number"),
    ("medusa", lambda c: c.update(hidden_size=64), "hidden size 64"),
    ("medusa", lambda c: c.update(vocab_size=99), "vocabulary of 99"),
    ("medusa", lambda c: c.update(num_hidden_layers=32), "whole model with Medusa heads inside"),
    ("medusa", lambda c: c.update(novelty=1), "novelty = 1 is not known here"),
    ("vllm-medusa", lambda c: c.update(num_heads=2), r"unknown blocks\.2\.layers\.0\.bias"),
    ("vllm-medusa", lambda c: c.update(num_heads=4), r"missing blocks\.3\.layers\.0\.bias"),
    ("vllm-medusa", lambda c: c.update(num_hidden_layers=1), r"unknown blocks\.0\.layers\.1\.bias"),
    ("vllm-medusa", lambda c: c.update(medusa_fc_bias=False), r"unknown blocks\.0\.layers\.0\.bias \[32\]"),
    ("vllm-medusa", lambda c: c.pop("medusa_fc_bias"), r"unknown blocks\.0\.layers\.0\.bias \[32\]"),
    ("vllm-medusa", lambda c: c.update(medusa_fc_bias="yes"), "medusa_fc_bias = 'yes'"),
    ("vllm-medusa", lambda c: c.update(original_lm_head=True), r"lm_heads\.0\.weight .*not the target's"),
    ("vllm-medusa", lambda c: c.update(draft_vocab_size=41), r"token_map has shape \[40\], expected \[41\]"),
    ("vllm-medusa", lambda c: c.pop("draft_vocab_size"), r"unknown token_map \[40\]"),
    ("vllm-medusa", lambda c: c.update(logit_scale=0.5), "logit_scale = 0.5, only 1.0"),
    ("vllm-medusa", lambda c: c.update(architectures=["Medusa2Model"]), 'architectures = ."Medusa2Model"'),
    ("vllm-medusa", lambda c: c.pop("num_heads"), "num_heads is None"),
    ("vllm-medusa", lambda c: c.update(vocab_size=256), "vocabulary of 256"),
    ("vllm-medusa", lambda c: c.update(quantization_config={"bits": 4}), "quantization_config"),
]


@pytest.mark.parametrize(("name", "change", "message"), MEDUSA_FAULTS, ids=range(len(MEDUSA_FAULTS)))
def test_faults_of_configurations_are_refused(
    name: str, change: Callable[[Config], Any], message: str, world: World, tmp_path: Path
) -> None:
    reduced = {"draft_vocab_size": 40} if name == "vllm-medusa" else {}
    folder = exported(tmp_path, world, name, **reduced)
    edit_config(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


def test_a_missing_bias_is_missed(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "vllm-medusa", block_bias=False)
    edit_config(folder, lambda config: config.update(medusa_fc_bias=True))
    with pytest.raises(ValueError, match=r"missing blocks\.0\.layers\.0\.bias \[32\]"):
        read(folder, world)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("token_map"), "lacks token_map: 40 draft tokens of 128 need their map"),
        (lambda t: t["token_map"].zero_(), "token_map: .* twice"),
        (lambda t: t["token_map"][:1].fill_(128), r"token_map: .*0\.\.127"),
        (lambda t: t["token_map"][:1].fill_(-1), r"token_map: .*-1"),
        (lambda t: t.update(token_map=t["token_map"].float()), "token_map has dtype torch.float32"),
        (lambda t: t.update(token_map=t["token_map"] > 9), "token_map has dtype torch.bool"),
    ],
    ids=range(6),
)
def test_faults_of_the_map_are_refused(
    change: Callable[[Tensors], Any], message: str, world: World, tmp_path: Path
) -> None:
    folder = exported(tmp_path, world, "vllm-medusa", draft_vocab_size=40)
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"draft_vocab_size": 40}, "no reduced vocabulary.* 40 of 128"), ({"block_bias": False}, "blocks have biases")],
)
def test_what_a_form_cannot_say_is_not_exported(
    changes: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{message}.*export it as vllm-medusa"):
        exported(tmp_path, world, "medusa", **changes)
    assert not (tmp_path / "medusa").exists()


@pytest.mark.parametrize("name", FILES)
def test_one_form_knows_each_file(name: str, world: World, tmp_path: Path) -> None:
    """By its configuration; and a file beside another form's configuration is told by its tensors."""
    if name == "vllm-medusa":
        config = read_config(exported(tmp_path / "reduced", world, name, draft_vocab_size=40))
        assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]
    folder = exported(tmp_path, world, name)
    config = read_config(folder)
    assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]
    assert detect_format(config, source="x") == name
    tensors = load_file(weights_file(folder))
    assert [other for other, form in FORMATS.items() if form.looks_alike(tensors)] == [name]
    other = next(other for other in FILES if other != name)
    (tmp_path / other).mkdir()
    save_file(tensors, tmp_path / other / FILES[other])
    counts = {"medusa_num_heads": HEADS, "medusa_num_layers": 2}
    native = make_head(world).config.to_native()
    (tmp_path / other / CONFIG_FILE).write_text(json.dumps(counts if other == "medusa" else native))
    with pytest.raises(ValueError, match=rf"look like those of Medusa \(--from {name}"):
        read(tmp_path / other, world)

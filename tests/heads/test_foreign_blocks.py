"""P-EAGLE, DFlash and DSpark heads of other projects: equal draft logits on both sides of a conversion, and refusals
where a file shows a fault."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from heads.block import BlockHead
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, TargetReference, save_head
from heads.dflash import DFlashConfig
from heads.foreign import FORMATS, detect_format, read_foreign, write_foreign
from heads.peagle import PEagleConfig
from heads.registry import family_of_head
from tests.heads.foreign_blocks import DEPTHS, MASK, make_head, own_logits, reference_logits
from tests.heads.foreign_helpers import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Config,
    Tensors,
    World,
    assert_other_logits,
    assert_same_logits,
    edit_config,
    edit_tensors,
    forms_of,
    make_world,
    one_tensor_faults,
    read,
    read_config,
    write_tensors,
)

FORMS = [*forms_of("peagle"), *forms_of("dflash")]
GATED = {"markov_rank": 5, "markov_table": True, "markov_gate": True}
TABLE = {"markov_rank": 5, "markov_table": True}
PROJECTED = {"markov_rank": 5}
ANCHOR = {"sample_from_anchor": True}
REDUCED = {"draft_vocab_size": 40}
HEADS: dict[str, list[dict[str, Any]]] = {
    "speculators-peagle": [
        {},
        REDUCED | {"own_embedding": True, "num_layers": 3},
        {"norm_before_residual": True, "fc_norm": True, "num_depths": 1},
        REDUCED | {"norm_before_fc": True, "num_layers": 1, "taps": (1, 3, 7)},
    ],
    "vllm-peagle": [{}, REDUCED | {"own_embedding": True}, {"norm_before_residual": True, "fc_norm": True}],
    "dflash": [{}, {"num_layers": 1, "num_depths": 1, "taps": (4,)}, {"taps": (1, 2, 5, 7)}],
    "speculators-dflash": [{}, REDUCED, ANCHOR | REDUCED, {"taps": (1, 8)}],
    "speculators-dspark": [ANCHOR | TABLE, TABLE | REDUCED, ANCHOR | GATED | REDUCED, GATED],
    "deepspec": [ANCHOR | TABLE, ANCHOR | GATED, ANCHOR],
}
"""Heads that a form can say, for each form. The first is its plainest."""
CASES = [(name, number) for name, heads in HEADS.items() for number in range(len(heads))]


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def head_for(name: str, number: int = 0, **changes: Any) -> BlockHead:
    return make_head(FORMATS[name].family, **{**HEADS[name][number], **changes})


def saved(folder: Path, world: World, head: BlockHead, dtype: torch.dtype | None = None) -> Path:
    return save_head(folder, head, HeadCard(target=world.reference, family=family_of_head(head)), dtype=dtype)


def write(folder: Path, head: Path, name: str, world: World) -> Path:
    """With the target, where the form holds copies of its weights."""
    return write_foreign(folder, head, name, weights=world.weights if FORMATS[name].written_copies else None)


def exported(tmp_path: Path, world: World, name: str, head: BlockHead | None = None) -> Path:
    return write(tmp_path / name, saved(tmp_path / "head", world, head or head_for(name)), name, world)


def imported(folder: Path, world: World, name: str | None = None) -> BlockHead:
    return cast(BlockHead, read(folder, world, name).head)


# The same drafts.


@pytest.mark.parametrize(("name", "number"), CASES)
def test_draft_logits_are_equal_on_both_sides(name: str, number: int, world: World, tmp_path: Path) -> None:
    """After export the project's own reading drafts what the head drafts, and so does the head that comes back."""
    head = head_for(name, number)
    folder = exported(tmp_path, world, name, head)
    theirs = reference_logits(folder, world, name)
    assert len(theirs) == head.config.num_depths
    assert_same_logits(own_logits(head, world), theirs)
    assert_same_logits(own_logits(imported(folder, world), world), theirs)


@pytest.mark.parametrize("name", FORMS)
def test_the_comparison_sees_each_convention(name: str, world: World, tmp_path: Path) -> None:
    """Another layer tapped, other angles, another mask token or a block that is one place longer must not compare as
    equal; nor swapped norms, nor a correction by another token."""
    theirs = reference_logits(exported(tmp_path, world, name), world, name)
    taps = (2, 4, 6) if "peagle" in name else (2, 5)
    wrong = [head_for(name, **changes) for changes in ({"taps": taps}, {"rope_theta": 400.0}, {"mask_token_id": 3})]
    swapped = head_for(name)
    layer = cast(Any, swapped.layers)[1]
    layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm
    wrong.append(swapped)
    if FORMATS[name].family == "dflash":
        wrong.append(head_for(name, num_depths=DEPTHS + 1))
        wrong.append(head_for(name, sample_from_anchor=not head_for(name).config.sample_from_anchor))
    if head_for(name).config.markov_rank:
        shifted = head_for(name)
        with torch.no_grad():
            shifted.markov.table.weight.copy_(shifted.markov.table.weight.roll(1, dims=0))
        wrong.append(shifted)
    for head in wrong:
        assert_other_logits(own_logits(head, world)[:DEPTHS], theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_there_and_back_changes_nothing(
    name: str, number: int, dtype: torch.dtype, world: World, tmp_path: Path
) -> None:
    """Our files come back bit for bit, and theirs too: names, tensors, dtypes and every setting."""
    first = saved(tmp_path / "head", world, head_for(name, number), dtype)
    abroad = write(tmp_path / "abroad", first, name, world)
    back = read(abroad, world)
    assert back.notes == []
    assert back.dtype == dtype
    second = saved(tmp_path / "again", world, cast(BlockHead, back.head), dtype)
    assert (first / WEIGHTS_FILE).read_bytes() == (second / WEIGHTS_FILE).read_bytes()
    assert (first / CONFIG_FILE).read_text() == (second / CONFIG_FILE).read_text()
    again = write(tmp_path / "abroad_again", second, name, world)
    assert sorted(path.name for path in again.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (abroad / file).read_bytes() == (again / file).read_bytes()


@pytest.mark.parametrize(("name", "number"), CASES)
def test_each_form_is_recognised(name: str, number: int, world: World, tmp_path: Path) -> None:
    """No form is taken for another: of each, one detector alone answers."""
    config = read_config(exported(tmp_path, world, name, head_for(name, number)))
    assert detect_format(config, source="") == name
    assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("name", ["speculators-dspark", "deepspec"])
def test_a_projection_is_written_as_the_table_that_it_makes(
    name: str, gate: bool, world: World, tmp_path: Path
) -> None:
    """The head that comes back has a table, and drafts the same."""
    head = make_head("dflash", **ANCHOR, **PROJECTED, markov_gate=gate)
    folder = exported(tmp_path, world, name, head)
    theirs = reference_logits(folder, world, name)
    assert_same_logits(own_logits(head, world), theirs)
    back = imported(folder, world)
    assert back.config == replace(cast(DFlashConfig, head.config), markov_table=True)
    assert_same_logits(own_logits(back, world), theirs)


# What a file may leave out, and what it may hold besides.


@pytest.mark.parametrize("name", ["speculators-dflash", "speculators-dspark", "deepspec"])
def test_copies_of_the_target_s_weights(name: str, world: World, tmp_path: Path) -> None:
    """They are written, in the dtype of the head, and need not be there; another embedding or LM head is refused."""
    number = 1 if name == "speculators-dflash" else 0
    folder = exported(tmp_path, world, name, head_for(name, number))
    whole = load_file(folder / WEIGHTS_FILE)
    ids = head_for(name, number).target_ids
    assert torch.equal(whole["embed_tokens.weight"], world.weights.embedding)
    assert torch.equal(whole["lm_head.weight"], world.weights.lm_head[ids])
    expected = reference_logits(folder, world, name)
    for copy in ("embed_tokens.weight", "lm_head.weight"):
        write_tensors(folder, {key: tensor for key, tensor in whole.items() if key != copy})
        assert_same_logits(own_logits(imported(folder, world), world), expected)
        write_tensors(folder, {**whole, copy: whole[copy].half()})
        imported(folder, world)
        changed = whole[copy].clone()
        changed[7] *= 1.1
        write_tensors(folder, {**whole, copy: changed})
        with pytest.raises(ValueError, match=rf"{copy} is not the target's \(1 of {len(changed)} rows differ\)"):
            read(folder, world)
    with pytest.raises(ValueError, match="holds copies of the target's weights: the target is needed too"):
        write_foreign(tmp_path / "x", tmp_path / "head", name)
    plain = saved(tmp_path / "plain", world, head_for("dflash"))
    with pytest.raises(ValueError, match="only speculators-dflash or speculators-dspark or deepspec may hold a copy"):
        write_foreign(tmp_path / "x", plain, "dflash", weights=world.weights)


@pytest.mark.parametrize("name", forms_of("peagle"))
def test_an_embedding_is_the_head_s_own_or_a_copy(name: str, world: World, tmp_path: Path) -> None:
    """A copy of the target's is dropped, whatever the file says of it; one that differs in a row is the head's own."""
    head = head_for(name)
    folder = write_foreign(tmp_path / name, saved(tmp_path / "head", world, head), name, weights=world.weights)
    back = imported(folder, world)
    assert back.config == head.config
    assert "embed_tokens.weight" not in back.state_dict()
    edit_tensors(folder, lambda tensors: tensors["embed_tokens.weight"][MASK].add_(torch.arange(HIDDEN) / HIDDEN))
    back = imported(folder, world)
    assert back.config == replace(cast(PEagleConfig, head.config), own_embedding=True)
    assert_same_logits(own_logits(back, world), reference_logits(folder, world, name))
    assert_other_logits(own_logits(back, world)[1:], own_logits(head, world)[1:])
    again = write_foreign(tmp_path / "again", saved(tmp_path / "back", world, back), name, weights=world.weights)
    stays = load_file(again / WEIGHTS_FILE)["embed_tokens.weight"]
    assert torch.equal(stays, load_file(folder / WEIGHTS_FILE)["embed_tokens.weight"]), "its own is not replaced"


def test_what_no_draft_depends_on_is_left_out_and_named(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "speculators-dspark")
    expected = reference_logits(folder, world, "speculators-dspark")
    beside = {
        "confidence_head.proj.weight": torch.ones(1, HIDDEN + 5),
        "confidence_head.proj.bias": torch.ones(1),
        "verifier_norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    edit_tensors(folder, lambda tensors: tensors.update(beside))
    edit_config(folder, lambda config: config.update(enable_confidence_head=True, confidence_head_with_markov=True))
    back = read(folder, world)
    assert back.notes == [f"{', '.join(sorted(beside))}: left out, for no draft depends on it"]
    assert back.dtype == torch.float32
    assert_same_logits(own_logits(cast(BlockHead, back.head), world), expected)


def test_how_many_tokens_vllm_s_files_draft_is_ours_to_say(world: World, tmp_path: Path) -> None:
    """They name no number; the places before one more are not touched by it."""
    folder = exported(tmp_path, world, "vllm-peagle")
    expected = reference_logits(folder, world, "vllm-peagle")
    edit_config(folder, lambda config: config.pop("num_depths"))
    back = read(folder, world)
    assert back.head.config.num_depths == 8
    assert ["does not say how many tokens it drafts: 8 were taken" in note for note in back.notes] == [True]
    assert_same_logits(own_logits(cast(BlockHead, back.head), world)[:DEPTHS], expected)


@pytest.mark.parametrize("key", ["pard_token", "mask_token_id"])
def test_vllm_s_other_spellings(key: str, world: World, tmp_path: Path) -> None:
    """The first layer as midlayer, the mask state as a row or a vector, and other names of the token."""
    folder = exported(tmp_path, world, "vllm-peagle")
    expected = imported(folder, world)

    def respell(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
        mask = tensors["mask_hidden"]
        tensors["mask_hidden"] = mask.view(1, -1) if key == "pard_token" else mask.view(-1)

    edit_tensors(folder, respell)
    edit_config(folder, lambda config: config.update({key: config.pop("ptd_token_id")}))
    back = imported(folder, world)
    assert back.config == expected.config
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in expected.state_dict().items())
    edit_tensors(folder, lambda tensors: tensors.update({"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}))
    with pytest.raises(ValueError, match=r"holds layers\.0\.hidden_norm\.weight under the name of midlayer too"):
        read(folder, world)


# Faults.


@pytest.mark.parametrize("name", FORMS)
def test_a_fault_in_any_tensor_is_named(name: str, world: World, tmp_path: Path) -> None:
    """Left out, renamed, cut, of another shape, not a number, or one too many."""
    number = {
        "speculators-peagle": 1,
        "vllm-peagle": 1,
        "speculators-dflash": 1,
        "speculators-dspark": 2,
        "deepspec": 1,
    }
    folder = exported(tmp_path, world, name, head_for(name, number.get(name, 0)))
    whole = load_file(folder / WEIGHTS_FILE)
    may_be_left_out = {*FORMATS[name].copies, *FORMATS[name].own_or_copies}
    faults = [
        (what, tensors, needle)
        for what, tensors, needle in one_tensor_faults(whole)
        if not (needle in may_be_left_out and "left out" in what) and what != "mask_hidden in one more dimension"
    ]
    for key, tensor in whole.items():
        if tensor.is_floating_point() and key not in FORMATS[name].copies:
            spoiled = tensor.clone()
            spoiled.view(-1)[3] = torch.nan
            faults.append((f"{key} holds NaN", {**whole, key: spoiled}, key))
    for what, tensors, needle in faults:
        write_tensors(folder, tensors)
        with pytest.raises(ValueError, match=re.escape(needle)):
            pytest.fail(f"{what} was read: {read(folder, world)}")


@pytest.mark.parametrize("name", FORMS)
def test_every_unknown_key_is_named(name: str, world: World, tmp_path: Path) -> None:
    """At the top, and in every part."""
    folder = exported(tmp_path, world, name)
    whole = read_config(folder)
    parts = ["", *(key for key, value in whole.items() if isinstance(value, dict))]
    for part in parts:
        changed = json.loads(json.dumps(whole))
        (changed[part] if part else changed)["novelty"] = 1
        (folder / CONFIG_FILE).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"novelty = 1 is not known here"):
            read(folder, world)


def layer_of(config: Config) -> Config:
    part: Config = config.get("transformer_layer_config", config)
    return part


LAYER_FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "sliding_attention.*only full_attention in all 2 layers",
    ),
    ({"layer_types": ["full_attention"]}, "only full_attention in all 2 layers"),
    ({"use_sliding_window": True}, "use_sliding_window = true"),
    ({"attention_bias": True}, "attention_bias = true"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    ({"model_type": "gemma"}, 'model_type = "gemma"'),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number"),
    ({"num_hidden_layers": 3, "layer_types": None}, r"missing layers\.2"),
    ({"num_hidden_layers": 1, "layer_types": None}, r"unknown layers\.1"),
    ({"hidden_size": None}, "hidden_size is None, expected a whole number"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a positive number"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
]


@pytest.mark.parametrize("number", range(len(LAYER_FAULTS)))
@pytest.mark.parametrize("name", FORMS)
def test_what_a_layer_cannot_be_is_refused_by_name(name: str, number: int, world: World, tmp_path: Path) -> None:
    change, message = LAYER_FAULTS[number]
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: layer_of(config).update(change))
    with pytest.raises(ValueError, match=message):
        read(folder, world)


TAPS, AUX = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
FORM_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("speculators-peagle", {"norm_before_residual": None}, "norm_before_residual is missing"),
    ("speculators-peagle", {"norm_output": True}, "norm_output = true"),
    ("speculators-peagle", {"mask_token_id": None}, "mask_token_id is None, expected a token id"),
    ("speculators-peagle", {"mask_token_id": VOCABULARY}, "mask_token_id 128 is none of the target's 128 tokens"),
    ("speculators-peagle", {"architectures": ["Eagle3DraftModel"]}, "Eagle3DraftModel"),
    ("speculators-peagle", {"speculators_config": {"algorithm": "eagle3"}}, 'algorithm = "eagle3"'),
    ("speculators-peagle", {"speculators_config": {"proposal_methods": [4]}}, r"proposal_methods are \[4\], expected"),
    ("speculators-peagle", {"target_hidden_size": 64}, "target_hidden_size is 64"),
    ("speculators-peagle", {TAPS: [2, 4]}, r"\[2, 4\], expected 3 whole numbers"),
    ("speculators-peagle", {TAPS: [2, 4, 9]}, r"\[2, 4, 9\], but the target has 8 layers"),
    ("vllm-peagle", {"pard_token": 5}, "named twice and differently"),
    ("vllm-peagle", {"ptd_token_id": None}, "names no token for the places of a draft"),
    ("vllm-peagle", {"ptd_token_id": True}, "ptd_token_id is True, expected a token id"),
    ("vllm-peagle", {"num_depths": 0}, "num_depths is 0, expected a whole number"),
    ("vllm-peagle", {"eagle_config": {TAPS: [2, 4, 5]}}, "taps are named twice and differently"),
    ("vllm-peagle", {"norm_output": True}, "norm_output = true"),
    ("dflash", {"block_size": 1}, "block_size is 1: no place of such a block guesses a token"),
    ("dflash", {"block_size": None}, "block_size is None, expected a whole number"),
    ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, but tiny has 8 layers"),
    ("dflash", {"dflash_config": None}, "dflash_config is None, expected a mapping"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "block_size": 9}}, "block_size is 4, but 9 in dflash_config"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "causal": True}}, "causal = true"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "use_swa": True}}, "use_swa = true"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 3]}}, "mask_token_id is None, expected a token id"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, r"\[0, 7\] name the last of"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 3]}}, "layer outputs in ascending"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "expected whole numbers"),
    ("dflash", {"markov_rank": 4}, "markov_rank = 4 is not known here"),
    ("dflash", {"target_hidden_size": 64}, "target_hidden_size is 64"),
    ("speculators-dflash", {"markov_rank": 4}, "markov_rank = 4 is not known here"),
    ("speculators-dflash", {"sample_from_anchor": 1}, "sample_from_anchor is 1, expected true or false"),
    ("speculators-dflash", {"block_size": None}, "block_size is None, expected a whole number"),
    ("speculators-dflash", {AUX: None}, "aux_hidden_state_layer_ids is None, expected whole numbers"),
    ("speculators-dflash", {AUX: [1, 9]}, r"\[1, 9\], but the target has 8 layers"),
    ("speculators-dflash", {"draft_vocab_size": 40}, "lacks d2t, t2d: 40 draft tokens of 128 need their map"),
    ("speculators-dflash", {"speculators_model_type": "eagle"}, 'only "eagle3" is supported'),
    ("speculators-dspark", {"sample_from_anchor": None}, "sample_from_anchor is missing"),
    ("speculators-dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn', expected vanilla or gated: rnn"),
    ("speculators-dspark", {"markov_head_type": "gated"}, r"missing markov_head\.gate_proj"),
    ("speculators-dspark", {"markov_rank": 4}, r"markov_head\.markov_w1\.weight has shape \[128, 5\]"),
    ("speculators-dspark", {"markov_rank": 0}, r"unknown markov_head\.markov_w1"),
    ("speculators-dspark", {"markov_rank": None}, "markov_rank is None, expected a whole number from 0"),
    ("deepspec", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
    ("deepspec", {"target_layer_ids": [0, 7]}, "name the last of"),
    ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, r"of no known form.*look like those of DFlash and DSpark"),
]


@pytest.mark.parametrize("number", range(len(FORM_FAULTS)))
def test_faults_of_configurations_are_refused(number: int, world: World, tmp_path: Path) -> None:
    name, change, message = FORM_FAULTS[number]
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        read(folder, world)


def test_a_mask_embedding_beside_the_weights_is_refused(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "dflash")
    torch.save({"embedding": torch.ones(HIDDEN)}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"holds mask_embedding\.pt, which changes what the head computes"):
        read(folder, world)


@pytest.mark.parametrize("name", FORMS)
def test_a_target_of_other_sizes_is_refused(name: str, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, name)
    other = TargetReference(name="other", fingerprint="x", num_layers=LAYERS, hidden_size=48, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="hidden size 32 and is for a vocabulary of 128; other has 48 and 128"):
        read_foreign(folder, target=other, weights=world.weights)


# What a form cannot say.

EXPORTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("peagle", "speculators-peagle", PROJECTED, r"no correction by the token before.*\(markov_rank 5\).*markov_rank=0"),
    ("peagle", "vllm-peagle", TABLE, "no correction by the token before"),
    ("dflash", "dflash", PROJECTED, r"no a correction.*markov_rank 5.*export it as speculators-dspark"),
    ("dflash", "dflash", REDUCED, r"a reduced vocabulary \(40 of 128 tokens\).*export it as speculators-dflash"),
    ("dflash", "dflash", ANCHOR, r"sample_from_anchor.*export it as speculators-dflash"),
    ("dflash", "dflash", {"taps": (1, 8)}, r"last layer \(hidden_states 8\).*export it as speculators-dflash"),
    ("dflash", "speculators-dflash", PROJECTED, r"a correction.*export it as speculators-dspark, or train one with"),
    ("dflash", "speculators-dspark", {}, "this one has not: export it as dflash or speculators-dflash"),
    ("dflash", "deepspec", ANCHOR | TABLE | REDUCED, "a reduced vocabulary.*export it as speculators-dspark"),
    ("dflash", "deepspec", TABLE, "sample_from_anchor is false.*export it as speculators-dspark"),
    ("dflash", "speculators-peagle", {}, "is a form of P-EAGLE heads"),
]


@pytest.mark.parametrize("number", range(len(EXPORTS)))
def test_what_a_form_cannot_say_is_refused(number: int, world: World, tmp_path: Path) -> None:
    """By name, with a way out, and nothing is written."""
    family, name, changes, message = EXPORTS[number]
    head = saved(tmp_path / "head", world, make_head(family, **changes))
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "out", head, name, world)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_layers_that_z_lab_does_not_name_are_spread_evenly(world: World, tmp_path: Path) -> None:
    """As many as the head has layers, from output 1 to n-3."""
    folder = exported(tmp_path, world, "dflash", head_for("dflash", taps=(2, 4, 6), num_layers=3))
    edit_config(folder, lambda config: config["dflash_config"].pop("target_layer_ids"))
    assert imported(folder, world).config.taps == (2, 4, 6)
    alone = exported(tmp_path / "one", world, "dflash", head_for("dflash", 1, taps=(5,)))
    edit_config(alone, lambda config: config["dflash_config"].pop("target_layer_ids"))
    assert imported(alone, world).config.taps == (5,)


def test_every_form_says_its_conventions() -> None:
    for name in FORMS:
        assert "layers.i.*" in FORMATS[name].conventions
        assert len(FORMATS[name].conventions) > 80


# Checkpoints as their projects publish them, made small: configurations key by key (sizes apart), tensors by the names
# that their code gives.

_SMALL = {
    "head_dim": 6,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
_QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
    **_SMALL,
}
_ROPE = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
_PROPOSAL = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}


def _speculators(algorithm: str) -> Config:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [_PROPOSAL],
        "verifier": {"architectures": [], "name_or_path": "somebody/Tiny"},
    }


PUBLISHED: dict[str, tuple[str, dict[str, Any], Config]] = {
    "z-lab's for Qwen3": (
        "dflash",
        {"rope_theta": 1e6},
        {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": 4,
            "bos_token_id": 151643,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 3]},
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "num_target_layers": LAYERS,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
            "transformers_version": "4.57.3",
            **_QWEN3,
        },
    ),
    "z-lab's newer ones, the block size with the rest": (
        "dflash",
        {"rope_theta": 1e6},
        {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "bos_token_id": None,
            "dflash_config": {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 3]},
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "num_target_layers": LAYERS,
            "pad_token_id": None,
            **_ROPE,
            **_QWEN3,
        },
    ),
    "speculators' DFlash": (
        "speculators-dflash",
        {"rope_theta": 1e6},
        {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"": "config.DFlashSpeculatorConfig"},
            "aux_hidden_state_layer_ids": [1, 4],
            "block_size": 4,
            "draft_vocab_size": VOCABULARY,
            "dtype": "bfloat16",
            "mask_token_id": MASK,
            "max_anchors": 256,
            "sliding_window_non_causal": False,
            "speculators_config": _speculators("dflash"),
            "speculators_model_type": "dflash",
            "speculators_version": "0.7.0.dev0",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": {"bos_token_id": None, **_ROPE, **_QWEN3},
        },
    ),
    "speculators' DSpark": (
        "speculators-dspark",
        {"rope_theta": 1e6, **ANCHOR, **TABLE},
        {
            "architectures": ["DSparkDraftModel"],
            "aux_hidden_state_layer_ids": [1, 4],
            "block_size": 3,
            "confidence_head_with_markov": True,
            "draft_vocab_size": VOCABULARY,
            "dtype": "bfloat16",
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": 5,
            "mask_token_id": MASK,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
            "speculators_config": _speculators("dspark"),
            "speculators_model_type": "dspark",
            "tie_word_embeddings": False,
            "transformer_layer_config": {**_ROPE, **_QWEN3},
        },
    ),
    "DeepSpec's for Qwen3": (
        "deepspec",
        {"rope_theta": 1e6, **ANCHOR, **TABLE},
        {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 3,
            "confidence_head_with_markov": True,
            "dtype": "bfloat16",
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": 5,
            "mask_token_id": MASK,
            "num_anchors": 512,
            "num_target_layers": LAYERS,
            "target_layer_ids": [0, 3],
            "tie_word_embeddings": False,
            **_ROPE,
            **_QWEN3,
        },
    ),
    "DeepSpec's DFlash": (
        "deepspec",
        {"rope_theta": 1e6, **ANCHOR},
        {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 3,
            "enable_confidence_head": False,
            "markov_rank": 0,
            "mask_token_id": MASK,
            "num_anchors": 512,
            "num_target_layers": LAYERS,
            "target_layer_ids": [0, 3],
            "tie_word_embeddings": False,
            **_ROPE,
            **_QWEN3,
        },
    ),
    "speculators' P-EAGLE": (
        "speculators-peagle",
        {"rope_theta": 1e6, "own_embedding": True, **REDUCED},
        {
            "architectures": ["PEagleDraftModel"],
            "auto_map": {"": "config.PEagleSpeculatorConfig"},
            "draft_vocab_size": 40,
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "embed_requires_grad": True,
            "fc_norm": False,
            "mask_token_id": MASK,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": False,
            "speculators_config": _speculators("peagle"),
            "speculators_model_type": "peagle",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": {
                **_ROPE,
                **_QWEN3,
                "mlp_bias": False,
                "model_type": "llama",
                "pretraining_tp": 1,
                "sliding_window": 2048,
            },
        },
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_checkpoints_are_read_as_they_are_meant(case: str, world: World, tmp_path: Path) -> None:
    name, changes, config = PUBLISHED[case]
    head = make_head(FORMATS[name].family, **{**changes, "rms_norm_eps": 1e-6})
    folder = exported(tmp_path, world, name, head)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    assert detect_format(config, source="") == name
    back = imported(folder, world)
    assert_same_logits(own_logits(back, world), own_logits(head, world))
    assert_same_logits(own_logits(back, world), reference_logits(folder, world, name))


def test_vllm_s_barest_configuration(world: World, tmp_path: Path) -> None:
    """Told from EAGLE-3's by the token alone: the usual layers are tapped, and the residual is the raw state."""
    folder = exported(tmp_path, world, "vllm-peagle")
    small = {key: read_config(folder)[key] for key in (*_SMALL, "rms_norm_eps", "rope_theta")}
    bare = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VOCABULARY, "ptd_token_id": 0, **small}
    (folder / CONFIG_FILE).write_text(json.dumps(bare))
    assert [name for name, form in FORMATS.items() if form.detect(bare)] == ["vllm-peagle"]
    expected = head_for("vllm-peagle", mask_token_id=0, num_depths=8)
    assert_same_logits(own_logits(imported(folder, world), world), own_logits(expected, world))


@pytest.mark.parametrize("pickled", [False, True])
def test_files_may_be_pickled(pickled: bool, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "dflash")
    expected = reference_logits(folder, world, "dflash")
    if pickled:
        torch.save(load_file(folder / WEIGHTS_FILE), folder / "pytorch_model.bin")
        (folder / WEIGHTS_FILE).unlink()
        assert_same_logits(own_logits(imported(folder, world), world), expected)
    else:
        (folder / WEIGHTS_FILE).rename(folder / "model-00001-of-00002.safetensors")
        with pytest.raises(ValueError, match=r"holds .*model-00001-of-00002.* expected model\.safetensors or"):
            read(folder, world)

"""EAGLE-3 heads of other projects: equal draft logits on both sides of a conversion, and refusals where a file shows a
fault.

The references below compute draft logits from the foreign files alone, each by its own project's conventions, in plain
torch. They share no code with headstart, and tap the target by hooks rather than by `hidden_states` indices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads import foreign
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, TargetReference, load_head, save_head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.foreign import FORMATS, detect_format, read_foreign, write_foreign
from heads.vocab import DraftVocabulary
from tests.heads import foreign_helpers
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
    own_logits,
    read,
    read_config,
    write_tensors,
)
from tests.heads.foreign_reference import decoder_layer, norm

USUAL_TAPS = (2, 4, 5)
FORMS = forms_of("eagle3")
WITH_MARKS = [name for name in FORMS if name != "modelopt"]
"""Forms whose files have t2d."""
SCALINGS: dict[str, Config] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    # Lengths at which a head dimension of 6 has a pair of each sort.
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
    "yarn, set out": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def make_head(
    taps: tuple[int, ...] = USUAL_TAPS, *, draft_vocab_size: int = 40, base: float = 500.0, **more: Any
) -> Eagle3Head:
    """Random, norms included (weights of one would hide a swap), with every optional setting off its default."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        rms_norm_eps=3e-5,
        rope_theta=base,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    vocabulary = DraftVocabulary.from_counts(
        dict.fromkeys(range(1, VOCABULARY, 3), 1), size=draft_vocab_size, vocab_size=VOCABULARY
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = Eagle3Head(config, vocabulary)
        for name, parameter in head.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return head


def saved(folder: Path, world: World, head: Eagle3Head | None = None, dtype: torch.dtype | None = None) -> Path:
    return foreign_helpers.saved(folder, world, head or make_head(), dtype)


def exported(tmp_path: Path, world: World, name: str, head: Eagle3Head | None = None, **more: Any) -> Path:
    return foreign_helpers.exported(tmp_path, world, name, head or make_head(), **more)


# The other side: one network, and what each project means by its files.


def reference_logits(folder: Path, world: World, name: str, steps: int = 3) -> list[torch.Tensor]:
    config, tensors = read_config(folder), load_file(folder / WEIGHTS_FILE)
    taps, prefix, layer = REFERENCES[name](config, world)
    embedding = tensors.get("embed_tokens.weight", world.weights.embedding)
    eps = layer["rms_norm_eps"]
    if config.get("norm_before_fc"):
        taps = [norm(torch.cat(taps, dim=-1), tensors["input_norm.weight"], eps)]
    if config.get("fc_norm"):
        taps = [norm(tap, tensors[f"fc_norm.{index}.weight"], eps) for index, tap in enumerate(taps)]
    tokens, states = world.token_ids[1:], (torch.cat(taps, dim=-1) @ tensors["fc.weight"].T)[:-1]
    result = []
    for _ in range(steps):
        both = [
            norm(embedding[tokens], tensors[f"{prefix}.input_layernorm.weight"], eps),
            norm(states, tensors[f"{prefix}.hidden_norm.weight"], eps),
        ]
        residual = both[1] if config.get("norm_before_residual") else states
        last = decoder_layer(torch.cat(both, dim=-1), residual, tensors, prefix, layer)[-1:]
        normed = norm(last, tensors["norm.weight"], eps)
        logits = (normed @ tensors["lm_head.weight"].T)[0]
        everywhere = torch.full((VOCABULARY,), -math.inf)
        for draft, logit in enumerate(logits):
            everywhere[draft + int(tensors["d2t"][draft]) if "d2t" in tensors else draft] = logit
        assert "t2d" not in tensors or torch.equal(everywhere > -math.inf, tensors["t2d"])
        result.append(everywhere)
        last = normed if config.get("norm_output") else last
        tokens, states = torch.cat([tokens, everywhere.argmax()[None]]), torch.cat([states, last])
    return result


Reference = tuple[list[torch.Tensor], str, Config]


def safeailab(config: Config, world: World) -> Reference:
    """The inputs of layers 2, n//2 and n-3."""
    return [world.inputs[layer] for layer in (2, LAYERS // 2, LAYERS - 3)], "midlayer", config


def specforge(config: Config, world: World) -> Reference:
    """The outputs of the layers named."""
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return [world.outputs[layer] for layer in layers], "midlayer", config


def speculators(config: Config, world: World) -> Reference:
    """What vLLM collects before layer i runs, and the settings of the nested layer."""
    assert isinstance(config["norm_before_residual"], bool)
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return [world.inputs[layer] for layer in layers], "layers.0", config["transformer_layer_config"]


def modelopt(config: Config, world: World) -> Reference:
    """Hooks on the outputs of the layers named."""
    said = config["eagle_config"]
    assert all(
        said[key] for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
    )
    layers = said["eagle_aux_hidden_state_layer_ids"]
    return [world.outputs[layer] for layer in layers], "layers.0", config


def vllm(config: Config, world: World) -> Reference:
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return [world.inputs[layer] for layer in layers], "midlayer", config


REFERENCES: dict[str, Callable[[Config, World], Reference]] = {
    "safeailab": safeailab,
    "specforge": specforge,
    "speculators": speculators,
    "modelopt": modelopt,
    "vllm": vllm,
}


@pytest.mark.parametrize("taps", [USUAL_TAPS, (1, 3, 7)])
@pytest.mark.parametrize("name", FORMS)
def test_draft_logits_are_equal_on_both_sides(name: str, taps: tuple[int, ...], world: World, tmp_path: Path) -> None:
    """After export the project's own reading drafts what the head drafts, and so does the head that comes back."""
    if name == "safeailab" and taps != USUAL_TAPS:
        pytest.skip("cannot say its taps")
    head = make_head(taps)
    folder = exported(tmp_path, world, name, head)
    theirs = reference_logits(folder, world, name)
    assert_same_logits(own_logits(head, world), theirs)
    assert_same_logits(own_logits(read(folder, world).head, world), theirs)


@pytest.mark.parametrize("name", FORMS)
def test_the_comparison_sees_each_convention(name: str, world: World, tmp_path: Path) -> None:
    """Swapped norms, shifted taps or absolute ids on one side alone must not compare as equal."""
    folder = exported(tmp_path, world, name)
    theirs = reference_logits(folder, world, name)
    swapped = make_head()
    layer = swapped.midlayer
    layer.hidden_norm, layer.input_layernorm = layer.input_layernorm, layer.hidden_norm
    renumbered = make_head()
    renumbered._target_ids = renumbered.target_ids + 1
    turned = make_head(base=400.0)
    for wrong in (swapped, renumbered, turned, make_head((1, 3, 4)), make_head((3, 5, 6))):
        with pytest.raises(AssertionError):
            assert_same_logits(own_logits(wrong, world), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_there_and_back_changes_nothing(name: str, dtype: torch.dtype, world: World, tmp_path: Path) -> None:
    """Our files come back bit for bit, and theirs too: names, tensors, dtypes and every setting."""
    first = saved(tmp_path / "head", world, dtype=dtype)
    abroad = write_foreign(tmp_path / "abroad", first, name)
    imported = read(abroad, world)
    assert imported.notes == []
    second = save_head(
        tmp_path / "again", imported.head, HeadCard(target=world.reference, training=imported.origin), dtype=dtype
    )
    assert imported.dtype == dtype
    assert (first / WEIGHTS_FILE).read_bytes() == (second / WEIGHTS_FILE).read_bytes()
    assert (first / CONFIG_FILE).read_text() == (second / CONFIG_FILE).read_text()
    abroad_again = write_foreign(tmp_path / "abroad_again", second, name)
    assert sorted(path.name for path in abroad_again.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (abroad / file).read_bytes() == (abroad_again / file).read_bytes()


def test_our_own_form_is_a_copy_without_the_card(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "vllm")
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (folder / file).read_bytes() == (tmp_path / "head" / file).read_bytes()


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_recognised(name: str, world: World, tmp_path: Path) -> None:
    """No form is taken for another: of each, one detector alone answers."""
    config = read_config(exported(tmp_path, world, name))
    assert detect_format(config, source="") == name
    assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]


def test_files_as_their_projects_publish_them(world: World, tmp_path: Path) -> None:
    """SafeAILab's: pickled, in float16, with bookkeeping keys, a list of end tokens and few settings."""
    folder = exported(tmp_path, world, "safeailab")
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / WEIGHTS_FILE).items()
    }
    (folder / WEIGHTS_FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    bookkeeping = {"transformers_version": "4.28.1", "use_cache": True, "pad_token_id": 0, "initializer_range": 0.02}
    edit_config(folder, lambda config: config.update(bookkeeping, eos_token_id=[2, 3]))
    for key in ("mlp_bias", "attention_bias", "rope_scaling"):
        edit_config(folder, lambda config, key=key: config.pop(key))
    imported = read(folder, world)
    assert imported.dtype == torch.float16
    assert imported.head.config == make_head().config
    assert all(torch.equal(imported.head.state_dict()[name].to(tensors[name].dtype), tensors[name]) for name in tensors)
    assert set(imported.origin["unused_settings"]) == {*bookkeeping, "torch_dtype"}
    assert imported.origin["imported_from"] == "safeailab"


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_layers_that_are_not_named_are_the_usual(name: str, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, name)
    key = "eagle_aux_hidden_state_layer_ids"
    edit_config(folder, lambda config: config.get("eagle_config", config).pop(key))
    assert read(folder, world).head.config.taps == USUAL_TAPS


def test_an_embedding_is_a_copy_of_the_target_s_or_refused(world: World, tmp_path: Path) -> None:
    """A head here borrows its target's, so a trained one would be lost in silence. Rounding is no training."""
    folder = exported(tmp_path, world, "speculators", weights=world.weights)
    assert torch.equal(load_file(folder / WEIGHTS_FILE)["embed_tokens.weight"], world.weights.embedding)
    assert_same_logits(own_logits(read(folder, world).head, world), reference_logits(folder, world, "speculators"))
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": world.weights.embedding.half()}))
    read(folder, world)
    edit_tensors(folder, lambda tensors: tensors["embed_tokens.weight"][7].mul_(1.1))
    with pytest.raises(ValueError, match=r"not the target's \(1 of 128 rows differ\), expected a copy"):
        read(folder, world)
    with pytest.raises(ValueError, match="only speculators may hold a copy"):
        write_foreign(tmp_path / "x", tmp_path / "head", "vllm", weights=world.weights)


@pytest.mark.parametrize("name", FORMS)
def test_a_full_vocabulary_needs_no_maps(name: str, world: World, tmp_path: Path) -> None:
    """vLLM has no place for them then, so forms that it loads are written without; the others have maps of nothing."""
    head = make_head(draft_vocab_size=VOCABULARY)
    folder = exported(tmp_path, world, name, head)
    maps = load_file(folder / WEIGHTS_FILE).keys() & {"d2t", "t2d"}
    assert maps == ({"d2t", "t2d"} if name in ("safeailab", "specforge") else set())
    expected = reference_logits(folder, world, name)
    assert_same_logits(own_logits(read(folder, world).head, world), expected)
    edit_tensors(folder, lambda tensors: [tensors.pop(key) for key in maps])
    assert_same_logits(own_logits(read(folder, world).head, world), expected)


@pytest.mark.parametrize("name", FORMS)
def test_a_full_vocabulary_s_lm_head_may_be_the_target_s(name: str, world: World, tmp_path: Path) -> None:
    """Files without one are served with the target's, so it is taken, and said. A reduced one's must be there."""
    folder = exported(tmp_path, world, name, make_head(draft_vocab_size=VOCABULARY))
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    imported = read(folder, world)
    assert imported.notes == ["lm_head.weight is not in the file: the target's was taken"]
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": world.weights.lm_head}))
    assert_same_logits(own_logits(imported.head, world), reference_logits(folder, world, name))


@pytest.mark.parametrize("name", WITH_MARKS)
def test_target_ids_for_differences_are_known_by_the_marks(name: str, world: World, tmp_path: Path) -> None:
    """Where t2d proves it, a d2t of target ids is read for what it is; nothing but the file's d2t differs then."""
    folder = exported(tmp_path, world, name)
    expected = read(folder, world).head.state_dict()
    edit_tensors(folder, lambda tensors: tensors["d2t"].add_(torch.arange(len(tensors["d2t"]))))
    found = read(folder, world).head.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_head_whose_taps_a_form_cannot_say_is_not_exported(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"means hidden_states \[2, 4, 5\]; this head reads \[1, 3, 7\]"):
        exported(tmp_path, world, "safeailab", make_head((1, 3, 7)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


# Faults.


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "d2t never filled": (lambda t: t["d2t"].zero_(), "d2t is all zeros"),
    "map past the vocabulary": (lambda t: t["d2t"][-1:].add_(500), r"0\.\.127"),
    "map not one to one": (lambda t: t["d2t"][5:6].sub_(3), "strictly ascending"),
    "short d2t": (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t has shape \[39\], expected \[40\]"),
    "no norm": (lambda t: t.pop("norm.weight"), r"missing norm.weight \[32\]"),
    "bias": (lambda t: t.update({"fc.bias": torch.zeros(32)}), r"unknown fc.bias \[32\]"),
    "norm of features": (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), "unknown fc_norm.0.weight"),
    "norm of all taps": (lambda t: t.update({"input_norm.weight": torch.ones(96)}), "unknown input_norm.weight"),
    "embedding elsewhere": (
        lambda t: t.update({"midlayer.embed_tokens.weight": torch.zeros(128, 32)}),
        "midlayer.embed_tokens.weight, expected",
    ),
    "two taps": (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]}), r"\[32, 64\], expected \[32, 96\]"),
    "transposed": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T}), r"\[32, 40\], expected \[40, 32\]"),
    "not a number": (lambda t: t["norm.weight"][:1].fill_(math.nan), "norm.weight holds non-finite"),
    "quantised": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        r"fc.weight torch.float8_e4m3fn; expected weights in float32, bfloat16, float16",
    ),
    "integers for weights": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight has dtype"),
}


MARK_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "t2d of another map": (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d and d2t disagree"),
    "short t2d": (lambda t: t.update(t2d=t["t2d"][:-1]), r"target's 128 tokens, got shape \[127\]"),
    "no t2d": (lambda t: t.pop("t2d"), "lacks t2d: 40 draft tokens of 128"),
}


@pytest.mark.parametrize("fault", MARK_FAULTS)
@pytest.mark.parametrize("name", WITH_MARKS)
def test_faults_of_marks_are_refused(name: str, fault: str, world: World, tmp_path: Path) -> None:
    change, message = MARK_FAULTS[fault]
    folder = exported(tmp_path, world, name)
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("name", FORMS)
def test_faults_of_tensors_are_refused(name: str, fault: str, world: World, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[fault]
    folder = exported(tmp_path, world, name)
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_counts_and_is_called_as_the_file_calls_it(name: str, world: World, tmp_path: Path) -> None:
    """Left out, renamed, cut or in another shape, each is refused by its name in the file; and so is one too many."""
    folder = exported(tmp_path, world, name)
    whole = load_file(folder / WEIGHTS_FILE)
    for what, tensors, named in one_tensor_faults(whole):
        write_tensors(folder, tensors)
        with pytest.raises(ValueError, match=re.escape(named)):
            pytest.fail(f"{what}, and was read as {read(folder, world).head}")
    own, other = ("layers.0", "midlayer") if name in ("speculators", "modelopt") else ("midlayer", "layers.0")
    write_tensors(folder, {key.replace(own, other): tensor for key, tensor in whole.items()})
    with pytest.raises(ValueError, match=rf"missing {own}.*unknown {other}"):
        read(folder, world)


# Variants.

VARIANTS: dict[str, tuple[Config, tuple[str, ...]]] = {
    "the normed state as the residual": ({"norm_before_residual": True}, ("speculators", "vllm")),
    "a norm a tap": ({"fc_norm": True}, ("specforge", "speculators", "vllm")),
    "one norm of all taps": ({"norm_before_fc": True}, ("speculators", "vllm")),
    "the normed state fed back": ({"norm_output": True}, ("specforge", "speculators", "vllm")),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, ("specforge", "speculators", "vllm")),
    "all at once": (
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        ("speculators", "vllm"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_other_functions_and_survive(variant: str, name: str, world: World, tmp_path: Path) -> None:
    """Where a form can say them, its own reading drafts what ours does, and the plain head's tensors read without the
    flag do not. Where it cannot, nothing is written."""
    settings, forms = VARIANTS[variant]
    head = make_head(**settings)
    if name not in forms:
        with pytest.raises(ValueError, match=next(iter(settings))):
            exported(tmp_path, world, name, head)
        assert not (tmp_path / name).exists()
        return
    folder = exported(tmp_path, world, name, head)
    expected = reference_logits(folder, world, name)
    again = read(folder, world)
    assert again.head.config == head.config
    assert_same_logits(own_logits(head, world), expected)
    assert_same_logits(own_logits(again.head, world), expected)
    assert_other_logits(own_logits(as_plain(head), world), expected)
    second = save_head(tmp_path / "again", again.head, HeadCard(target=world.reference, training=again.origin))
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (tmp_path / "head" / file).read_bytes() == (second / file).read_bytes()


def as_plain(head: Eagle3Head) -> Eagle3Head:
    """The same weights in the network without variants, as a reader would have it that skips what it does not know."""
    flags = dict.fromkeys(("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"), False)
    plain = Eagle3Head(replace(head.config, **flags), head.vocabulary)
    plain.load_state_dict({key: head.state_dict()[key] for key in plain.state_dict()})
    return plain


@pytest.mark.parametrize("name", ["speculators", "vllm"])
@pytest.mark.parametrize("flag", ["fc_norm", "norm_before_fc"])
def test_a_norm_and_its_flag_go_together(flag: str, name: str, world: World, tmp_path: Path) -> None:
    """A flag without its tensors, tensors without their flag, and both norms at once are refused by name."""
    tensor = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}[flag]
    other = {"fc_norm": "norm_before_fc", "norm_before_fc": "fc_norm"}[flag]
    folder = exported(tmp_path, world, name, make_head(**{flag: True}))
    edit_config(folder, lambda config: config.update({other: True}))
    with pytest.raises(ValueError, match="fc_norm and norm_before_fc are both true"):
        read(folder, world)
    edit_config(folder, lambda config: config.update({other: None, flag: False}))
    with pytest.raises(ValueError, match=f"unknown {tensor}"):
        read(folder, world)
    edit_config(folder, lambda config: config.update({flag: True}))
    edit_tensors(folder, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ValueError, match=f"missing {tensor}"):
        read(folder, world)


def test_specforge_s_norm_output_is_pointed_out(world: World, tmp_path: Path) -> None:
    """For a time SpecForge trained heads with this flag on the raw state, whatever the flag said."""
    folder = exported(tmp_path, world, "specforge", make_head(norm_output=True))
    (note,) = read(folder, world).notes
    assert "set norm_output to false" in note
    edit_config(folder, lambda config: config.update(norm_output=False))
    assert read(folder, world).notes == []


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_embeddings(kind: str, name: str, world: World, tmp_path: Path) -> None:
    """Each form's own reading turns by the same angles; unscaled ones would draft otherwise."""
    head = make_head(rope_scaling=SCALINGS[kind])
    folder = exported(tmp_path, world, name, head)
    expected = reference_logits(folder, world, name)
    imported = read(folder, world)
    assert imported.head.config == head.config
    assert_same_logits(own_logits(imported.head, world), expected)
    assert_other_logits(own_logits(make_head(), world), expected, least=1e-3)


LLAMA_FAULTS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "input_norm": True,
    "tie_word_embeddings": True,
    "target_hidden_size": 64,
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "sliding_window": 4096,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"bits": 4},
    "a_flag_of_tomorrow": True,
    "hidden_size": "32",
    "rms_norm_eps": 0,
}
ROPE_FAULTS: list[tuple[Any, str]] = [
    ({"rope_type": "dynamic", "factor": 8.0}, "type 'dynamic'; draft heads have default, linear, llama3, yarn"),
    ({"rope_type": "longrope", "short_factor": [1.0]}, "type 'longrope'"),
    ({"rope_type": "llama3", "factor": 8.0}, "'llama3' lacks low_freq_factor, high_freq_factor, original_max"),
    ({"rope_type": "yarn", "factor": 8.0}, "'yarn' lacks original_max_position_embeddings"),
    ({"rope_type": "linear", "factor": 8.0, "novelty": 1}, "has novelty, which is not known"),
    ({"rope_type": "linear", "factor": -1}, "rope_scaling.factor is -1, expected a positive number"),
    ({"rope_type": "default", "factor": 8.0}, "'default' has factor"),
    ({"rope_theta": 7.0}, "rope_theta is said to be 7 and 500"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "turns a part of each head only"),
    ("yarn", "rope_scaling is 'yarn', expected a mapping"),
]


@pytest.mark.parametrize("key", LLAMA_FAULTS)
@pytest.mark.parametrize("name", FORMS)
def test_flags_that_change_the_forward_are_refused_by_name(name: str, key: str, world: World, tmp_path: Path) -> None:
    """Wherever the form's configuration can hold them."""
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.get("transformer_layer_config", config).update({key: LLAMA_FAULTS[key]}))
    if (name, key) == ("safeailab", "num_hidden_layers"):
        assert read(folder, world).head.config == make_head().config, "its code has one layer, whatever that says"
        return
    with pytest.raises(ValueError, match="rope_theta" if key == "rope_parameters" else key):
        read(folder, world)


@pytest.mark.parametrize("flag", ["norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"])
@pytest.mark.parametrize("name", FORMS)
def test_variants_that_a_form_does_not_know_are_refused_by_name(
    name: str, flag: str, world: World, tmp_path: Path
) -> None:
    """In a file of that form, read as such: also where a form that knows them would have been found."""
    if any(flag in settings and name in forms for settings, forms in VARIANTS.values()):
        pytest.skip("knows it")
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.update({flag: True}))
    with pytest.raises(ValueError, match=f"{flag} = true, only false"):
        read(folder, world, name)


@pytest.mark.parametrize("rope", ROPE_FAULTS, ids=range(len(ROPE_FAULTS)))
@pytest.mark.parametrize("name", FORMS)
def test_other_angles_are_refused(name: str, rope: tuple[Any, str], world: World, tmp_path: Path) -> None:
    scaling, message = rope
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.get("transformer_layer_config", config).update(rope_scaling=scaling))
    with pytest.raises(ValueError, match=message):
        read(folder, world)


KEY = "eagle_aux_hidden_state_layer_ids"
FORM_FAULTS: list[tuple[str, Callable[[Config], Any], str]] = [
    ("speculators", lambda c: c.update(norm_before_residual=1), "norm_before_residual = 1; expected true or false"),
    ("speculators", lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing"),
    ("speculators", lambda c: c.update(norm_before_fc=1), "norm_before_fc = 1; expected true or false"),
    ("modelopt", lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state = false"),
    ("modelopt", lambda c: c["eagle_config"].update(use_last_layernorm=False), "use_last_layernorm = false"),
    ("modelopt", lambda c: c["eagle_config"].update(use_mtp_layernorm=True), "use_mtp_layernorm = true"),
    ("modelopt", lambda c: c["eagle_config"].update(parallel_draft_step=4), "parallel_draft_step = 4"),
    ("modelopt", lambda c: c["eagle_config"].update(novelty=1), "novelty"),
    ("modelopt", lambda c: c["eagle_config"].update({KEY: [1]}), r"\[1\], expected 3 whole numbers"),
    ("safeailab", lambda c: c.update(truncated_vocab_size=39), "truncated_vocab_size is 39, but draft_vocab_size 40"),
    ("speculators", lambda c: c.update(embed_requires_grad=True), "embed_requires_grad"),
    ("speculators", lambda c: c.update(target_hidden_size=64), "target_hidden_size"),
    ("speculators", lambda c: c.update(speculators_model_type="eagle"), 'speculators_model_type = "eagle"'),
    ("speculators", lambda c: c.update(architectures=["DFlash"]), "DFlash"),
    ("speculators", lambda c: c.update(novelty=1), "novelty"),
    ("speculators", lambda c: c["speculators_config"].update(algorithm="eagle"), "algorithm"),
    (
        "speculators",
        lambda c: c.pop("transformer_layer_config"),
        "transformer_layer_config is None, expected a mapping",
    ),
    ("speculators", lambda c: c.update({KEY: [2, 4]}), r"\[2, 4\], expected 3 whole numbers"),
    ("speculators", lambda c: c.update({KEY: [4, 2, 5]}), "ascending"),
    ("speculators", lambda c: c.update({KEY: [2, 4, 9]}), r"\[2, 4, 9\], but the target has 8 layers"),
    ("specforge", lambda c: c["eagle_config"].update({KEY: [2, 4, 8]}), r"\[3, 5, 9\], but the target has 8 layers"),
    ("specforge", lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state = false"),
    ("specforge", lambda c: c["eagle_config"].update(novelty=1), "novelty"),
    ("vllm", lambda c: c.update({KEY: [3, 5, 6]}), r"named twice and differently: .*\[3, 5, 6\].*\[2, 4, 5\]"),
    ("vllm", lambda c: c["eagle_config"].update({KEY: [2, 4, 5]}), "named twice and differently"),
    ("safeailab", lambda c: c.update(architectures=["LlamaForCausalLM"], draft_vocab_size=None), "look like .*EAGLE-3"),
    (
        "safeailab",
        lambda c: c.update(architectures=["Unheard"]),
        r"of no known form.*look like those of EAGLE-3 \(--from",
    ),
    ("safeailab", lambda c: c.update(bias=True), "bias = true"),
    ("safeailab", lambda c: c.pop("hidden_size"), "hidden_size is None, expected a whole number"),
    ("safeailab", lambda c: c.update(draft_vocab_size=41), r"d2t has shape \[40\], expected \[41\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), FORM_FAULTS, ids=range(len(FORM_FAULTS)))
def test_faults_of_configurations_are_refused(
    name: str, change: Callable[[Config], Any], message: str, world: World, tmp_path: Path
) -> None:
    folder = exported(tmp_path, world, name)
    edit_config(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


@pytest.mark.parametrize(
    ("name", "ids", "word"),
    [("specforge", [2, 4, 5], "hidden_states indices"), ("speculators", [1, 3, 4], "layers counted from 0")],
)
def test_taps_that_look_off_by_one_are_pointed_out(
    name: str, ids: list[int], word: str, world: World, tmp_path: Path
) -> None:
    """One file cannot prove it, for such taps are possible; but they are the usual ones in the other numbering."""
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.get("eagle_config", config).update({KEY: ids}))
    (note,) = read(folder, world).notes
    assert f"if the file's ids are {word}, it is off by one" in note


def test_a_form_that_is_asked_for_is_held_to(world: World, tmp_path: Path) -> None:
    """Named layers are not dropped by reading a file as the form that has no place for them."""
    folder = exported(tmp_path, world, "specforge", make_head((1, 3, 7)))
    with pytest.raises(ValueError, match="read as safeailab: eagle_config"):
        read(folder, world, "safeailab")
    with pytest.raises(ValueError, match="read as speculators: transformer_layer_config"):
        read(folder, world, "speculators")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 48}, r"hidden size 32 and is for a vocabulary of 128; tiny has 48 and 128"),
        ({"vocab_size": 256}, r"hidden size 32 and is for a vocabulary of 128; tiny has 32 and 256"),
        ({"num_layers": 6}, r"6 are too few .* \[2, 3, 3\]"),
    ],
)
def test_a_target_of_other_sizes_is_refused(sizes: dict[str, int], message: str, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "safeailab")
    values = {"num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY, **sizes}
    other = TargetReference(name="tiny", fingerprint="x", **values)
    with pytest.raises(ValueError, match=message):
        read_foreign(folder, target=other, weights=world.weights)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, "pytorch_model.bin", CONFIG_FILE])
def test_truncated_files_are_refused_at_any_length(file: str, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "safeailab")
    if file == "pytorch_model.bin":
        torch.save(load_file(folder / WEIGHTS_FILE), folder / file)
        (folder / WEIGHTS_FILE).unlink()
    content = (folder / file).read_bytes()
    for length in (0, 1, 2, 7, 100, *range(101, len(content) - 3, len(content) // 40), len(content) - 3):
        (folder / file).write_bytes(content[:length])
        with pytest.raises(ValueError, match=file):
            read(folder, world)


def test_what_is_no_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    """Pickles that hold more than tensors are not executed."""
    with pytest.raises(ValueError, match="already"):
        read(saved(tmp_path / "head", world), world)
    with pytest.raises(ValueError, match="there is no folder"):
        read(tmp_path / "nowhere", world)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read(tmp_path / "empty", world)
    folder = exported(tmp_path, world, "specforge")
    (folder / WEIGHTS_FILE).rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"holds .*model-00001-of-00002.* expected model\.safetensors or"):
        read(folder, world)
    for values, message in (
        ({"fc.weight": print}, "more than tensors"),
        ([1], "expected a mapping"),
        ({"epoch": 3}, "epoch are no tensors"),
    ):
        torch.save(values, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=message):
            read(folder, world)


def test_an_export_that_fails_leaves_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder nor a staging folder; and what is there already is never replaced."""
    head = saved(tmp_path / "head", world)

    def full_disk(tensors: Any, path: Path, **more: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(foreign, "save_file", full_disk)
        with pytest.raises(OSError, match="no space left"):
            write_foreign(tmp_path / "out", head, "vllm")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    with pytest.raises(ValueError, match="exists already"):
        write_foreign(head, head, "vllm")
    assert load_head(head)[1].target == world.reference


def test_every_form_says_its_conventions() -> None:
    """The table is what a reader looks things up in: each entry names its layer and its maps."""
    for form in (FORMATS[name] for name in FORMS):
        layer = form.spelling("midlayer.").rstrip(".")
        assert layer in form.conventions or "as SafeAILab's" in form.conventions
        assert len(form.conventions) > 80

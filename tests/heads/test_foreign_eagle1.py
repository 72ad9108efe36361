"""EAGLE and EAGLE-2 heads of other projects: equal draft logits on both sides of a conversion, and refusals by name.

The reference computes draft logits from the foreign files alone, by the papers and each project's reading of the files,
in plain torch. It shares no code with headstart, and takes the target's last state by a hook behind its final norm.
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

from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, save_head
from heads.eagle1 import Eagle1Config, Eagle1Head
from heads.foreign import FORMATS, detect_format, read_foreign_config, write_foreign
from heads.vocab import DraftVocabulary
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
    exported,
    forms_of,
    make_world,
    one_tensor_faults,
    own_logits,
    read,
    read_config,
    saved,
    write_tensors,
)
from tests.heads.foreign_reference import decoder_layer

FORMS = forms_of("eagle1")
BIASED = [name for name in FORMS if name != "vllm-eagle1"]
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def make_head(*, bias: bool = False, draft_vocab_size: int = VOCABULARY, **more: Any) -> Eagle1Head:
    """Random, norms included, with every optional setting off its default; small, for no norm holds the states down."""
    settings = {"num_attention_heads": 4, "head_dim": 8, "rms_norm_eps": 3e-5, "rope_theta": 500.0, **more}
    config = Eagle1Config(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocab_size,
        taps=(LAYERS + 1,),
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        bias=bias,
        **settings,
    )
    counts = dict.fromkeys(range(1, VOCABULARY, 3), 1)
    vocabulary = DraftVocabulary.from_counts(counts, size=draft_vocab_size, vocab_size=VOCABULARY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = Eagle1Head(config, vocabulary)
        for name, parameter in head.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    return head


def reference_logits(folder: Path, world: World, name: str, steps: int = 3) -> list[torch.Tensor]:
    """[embedding; state] through fc, Llama's layer without an input norm, and the target's LM head on what comes out,
    which is the next state too."""
    config, tensors = read_config(folder), load_file(folder / WEIGHTS_FILE)
    architecture, has_bias = READINGS[name]
    assert config["architectures"] == [architecture]
    bias = tensors["fc.bias"] if has_bias(config) else 0.0
    tokens, states = world.token_ids[1:], world.last[:-1]
    result = []
    for _ in range(steps):
        both = torch.cat([world.weights.embedding[tokens], states], dim=-1)
        fused = both @ tensors["fc.weight"].T + bias
        last = decoder_layer(fused, fused, tensors, "layers.0", config)[-1:]
        logits = (last @ world.weights.lm_head.T)[0]
        result.append(logits)
        tokens, states = torch.cat([tokens, logits.argmax()[None]]), torch.cat([states, last])
    return result


READINGS: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "safeailab-eagle1": ("LlamaForCausalLM", lambda config: config.get("bias", True)),
    "vllm-eagle1": ("EagleLlamaForCausalLM", lambda config: False),
    "sglang-eagle1": ("LlamaForCausalLMEagle", lambda config: True),
}
"""The class that each project takes, and whether it has a bias in fc."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_draft_logits_are_equal_on_both_sides(name: str, bias: bool, world: World, tmp_path: Path) -> None:
    """After export the project's own reading drafts what the head drafts, and so does the head that comes back. vLLM
    has no bias."""
    head = make_head(bias=bias)
    if bias and name not in BIASED:
        with pytest.raises(ValueError, match="vLLM has no bias in fc"):
            exported(tmp_path, world, name, head)
        assert not (tmp_path / name).exists()
        return
    folder = exported(tmp_path, world, name, head)
    theirs = reference_logits(folder, world, name)
    assert_same_logits(own_logits(head, world), theirs)
    assert_same_logits(own_logits(read(folder, world).head, world), theirs)


@pytest.mark.parametrize("name", FORMS)
def test_the_comparison_sees_each_convention(name: str, world: World, tmp_path: Path) -> None:
    """Halves of fc the other way round, other angles, a bias, and a state before the norm must not compare as equal."""
    folder = exported(tmp_path, world, name, make_head())
    theirs = reference_logits(folder, world, name)
    turned_round = make_head()
    turned_round.fc.weight.data = turned_round.fc.weight.data.roll(HIDDEN, dims=1)
    raw = make_head()
    raw.config = replace(raw.config, taps=(LAYERS,))
    for wrong in (turned_round, make_head(rope_theta=400.0), make_head(bias=True), raw):
        with pytest.raises(AssertionError):
            assert_same_logits(own_logits(wrong, world), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_there_and_back_changes_nothing(
    name: str, bias: bool, dtype: torch.dtype, world: World, tmp_path: Path
) -> None:
    """Our files come back bit for bit, and theirs too: names, tensors, dtypes and every setting of the network."""
    if bias and name not in BIASED:
        pytest.skip("cannot say it")
    first = saved(tmp_path / "head", world, make_head(bias=bias), dtype)
    abroad = write_foreign(tmp_path / "abroad", first, name)
    imported = read(abroad, world)
    assert imported.notes == []
    assert imported.dtype == dtype
    card = HeadCard(target=world.reference, family="eagle1", training=imported.origin)
    second = save_head(tmp_path / "again", imported.head, card, dtype=dtype)
    abroad_again = write_foreign(tmp_path / "abroad_again", second, name)
    for ours, theirs in ((first, second), (abroad, abroad_again)):
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    assert load_file(abroad / WEIGHTS_FILE).keys() == {
        "fc.weight",
        *(["fc.bias"] if bias or name == "sglang-eagle1" else []),
        *(f"layers.0.self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_recognised(name: str, world: World, tmp_path: Path) -> None:
    """No form is taken for another: of each, one detector alone answers."""
    config = read_config(exported(tmp_path, world, name, make_head()))
    assert detect_format(config, source="") == name
    assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]


def test_our_own_form_is_a_copy_without_the_card(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "vllm-eagle1", make_head())
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (folder / file).read_bytes() == (tmp_path / "head" / file).read_bytes()


@pytest.mark.parametrize("name", FORMS)
def test_a_reduced_vocabulary_has_no_place_in_any_form(name: str, world: World, tmp_path: Path) -> None:
    """They draft with the target's whole LM head, which would give logits that were never trained."""
    with pytest.raises(ValueError, match=r"made for 40 of 128 tokens: train one with head.draft_vocab_size=null"):
        exported(tmp_path, world, name, make_head(draft_vocab_size=40))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


@pytest.mark.parametrize("name", FORMS)
def test_copies_of_the_target_s_tensors_are_checked_and_dropped(name: str, world: World, tmp_path: Path) -> None:
    """SafeAILab's files hold the embedding, converted ones the LM head too. A copy is redundant, anything else would be
    lost in silence; a tensor of another name is refused."""
    folder = exported(tmp_path, world, name, make_head())
    expected = own_logits(read(folder, world).head, world)
    copies = {"embed_tokens.weight": world.weights.embedding, "lm_head.weight": world.weights.lm_head}
    edit_tensors(folder, lambda tensors: tensors.update(copies))
    imported = read(folder, world)
    assert_same_logits(own_logits(imported.head, world), expected)
    again = save_head(tmp_path / "again", imported.head, HeadCard(target=world.reference, family="eagle1"))
    assert load_file(again / WEIGHTS_FILE).keys().isdisjoint(copies)
    for key in copies:
        edit_tensors(folder, lambda tensors, key=key: tensors.update({**copies, key: copies[key] * 1.1}))
        with pytest.raises(ValueError, match=rf"{key} is not the target's \(12[78] of 128 rows differ\)"):
            read(folder, world)


def test_only_safeailab_s_form_may_be_given_the_embedding(world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "safeailab-eagle1", make_head(), weights=world.weights)
    assert torch.equal(load_file(folder / WEIGHTS_FILE)["embed_tokens.weight"], world.weights.embedding)
    with pytest.raises(ValueError, match="only safeailab-eagle1 may hold a copy"):
        write_foreign(tmp_path / "x", tmp_path / "head", "vllm-eagle1", weights=world.weights)


# The bias.


def test_safeailab_s_bias_is_what_the_configuration_says(world: World, tmp_path: Path) -> None:
    """True where it says nothing. A tensor that it does not announce, or announces in vain, is refused by name."""
    folder = exported(tmp_path, world, "safeailab-eagle1", make_head(bias=True))
    edit_config(folder, lambda config: config.pop("bias"))
    assert read(folder, world).head.config.bias
    edit_config(folder, lambda config: config.update(bias=False))
    with pytest.raises(ValueError, match=r"unknown fc.bias \[32\]"):
        read(folder, world)
    edit_tensors(folder, lambda tensors: tensors.pop("fc.bias"))
    assert not read(folder, world).head.config.bias
    for bias in (True, None):
        edit_config(folder, lambda config, bias=bias: config.update(bias=bias))
        with pytest.raises(ValueError, match=r"missing fc.bias \[32\]"):
            read(folder, world)
    edit_config(folder, lambda config: config.update(bias="no"))
    with pytest.raises(ValueError, match="bias is 'no', expected true or false"):
        read(folder, world)


def test_sglang_s_files_always_have_a_bias(world: World, tmp_path: Path) -> None:
    """Of zeros for a head without one: SGLang would leave it random. Zeros, or none at all, read as none."""
    folder = exported(tmp_path, world, "sglang-eagle1", make_head())
    tensors = load_file(folder / WEIGHTS_FILE)
    assert torch.equal(tensors["fc.bias"], torch.zeros(HIDDEN))
    assert "bias" not in read_config(folder), "SGLang would put biases into attention"
    assert not read(folder, world).head.config.bias
    edit_tensors(folder, lambda tensors: tensors.pop("fc.bias"))
    assert not read(folder, world).head.config.bias
    edit_tensors(folder, lambda tensors: tensors.update({"fc.bias": torch.zeros(HIDDEN + 1)}))
    with pytest.raises(ValueError, match=r"fc.bias has shape \[33\], expected \[32\]"):
        read(folder, world)
    head = make_head(bias=True)
    torch.nn.init.zeros_(head.fc.bias)
    with pytest.raises(ValueError, match="zero throughout"):
        write_foreign(tmp_path / "x", saved(tmp_path / "zeros", world, head), "sglang-eagle1")


# Faults.


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_counts(name: str, world: World, tmp_path: Path) -> None:
    """Left out, renamed, cut or in another shape, each is refused by its name; and so is one too many."""
    folder = exported(tmp_path, world, name, make_head(bias=name in BIASED))
    for what, tensors, named in one_tensor_faults(load_file(folder / WEIGHTS_FILE)):
        write_tensors(folder, tensors)
        if name == "sglang-eagle1" and what == "fc.bias left out":
            continue  # means none, as above
        with pytest.raises(ValueError, match=re.escape(named)):
            pytest.fail(f"{what}, and was read as {read(folder, world).head}")


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a norm before attention": (
        lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
        r"unknown layers.0.input_layernorm.weight \[32\]",
    ),
    "a norm at the end": (lambda t: t.update({"norm.weight": torch.ones(32)}), r"unknown norm.weight \[32\]"),
    "a second layer": (
        lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(48, 32)}),
        "unknown layers.1.mlp.up_proj.weight",
    ),
    "a map": (lambda t: t.update(d2t=torch.zeros(40, dtype=torch.int64)), r"unknown d2t \[40\]"),
    "attention biases": (
        lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        "unknown layers.0.self_attn.q_proj.bias",
    ),
    "not a number": (lambda t: t["fc.weight"][0].fill_(math.nan), "fc.weight holds non-finite"),
    "quantised": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "float8"),
    "integers for weights": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight has dtype"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("name", FORMS)
def test_faults_of_tensors_are_refused(name: str, fault: str, world: World, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[fault]
    folder = exported(tmp_path, world, name, make_head())
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


LLAMA_FAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "qkv_bias": True,
    "mlp_bias": True,
    "model_type": "qwen2",
    "sliding_window": 4096,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"bits": 4},
    "add_para_norm": True,
    "hot_vocab_size": 64,
    "a_flag_of_tomorrow": True,
    "hidden_size": "32",
    "rms_norm_eps": 0,
    "rope_theta": -1,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("key", LLAMA_FAULTS)
@pytest.mark.parametrize("name", FORMS)
def test_flags_that_change_the_forward_are_refused_by_name(name: str, key: str, world: World, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, name, make_head())
    edit_config(folder, lambda config: config.update({key: LLAMA_FAULTS[key]}))
    with pytest.raises(ValueError, match=key):
        read(folder, world)


FORM_FAULTS: list[tuple[str, Callable[[Config], Any], str]] = [
    ("safeailab-eagle1", lambda c: c.update(num_hidden_layers=2), "of no known form.*num_hidden_layers is 2.*EAGLE"),
    ("vllm-eagle1", lambda c: c.update(num_hidden_layers=2), "num_hidden_layers = 2, only 1"),
    ("vllm-eagle1", lambda c: c.update(bias=True), "bias = true, only false"),
    ("vllm-eagle1", lambda c: c.update(draft_vocab_size=40), "draft_vocab_size is 40, but vLLM drafts with all 128"),
    ("sglang-eagle1", lambda c: c.update(bias=True), "bias = true, only false"),
    ("sglang-eagle1", lambda c: c.update(vocab_size=64), "vocabulary of 64; tiny has 32 and 128"),
    ("safeailab-eagle1", lambda c: c.pop("hidden_size"), "hidden_size is None, expected a whole number"),
]


@pytest.mark.parametrize(("name", "change", "message"), FORM_FAULTS, ids=range(len(FORM_FAULTS)))
def test_faults_of_configurations_are_refused(
    name: str, change: Callable[[Config], Any], message: str, world: World, tmp_path: Path
) -> None:
    folder = exported(tmp_path, world, name, make_head())
    edit_config(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


def test_what_safeailab_s_code_cannot_compute_is_not_exported_to_it(world: World, tmp_path: Path) -> None:
    """It divides the hidden size among the heads, and of scaled rotary embeddings it has the linear ones."""
    with pytest.raises(ValueError, match="divides hidden size 32 among 4 heads, and this head's are 6 wide"):
        exported(tmp_path, world, "safeailab-eagle1", make_head(head_dim=6))
    with pytest.raises(ValueError, match="no rotary embeddings of type 'yarn'"):
        write_foreign(tmp_path / "x", saved(tmp_path / "yarn", world, make_head(rope_scaling=YARN)), "safeailab-eagle1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "yarn"]


@pytest.mark.parametrize("name", FORMS)
def test_scaled_rotary_embeddings(name: str, world: World, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0} if name == "safeailab-eagle1" else YARN
    head = make_head(rope_scaling=scaling)
    folder = exported(tmp_path, world, name, head)
    expected = reference_logits(folder, world, name)
    imported = read(folder, world)
    assert imported.head.config == head.config
    assert_same_logits(own_logits(imported.head, world), expected)
    assert_other_logits(own_logits(make_head(), world), expected, least=1e-3)


# One project's weights beside another's configuration.


@pytest.fixture
def eagle3_folder(world: World, tmp_path: Path) -> Path:
    from tests.heads.test_foreign import exported as exported_eagle3

    return exported_eagle3(tmp_path / "eagle3", world, "safeailab")


def test_eagle3_weights_beside_an_eagle_configuration(world: World, eagle3_folder: Path, tmp_path: Path) -> None:
    """The error says what the file looks like and which form would read it."""
    folder = exported(tmp_path, world, "safeailab-eagle1", make_head())
    (folder / WEIGHTS_FILE).write_bytes((eagle3_folder / WEIGHTS_FILE).read_bytes())
    with pytest.raises(ValueError, match=r"lm_head\.weight") as refusal:
        read(folder, world)
    assert "look like those of EAGLE-3 (--from safeailab or specforge or vllm" in str(refusal.value)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing layers.0.*unknown midlayer.*look like those of EAGLE-3 \(--from"):
        read(folder, world)


def test_eagle_weights_beside_an_eagle3_configuration(world: World, eagle3_folder: Path, tmp_path: Path) -> None:
    folder = exported(tmp_path, world, "safeailab-eagle1", make_head())
    (eagle3_folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes())
    hint = r"look like those of EAGLE and EAGLE-2 \(--from safeailab-eagle1 or vllm-eagle1 or sglang-eagle1"
    with pytest.raises(ValueError, match=f"lacks d2t, t2d.*{hint}"):
        read(eagle3_folder, world)
    edit_config(eagle3_folder, lambda config: config.update(architectures=["Nothing"]))
    with pytest.raises(ValueError, match=f"of no known form.*{hint}"):
        read_foreign_config(eagle3_folder)


def test_a_head_is_not_exported_as_another_family(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"specforge is a form of EAGLE-3 heads, .* holds EAGLE and EAGLE-2: expected"):
        exported(tmp_path, world, "specforge", make_head())


def test_files_as_their_projects_publish_them(world: World, tmp_path: Path) -> None:
    """SafeAILab's: pickled, in float16, with a copy of the embedding, bookkeeping keys and no bias key; the copy is
    rounded as the file is."""
    folder = exported(tmp_path, world, "safeailab-eagle1", make_head(bias=True))
    tensors = load_file(folder / WEIGHTS_FILE) | {"embed_tokens.weight": world.weights.embedding}
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    (folder / WEIGHTS_FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    bookkeeping = {"transformers_version": "4.28.1", "use_cache": True, "pad_token_id": 0, "initializer_range": 0.02}
    edit_config(folder, lambda config: config.update(bookkeeping, eos_token_id=[2, 3]))
    for key in ("mlp_bias", "attention_bias", "rope_scaling", "head_dim", "bias"):
        edit_config(folder, lambda config, key=key: config.pop(key))
    imported = read(folder, world)
    assert imported.dtype == torch.float16
    assert imported.head.config == make_head(bias=True).config
    assert set(imported.origin["unused_settings"]) == {*bookkeeping, "torch_dtype"}

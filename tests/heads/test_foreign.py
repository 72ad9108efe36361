"""Heads of other projects: equal draft logits on both sides of a conversion, and refusals where a file shows a fault.

The references below compute draft logits from the foreign files alone, each by its own project's conventions, in plain
torch. They share no code with headstart, and tap the target by hooks rather than by `hidden_states` indices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import foreign
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, TargetReference, load_head, save_head
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.foreign import FORMATS, Imported, detect_format, read_foreign, write_foreign
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model

LAYERS, VOCABULARY, HIDDEN = 8, 128, 32
USUAL_TAPS = (2, 4, 5)
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A target, and its states for a text: `inputs[i]` and `outputs[i]` of decoder layer i [T, H], by hooks, and
    `hidden_states`, which headstart numbers its taps by."""

    reference: TargetReference
    embedding: torch.Tensor
    token_ids: torch.Tensor
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    hidden_states: tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def world() -> World:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    handles = []
    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0])))
        handles.append(layer.register_forward_hook(lambda module, args, out: outputs.append(_first(out)[0])))
    token_ids = torch.randint(VOCABULARY, (11,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result = model(token_ids[None], output_hidden_states=True)
    for handle in handles:
        handle.remove()
    reference = TargetReference(
        name="tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    embedding = model.get_input_embeddings().weight.detach()
    return World(reference, embedding, token_ids, inputs, outputs, tuple(one[0] for one in result.hidden_states))


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def make_head(
    taps: tuple[int, ...] = USUAL_TAPS, *, draft_vocab_size: int = 40, norm_before_residual: bool = False
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
        rope_theta=500.0,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        norm_before_residual=norm_before_residual,
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
    return save_head(folder, head or make_head(), HeadCard(target=world.reference), dtype=dtype)


def exported(tmp_path: Path, world: World, name: str, head: Eagle3Head | None = None, **more: Any) -> Path:
    return write_foreign(tmp_path / name, saved(tmp_path / "head", world, head), name, **more)


def read(folder: Path, world: World, name: str | None = None) -> Imported:
    return read_foreign(folder, name, target=world.reference, embedding_weight=world.embedding)


def read_config(folder: Path) -> Config:
    values: Config = json.loads((folder / CONFIG_FILE).read_text())
    return values


def edit_config(folder: Path, change: Callable[[Config], Any]) -> None:
    config = read_config(folder)
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)


# Our side.


def own_logits(head: Eagle3Head, world: World, steps: int = 3) -> list[torch.Tensor]:
    """Logits over target ids [V] (-inf where there is no draft token) of greedy draft steps after the text."""
    head.bind(world.embedding)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        every_key, every_value = (torch.cat(one).repeat_interleave(2, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, every_key) / math.sqrt(query.shape[-1])
        behind = len(every_key) - len(query)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(behind + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), every_value)

    taps = torch.cat([world.hidden_states[tap] for tap in head.config.taps], dim=-1)
    tokens, states = world.token_ids[1:], head.fuse(taps[:-1])
    result: list[torch.Tensor] = []
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        for step in range(steps):
            states = head(tokens, states, positions, attend)
            everywhere = torch.full((VOCABULARY,), -math.inf)
            everywhere[head.target_ids] = head.logits(states[-1])
            result.append(everywhere)
            tokens, states = everywhere.argmax()[None], states[-1:]
            positions = torch.tensor([len(world.token_ids) - 1 + step])
    return result


# The other side: one network, and what each project means by its files.


def reference_logits(folder: Path, world: World, name: str, steps: int = 3) -> list[torch.Tensor]:
    config, tensors = read_config(folder), load_file(folder / WEIGHTS_FILE)
    states, prefix, layer_config = REFERENCES[name](config, world)
    embedding = tensors.get("embed_tokens.weight", world.embedding)
    heads, groups = layer_config["num_attention_heads"], layer_config["num_key_value_heads"]
    size, eps = layer_config["head_dim"], layer_config["rms_norm_eps"]

    def norm(vectors: torch.Tensor, weight: str) -> torch.Tensor:
        return tensors[weight] * vectors / (vectors.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        """[T, heads, D]: the first half and the second are the real and imaginary parts of D/2 complex numbers."""
        frequencies = layer_config["rope_theta"] ** (-torch.arange(size // 2) * 2.0 / size)
        angles = torch.arange(len(vectors))[:, None] * frequencies
        complex_ = torch.complex(vectors[..., : size // 2], vectors[..., size // 2 :])
        complex_ = complex_ * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([complex_.real, complex_.imag], dim=-1)

    def forward(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The whole sequence at once, causal, without a cache."""
        both = [
            norm(embedding[tokens], f"{prefix}.input_layernorm.weight"),
            norm(states, f"{prefix}.hidden_norm.weight"),
        ]
        wide = torch.cat(both, dim=-1)
        query, key, value = (
            (wide @ tensors[f"{prefix}.self_attn.{one}_proj.weight"].T).view(len(tokens), -1, size) for one in "qkv"
        )
        assert (query.shape[1], key.shape[1]) == (heads, groups)
        query, key = turned(query), turned(key)
        mixed = []
        for one in range(heads):
            group = one // (heads // groups)
            scores = query[:, one] @ key[:, group].T / size**0.5
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
            mixed.append(scores.softmax(-1) @ value[:, group])
        residual = both[1] if config.get("norm_before_residual") else states
        states = residual + torch.cat(mixed, dim=-1) @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(states, f"{prefix}.post_attention_layernorm.weight")
        gate, up, down = (tensors[f"{prefix}.mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        return states + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    tokens, states = world.token_ids[1:], (states @ tensors["fc.weight"].T)[:-1]
    result = []
    for _ in range(steps):
        last = forward(tokens, states)[-1:]
        logits = (norm(last, "norm.weight") @ tensors["lm_head.weight"].T)[0]
        everywhere = torch.full((VOCABULARY,), -math.inf)
        for draft, logit in enumerate(logits):
            everywhere[draft + int(tensors["d2t"][draft])] = logit
        assert torch.equal(everywhere > -math.inf, tensors["t2d"])
        result.append(everywhere)
        tokens, states = torch.cat([tokens, everywhere.argmax()[None]]), torch.cat([states, last])
    return result


Reference = tuple[torch.Tensor, str, Config]


def safeailab(config: Config, world: World) -> Reference:
    """The inputs of layers 2, n//2 and n-3."""
    layers = (2, LAYERS // 2, LAYERS - 3)
    return torch.cat([world.inputs[layer] for layer in layers], dim=-1), "midlayer", config


def specforge(config: Config, world: World) -> Reference:
    """The outputs of the layers named."""
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return torch.cat([world.outputs[layer] for layer in layers], dim=-1), "midlayer", config


def speculators(config: Config, world: World) -> Reference:
    """What vLLM collects before layer i runs, and the settings of the nested layer."""
    assert isinstance(config["norm_before_residual"], bool)
    layers = config["eagle_aux_hidden_state_layer_ids"]
    states = torch.cat([world.inputs[layer] for layer in layers], dim=-1)
    return states, "layers.0", config["transformer_layer_config"]


def vllm(config: Config, world: World) -> Reference:
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return torch.cat([world.inputs[layer] for layer in layers], dim=-1), "midlayer", config


REFERENCES: dict[str, Callable[[Config, World], Reference]] = {
    "safeailab": safeailab,
    "specforge": specforge,
    "speculators": speculators,
    "vllm": vllm,
}


def assert_same_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Logits up to 3.4 differ by 7e-7 between two orders of summation in float32, and by 0.8 and more where one side
    swaps norms or taps one layer off (`test_the_comparison_sees_each_convention`)."""
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("taps", [USUAL_TAPS, (1, 3, 7)])
@pytest.mark.parametrize("name", FORMATS)
def test_draft_logits_are_equal_on_both_sides(name: str, taps: tuple[int, ...], world: World, tmp_path: Path) -> None:
    """After export the project's own reading drafts what the head drafts, and so does the head that comes back."""
    if name == "safeailab" and taps != USUAL_TAPS:
        pytest.skip("cannot say its taps")
    head = make_head(taps)
    folder = exported(tmp_path, world, name, head)
    theirs = reference_logits(folder, world, name)
    assert_same_logits(own_logits(head, world), theirs)
    assert_same_logits(own_logits(read(folder, world).head, world), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_the_comparison_sees_each_convention(name: str, world: World, tmp_path: Path) -> None:
    """Swapped norms, shifted taps or absolute ids on one side alone must not compare as equal."""
    folder = exported(tmp_path, world, name)
    theirs = reference_logits(folder, world, name)
    swapped = make_head()
    layer = swapped.midlayer
    layer.hidden_norm, layer.input_layernorm = layer.input_layernorm, layer.hidden_norm
    renumbered = make_head()
    renumbered.d2t += 1
    for wrong in (swapped, renumbered, make_head((1, 3, 4)), make_head((3, 5, 6))):
        with pytest.raises(AssertionError):
            assert_same_logits(own_logits(wrong, world), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
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


@pytest.mark.parametrize("name", FORMATS)
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
    folder = exported(tmp_path, world, "speculators", embedding_weight=world.embedding)
    assert torch.equal(load_file(folder / WEIGHTS_FILE)["embed_tokens.weight"], world.embedding)
    assert_same_logits(own_logits(read(folder, world).head, world), reference_logits(folder, world, "speculators"))
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": world.embedding.half()}))
    read(folder, world)
    edit_tensors(folder, lambda tensors: tensors["embed_tokens.weight"][7].mul_(1.1))
    with pytest.raises(ValueError, match=r"not the target's \(1 of 128 rows differ\), expected a copy"):
        read(folder, world)
    with pytest.raises(ValueError, match="only speculators' may hold a copy"):
        write_foreign(tmp_path / "x", tmp_path / "head", "vllm", embedding_weight=world.embedding)


def test_a_full_vocabulary_needs_no_maps(world: World, tmp_path: Path) -> None:
    head = make_head(draft_vocab_size=VOCABULARY)
    folder = exported(tmp_path, world, "speculators", head)
    expected = reference_logits(folder, world, "speculators")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    assert_same_logits(own_logits(read(folder, world).head, world), expected)


def test_a_head_whose_taps_a_form_cannot_say_is_not_exported(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"means hidden_states \[2, 4, 5\]; this head reads \[1, 3, 7\]"):
        exported(tmp_path, world, "safeailab", make_head((1, 3, 7)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


# Faults.


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "absolute ids": (absolute, r"d2t holds target ids, expected differences"),
    "d2t never filled": (lambda t: t["d2t"].zero_(), "d2t is all zeros"),
    "t2d of another map": (lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d and d2t disagree"),
    "map past the vocabulary": (lambda t: t["d2t"][-1:].add_(500), r"0\.\.127"),
    "map not one to one": (lambda t: t["d2t"][5:6].sub_(3), "strictly ascending"),
    "short d2t": (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t has shape \[39\], expected \[40\]"),
    "short t2d": (lambda t: t.update(t2d=t["t2d"][:-1]), r"target's 128 tokens, got shape \[127\]"),
    "no t2d": (lambda t: t.pop("t2d"), "lacks t2d: 40 draft tokens of 128"),
    "no norm": (lambda t: t.pop("norm.weight"), r"missing norm.weight \[32\]"),
    "bias": (lambda t: t.update({"fc.bias": torch.zeros(32)}), r"unknown fc.bias \[32\]"),
    "norm of features": (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), "unknown fc_norm.0.weight"),
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


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("name", FORMATS)
def test_faults_of_tensors_are_refused(name: str, fault: str, world: World, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[fault]
    folder = exported(tmp_path, world, name)
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        read(folder, world)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_counts_and_is_called_as_the_file_calls_it(name: str, world: World, tmp_path: Path) -> None:
    """Left out or renamed to another form's spelling, each is missed under its own name."""
    folder = exported(tmp_path, world, name)
    whole = load_file(folder / WEIGHTS_FILE)
    for missing in whole:
        save_file({key: tensor for key, tensor in whole.items() if key != missing}, folder / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=rf"(missing|lacks) {missing}"):
            read(folder, world)
    own, other = ("layers.0", "midlayer") if name == "speculators" else ("midlayer", "layers.0")
    save_file({key.replace(own, other): tensor for key, tensor in whole.items()}, folder / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=rf"missing {own}.*unknown {other}"):
        read(folder, world)


@pytest.mark.parametrize("name", ["speculators", "vllm"])
def test_the_normed_state_as_the_residual(name: str, world: World, tmp_path: Path) -> None:
    """Most speculators heads have it. It is another function, and survives the way there and back."""
    head = make_head(norm_before_residual=True)
    folder = exported(tmp_path, world, name, head)
    expected = reference_logits(folder, world, name)
    again = read(folder, world)
    assert again.head.config == head.config
    for logits, wanted in zip(own_logits(again.head, world), expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    raw = own_logits(make_head(), world)[0]
    assert (raw - expected[0])[raw.isfinite()].abs().max() > 0.1


@pytest.mark.parametrize("name", ["safeailab", "specforge"])
def test_forms_that_cannot_say_the_normed_residual_refuse_it(name: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="normed one"):
        exported(tmp_path, world, name, make_head(norm_before_residual=True))
    assert not (tmp_path / name).exists()


LLAMA_FAULTS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "norm_before_fc": True,
    "norm_output": True,
    "fc_norm": True,
    "input_norm": True,
    "tie_word_embeddings": True,
    "target_hidden_size": 64,
    "model_type": "qwen3",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "sliding_window": 4096,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"bits": 4},
    "a_flag_of_tomorrow": True,
    "hidden_size": "32",
    "rms_norm_eps": 0,
}


@pytest.mark.parametrize("key", LLAMA_FAULTS)
@pytest.mark.parametrize("name", FORMATS)
def test_flags_that_change_the_forward_are_refused_by_name(name: str, key: str, world: World, tmp_path: Path) -> None:
    """Wherever the form's configuration can hold them."""
    folder = exported(tmp_path, world, name)
    edit_config(folder, lambda config: config.get("transformer_layer_config", config).update({key: LLAMA_FAULTS[key]}))
    with pytest.raises(ValueError, match="rope_theta" if key == "rope_parameters" else key):
        read(folder, world)


KEY = "eagle_aux_hidden_state_layer_ids"
FORM_FAULTS: list[tuple[str, Callable[[Config], Any], str]] = [
    ("speculators", lambda c: c.update(norm_before_residual=1), "norm_before_residual = 1; expected true or false"),
    ("safeailab", lambda c: c.update(norm_before_residual=True), "norm_before_residual = true, only false"),
    ("specforge", lambda c: c.update(norm_before_residual=True), "norm_before_residual = true, only false"),
    ("speculators", lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing"),
    ("speculators", lambda c: c.update(norm_before_fc=True), "norm_before_fc = true, only false"),
    ("speculators", lambda c: c.update(embed_requires_grad=True), "embed_requires_grad"),
    ("speculators", lambda c: c.update(target_hidden_size=64), "target_hidden_size"),
    ("speculators", lambda c: c.update(speculators_model_type="peagle"), 'speculators_model_type = "peagle"'),
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
    ("safeailab", lambda c: c.update(architectures=["LlamaForCausalLM"]), "of no known form"),
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
        read_foreign(folder, target=other, embedding_weight=world.embedding)


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
    for form in FORMATS.values():
        assert form.layer in form.conventions or "as SafeAILab's" in form.conventions
        assert len(form.conventions) > 80

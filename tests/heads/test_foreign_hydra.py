"""Hydra heads of the public code: equal draft logits on both sides of a conversion, and refusals by name.

The reference builds that code's modules (blocks with their first residual, dropout between layers, a whole Llama of one
layer as the prefix layer) from its public description and computes logits of every depth over a true text. It shares no
code with headstart, and takes the target's states by hooks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

from heads.base import TargetSizes, TargetWeights
from heads.checkpoint import CONFIG_FILE, HeadCard, TargetReference, load_head, save_head
from heads.foreign import FORMATS, Imported, detect_format, read_foreign, write_foreign
from heads.hydra import HydraConfig, HydraHead
from heads.vocab import DraftVocabulary
from tests.conftest import make_tiny_model
from tests.heads.path_heads import causal, randomize

LAYERS, VOCABULARY, HIDDEN, HEADS = 4, 128, 32, 3
SIZES = TargetSizes(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    rope_scaling=None,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
FORMS = ("hydra", "hydra-prefix")
EVERY_FORM = pytest.mark.parametrize("name", FORMS)
FILE = "hydra_lm_head.pt"
LAYER = "prefix_embeding_layer.layers.0"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A target, a text, and for that text the states that Hydra's offsets mean [T, H], by hooks: 0 behind the final
    norm, k behind the k-th layer before the last. `hidden_states` is what headstart numbers its taps by."""

    reference: TargetReference
    weights: TargetWeights
    token_ids: torch.Tensor
    hooked: dict[int, torch.Tensor]
    hidden_states: tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def world() -> World:
    model: Any = make_tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
    outputs: list[torch.Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        outputs.append((out[0] if isinstance(out, tuple) else out)[0])

    handles = [module.register_forward_hook(keep) for module in (*model.model.layers, model.model.norm)]
    token_ids = torch.randint(VOCABULARY, (13,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result = model(token_ids[None], output_hidden_states=True)
    for handle in handles:
        handle.remove()
    *layers, last = outputs
    reference = TargetReference(
        name="someone/tiny", fingerprint="f00d", num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY
    )
    weights = TargetWeights(
        embedding=model.get_input_embeddings().weight.detach(), lm_head=model.get_output_embeddings().weight.detach()
    )
    hooked = {0: last, **{offset: layers[-1 - offset] for offset in range(1, LAYERS)}}
    return World(reference, weights, token_ids, hooked, tuple(one[0] for one in result.hidden_states))


# The other side.


class ResBlock(nn.Module):
    def __init__(self, num_condition: int = 0) -> None:
        super().__init__()
        width = HIDDEN * (num_condition + 1)
        self.linear = nn.Linear(width, HIDDEN)
        self.res_connection = nn.Linear(width, HIDDEN) if num_condition else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.res_connection(inputs) + nn.functional.silu(self.linear(inputs))
        return result


class PublicHydra(nn.Module):
    """`hydra_head` of that project's models, whose state is what its training saves."""

    def __init__(self, num_layers: int, *, prefix: bool) -> None:
        super().__init__()
        sizes = {
            "hidden_size": HIDDEN,
            "intermediate_size": SIZES.intermediate_size,
            "num_attention_heads": SIZES.num_attention_heads,
            "num_key_value_heads": SIZES.num_key_value_heads,
            "rms_norm_eps": SIZES.rms_norm_eps,
            "vocab_size": VOCABULARY,
        }
        if prefix:  # whose rotary embeddings do not follow the target's
            base = {"rope_type": "default", "rope_theta": 10000.0}
            self.prefix_embeding_layer = LlamaModel(
                LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=base, attn_implementation="eager")
            )
        dropout = [nn.Dropout(0.2)] if prefix else []
        shared = [[*dropout, ResBlock()] * (num_layers - 1) for _ in range(HEADS)]
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*dropout, ResBlock(head + 1), *shared[head]) for head in range(HEADS)
        )
        lm_heads = [nn.Linear(HIDDEN, VOCABULARY) for _ in range(HEADS)]
        self.hydra_lm_head = nn.ModuleList(
            nn.Sequential(*dropout, lm_head) if prefix else lm_head for lm_head in lm_heads
        )
        randomize(self)
        self.eval()

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor) -> list[torch.Tensor]:
        """[T, V] of each head, from states and embeddings [T, H] of one text."""
        if hasattr(self, "prefix_embeding_layer"):
            states = self.prefix_embeding_layer(inputs_embeds=states[None]).last_hidden_state[0]
        inputs, result = [states], []
        for head in range(HEADS):
            inputs.append(embeddings.roll(-(head + 1), 0))
            result.append(self.hydra_lm_head[head](self.hydra_mlp[head](torch.cat(inputs, dim=-1))))
        return result

    def saved(self) -> Tensors:
        """As the project's older transformers named them: the frequencies lay in the attention, and were saved."""
        tensors = dict(self.state_dict())
        if hasattr(self, "prefix_embeding_layer"):
            half = SIZES.head_dim // 2
            tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = 10000.0 ** (-torch.arange(half) / half)
        return tensors


def public_config(name: str, num_layers: int = 2, **changes: Any) -> Config:
    """As its training writes it: no sizes at all."""
    return {
        "base_model_name_or_path": "elsewhere/Tiny",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp" if name == "hydra-prefix" else "mlp",
        "hydra_num_heads": HEADS,
        "hydra_num_layers": num_layers,
        "transformers_version": "4.33.2",
    } | changes


def public_folder(tmp_path: Path, name: str, num_layers: int = 2, **changes: Any) -> tuple[Path, PublicHydra]:
    folder = tmp_path / "public"
    folder.mkdir()
    model = PublicHydra(num_layers, prefix=name == "hydra-prefix")
    torch.save(model.saved(), folder / FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(public_config(name, num_layers, **changes)))
    return folder, model


def public_logits(model: PublicHydra, world: World, offset: int = 0) -> list[torch.Tensor]:
    with torch.no_grad():
        return model(world.hooked[offset], world.weights.embedding[world.token_ids])


# Our side.


def make_head(world: World, name: str, **changes: Any) -> HydraHead:
    layer = (
        {
            "prefix_layer": True,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "rms_norm_eps": 3e-5,
        }
        if name == "hydra-prefix"
        else {}
    )
    config = HydraConfig(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        taps=(LAYERS + 1,),
        num_heads=HEADS,
        num_layers=2,
        **layer,
    )
    config = replace(config, **changes)
    vocabulary = DraftVocabulary.from_counts({}, size=config.draft_vocab_size, vocab_size=VOCABULARY)
    head = HydraHead(config, vocabulary)
    randomize(head)
    return head.bind(world.weights)


def save(folder: Path, head: Any, world: World) -> Path:
    return save_head(folder, head, HeadCard(target=world.reference, family="hydra"))


def exported(tmp_path: Path, world: World, name: str, **changes: Any) -> Path:
    return write_foreign(tmp_path / name, save(tmp_path / "head", make_head(world, name, **changes), world), name)


def read(folder: Path, world: World, name: str | None = None, sizes: TargetSizes | None = SIZES) -> Imported:
    return read_foreign(folder, name, target=world.reference, weights=world.weights, sizes=sizes)


def read_tensors(folder: Path) -> Tensors:
    (path,) = folder.glob("hydra_lm_head.*")
    tensors: Tensors = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    return tensors


def write_tensors(folder: Path, tensors: Tensors) -> None:
    (path,) = folder.glob("hydra_lm_head.*")
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


def read_config(folder: Path) -> Config:
    values: Config = json.loads((folder / CONFIG_FILE).read_text())
    return values


def own_logits(head: Any, world: World) -> list[torch.Tensor]:
    """[T, V] of each depth, every row as a root with the true tokens behind it (those past the end wrap around)."""
    tokens = world.token_ids
    result = []
    with torch.no_grad():
        taps = world.hidden_states[min(head.config.taps[0], LAYERS)]
        roots = head.roots(taps, tokens.roll(-1), torch.arange(len(tokens)), causal)
        for depth in range(head.num_depths):
            path = torch.stack([tokens.roll(-(i + 1)) for i in range(depth + 1)], dim=-1)
            result.append(head.logits(head.draft(roots, path, depth), depth))
    return result


def assert_same_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Logits of tens, sums of some hundred products in float32: 2e-3 is a hundred times what two orders of summation
    make of them, and a thousandth of what a swapped or missing tensor does."""
    assert len(ours) == len(theirs) == HEADS
    for here, there in zip(ours, theirs, strict=True):
        assert there.std() > 2
        torch.testing.assert_close(here, there, rtol=0, atol=2e-3)


@pytest.mark.parametrize("file", [FILE, "hydra_lm_head.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 4])
@EVERY_FORM
def test_files_of_the_public_code_are_read(name: str, num_layers: int, file: str, world: World, tmp_path: Path) -> None:
    """Its shared block is in the file once a place; its prefix layer's sizes are the target's, its rotary embeddings
    are not, and the embedding inside it is read by nobody."""
    folder, model = public_folder(tmp_path, name, num_layers)
    if file != FILE:
        save_file({key: tensor.clone() for key, tensor in model.saved().items()}, folder / file)
        (folder / FILE).unlink()
    imported = read(folder, world)
    assert isinstance(imported.head, HydraHead)
    assert imported.head.config.rope_theta == 10000.0
    assert not imported.notes
    assert_same_logits(own_logits(imported.head, world), public_logits(model, world))


@pytest.mark.parametrize("offset", [1, LAYERS - 1])
@EVERY_FORM
def test_states_of_earlier_layers(name: str, offset: int, world: World, tmp_path: Path) -> None:
    """Hydra's offset k is the k-th entry of `hidden_states` before the last, which is no layer's output but the normed
    one: an off-by-one here reads a neighbour layer and drafts almost as well."""
    folder, model = public_folder(tmp_path, name, hidden_state_offset=offset)
    imported = read(folder, world)
    assert imported.head.config.taps == (LAYERS - offset,)
    assert_same_logits(own_logits(imported.head, world), public_logits(model, world, offset))


@EVERY_FORM
def test_the_public_code_reads_what_is_written(name: str, world: World, tmp_path: Path) -> None:
    """Every parameter that it has, but for the embedding that it never reads; and it drafts alike."""
    head = make_head(world, name, **({"num_key_value_heads": 2, "intermediate_size": 48} if "prefix" in name else {}))
    folder = write_foreign(tmp_path / "out", save(tmp_path / "head", head, world), name)
    model = PublicHydra(2, prefix=name == "hydra-prefix")
    if name == "hydra-prefix":
        for norm in (*model.prefix_embeding_layer.layers[0].children(), model.prefix_embeding_layer.norm):
            if hasattr(norm, "variance_epsilon"):
                norm.variance_epsilon = 3e-5
    missing, unexpected = model.load_state_dict(read_tensors(folder), strict=False)
    assert unexpected == []
    assert missing == (["prefix_embeding_layer.embed_tokens.weight"] if name == "hydra-prefix" else [])
    assert_same_logits(own_logits(head, world), public_logits(model, world))
    config = read_config(folder)
    assert config.items() >= (public_config(name) | {"base_model_name_or_path": "someone/tiny"}).items() - {
        ("transformers_version", "4.33.2")
    }


@EVERY_FORM
def test_there_and_back_is_the_identity(name: str, world: World, tmp_path: Path) -> None:
    """Bit for bit, tensors and configuration, and without the target's sizes: the export says them."""
    head = make_head(world, name)
    first = exported(tmp_path, world, name)
    imported = read(first, world, sizes=None)
    assert imported.head.config == head.config
    assert (imported.origin["imported_from"], imported.dtype) == (name, torch.float32)
    saved = save(tmp_path / "again", imported.head, world)
    second = write_foreign(tmp_path / "second", saved, name)
    before, after = read_tensors(first), read_tensors(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read_config(first) == read_config(second)
    reloaded, _ = load_head(saved, world.weights)
    assert_same_logits(own_logits(reloaded, world), own_logits(head, world))


# Faults.


@EVERY_FORM
def test_every_tensor_counts_under_its_own_name(name: str, world: World, tmp_path: Path) -> None:
    """Left out, renamed, reshaped, or one more than there should be: refused, saying which."""
    folder, _ = public_folder(tmp_path, name)
    whole = read_tensors(folder)
    unread = {"prefix_embeding_layer.embed_tokens.weight", f"{LAYER}.self_attn.rotary_emb.inv_freq"}
    for key, tensor in whole.items():
        rest = {other: value for other, value in whole.items() if other != key}
        faults = {rf"{key} has shape": rest | {key: tensor[..., :-1]}, rf"unknown {key}x": whole | {f"{key}x": tensor}}
        if key not in unread:
            faults[rf"missing {key} "] = rest
            faults[rf"missing {key} .*unknown {key}x"] = rest | {f"{key}x": tensor}
            faults[rf"{key} holds non-finite"] = rest | {key: tensor / 0}
        for message, tensors in faults.items():
            write_tensors(folder, tensors)
            with pytest.raises(ValueError, match=message):
                read(folder, world)
    write_tensors(folder, {key: tensor for key, tensor in whole.items() if key not in unread})
    read(folder, world)
    assert [path.name for path in tmp_path.iterdir()] == ["public"]


FAULTS: list[tuple[str, Callable[[Config], Any], str]] = [
    ("hydra", lambda c: c.update(hydra_num_heads=2), r"unknown hydra_lm_head\.2\.bias"),
    ("hydra", lambda c: c.update(hydra_num_heads=4), r"missing hydra_lm_head\.3\.bias"),
    ("hydra", lambda c: c.update(hydra_num_layers=1), r"unknown hydra_mlp\.0\.1\.linear\.bias"),
    ("hydra-prefix", lambda c: c.update(hydra_num_layers=3), r"missing hydra_mlp\.0\.5\.linear\.bias"),
    ("hydra", lambda c: c.pop("hydra_num_layers"), "hydra_num_layers is None, expected a whole number"),
    ("hydra", lambda c: c.update(grounded_heads=False), "grounded_heads = false, only true"),
    ("hydra", lambda c: c.pop("grounded_heads"), "grounded_heads = None; only true"),
    ("hydra", lambda c: c.update(hydra_head_arch="cross-attn"), 'hydra_head_arch = "cross-attn", only "mlp"'),
    ("hydra", lambda c: c.update(hydra_head_arch="eagle-attn"), 'hydra_head_arch = "eagle-attn", only "mlp"'),
    ("hydra", lambda c: c.update(hidden_state_offset=4), "hidden_state_offset is 4, expected 0 to 3"),
    ("hydra", lambda c: c.update(hidden_state_offset="0"), "hidden_state_offset is '0'"),
    ("hydra", lambda c: c.update(hidden_size=64), "hidden size 64"),
    ("hydra", lambda c: c.update(novelty=1), "novelty = 1 is not known here"),
    ("hydra-prefix", lambda c: c.update(rope_theta=500000.0), "rope_theta = 500000.0 is not known here"),
    ("hydra-prefix", lambda c: c.update(rms_norm_eps=0), "rms_norm_eps is 0, expected a positive number"),
    ("hydra-prefix", lambda c: c.update(num_attention_heads=2), r"q_proj\.weight has shape \[32, 32\], expected \[16"),
    (
        "hydra-prefix",
        lambda c: c.update(head_dim=16, num_attention_heads=2),
        r"inv_freq has shape \[4\], expected \[8\]",
    ),
    ("hydra", lambda c: c.update(hydra_head_arch="prefix-mlp"), r"look like those of Hydra \(--from hydra,"),
    ("hydra-prefix", lambda c: c.update(hydra_head_arch="mlp"), r"look like those of Hydra \(--from hydra-prefix,"),
]


@pytest.mark.parametrize(("name", "change", "message"), FAULTS, ids=range(len(FAULTS)))
def test_faults_of_configurations_are_refused(
    name: str, change: Callable[[Config], Any], message: str, world: World, tmp_path: Path
) -> None:
    folder, _ = public_folder(tmp_path, name)
    config = read_config(folder)
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read(folder, world)


def test_sizes_that_nothing_says_are_asked_for(world: World, tmp_path: Path) -> None:
    folder, _ = public_folder(tmp_path, "hydra-prefix")
    with pytest.raises(ValueError, match=r"prefix layer's intermediate_size, .*, rms_norm_eps, nor is the target"):
        read(folder, world, sizes=None)


def test_a_target_with_scaled_rotary_embeddings_is_refused(world: World, tmp_path: Path) -> None:
    """The public code scales the prefix layer's by the target's configuration, which no file shows."""
    folder, _ = public_folder(tmp_path, "hydra-prefix")
    scaled = replace(SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0})
    with pytest.raises(ValueError, match=r"scaled \(.*linear.*only unscaled ones"):
        read(folder, world, sizes=scaled)


def test_other_frequencies_are_refused(world: World, tmp_path: Path) -> None:
    """They show that the file is of some other code, which follows its target. Rounding to bfloat16 is no such sign."""
    folder, _ = public_folder(tmp_path, "hydra-prefix")
    whole = read_tensors(folder)
    name = f"{LAYER}.self_attn.rotary_emb.inv_freq"
    write_tensors(folder, whole | {name: whole[name].bfloat16()})
    read(folder, world)
    write_tensors(folder, whole | {name: 500000.0 ** (-torch.arange(4) / 4)})
    with pytest.raises(ValueError, match=r"inv_freq are not those of the base 10000"):
        read(folder, world)


def test_a_map_has_no_place_in_the_form(world: World, tmp_path: Path) -> None:
    folder, _ = public_folder(tmp_path, "hydra")
    write_tensors(folder, read_tensors(folder) | {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)})
    with pytest.raises(ValueError, match="unknown d2t"):
        read(folder, world)


def test_another_target_is_pointed_out(world: World, tmp_path: Path) -> None:
    folder, _ = public_folder(tmp_path, "hydra", base_model_name_or_path="lmsys/vicuna-7b-v1.3")
    (note,) = read(folder, world).notes
    assert "its target is lmsys/vicuna-7b-v1.3; it is imported for someone/tiny" in note


@pytest.mark.parametrize(
    ("name", "as_name", "changes", "message"),
    [
        ("hydra", "hydra", {"draft_vocab_size": 40}, "no reduced vocabulary.* 40 of 128"),
        ("hydra", "hydra-prefix", {}, "has no prefix layer: export it as hydra"),
        ("hydra-prefix", "hydra", {}, "has a prefix layer: export it as hydra-prefix"),
        ("hydra-prefix", "hydra-prefix", {"rope_theta": 5e5}, "base 10000 alone, this head's .* by 500000"),
        ("hydra-prefix", "hydra-prefix", {"head_dim": 16}, r"as wide as its states \(32\), .* 4 x 16"),
    ],
)
def test_what_a_form_cannot_say_is_not_exported(
    name: str, as_name: str, changes: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    saved = save(tmp_path / "head", make_head(world, name, **changes), world)
    with pytest.raises(ValueError, match=message):
        write_foreign(tmp_path / "out", saved, as_name)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@EVERY_FORM
def test_one_form_knows_each_file(name: str, world: World, tmp_path: Path) -> None:
    folder, _ = public_folder(tmp_path, name)
    config, tensors = read_config(folder), read_tensors(folder)
    assert [other for other, form in FORMATS.items() if form.detect(config)] == [name]
    assert detect_format(config, source="x") == name
    assert [other for other, form in FORMATS.items() if form.looks_alike(tensors)] == [name]

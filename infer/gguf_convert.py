"""Convert a GGUF file to an ordinary Hugging Face folder in float32, and prove that nothing was lost.

transformers does the conversion; it only logs tensors that it cannot place and leaves their parameters as
they were initialised, it drops the tokenizer's pre-splitting of digits, and what a file leaves unsaid becomes
a class's default. So the saved folder is compared with the GGUF tensor by tensor, each parameter has to come
from somewhere, the tokenizer is repaired, and tokenizer and configuration are held against known facts.
Knows the architectures in `_ARCHITECTURES`; another one is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ModelFacts", "convert_gguf", "verify_loads", "verify_weights"]


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """How an architecture's tensors are called in a GGUF and in transformers, and what a GGUF does to their values.

    rotary: kinds of tensors whose rows a GGUF reorders, and the setting that says how many heads they have.
    norm_offset: what a GGUF adds to the weights of norms. tokenizer: the kind of its vocabulary. splits: the kinds of
    pre-tokenisation that are known, and whether each isolates digits before the GPT-2 split (None: there is no such
    split, for sentencepiece cuts by its merges alone).
    """

    names: Mapping[str, str]
    tokenizer: str
    splits: Mapping[str, bool | None]
    rotary: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ARCHITECTURES = {
    "llama": _Architecture(
        names={**_NAMES, "ffn_norm.weight": "post_attention_layernorm.weight"},
        tokenizer="gpt2",
        splits={"smollm": True, "gpt-2": False},
        rotary={"attn_q.weight": "attention.head_count", "attn_k.weight": "attention.head_count_kv"},
    ),
    "gemma3": _Architecture(
        names={
            **_NAMES,
            "attn_q_norm.weight": "self_attn.q_norm.weight",
            "attn_k_norm.weight": "self_attn.k_norm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        },
        tokenizer="llama",
        splits={"default": None},
        # Gemma multiplies by one plus the weight; a GGUF holds the sum.
        norm_offset=1.0,
    ),
}

_ENTROPY_PROMPT = "The capital of France is"
_ROUND_TRIP_TEXTS = (
    "Hello, world!",
    "  leading and   inner spaces ",
    "tabs\tand\n\nnew lines\r\n",
    "3.14159 and 1,000,000 or 2026-01-01",
    "it's, we'll, I'D, don't",
    "naïve café Ünïcödé",
    "日本語と中文 и русский",
    "emoji 🎉👩‍👩‍👧 done",
    "def f(x):\n    return x ** 2  # comment",
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a converted model must agree with.

    has_chat_template: a base model has none. golden_ids: texts and the ids that the model's own tokenizer gives them,
    its special tokens included. config: settings of the model's own configuration, above all those that a GGUF does
    not state.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    has_chat_template: bool = True
    golden_ids: tuple[tuple[str, tuple[int, ...]], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def convert_gguf(file: Path, folder: Path, *, facts: ModelFacts) -> None:
    """Write the model and tokenizer of a GGUF file to the new `folder`; ValueError if a check fails."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    metadata = _read_metadata(file)
    _architecture(metadata)
    # Without dequantize=True the model stays quantised and save_pretrained refuses it.
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    _clean_config(model, facts)
    _repair_tokenizer(tokenizer, metadata, max_length=model.config.max_position_embeddings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _demote_reserved_tokens(folder / "tokenizer.json")
    del model
    verify_weights(file, folder)
    verify_loads(folder, facts=facts, tokens=_token_spellings(metadata))


def verify_weights(file: Path, folder: Path) -> None:
    """Check that the folder's tensors are the GGUF's, all of them and nothing else, bit for bit."""
    import gguf
    import torch
    from safetensors import safe_open

    reader = gguf.GGUFReader(file)
    metadata = _read_metadata(file)
    name, architecture = _architecture(metadata)
    heads = {kind: int(metadata[f"{name}.{setting}"]) for kind, setting in architecture.rotary.items()}
    shards: list[Any] = [safe_open(shard, framework="pt") for shard in sorted(folder.glob("*.safetensors"))]
    unfilled = {key: shard for shard in shards for key in shard.keys()}  # noqa: SIM118 (not a mapping)
    faults: list[str] = []
    for tensor in reader.tensors:
        kind = re.sub(r"^blk\.\d+\.", "", tensor.name)
        saved_name = _saved_name(tensor.name, architecture.names)
        if saved_name is None or saved_name not in unfilled:
            faults.append(f"{tensor.name} of the file was not used")
            continue
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            faults.append(f"{tensor.name} has the unsupported type {tensor.tensor_type.name}")
            continue
        expected = torch.from_numpy(values.copy())
        if kind in heads:
            expected = _undo_rotary_order(expected, heads[kind])
        if kind.endswith("norm.weight"):
            expected = expected - architecture.norm_offset
        saved = unfilled.pop(saved_name).get_tensor(saved_name)
        if saved.shape != expected.shape or not torch.equal(saved, expected):
            faults.append(f"{saved_name} differs from {tensor.name} of the file")
    faults += [f"{name} was filled by nothing in the file" for name in sorted(unfilled)]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ValueError(f"the conversion of {file.name} is not faithful: {shown}. Try another transformers version")


def verify_loads(folder: Path, *, facts: ModelFacts, tokens: list[str] | None = None) -> float:
    """Load the folder afresh and check it; returns the entropy (nats) of a first next-token distribution."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), facts)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    _check_tokenizer(tokenizer, facts, tokens)
    # The stubs do not know that output_loading_info makes it return a pair.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise ValueError(f"{folder} does not load whole; {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))}")
    prompt = torch.tensor([tokenizer(_ENTROPY_PROMPT).input_ids])  # [1, T]
    with torch.no_grad():
        log_probs = model.eval()(prompt).logits[0, -1].float().log_softmax(-1)  # [V]
    entropy = float(-(log_probs.exp() * log_probs).sum())
    limit = math.log(log_probs.numel()) - 0.1
    # The comparison is written so that a NaN fails it.
    if not entropy < limit:
        raise ValueError(
            f"the converted model knows nothing: its first next-token distribution has an entropy of "
            f"{entropy:.2f} nats and should be below {limit:.2f}"
        )
    return entropy


def _read_metadata(file: Path) -> dict[str, Any]:
    import gguf

    try:
        reader = gguf.GGUFReader(file)
    except ValueError as error:
        raise ValueError(f"{file.name} is not a GGUF file that can be read: {error}") from error
    return {name: field.contents() for name, field in reader.fields.items()}


def _architecture(metadata: dict[str, Any]) -> tuple[str, _Architecture]:
    name = str(metadata.get("general.architecture"))
    if name not in _ARCHITECTURES:
        raise ValueError(f"the GGUF file holds the architecture {name!r}; supported: {', '.join(_ARCHITECTURES)}")
    return name, _ARCHITECTURES[name]


def _saved_name(gguf_name: str, names: Mapping[str, str]) -> str | None:
    block = re.match(r"blk\.(\d+)\.(.+)", gguf_name)
    if block is None:
        return names.get(gguf_name)
    name = names.get(block[2])
    return None if name is None else f"model.layers.{block[1]}.{name}"


def _undo_rotary_order(weight: Any, num_heads: int) -> Any:
    """GGUF interleaves the halves of rotary pairs, Hugging Face keeps them apart. weight: [heads * D, H]"""
    rows, width = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return paired.transpose(1, 2).reshape(rows, width)


def _clean_config(model: Any, facts: ModelFacts) -> None:
    config = model.config
    # The GGUF's display name, which transformers would keep in config.json as if it were a setting.
    if "_model_name_or_path" in vars(config):
        delattr(config, "_model_name_or_path")
    # GGUF stores the epsilon in float32: 9.999999747e-06 was written as 1e-05.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    config.use_cache = True
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(facts, name))
        setattr(model.generation_config, name, getattr(facts, name))
    model.generation_config._from_model_config = False


def _repair_tokenizer(tokenizer: PreTrainedTokenizerBase, metadata: dict[str, Any], *, max_length: int) -> None:
    """Restore what the conversion leaves out: the digit split, the longest input, the template as stored."""
    name, architecture = _architecture(metadata)
    kind, split = str(metadata.get("tokenizer.ggml.model")), str(metadata.get("tokenizer.ggml.pre"))
    if kind != architecture.tokenizer:
        raise ValueError(f"the GGUF's tokenizer is of kind {kind!r}; supported for {name}: {architecture.tokenizer!r}")
    if split not in architecture.splits:
        raise ValueError(f"the GGUF's tokenizer splits text as {split!r}; supported: {', '.join(architecture.splits)}")
    digits_stand_alone = architecture.splits[split]
    if digits_stand_alone is not None:
        _set_byte_level_split(tokenizer, digits_stand_alone=digits_stand_alone)
    tokenizer.model_max_length = max_length
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")


def _set_byte_level_split(tokenizer: PreTrainedTokenizerBase, *, digits_stand_alone: bool) -> None:
    from tokenizers import pre_tokenizers

    split: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if digits_stand_alone:
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend: Any = tokenizer
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)


def _demote_reserved_tokens(file: Path) -> None:
    """Make tokens that are kept for later use (`<unused12>`) added but not special, as Gemma's own tokenizer has them.

    A GGUF marks them like the markers of turns; there are thousands, and what is special has a place in every draft
    vocabulary.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    reserved = [token for token in content["added_tokens"] if re.fullmatch(r"<unused\d+>", token["content"])]
    if not reserved:
        return
    for token in reserved:
        token["special"] = False
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _token_spellings(metadata: dict[str, Any]) -> list[str]:
    """The file's tokens as the converted tokenizer spells them: sentencepiece's runs of spaces are stored as such."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if metadata.get("tokenizer.ggml.model") != "llama":
        return tokens
    return ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]


def _check_config(config: dict[str, Any], facts: ModelFacts) -> None:
    for name, expected in facts.config.items():
        if config.get(name) != expected:
            raise ValueError(f"the converted configuration has {name} {config.get(name)!r}; expected {expected!r}")


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, facts: ModelFacts, tokens: list[str] | None) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given, expected = getattr(tokenizer, name), getattr(facts, name)
        if given != expected:
            raise ValueError(f"the converted tokenizer has {name} {given}; expected {expected}")
    if facts.has_chat_template and not tokenizer.chat_template:
        raise ValueError("the converted tokenizer has no chat template; the GGUF file carries none")
    if tokens is not None and tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) != tokens:
        raise ValueError("the converted tokenizer gives other tokens to some ids than the GGUF file does")
    for text, expected_ids in facts.golden_ids:
        ids = tuple(tokenizer(text).input_ids)
        if ids != expected_ids:
            raise ValueError(f"the converted tokenizer turns {text!r} into {list(ids)}; expected {list(expected_ids)}")
    for text in _ROUND_TRIP_TEXTS:
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids, clean_up_tokenization_spaces=False)
        if back != text:
            raise ValueError(f"the converted tokenizer turns {text!r} into {back!r} and not back into itself")

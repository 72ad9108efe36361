"""What a recipe trains on, counted: exactly where the target's tokenizer is here, by the letters where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from infer.evaluate import EvalPrompt
from train.corpus.conversations import Conversation, load_conversations
from train.corpus.dataset import TrainingData, load_data
from train.corpus.reading import check_sources
from train.features.stored_target import TARGET_FOLDER

LETTERS_A_TOKEN = 4.0
"""About, of English text."""
FRAME_TOKENS = 6
"""That a template puts around a message, about."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained on. Lengths in tokens; num_rows: of an epoch, None of a stream. num_tokens: of all rows that are
    visited, which for a stream are more than are in memory. is_counted: with the target's own tokenizer."""

    num_rows: int | None
    num_tokens: int
    tokens_in_memory: int
    num_labels: int | None
    mean_length: float
    longest: int
    held_out_tokens: int
    max_prompt: int
    is_counted: bool


def load_tokenizer(config: RunConfig) -> Any | None:
    """The target's; None where its folder holds a configuration alone."""
    from transformers import AutoTokenizer

    source = Path(config.target.features) / TARGET_FOLDER if config.target.features else Path(config.target.model)
    if source.is_dir() and not any((source / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(str(source) if source.is_dir() else config.target.model)


def read_data(config: RunConfig, tokenizer: Any, *, max_length: int) -> TrainingData:
    """As a run reads it."""
    check_sources(config.data)
    return load_data(
        config.data, tokenizer, seed=config.train.seed, max_prompt_tokens=max_length - config.eval.max_tokens
    )


def workload_of(data: TrainingData, *, visits: int | None) -> Workload:
    """Counted. Of a stream, the rows scanned stand for the others, of which there are as many as are visited."""
    lengths = [len(row.token_ids) for row in data.rows]
    mean = sum(lengths) / len(lengths)
    is_stream = data.num_rows is None
    num_tokens = round((visits or len(lengths)) * mean) if is_stream else sum(lengths)
    return Workload(
        num_rows=data.num_rows,
        num_tokens=num_tokens,
        tokens_in_memory=sum(lengths),
        num_labels=sum(row.num_supervised for row in data.rows),
        mean_length=mean,
        longest=max(lengths),
        held_out_tokens=sum(len(row.token_ids) for row in data.held_out),
        max_prompt=max(_length(prompt) for prompt in data.prompts),
        is_counted=True,
    )


def estimated_workload(config: RunConfig) -> Workload:
    """By letters. Nothing is filtered, since that takes tokens."""
    check_sources(config.data)
    conversations: list[Conversation] = []
    for source in config.data.train:
        limit = config.data.scan_rows if config.data.streaming else None
        conversations += load_conversations(source, raw=config.data.raw, limit=limit)[0]
    conversations = conversations[: config.data.max_conversations]
    lengths = [min(config.data.max_length, _estimated_tokens(one)) for one in conversations]
    held_out = min(config.data.max_holdout, round(config.data.holdout_fraction * len(lengths)))
    mean = sum(lengths) / len(lengths)
    return Workload(
        num_rows=None if config.data.streaming else len(lengths) - held_out,
        num_tokens=round(mean * (len(lengths) - held_out)),
        tokens_in_memory=sum(lengths),
        num_labels=None,
        mean_length=mean,
        longest=max(lengths),
        held_out_tokens=round(held_out * mean),
        max_prompt=max(lengths),
        is_counted=False,
    )


def _estimated_tokens(conversation: Conversation) -> int:
    letters = sum(len(message["content"]) for message in conversation.messages)
    return round(letters / LETTERS_A_TOKEN) + FRAME_TOKENS * len(conversation.messages) + 2


def _length(prompt: EvalPrompt) -> int:
    return len(prompt.token_ids)

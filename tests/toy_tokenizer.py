"""Tiny byte-level tokenizers without files: every byte is a token, plus chosen special tokens and a chat
template.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def toy_tokenizer(
    *,
    template: str | None = CHATML,
    adds_bos: bool = False,
    adds_eos: bool = False,
    merges: tuple[str, ...] = (),
) -> Any:
    """Specials have ids 0 to 3 in the order of `SPECIALS`; `merges` are pairs like "h i", in byte-level
    letters.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in merges)]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos or adds_eos:
        single = ("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        name_or_path="toy",
    )

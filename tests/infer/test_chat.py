"""Rendering of chats, and the masks of what the assistant wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from infer.chat import (
    Rendered,
    encode_text,
    end_of_user_turn_id,
    render_prompt,
    render_training,
    template_hash,
    token_id_list,
    tokenizer_hash,
    user_turn_prefix,
)
from infer.prompts import DOMAINS, load_prompts, prompt_hashes, text_hash
from tests.toy_tokenizer import CHATML, toy_tokenizer

TWO_TURNS = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello! \U0001f600 How are you?"},
    {"role": "user", "content": "Hello! \U0001f600 How are you?"},
    {"role": "assistant", "content": "I am fine.\n\nThanks"},
]
BOS_TEMPLATE = "{{ bos_token }}" + CHATML
THINK_STRIPPING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in message['content'] %}"
    "{{ message['content'].split('</think>')[-1] }}"
    "{% elif message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{{ message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


def masked_texts(tokenizer: Any, rendered: Rendered) -> list[str]:
    texts, run = [], []
    for token_id, supervised in [*zip(rendered.token_ids, rendered.loss_mask, strict=True), (0, False)]:
        if supervised:
            run.append(token_id)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def test_mask_is_the_assistant_text_and_its_end_token(smollm2: Any) -> None:
    """Templates without generation tags once gave all-zero masks, and a fall-back all-one ones. The user here
    repeats the assistant word for word, so finding answers by their text alone would not do.
    """
    rendered = render_training(smollm2, TWO_TURNS)
    assert masked_texts(smollm2, rendered) == [
        "Hello! \U0001f600 How are you?<|im_end|>",
        "I am fine.\n\nThanks<|im_end|>",
    ]
    golden = smollm2.apply_chat_template(TWO_TURNS, tokenize=True)
    assert rendered.token_ids == token_id_list(golden)
    assert rendered.num_supervised == 9 + 8
    assert rendered.loss_mask[-9:] == [True] * 8 + [False]  # the newline after the end token is the template's


def test_prompt_is_a_prefix_of_the_training_render(smollm2: Any) -> None:
    """Serving, benchmarks and training see the same ids before the first answer token."""
    rendered = render_training(smollm2, TWO_TURNS)
    prompt = render_prompt(smollm2, TWO_TURNS[:3])
    assert rendered.token_ids[: len(prompt)] == prompt
    assert rendered.loss_mask[len(prompt)]
    assert not rendered.loss_mask[len(prompt) - 1]


def test_a_cut_answer_teaches_no_end(smollm2: Any) -> None:
    rendered = render_training(smollm2, TWO_TURNS, end_of_last=False)
    assert masked_texts(smollm2, rendered) == [
        "Hello! \U0001f600 How are you?<|im_end|>",
        "I am fine.\n\nThanks",
    ]
    assert rendered.loss_mask[-1]


@pytest.mark.parametrize("content", ["assistant", "user", "<|im_end|", " leading", "trailing ", "a\n", "\n\nb", "é"])
def test_awkward_answers_are_masked_whole(content: str) -> None:
    """Contents that look like headers or begin with blanks: what follows the header up to the end is the
    answer.
    """
    tokenizer = toy_tokenizer()
    rendered = render_training(
        tokenizer, [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    )
    assert masked_texts(tokenizer, rendered) == [content + "<|im_end|>"]


def test_a_straddling_token_belongs_to_the_header() -> None:
    """A merge over the boundary (" " + "h") is not something the model is asked to write."""
    template = CHATML.replace("assistant\n", "assistant: ").replace(
        "{{ message['role'] }}\n", "{{ message['role'] }}: "
    )
    tokenizer = toy_tokenizer(template=template, merges=("Ġ h",))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hi"}]
    rendered = render_training(tokenizer, messages)
    assert masked_texts(tokenizer, rendered) == ["i<|im_end|>"]


def test_turns_that_the_template_rewrites_are_located() -> None:
    """A template that prints an empty think block in the last turn only: earlier renders are no prefix of the
    chat.
    """
    tokenizer = toy_tokenizer(template=THINK_STRIPPING)
    assert masked_texts(tokenizer, render_training(tokenizer, TWO_TURNS)) == [
        "Hello! \U0001f600 How are you?<|im_end|>",
        "I am fine.\n\nThanks<|im_end|>",
    ]


def test_text_that_the_template_strips_is_an_error_naming_it() -> None:
    tokenizer = toy_tokenizer(template=THINK_STRIPPING)
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["content"] = "<think>hm</think>Hello"
    with pytest.raises(ValueError, match="assistant message 1 in what the chat template of toy"):
        render_training(tokenizer, messages)


def test_template_without_end_token_masks_the_text_only() -> None:
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = toy_tokenizer(template=template)
    assert masked_texts(tokenizer, render_training(tokenizer, TWO_TURNS)) == [
        "Hello! \U0001f600 How are you?",
        "I am fine.\n\nThanks",
    ]


@pytest.mark.parametrize("template", [CHATML, BOS_TEMPLATE])
def test_bos_is_never_doubled(template: str) -> None:
    """The tokenizer adds BOS and the template prints one too: training and serving once differed by one
    token.
    """
    tokenizer = toy_tokenizer(template=template, adds_bos=True, adds_eos=True)
    prompt = render_prompt(tokenizer, TWO_TURNS[:1])
    rendered = render_training(tokenizer, TWO_TURNS[:2])
    assert prompt.count(0) == template.count("bos_token")
    assert prompt.count(1) == 0
    assert rendered.token_ids[: len(prompt)] == prompt


def test_plain_text_keeps_the_tokenizers_own_special_tokens() -> None:
    """One BOS whether or not the text brings its own, and a tokenizer-added EOS is not lost."""
    tokenizer = toy_tokenizer(adds_bos=True, adds_eos=True)
    plain = encode_text(tokenizer, "ab")
    assert plain == encode_text(tokenizer, "<s>ab")
    assert (plain[0], plain[-1], len(plain)) == (0, 1, 4)
    assert encode_text(toy_tokenizer(), "<s><s>a")[:2] == [
        0,
        0,
    ]  # nothing was added, so nothing is taken away


def test_no_template_needs_an_explicit_raw_mode() -> None:
    """A lone text stays as it is: a blank line behind it was once the last thing a base model read."""
    tokenizer = toy_tokenizer(template=None)
    with pytest.raises(ValueError, match=r"toy has no chat template.*raw text explicitly"):
        render_prompt(tokenizer, TWO_TURNS[:1])
    assert tokenizer.decode(render_prompt(tokenizer, TWO_TURNS[:1], raw=True)) == "Hi there"
    rendered = render_training(tokenizer, TWO_TURNS[:2], raw=True)
    assert masked_texts(tokenizer, rendered) == ["Hello! \U0001f600 How are you?</s>"]


def test_refused_messages_name_template_and_roles() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match=r"toy refused messages with roles \['system', 'user'\].*no system role"):
        render_prompt(toy_tokenizer(template=template), [{"role": "system", "content": "x"}, TWO_TURNS[0]])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": None}, "message 1 has content None: expected a text"),
        ({"role": "user"}, "message 1 has no content: expected a text"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "message 1 has content .*: expected a text"),
        ({"content": "x"}, "message 1 has no role: expected a text"),
        ({"role": "user", "content": "cut \ud83d"}, "half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_contents_that_are_no_text_are_refused(message: Any, complaint: str, raw: bool) -> None:
    """Templates printed them all the same: the model was asked about "None", or about a Python list."""
    with pytest.raises(ValueError, match=complaint):
        render_prompt(toy_tokenizer(), [{"role": "system", "content": "x"}, message], raw=raw)


@pytest.mark.parametrize(
    "returned",
    [
        [5, 6],
        [[5, 6]],
        (5, 6),
        {"input_ids": [5, 6], "attention_mask": [1, 1]},
        {"input_ids": [[5, 6]]},
        {"input_ids": torch.tensor([[5, 6]])},
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        [torch.tensor([5, 6])],
        numpy.array([[5, 6]]),
    ],
)
def test_every_return_type_of_tokenizers_becomes_a_list(returned: Any) -> None:
    """transformers 5 returns a mapping of length 2 where 4 gave the ids: every chat was once "too short"."""
    assert token_id_list(returned) == [5, 6]


def test_encodings_and_batches() -> None:
    tokenizer = toy_tokenizer()
    assert token_id_list(tokenizer("ab")) == token_id_list(tokenizer.backend_tokenizer.encode("ab"))
    assert token_id_list([]) == []
    with pytest.raises(ValueError, match="given 2 rows"):
        token_id_list([[1], [2]])
    with pytest.raises(TypeError):
        token_id_list([5.5])  # no id, and rounding it would make it one


def test_user_turn_prefix_ends_with_the_user_header(smollm2: Any) -> None:
    prefix = smollm2.decode(user_turn_prefix(smollm2))
    assert prefix.startswith("<|im_start|>system\n")
    assert prefix.endswith("<|im_start|>user\n")
    assert end_of_user_turn_id(smollm2) == smollm2.eos_token_id
    second = smollm2.decode(user_turn_prefix(smollm2, TWO_TURNS[:2]))
    assert second.endswith("How are you?<|im_end|>\n<|im_start|>user\n")


def test_user_turn_prefix_that_cannot_be_derived() -> None:
    tokenizer = toy_tokenizer(template="{{ messages[-1]['content'] | upper }}")
    with pytest.raises(ValueError, match="toy does not print a user message once and unchanged"):
        user_turn_prefix(tokenizer)


def test_hashes_see_template_specials_and_merges() -> None:
    """Equal content gives equal hashes; another template, special token or merge (same vocabulary size) does
    not.
    """
    assert tokenizer_hash(toy_tokenizer()) == tokenizer_hash(toy_tokenizer())
    other_template = toy_tokenizer(template=BOS_TEMPLATE)
    assert template_hash(other_template) != template_hash(toy_tokenizer())
    assert template_hash(toy_tokenizer(template=None)) == "none"
    others = [
        other_template,
        toy_tokenizer(adds_bos=True),
        toy_tokenizer(merges=("h e",)),
        toy_tokenizer(merges=("e r",)),
    ]
    assert len({tokenizer_hash(tokenizer) for tokenizer in [toy_tokenizer(), *others]}) == 5


def test_default_prompts_cover_every_domain() -> None:
    """At least eight prompts a domain, some of several turns, all different."""
    prompts = load_prompts()
    assert len(prompts) >= 56
    for domain in DOMAINS:
        assert sum(prompt.domain == domain for prompt in prompts) >= 8
    assert sum(len(prompt.messages) > 1 for prompt in prompts) >= 5
    assert len({str(prompt.messages) for prompt in prompts}) == len(prompts)
    assert text_hash("why does the SKY look blue, during the day and red at sunset") in prompt_hashes()


def test_a_prompt_needs_no_domain(tmp_path: Path) -> None:
    """Questions written for `generate` are messages alone; measurements put them in one group."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert [prompt.domain for prompt in load_prompts(path)] == ["other"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ('{"domain": "", "messages": []}', "line 2: expected a domain"),
        ('{"domain": "chat", "messages": []}', "line 2: expected a list of messages"),
        ('{"domain": "chat", "messages": [{"role": "user"}]}', "line 2: message 0 needs"),
        (
            '{"domain": "chat", "messages": [{"role": "assistant", "content": "a"}]}',
            "line 2: message 0 has role",
        ),
        (
            '{"domain": "c", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "line 2: the last message must be the user's",
        ),
    ],
)
def test_bad_prompt_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"domain": "chat", "messages": [{"role": "user", "content": "a"}]}\n' + line + "\n")
    with pytest.raises(ValueError, match=complaint):
        load_prompts(path)

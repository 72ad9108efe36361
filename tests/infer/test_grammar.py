"""Constraints: what may follow is what the grammar says, in whatever order nodes are visited, and with any draft the
answer is that of constrained plain decoding."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import pytest
import regex
import torch
from torch import Tensor
from transformers import AutoTokenizer

from infer import grammar
from infer.drafters import NgramDrafter, ScriptedDrafter, TreeSettings
from infer.engine import Engine
from infer.grammar import Constraint, Grammars
from infer.sampling import Processor, SamplingError, SamplingParams
from infer.target import TargetModel
from infer.tree import DraftTree, OneHot, Sampled
from tests.infer.helpers import plain, random_tree, sampling
from tests.toy_tokenizer import toy_tokenizer

EOS = 2
VOCAB_SIZE = 49152
FIXED = TreeSettings(max_nodes=32, max_depth=8, adaptive=False)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"$ref": "#/$defs/age"},
        "kind": {"enum": ["ab", "abc", "é"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 1, "maximum": 120}},
}
ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: /[0-9]+/ | "(" sum ")"
"""

CASES: dict[str, dict[str, Any]] = {
    "digits": {"regex": "[0-9]{3}"},
    "open_end": {"regex": "[0-9]{2,4}( ?(kg|g))?"},
    "forced": {"regex": "(Once upon a time){3}"},
    "unicode": {"regex": r"(日本|é+|\p{Greek}{2}|🙂)x"},
    "schema": {"json_schema": PERSON},
    "any_json": {"json_schema": {}},
    "arithmetic": {"grammar": ARITHMETIC},
    "lazy": {"grammar": 'start: x "b"\nx[lazy]: /[a-z]+/'},
    "stop": {"grammar": 'start: x "b"\nx[stop="a"]: /(?s:.*)/'},
    "limited": {"grammar": 'start: x "b"\nx[max_tokens=2]: /(?s:.*)/'},
    "special": {"grammar": 'start: "a" <|im_start|> /[0-9]/'},
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def target(tiny_model, tokenizer) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama", vocab_size=VOCAB_SIZE), tokenizer)


def constraint(grammars: Grammars, case: str | dict[str, Any]) -> Constraint:
    params = SamplingParams(**(CASES[case] if isinstance(case, str) else case))
    made = grammars.constraint(params, eos_ids=frozenset({EOS}))
    assert made is not None
    return made


def ids(row: Tensor) -> list[int]:
    return row.nonzero().flatten().tolist()


def walk(grammars: Grammars, case: str, num_paths: int, *, depth: int = 10) -> dict[tuple[int, ...], Tensor]:
    """Random paths and what may follow each, every one asked of a constraint of its own that has seen nothing else."""
    rng = random.Random(case)
    rows: dict[tuple[int, ...], Tensor] = {(): constraint(grammars, case).allowed([])}
    for _ in range(num_paths):
        path = rng.choice(list(rows))
        tokens = [token for token in ids(rows[path]) if token != EOS]
        if tokens and len(path) < depth:
            path = (*path, rng.choice(tokens))
            rows[path] = constraint(grammars, case).allowed(path)
    return rows


# What may follow.


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_what_a_parser_takes_token_by_token(case, grammars):
    """Each of 49,152 tokens put to a parser that has just read the path; end tokens where the text may be complete.

    In particular nothing is left out where the text is forced: any tokenization of it may be drawn.
    """
    rows = walk(grammars, case, 12)
    for path in random.Random(0).sample(list(rows), min(4, len(rows))):
        matcher = constraint(grammars, case)._start.deep_copy()
        assert matcher.try_consume_tokens(list(path)) == len(path)
        expected = {token for token in range(VOCAB_SIZE) if token != EOS and matcher.validate_tokens([token])}
        if matcher.is_accepting():
            expected.add(EOS)
        assert set(ids(rows[path])) == expected


@pytest.mark.parametrize("pattern", ["[0-9]{3}", "[0-9]{2,4}( ?(kg|g))?", "(Once upon a time){3}", "a*b|(?:ab){2}"])
def test_a_row_is_what_another_regex_library_says(pattern, grammars, tokenizer):
    """Independent of the parser: a token may follow if the text with it can still grow into a match."""
    texts = [tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
    plain = [token not in tokenizer.all_special_ids and "�" not in texts[token] for token in range(VOCAB_SIZE)]
    rng = random.Random(0)
    made, path, text = constraint(grammars, {"regex": pattern}), [], ""
    for _ in range(4):
        expected = {
            token
            for token in range(17, VOCAB_SIZE)
            if plain[token] and regex.fullmatch(pattern, text + texts[token], partial=True)
        }
        row = set(ids(made.allowed(path)))
        assert row - {EOS} == expected
        assert (EOS in row) == (re.fullmatch(pattern, text) is not None)
        if not expected:
            break
        path = [*path, rng.choice(sorted(expected))]
        text += texts[path[-1]]


@pytest.mark.parametrize("case", CASES)
def test_rows_do_not_depend_on_the_order_of_visits(case, grammars):
    """One constraint visits paths at random, back and forth; each row is that of a constraint which saw only this path.

    llguidance 1.9 fails this with its own rollback: in the arithmetic grammar, the row of the text taken back is
    returned for another one of the same length, with brackets that were never opened.
    """
    rows = walk(grammars, case, 120)
    rng = random.Random(1)
    paths = list(rows)
    made = constraint(grammars, case)
    for path in rng.choices(paths, k=3 * len(paths)):
        assert torch.equal(made.allowed(path), rows[path])


def test_long_paths_are_left_and_found_again(grammars):
    """More states than are kept: 60 tokens one by one, a jump to the beginning, and back."""
    made = constraint(grammars, {"regex": "[0-9]+"})
    path = [33 + index % 7 for index in range(60)]
    row = made.allowed(path[:1])
    for length in [*range(1, 61), 0, 3, 60, 59, 30, 31, 60]:
        assert torch.equal(made.allowed(path[:length])[3:], row[3:])
        assert bool(made.allowed(path[:length])[EOS]) == (length > 0)


def test_a_complete_text_takes_end_tokens_only(grammars):
    """Also after the end, where nothing more is asked of the parser: a tree may hold nodes there."""
    made = constraint(grammars, "digits")
    digits = [33, 34, 35]
    for path in (digits, [*digits, EOS], [*digits, EOS, EOS], [*digits, EOS, 7, 40], digits):
        assert ids(made.allowed(path)) == [EOS]
    assert EOS not in ids(made.allowed(digits[:2]))


def test_all_end_tokens_of_the_model_end_a_text(tokenizer):
    """The model's end tokens count, not the tokenizer's one; a special token that is none is never allowed."""
    made = Grammars(tokenizer, vocab_size=VOCAB_SIZE).constraint(SamplingParams(regex="[0-9]*"), eos_ids={0, 4})
    row = made.allowed([33])
    assert [token for token in range(17) if row[token]] == [0, 4]
    assert ids(made.allowed([33, 4])) == [0, 4]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 77, 40_000])
def test_rows_of_the_head_and_of_the_tokenizer_may_differ(vocab_size, tokenizer, grammars):
    """Padding rows of a larger head are never allowed; a smaller head has no rows for the last tokens."""
    made = Grammars(tokenizer, vocab_size=vocab_size).constraint(SamplingParams(regex="(?s:.*)"), eos_ids={EOS})
    row, whole = made.allowed([]), constraint(grammars, {"regex": "(?s:.*)"}).allowed([])
    shared = min(vocab_size, VOCAB_SIZE)
    assert row.shape == (vocab_size,)
    assert torch.equal(row[:shared], whole[:shared])
    assert not bool(row[VOCAB_SIZE:].any())


def test_a_tokenizer_without_merges():
    """The toy tokenizer: one token a byte, so that a character takes several, and an odd number of rows."""
    tokenizer = toy_tokenizer()
    made = Grammars(tokenizer, vocab_size=len(tokenizer) + 3).constraint(SamplingParams(regex="é[0-9]"), eos_ids={1})
    path: list[int] = []
    for token in tokenizer.encode("é7"):
        assert token in ids(made.allowed(path))
        path.append(token)
    assert len(path) == 3
    assert [len(ids(made.allowed(path[:length]))) for length in range(4)] == [1, 1, 10, 1]
    assert ids(made.allowed(path)) == [1]


def test_tokens_across_parts_of_a_grammar_are_allowed(grammars, tokenizer):
    """`{"`, `":` and the like belong to several parts; without them the model is pushed off its own tokenization."""
    made = constraint(grammars, "schema")
    for text in ('{"', '{"name', '{"name":', '{"name": "'):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens[-1] in ids(made.allowed(tokens[:-1]))
    assert len(tokenizer.encode('{"', add_special_tokens=False)) == 1


def test_white_space_in_json_is_bounded(grammars, tokenizer):
    """JSON allows any amount, and small models then write nothing else; a schema may ask for other bounds itself."""
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    brace = tokenizer.encode("{", add_special_tokens=False)[0]
    made = constraint(grammars, "schema")
    assert made.allowed([brace] + [newline] * 31)[newline]
    assert not made.allowed([brace] + [newline] * 32)[newline]
    compact = constraint(grammars, {"json_schema": {**PERSON, "x-guidance": {"whitespace_flexible": False}}})
    assert not compact.allowed([brace])[newline]


def test_properties_come_in_the_order_of_the_schema(grammars, tokenizer):
    """A schema's text is its identity, so its keys must not be sorted on the way."""
    for names in (("b", "a"), ("a", "b")):
        properties = {name: {"type": "integer"} for name in names}
        schema = {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
        made = constraint(grammars, {"json_schema": schema})
        row = made.allowed(tokenizer.encode('{"', add_special_tokens=False))
        assert [row[tokenizer.encode(name, add_special_tokens=False)[0]].item() for name in names] == [True, False]


def test_an_end_token_in_the_grammar_ends_the_answer(grammars):
    """A grammar may spell the end token out; the answer ends there, whatever else the grammar asks for."""
    made = constraint(grammars, {"grammar": "start: /[0-9]/ <|im_end|>"})
    assert ids(made.allowed([33])) == [EOS]
    assert ids(made.allowed([33, EOS])) == [EOS]


def test_a_token_that_cannot_follow_is_our_own_fault(grammars):
    """Its probability was 0, so no rule visits it; the constraint says so and is none the worse for it."""
    made = constraint(grammars, "digits")
    expected = made.allowed([33])
    with pytest.raises(AssertionError, match="token 100 cannot follow in this regex"):
        made.allowed([33, 100])
    with pytest.raises(AssertionError, match="cannot follow"):
        made.allowed([33, 33, 33, 33])
    assert torch.equal(made.allowed([33]), expected)


def test_a_parser_that_gives_up_fails_its_request_only(grammars):
    """20,000 alternatives of a grammar pass the parser's limits at the second token."""
    text = "start: " + " | ".join(f'"a{number}"' for number in range(20_000))
    made = constraint(grammars, {"grammar": text})
    (first,) = ids(made.allowed([]))
    for _ in range(2):
        with pytest.raises(SamplingError, match=r"the parser of this grammar gave up: .* 2000"):
            made.allowed([first])
    assert ids(made.allowed([])) == [first]
    assert ids(constraint(grammars, {"grammar": text}).allowed([])) == [first]


def test_a_dead_end_is_told(grammars):
    """A rule that never comes to an end leaves no token after "a"; one that begins like that is refused at once."""
    made = constraint(grammars, {"grammar": 'start: "a" x\nx: x "b"'})
    with pytest.raises(SamplingError, match="no token can follow in this grammar"):
        made.allowed(ids(made.allowed([])))


def test_compiled_constraints_are_shared_and_bounded(tokenizer, monkeypatch):
    """The same text is compiled once; old ones go, and requests that hold them go on."""
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE)
    compile_text, texts = grammar._compile, []
    monkeypatch.setattr(grammar, "_compile", lambda *args: (texts.append(args[1]), compile_text(*args))[1])
    first = constraint(grammars, "digits")
    second = constraint(grammars, "digits")
    assert len(texts) == 1
    assert second._start is not first._start  # each request reads a copy of its own
    for number in range(70):
        constraint(grammars, {"regex": f"a{number}"})
    assert len(grammars._compiled) == 64
    assert len(ids(first.allowed([33]))) == 10
    assert len(grammars._parser_tokenizers) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regex": "("}, r"regex '\(' cannot be kept: unclosed group$"),
        ({"regex": "a(?=b)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "(?P<x>a)(?P=x)"}, "cannot be kept: unrecognized flag"),
        ({"regex": r"\p{Nope}"}, "Unicode property not found"),
        ({"regex": "a\\"}, "ends within an escape"),
        ({"regex": "a\ud800"}, "cannot be kept: .*surrogates not allowed"),
        ({"regex": "(" * 100_000 + "a" + ")" * 100_000}, r"maximum number of nested parentheses"),
        ({"grammar": "start: foo"}, r'grammar \'start: foo\' cannot be kept: at 1\(8\): unknown name: "foo"$'),
        ({"grammar": "hello"}, "Expected token ':'"),
        ({"grammar": ' \nfoo: "a"'}, "no start rule found"),
        ({"grammar": 'start: start "a"'}, "no text fits it"),
        ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "too deeply nested"),
        ({"json_schema": {"type": "foo"}}, """json_schema '{"type":"foo"}' cannot be kept: Invalid type: foo"""),
        ({"json_schema": {"$ref": "#/nope"}}, "Pointer '/nope' does not exist"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "not present in a registry"),
        ({"json_schema": {"not": {}}}, 'Unimplemented keys: ."not".'),
        ({"json_schema": {"enum": []}}, "Unsatisfiable schema"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema: minimum"),
        ({"json_schema": '{"const": "\\ud800"}'}, "cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(changes, message, grammars):
    with pytest.raises(ValueError, match=message) as error:
        constraint(grammars, changes)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 450


def test_targets_that_cannot_be_constrained_say_why(tokenizer, monkeypatch):
    params = SamplingParams(regex="a")
    assert Grammars(None, vocab_size=9).constraint(SamplingParams(), eos_ids={EOS}) is None
    with pytest.raises(ValueError, match="regex needs the target's tokenizer"):
        Grammars(None, vocab_size=9).constraint(params, eos_ids={EOS})
    with pytest.raises(ValueError, match="regex needs an end token"):
        Grammars(tokenizer, vocab_size=9).constraint(params, eos_ids=())
    with pytest.raises(ValueError, match=r"regex cannot be kept with this target's tokenizer: .* out of range"):
        Grammars(tokenizer, vocab_size=70_000).constraint(params, eos_ids={60_000})
    with pytest.raises(ValueError, match=r"regex cannot be kept with this target's tokenizer: Only fast tokenizers"):
        Grammars(object(), vocab_size=9).constraint(params, eos_ids={EOS})
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"regex needs the package llguidance: pip install 'headstart\[grammar\]'"):
        Grammars(tokenizer, vocab_size=9).constraint(params, eos_ids={EOS})


# In the processor stack.


def processor(grammars: Grammars, **changes: Any) -> Processor:
    params = SamplingParams(**changes)
    made = grammars.constraint(params, eos_ids={EOS})
    return Processor(params, prompt_ids=[5, 33], eos_ids=[EOS], vocab_size=VOCAB_SIZE, constraint=made)


def test_the_law_is_the_targets_on_what_is_allowed(grammars):
    """Scores of allowed tokens are untouched, and filters count among them: the 2 best of 10 digits, not of all."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    allowed = constraint(grammars, "digits").allowed([33])
    scores = processor(grammars, regex="[0-9]{3}").scores(logits, [33])
    assert torch.equal(scores[allowed], logits[allowed])
    assert bool(torch.isneginf(scores[~allowed]).all())
    assert torch.equal(logits, before)
    best = processor(grammars, regex="[0-9]{3}", temperature=1.0, top_k=2).scores(logits, [33])
    assert torch.equal(best.isfinite().nonzero().flatten(), logits.where(allowed, -9e9).topk(2).indices.sort().values)


@pytest.mark.parametrize(
    "changes", [{"min_tokens": 9}, {"bad_words": ((EOS,),)}, {"logit_bias": {EOS: -float("inf")}, "temperature": 1.0}]
)
def test_a_complete_text_that_must_not_end_has_no_token(changes, grammars):
    """The request fails with a reason; before the text is complete nothing is amiss."""
    made = processor(grammars, regex="[0-9]{3}", **changes)
    logits = torch.zeros(VOCAB_SIZE)
    assert int(made.scores(logits, [33, 34]).isfinite().sum()) == 10
    with pytest.raises(
        SamplingError, match="no token is left after 3: the regex allows none but those that min_tokens"
    ):
        made.scores(logits, [33, 34, 35])


def test_min_tokens_keeps_a_text_open(grammars):
    """Where the text may go on, it goes on until it has its tokens."""
    made = processor(grammars, regex="[0-9]*", min_tokens=3)
    rows = [made.scores(torch.zeros(VOCAB_SIZE), [33] * length) for length in range(5)]
    assert [bool(row[EOS].isfinite()) for row in rows] == [False, False, False, True, True]


# In the engine.


def letters(request: Any, limit: Any) -> DraftTree:
    """A hostile draft: never a digit, and an end token too early."""
    return DraftTree.chain((350, 351, EOS, 352)[: limit.max_depth])


PROMPTS = [[5, 17, 3], [900, 901, 33, 34, 900, 901], [40]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", ["[0-9]{3}", "[0-9]{2,12}", "([0-9]{1,3},)*[0-9]"])
def test_digits_with_hostile_drafts(pattern, temperature, target):
    """Letters and random trees are drafted for digits: the answer is constrained plain decoding's, alone and in a batch
    beside a request without a constraint, which is not touched either."""
    rng = random.Random(0)
    params = [sampling(temperature, regex=pattern), sampling(temperature), sampling(temperature, regex=pattern, seed=4)]
    expected = [plain(target, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    answers = {answer.prompt_token_ids: answer.token_ids for answer in expected}

    def trees(request: Any, limit: Any) -> DraftTree:
        right = answers[request.prompt_ids][len(request.output_ids) :]
        return random_tree(rng, VOCAB_SIZE, limit, right)

    for script in (letters, trees):
        for max_requests in (1, 3):
            engine = Engine(target, ScriptedDrafter(script), tree=FIXED, max_requests=max_requests)
            for answer, wanted in zip(engine.generate(PROMPTS, params), expected, strict=True):
                assert answer.token_ids == wanted.token_ids
                assert (answer.finish_reason, answer.text) == (wanted.finish_reason, wanted.text)
    for index in (0, 2):
        if expected[index].finish_reason == "stop":
            assert re.fullmatch(pattern, expected[index].text)
            assert expected[index].token_ids[-1] == EOS
        else:
            assert regex.fullmatch(pattern, expected[index].text, partial=True)
    assert {answer.finish_reason for answer in expected if pattern == "[0-9]{3}"} <= {"stop", "length"}


@pytest.mark.parametrize("rule", ["recursive", "traversal", "token", "block", "typical"])
def test_rejection_rules_never_look_behind_a_forbidden_token(rule, target):
    """Sampled drafts of digits and letters, far beyond the end of the text: each answer is three digits."""
    weights = torch.zeros(VOCAB_SIZE)
    weights[33:38] = 1.0
    weights[350:353] = 1.0
    weights[EOS] = 1.0
    weights = weights / weights.sum()
    rng = random.Random(0)
    tokens = [*range(33, 38), 350, 351, 352, EOS]

    def script(request: Any, limit: Any) -> DraftTree:
        chain = tuple(rng.choice(tokens) for _ in range(min(5, limit.max_depth)))
        return DraftTree.chain(chain, kind=Sampled(draft_probs={node: weights for node in range(-1, len(chain))}))

    engine = Engine(target, ScriptedDrafter(script), tree=TreeSettings.chain(5), rule=rule)
    params = [sampling(1.0, regex="[0-9]{3}", seed=seed) for seed in range(12)]
    completions = engine.generate([PROMPTS[0]] * 12, params)
    assert all(re.fullmatch("[0-9]{3}", completion.text) for completion in completions)
    assert max(length for completion in completions for length in completion.accepted_lengths) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_gives_json_that_fits_it(temperature, target):
    """Parsed and checked field by field; drafted with trees that hold the right tokens among wrong ones."""
    params = [sampling(temperature, json_schema=PERSON, max_tokens=120, seed=seed) for seed in range(3)]
    expected = [plain(target, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    answers = {answer.prompt_token_ids: answer.token_ids for answer in expected}
    rng = random.Random(1)

    def script(request: Any, limit: Any) -> DraftTree:
        right = answers[request.prompt_ids][len(request.output_ids) :]
        return random_tree(rng, VOCAB_SIZE, limit, right)

    completions = Engine(target, ScriptedDrafter(script), tree=FIXED).generate(PROMPTS, params)
    assert [completion.token_ids for completion in completions] == [answer.token_ids for answer in expected]
    assert max(length for completion in completions for length in completion.accepted_lengths) > 2
    finished = [completion for completion in completions if completion.finish_reason == "stop"]
    for completion in finished:
        value = json.loads(completion.text)
        assert list(value) == ["name", "age", "kind"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 6
        assert type(value["age"]) is int
        assert 1 <= value["age"] <= 120
        assert value["kind"] in ("ab", "abc", "é")
    assert temperature == 0.0 or finished


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_stops_and_cuts_inside_a_constraint(depth, target):
    """A stop text within the answer, a length within it, and the end itself, each inside a drafted block."""
    whole = plain(target, PROMPTS[0], sampling(1.0, regex="[0-9]{8}"))
    assert re.fullmatch("[0-9]{8}", whole.text)
    stop = whole.text[3:5]
    for changes, text, reason in (
        ({}, whole.text, "stop"),
        ({"stop": (stop,)}, whole.text[: whole.text.index(stop)], "stop"),
        ({"max_tokens": 5}, whole.text[:5], "length"),
        ({"max_tokens": 8}, whole.text, "length"),
        ({"max_tokens": 9}, whole.text, "stop"),
        ({"stop_token_ids": (whole.token_ids[2],)}, None, "stop"),
    ):
        params = sampling(1.0, regex="[0-9]{8}", **changes)

        def script(request: Any, limit: Any) -> DraftTree:
            right = (*whole.token_ids, EOS, 33, 34)[len(request.output_ids) :]
            return DraftTree.chain(right[: min(depth, limit.max_depth)])

        (completion,) = Engine(target, ScriptedDrafter(script), tree=FIXED).generate([PROMPTS[0]], params)
        expected = plain(target, PROMPTS[0], params)
        assert (completion.token_ids, completion.text) == (expected.token_ids, expected.text)
        assert completion.finish_reason == expected.finish_reason == reason
        assert text is None or completion.text == text


@pytest.mark.parametrize("rule", ["match", "traversal"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_complete_text_before_min_tokens_fails_alone(rule, temperature, target):
    """It ends with an error that says why; the requests beside it are as if alone, and the engine goes on."""
    neighbour = sampling(temperature, regex="[0-9]{6}", seed=9)
    failing = sampling(temperature, regex="[0-9]{3}", min_tokens=7)
    expected = plain(target, PROMPTS[0], neighbour)
    cut_short = plain(target, PROMPTS[1], failing)
    right = {answer.prompt_token_ids: answer.token_ids for answer in (expected, cut_short)}

    def script(request: Any, limit: Any) -> DraftTree:
        """Right, under the match rule, up to the row without a token, which is met inside the tree."""
        return DraftTree.chain(right[request.prompt_ids][len(request.output_ids) :][: limit.max_depth], kind=OneHot())

    engine = Engine(target, ScriptedDrafter(script), tree=FIXED, rule=rule)
    for _ in range(2):
        (alone,) = engine.generate([PROMPTS[0]], neighbour)
        first, second, third = engine.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], [neighbour, failing, neighbour])
        assert first.token_ids == third.token_ids == alone.token_ids
        assert re.fullmatch("[0-9]{6}", first.text)
        for completion in (second, cut_short):
            assert completion.finish_reason == "error"
            assert "no token is left after 3" in completion.error
            assert "\n" not in completion.error
            assert re.fullmatch("[0-9]*", completion.text)
        if rule == "match":
            assert alone.token_ids == expected.token_ids
            assert second.token_ids == cut_short.token_ids
            assert cut_short.token_ids[: len(second.token_ids)] == second.token_ids


def test_samples_and_preempted_requests_keep_their_own_place(target):
    """Three samples of one prompt under one compiled constraint, all taken off their slots halfway."""
    params = sampling(1.0, regex="([0-9]{2}-){4}", n=3)
    expected = Engine(target).generate([PROMPTS[0]], params)
    assert len({completion.text for completion in expected}) == 3
    assert all(re.fullmatch("([0-9]{2}-){4}", completion.text) for completion in expected)
    engine = Engine(target, NgramDrafter(), tree=FIXED)
    requests = engine.submit([PROMPTS[0]], params)
    for _ in range(4):
        engine.step()
    engine.preempt()
    while any(request.finish_reason is None for request in requests):
        engine.step()
    assert [tuple(request.output_ids) for request in requests] == [answer.token_ids for answer in expected]


def test_a_wrong_constraint_is_refused_before_anything_is_queued(target):
    engine = Engine(target)
    with pytest.raises(ValueError, match="regex '\\(' cannot be kept"):
        engine.submit([PROMPTS[0], PROMPTS[1]], [sampling(0.0), sampling(0.0, regex="(")])
    assert engine.step() == 0
    assert engine.generate([PROMPTS[0]], sampling(0.0, regex="[0-9]{3}"))[0].finish_reason == "stop"


def test_a_schema_on_the_real_model(smollm2_path):
    """The demonstration model answers in JSON; lookup drafting changes no token, and gets some accepted."""
    target = TargetModel.load(smollm2_path, dtype="float32")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    chat = [{"role": "user", "content": 'Fill in: {"city": "...", "country": "..."} for the capital of France.'}]
    params = SamplingParams(json_schema=schema, max_tokens=40)
    (expected,) = Engine(target).generate([chat], params)
    (drafted,) = Engine(target, NgramDrafter(), tree=FIXED).generate([chat], params)
    assert drafted.token_ids == expected.token_ids
    assert drafted.finish_reason == "stop"
    value = json.loads(drafted.text)
    assert list(value) == ["city", "country"]
    assert all(isinstance(text, str) and len(text) <= 20 for text in value.values())
    assert max(drafted.accepted_lengths) > 1

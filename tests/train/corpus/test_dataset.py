"""What is trained on and what is held out, from files in memory and from streams by the same rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataConfig
from infer.chat import Rendered
from infer.prompts import load_prompts
from tests.toy_tokenizer import toy_tokenizer
from tests.train.training_fixtures import write_chats
from train.corpus.conversations import TrainingRow
from train.corpus.dataset import TrainingData, load_data, rows_hash, source_of
from train.corpus.order import VisitOrder


def chat(question: str, answer: str = "red fish, blue fish", **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        **fields,
    }


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(*files: str, seed: int = 0, **settings: Any) -> TrainingData:
    settings = {"holdout_fraction": 0.2, "max_length": 128, "max_repeat_fraction": 1.0, **settings}
    return load_data(DataConfig(train=files, **settings), toy_tokenizer(), seed=seed)


def question(row: Rendered) -> str:
    assert isinstance(row, TrainingRow)
    return row.conversation.messages[0]["content"]


def questions(data: TrainingData, start: int, stop: int) -> list[str]:
    return [question(data.visits.at(visit)) for visit in range(start, stop)]


def held_questions(data: TrainingData) -> set[str]:
    return {question(row) for row in data.held_out}


# Files in memory


def test_rows_in_memory_are_visited_in_the_order_they_always_were(tmp_path: Path) -> None:
    """Runs begun before sources could be mixed go on: the same permutations, and the same hash of the data."""
    data = load(str(write_chats(tmp_path / "chats.jsonl")), seed=3)
    order = VisitOrder(len(data.rows), seed=3)
    assert [data.visits.at(visit) for visit in range(90)] == [data.rows[order[visit]] for visit in range(90)]
    assert data.num_rows == len(data.rows)
    assert data.data_hash == rows_hash(data.rows)
    assert data.visits.state(17) == {}


def test_every_conversation_is_accounted_for(tmp_path: Path) -> None:
    """Rows in = rows trained on + held out + dropped for each reason, whatever there is in two files and `eval`."""
    first = [chat(f"question {i}") for i in range(30)] + [{"messages": []}, chat("short", "x"), {"title": "no chat"}]
    second = [chat(f"question {i}") for i in range(20, 60)] + [chat(load_prompts()[0].messages[-1]["content"])]
    files = [write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second)]
    evaluation = write(tmp_path / "eval.jsonl", [chat(f"question {i}", "other") for i in (1, 25, 99)] * 2)
    for settings in ({}, {"eval": (evaluation,)}, {"max_conversations": 50}, {"max_holdout": 4}):
        account = load(*files, min_label_tokens=4, **settings).account
        assert account["conversations_read"] == len(first) + len(second)
        trained_on = account["rows"] + account["dropped_few_labels"] + account["dropped_repetitive"]
        dropped = sum(account["dropped_in_reading"].values()) + sum(account["dropped_in_rendering"].values())
        held_out = account["held_out_unused"] + (0 if "eval" in settings else account["held_out"])
        total = trained_on + dropped + held_out + account["beyond_max_conversations"]
        assert total == account["conversations_read"], settings
        assert account["dropped_in_reading"]["evaluation prompt"] == 1
    assert load(*files, eval=(evaluation,)).account["held_out"] == 3  # three said the same again
    assert load(*files, eval=(evaluation,)).account["held_out_unused"] == 3  # 1, and 25 of both files


def test_what_is_held_out_of_one_file_is_trained_on_from_none(tmp_path: Path) -> None:
    """The same prompt in two files, with another answer in each, is on one side of the split."""
    files = [
        write(tmp_path / "a.jsonl", [chat(f"question {i}", "one answer here") for i in range(60)]),
        write(tmp_path / "b.jsonl", [chat(f"Question {i}!", "another answer here") for i in range(40, 100)]),
    ]
    for settings in ({}, {"weights": (1, 3)}, {"streaming": True, "weights": (1, 3)}):
        data = load(*files, **settings)
        held = {one.lower().strip("!") for one in held_questions(data)}
        visited = {one.lower().strip("!") for one in questions(data, 0, 800)}
        assert held
        assert not held & visited
        assert held | visited == {f"question {i}" for i in range(100)}


def test_weights_share_out_the_visits(tmp_path: Path) -> None:
    """A small file gets its share by whole epochs of it; the account says how often each is gone through."""
    small = write(tmp_path / "small.jsonl", [chat(f"small {i}") for i in range(10)])
    large = write(tmp_path / "large.jsonl", [chat(f"large {i}") for i in range(200)])
    data = load(small, large, weights=(0.3, 0.7))
    sources = {one["source"]: one for one in data.account["sources"]}
    assert sum(one["rows"] for one in sources.values()) == data.num_rows == len(data.rows)
    for period in range(5):
        visited = questions(data, 10 * period, 10 * period + 10)
        assert sum(one.startswith("small") for one in visited) == 3
    num_small = sources[small]["rows"]
    visits = 10 * num_small * 4
    times = Counter(one for one in questions(data, 0, visits) if one.startswith("small"))
    assert set(times.values()) == {visits * 3 // 10 // num_small} == {12}
    assert data.epochs(visits)[small] == pytest.approx(12)
    assert data.epochs(visits)[large] == pytest.approx(visits * 0.7 / sources[large]["rows"])


def test_without_weights_all_rows_count_alike(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.jsonl", [chat(f"{n} {i}") for i in range(n)]) for n in (10, 40)]
    data = load(*files)
    for one in data.account["sources"]:
        assert one["share"] == pytest.approx(one["rows"] / len(data.rows))
        assert data.epochs(3 * len(data.rows))[one["source"]] == pytest.approx(3)


def test_label_counts_follow_the_visits(tmp_path: Path) -> None:
    """A vocabulary is chosen for what is trained on: a rare file with a large share outweighs a large one without."""
    rare = write(tmp_path / "rare.jsonl", [chat(f"rare {i}", "zzzz") for i in range(20)])
    common = write(tmp_path / "common.jsonl", [chat(f"common {i}", "aaaa") for i in range(400)])
    tokenizer = toy_tokenizer()
    z, a = (tokenizer.convert_tokens_to_ids(letter) for letter in "za")
    plain, mixed = load(rare, common), load(rare, common, weights=(9, 1))
    assert plain.label_counts[a] > 10 * plain.label_counts[z]
    assert mixed.label_counts[z] == pytest.approx(9 * mixed.label_counts[a], rel=0.01)
    assert sum(mixed.label_counts.values()) == pytest.approx(sum(plain.label_counts.values()), rel=0.01)


def test_the_hash_tells_what_decides_the_visits(tmp_path: Path) -> None:
    """Rows and weights; not the names of the files."""
    a, b = (write(tmp_path / f"{n}.jsonl", [chat(f"{n} {i}") for i in range(20)]) for n in "ab")
    moved = write(tmp_path / "moved.jsonl", [chat(f"a {i}") for i in range(20)])
    hashes = [load(a, b, **s).data_hash for s in ({}, {"weights": (1, 1)}, {"weights": (1, 2)}, {"max_length": 30})]
    assert len(set(hashes)) == len(hashes)
    assert load(a, b, weights=(1, 2)).data_hash == load(a, b, weights=(0.2, 0.4)).data_hash
    assert load(a, b, weights=(1, 2)).data_hash == load(moved, b, weights=(1, 2)).data_hash


def test_a_weighted_file_without_a_row_is_refused(tmp_path: Path) -> None:
    """Its share would silently go to the others, or wait for ever."""
    good = write(tmp_path / "good.jsonl", [chat(f"question {i}") for i in range(20)])
    bad = write(tmp_path / "bad.jsonl", [chat(f"other {i}", "x") for i in range(20)])
    with pytest.raises(ValueError, match=r"gives .*bad.jsonl 50.00% of the visits, but none of its conversations is"):
        load(good, bad, weights=(1, 1))
    assert load(good, bad).account["dropped_few_labels"] > 0


def test_a_file_is_mixed_in_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat(f"question {i}") for i in range(20)])
    with pytest.raises(ValueError, match=r"data.train names .*a.jsonl 2 times; name it once and raise its weight"):
        load(path, path, weights=(1, 1))


def test_prompts_of_further_files_are_not_trained_on(tmp_path: Path) -> None:
    """`data.decontaminate`, in memory and in a stream."""
    path = write(tmp_path / "a.jsonl", [chat(f"question number {i}") for i in range(40)])
    prompts = write(tmp_path / "bench.jsonl", [{"prompt": f"Question, number {i}"} for i in (3, 17)])
    for settings in ({}, {"streaming": True, "scan_rows": 10, "shuffle_block": 8}):
        data = load(path, decontaminate=(prompts,), **settings)
        seen = {*questions(data, 0, 80), *held_questions(data)}
        assert not seen & {"question number 3", "question number 17"}
        assert len(seen) >= 30


# Streams


def test_a_stream_gives_what_memory_gives(tmp_path: Path) -> None:
    """The same conversations on each side, by the same rules; an epoch of the stream is all rows once."""
    rows = [chat(f"question {i}", "x" if i % 7 == 3 else "a longer answer") for i in range(100)]
    rows += [{"messages": []}, {"messages": "none"}, chat(load_prompts()[0].messages[-1]["content"])]
    path = write(tmp_path / "a.jsonl", rows)
    held, streamed = load(path), load(path, streaming=True, shuffle_block=16)
    num_rows = len(held.rows)
    assert held_questions(held) == held_questions(streamed)
    assert sorted(questions(streamed, 0, num_rows)) == sorted(question(row) for row in held.rows)
    assert sorted(questions(streamed, num_rows, 2 * num_rows)) == sorted(question(row) for row in held.rows)
    assert streamed.num_rows is None
    assert {prompt.token_ids for prompt in streamed.prompts} == {prompt.token_ids for prompt in held.prompts}
    assert {key: held.account[key] for key in ("rows", "tokens", "label_tokens", "dropped_in_reading")} == {
        key: streamed.account[key] for key in ("rows", "tokens", "label_tokens", "dropped_in_reading")
    }


def test_bad_chats_are_dropped_from_a_stream_as_from_a_file(tmp_path: Path) -> None:
    """Empty, system alone, the assistant first, two users in a row, null content, a missing key: the same rules and
    the same names.
    """
    user, answer = chat("question")["messages"]
    bad: list[Any] = [
        [],
        [{"role": "system", "content": "be brief"}],
        [user],
        [user, {"role": "assistant", "content": None}],
        [{"role": "user"}, answer],
        [user, {"role": "robot", "content": "x"}],
        "no list",
    ]
    fixed = [[answer, {**user, "content": "first"}, answer], [user, {**user, "content": "second"}, answer]]
    rows = [{"messages": messages} for messages in bad + fixed] + [3, [user, {"content": "x"}]]
    path = write(tmp_path / "a.jsonl", [*rows, *(chat(f"question {i}") for i in range(30))])
    held, streamed = load(path), load(path, streaming=True, shuffle_block=8)
    seen = set(questions(streamed, 0, 64))
    dropped = dict(streamed.account["sources"][0]["read"]["dropped"])
    assert dropped.pop("held out") == len(held.held_out)
    assert dropped == held.account["dropped_in_reading"]
    assert sum(dropped.values()) == 9
    assert seen | held_questions(streamed) == {question(row) for row in held.rows} | held_questions(held)


def test_rows_from_which_nothing_can_be_learnt_are_dropped(tmp_path: Path) -> None:
    """Answers of one token leave no label, as the first is the target's own: a run on them would look healthy."""
    rows = [{**chat(f"question {i}", "x"), "truncated": True} for i in range(20)]
    with pytest.raises(ValueError, match="no training row is left"):
        load(write(tmp_path / "a.jsonl", rows), min_label_tokens=1)


def test_the_held_out_side_is_never_trained_on(tmp_path: Path) -> None:
    """Also beyond the scanned rows: the scan fixes the threshold, and whatever is on its other side is left out."""
    path = write(tmp_path / "a.jsonl", [chat(f"question {i % 300}", f"answer {i}") for i in range(600)])
    data = load(path, streaming=True, scan_rows=60, shuffle_block=16)
    assert 0 < len(data.held_out) < 60
    visited = set(questions(data, 0, 1200))
    assert not visited & held_questions(data)
    left_out = data.account["sources"][0]["read"]["dropped"]["held out"]
    assert 0.1 * 600 < left_out < 0.3 * 600  # the fraction asked for is 0.2


def test_held_out_files_beside_a_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat(f"question {i}") for i in range(60)])
    evaluation = write(tmp_path / "eval.jsonl", [chat(f"question {i}") for i in (2, 55, 77)])
    data = load(path, streaming=True, scan_rows=10, eval=(evaluation,))
    assert held_questions(data) == {"question 2", "question 55", "question 77"}
    assert set(questions(data, 0, 58)) == {f"question {i}" for i in range(60) if i not in (2, 55)}


@pytest.mark.parametrize("interrupted", [37, 90, 91])
def test_streams_in_fixed_shares_go_on_exactly(interrupted: int, tmp_path: Path) -> None:
    """Two sources of other lengths, each in its own epoch and block, three resumes in a row."""
    datasets = pytest.importorskip("datasets")
    lines = write(tmp_path / "lines.jsonl", [chat(f"line {i}") for i in range(30)])
    folder = tmp_path / "tables"
    folder.mkdir()
    for part in range(3):
        table = datasets.Dataset.from_list([chat(f"table {50 * part + i}") for i in range(50)])
        table.to_parquet(folder / f"{part}.parquet", batch_size=16)

    def fresh() -> TrainingData:
        return load(lines, str(folder), streaming=True, weights=(0.3, 0.7), scan_rows=40, shuffle_block=20)

    whole = questions(fresh(), 0, 300)
    assert sum(one.startswith("line") for one in whole[:100]) == 30
    seen: list[str] = []
    data = fresh()
    for stop in (interrupted, interrupted + 53, interrupted + 54, 300):
        seen += questions(data, len(seen), stop)
        state = json.loads(json.dumps(data.visits.state(stop)))
        again = fresh()
        assert again.data_hash == data.data_hash
        again.visits.seek(stop, state)
        data = again
    assert seen == whole


def test_the_account_of_a_stream_grows(tmp_path: Path) -> None:
    """What was read beyond the scan is counted, bad rows by their reason."""
    rows: list[Any] = [chat(f"question {i}") for i in range(100)]
    rows[70] = {"messages": "none"}
    path = write(tmp_path / "a.jsonl", rows)
    data = load(path, streaming=True, scan_rows=20, shuffle_block=10)
    (source,) = data.account["sources"]
    assert (data.account["conversations_read"], source["read"]["rows_in"]) == (20, 0)
    questions(data, 0, 200)
    assert source["read"]["rows_in"] == 100
    assert source["read"]["dropped"]["messages is not a list"] == 1
    assert source["read"]["rows"] + sum(source["read"]["dropped"].values()) == 100
    json.dumps(data.account)


def test_the_hash_of_a_stream(tmp_path: Path) -> None:
    """Whatever decides what is visited when: the source as far as it is known, blocks, shares, and what is left out."""
    rows = [chat(f"question {i}") for i in range(60)]
    a = write(tmp_path / "a.jsonl", rows)
    longer = write(tmp_path / "longer.jsonl", [*rows, chat("one more")])
    same = write(tmp_path / "same.jsonl", rows)
    evaluations = [write(tmp_path / f"{n}.jsonl", [chat("elsewhere"), chat(f"question {n}")]) for n in (50, 51)]
    prompts = write(tmp_path / "bench.jsonl", [{"prompt": "another prompt"}])

    def hash_of(*files: str, **settings: Any) -> str:
        return load(*files, **{"streaming": True, "scan_rows": 20, "shuffle_block": 8, **settings}).data_hash

    hashes = [
        hash_of(a),
        hash_of(longer),
        hash_of(a, shuffle_block=9),
        hash_of(a, holdout_fraction=0.3),
        hash_of(a, decontaminate=(prompts,)),
        hash_of(a, longer, weights=(1, 1)),
        hash_of(a, longer, weights=(1, 2)),
        *(hash_of(a, eval=(one,)) for one in evaluations),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hash_of(same) == hash_of(a)


def test_all_processes_read_the_same(tmp_path: Path) -> None:
    """Nothing but the settings and the seed decides, so processes need not tell each other."""
    path = write(tmp_path / "a.jsonl", [chat(f"question {i}") for i in range(60)])
    one, other = (load(path, streaming=True, scan_rows=30, shuffle_block=16, seed=3) for _ in range(2))
    assert questions(one, 0, 150) == questions(other, 0, 150)
    assert one.data_hash == other.data_hash
    assert questions(load(path, streaming=True, scan_rows=30, shuffle_block=16, seed=4), 0, 150) != questions(
        one, 0, 150
    )


def test_streams_need_their_shares(tmp_path: Path) -> None:
    """How many rows a stream has is not known, so nothing can be visited alike."""
    files = [write(tmp_path / f"{n}.jsonl", [chat(f"{n} {i}") for i in range(20)]) for n in "ab"]
    with pytest.raises(ValueError, match=r"data.streaming with 2 sources in data.train needs data.weights"):
        load(*files, streaming=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"no conversation in its first 2,000 rows: 0 rows in, 0 kept, 0 dropped"),
        ([{"messages": []}] * 30, r"30 dropped: no messages .*the first row is \"\{'messages': \[\]\}\""),
        ([{"text": "<s>user\r\nhello"}] * 30, r"30 dropped: text is not ChatML .*<s>user"),
        ([chat(f"question {i}", "x") for i in range(30)], r"no training row is left: \d+ have fewer than 4 labels"),
    ],
)
def test_a_stream_without_use_is_refused_at_once(rows: list[Any], message: str, tmp_path: Path) -> None:
    """With the reasons and the first row, before anything is trained."""
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "a.jsonl", rows), streaming=True)


def test_a_template_without_a_mask_stops_a_stream(tmp_path: Path) -> None:
    """All rows refused by the template: its name and reason are told, instead of a run at zero loss."""
    path = write(tmp_path / "a.jsonl", [chat(f"question {i}") for i in range(30)])
    settings = DataConfig(train=(path,), streaming=True, holdout_fraction=0.2)
    template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template of toy"):
        load_data(settings, toy_tokenizer(template=template), seed=0)


def test_rows_say_where_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": []}, *(chat(f"question {i}") for i in range(20))])
    for settings in ({}, {"streaming": True}):
        row = load(path, **settings).visits.at(5)
        number = int(question(row).split()[1])
        assert source_of(row) == f"{path}:{number + 2}"


# Raw text


@pytest.mark.parametrize("streaming", [False, True])
def test_raw_texts_are_continued_from_their_first_half(streaming: bool, tmp_path: Path) -> None:
    """No template: every token but the first is trained on, and a prompt is the beginning of a held-out text."""
    texts = [f"text {i}: " + " ".join(f"word{j}" for j in range(i)) for i in range(40)]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = load(path, raw=True, streaming=streaming)
    ids_of = {tuple(toy_tokenizer()(text)["input_ids"]): text for text in texts}
    assert all(row.loss_mask == [False] + [True] * (len(row.token_ids) - 1) for row in data.rows)
    assert len(data.prompts) == len(data.held_out)
    for prompt, row in zip(data.prompts, data.held_out, strict=True):
        assert prompt.token_ids == tuple(row.token_ids[: len(row.token_ids) // 2])
        assert len(row.token_ids) <= 128
    trained_on = {text for row in (data.visits.at(visit) for visit in range(200)) for text in [question(row)]}
    held_out = {question(row) for row in data.held_out}
    assert held_out
    assert not trained_on & held_out
    assert trained_on | held_out == set(ids_of.values())


def test_a_long_raw_text_is_one_prompt_of_bounded_length(tmp_path: Path) -> None:
    """It fills many rows to train on, and would otherwise be most of what is measured."""
    texts = [f"text {i}: " + "some words " * 400 for i in range(20)]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    data = load(path, raw=True, max_length=1024)
    assert len(data.rows) > 60
    assert len(data.held_out) == len(data.prompts) == data.account["held_out"]
    assert {len(prompt.token_ids) for prompt in data.prompts} == {256}

"""A target of which only features and a few parts are left: training reads it as the target itself."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import HeadCard
from infer.chat import Rendered, template_hash
from infer.evaluate import EvalPrompt
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.toy_tokenizer import toy_tokenizer
from tests.train.features.feature_rows import TAPS, assert_equal, cached, random_rows
from tests.train.training_fixtures import tiny_recipe, tiny_target, write_chats
from train.corpus.dataset import load_data
from train.features import OnlineFeatures, StoredFeatures, StoredTarget, make_features
from train.features.filling import fill
from train.features.stored_target import HeldOut, write_held_out, write_target
from train.setup import make_head

ROWS = random_rows(5, 12, 7)


def write_folder(folder: Path, target: TargetModel, rows: list[Rendered] = ROWS, **settings: Any) -> Path:
    source = cached(target, folder, **settings)
    write_target(folder, target)
    prompts = [EvalPrompt(domain="code", token_ids=(4, 5, 6))]
    write_held_out(source.store, HeldOut(rows=rows[:1], domains=["code"], prompts=prompts))
    fill(source, rows)
    return folder


def test_it_reads_as_the_target_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything training reads of a target is equal, from a folder that was moved, without any network; the folder
    names no place of the machine it was made on."""

    def no_network(*args: Any, **named: Any) -> Any:
        raise AssertionError("the network must not be asked")

    target = tiny_target()
    folder = write_folder(tmp_path / "made" / "features", target).rename(tmp_path / "moved")
    monkeypatch.setattr(socket.socket, "connect", no_network)
    stored = StoredTarget.load(folder)
    for name in ("name", "num_layers", "hidden_size", "vocab_size", "dtype", "device", "max_length", "eos_ids"):
        assert getattr(stored, name) == getattr(target, name), name
    assert stored.fingerprint == target.fingerprint
    assert stored.reference == target.reference
    stored.check_card(HeadCard(target=target.reference))
    with pytest.raises(ValueError, match="other weights"):
        stored.check_card(HeadCard(target=tiny_target(seed=1).reference))
    assert torch.equal(stored.weights.embedding, target.weights.embedding)
    assert torch.equal(stored.weights.lm_head, target.weights.lm_head)
    online, kept = OnlineFeatures(target, TAPS), StoredFeatures(stored, TAPS)
    for row, one in zip(ROWS, kept.get_many(ROWS), strict=True):
        assert_equal(one, online.get(row))
    assert stored.held_out == HeldOut(
        rows=ROWS[:1], domains=["code"], prompts=[EvalPrompt(domain="code", token_ids=(4, 5, 6))]
    )
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_neox"])
def test_a_new_head_starts_from_the_same_weights(family: str, tmp_path: Path) -> None:
    """`head.init: target` reads the last layer and the final norm, whatever a family's are called; tied embeddings are
    kept once."""
    tokenizer = toy_tokenizer()
    target = TargetModel.wrap(make_tiny_model(family, vocab_size=264), tokenizer, name=family)
    stored = StoredTarget.load(write_folder(tmp_path / "kept", target, taps=(1, 2, 3)))
    chats = write_chats(tmp_path / "chats.jsonl")
    config = tiny_recipe(chats, head__taps=(1, 2, 3))
    data = load_data(config.data, tokenizer, seed=0)
    one, other = make_head(config, target, data), make_head(config, stored, data)  # type: ignore[arg-type]
    state = other.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
    norm, states = stored.final_norm, torch.randn(3, target.hidden_size)
    assert torch.equal(norm(states), target.final_norm(states))


def test_a_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    tied, untied = tiny_target(tie_word_embeddings=True), tiny_target()
    sizes = []
    for place, target in enumerate((tied, untied)):
        folder = write_folder(tmp_path / f"{place}", target)
        sizes.append((folder / "target" / "parts.safetensors").stat().st_size)
        stored = StoredTarget.load(folder)
        assert torch.equal(stored.lm_head_weight, target.lm_head_weight)
    assert sizes[1] - sizes[0] > untied.lm_head_weight.nbytes * 0.9


def test_missing_rows_are_counted_before_anything_runs(tmp_path: Path) -> None:
    stored = StoredTarget.load(write_folder(tmp_path / "kept", tiny_target()))
    config = tiny_recipe(tmp_path / "none.jsonl")
    others = random_rows(6, 9, seed=7)
    with pytest.raises(ValueError, match=r"lacks 2 of 5 rows \(15 of 39 tokens\).*headstart features"):
        make_features(config, stored, taps=TAPS, folder=tmp_path, rows=[*ROWS, *others], notice=lambda text: None)
    source = make_features(config, stored, taps=TAPS, folder=tmp_path, rows=ROWS, notice=lambda text: None)
    with pytest.raises(ValueError, match="lacks 1 of 1 rows"):
        source.get(others[0])
    assert not (tmp_path / ".features").exists()


def test_features_of_something_else_are_refused_with_both_values(tmp_path: Path) -> None:
    """Other taps, another form, another template or tokenizer (in the folder, or in the target that the recipe names):
    token counts that differ late, or ids that mean other text, were the symptoms."""
    folder = write_folder(tmp_path / "kept", tiny_target())
    stored = StoredTarget.load(folder)

    def use(taps: tuple[int, ...] = TAPS, **changes: Any) -> None:
        config = tiny_recipe(tmp_path / "none.jsonl", **changes)
        make_features(config, stored, taps=taps, folder=tmp_path, notice=lambda text: None)

    use(taps=(2, 4))
    with pytest.raises(ValueError, match=r"taps \[1, 2, 4\], and the head reads \[1, 3\]"):
        use(taps=(1, 3))
    with pytest.raises(ValueError, match=r"stored_dtype float32 \(tiny\), and int8"):
        use(train__feature_dtype="int8")

    model = tmp_path / "model"
    toy_tokenizer().save_pretrained(model)
    StoredTarget.load(folder, model=model)
    StoredTarget.load(folder, model=tmp_path / "not here")
    other = toy_tokenizer(template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
    other.save_pretrained(model)
    then, now = template_hash(toy_tokenizer()), template_hash(other)
    with pytest.raises(ValueError, match=rf"template_hash {then}, and target.model .* has {now}"):
        StoredTarget.load(folder, model=model)
    toy_tokenizer(merges=("h i",)).save_pretrained(model)
    with pytest.raises(ValueError, match=r"tokenizer_hash .* target.model"):
        StoredTarget.load(folder, model=model)
    (folder / "target" / "chat_template.jinja").write_text(other.chat_template)
    with pytest.raises(ValueError, match=rf"template_hash {then}, and .* now has {now}"):
        StoredTarget.load(folder)


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no features"):
        StoredTarget.load(tmp_path / "nothing")
    folder = write_folder(tmp_path / "kept", tiny_target())
    parts = folder / "target" / "parts.safetensors"
    whole = parts.read_bytes()
    parts.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="damaged or truncated"):
        StoredTarget.load(folder)
    parts.write_bytes(whole)
    (folder / "held_out.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is damaged"):
        StoredTarget.load(folder).held_out  # noqa: B018
    (folder / "held_out.json").unlink()
    with pytest.raises(ValueError, match="no held-out text"):
        StoredTarget.load(folder).held_out  # noqa: B018
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99, this headstart reads"):
        StoredTarget.load(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(folder / "target")
    with pytest.raises(ValueError, match=r"target/ is missing.*--out"):
        StoredTarget.load(folder)

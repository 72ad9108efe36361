"""The commands import and export, through `headstart.main`, on a tiny target with random heads of each family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headstart
from heads import checkpoint
from heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadCard, read_card, save_head
from heads.foreign import FORMATS
from heads.registry import family_of_head
from infer.target import TargetModel
from tests.conftest import make_tiny_model
from tests.head_families import tiny_head
from tests.toy_tokenizer import toy_tokenizer

HEADS: dict[str, tuple[str, int | None]] = {
    "eagle3": ("eagle3", 64),
    "eagle1": ("eagle1", None),
    "medusa": ("medusa", None),
    "hydra": ("hydra", None),
    "hydra-prefix": ("hydra with a prefix layer", None),
    "peagle": ("peagle by itself", 64),
    "dflash": ("dflash of two layers", None),
    "speculators-dflash": ("dflash of two layers", 64),
    "speculators-dspark": ("dspark", 64),
    "deepspec": ("dspark", None),
}
"""Heads (of `tests.head_families`) by a form's name, or else its family, and their draft vocabulary: some forms know
only the full one."""


@dataclass(frozen=True)
class Folders:
    """A target of eight layers (with fewer, SafeAILab's form has no three to tap), its heads, and a wider target."""

    target: Path
    wide: Path
    heads: Mapping[str, Path]

    @property
    def head(self) -> Path:
        return self.heads["eagle3"]

    def head_for(self, form: str) -> Path:
        return self.heads[form if form in self.heads else FORMATS[form].family]

    def target_for(self, form: str) -> list[str | Path]:
        """What an export is told of the target, where the form holds copies of its weights."""
        return ["--target", self.target, "--device", "cpu"] if FORMATS[form].written_copies else []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    tokenizer = toy_tokenizer()
    for folder, hidden_size in ((root / "target", 32), (root / "wide", 64)):
        model = make_tiny_model(
            "llama",
            num_hidden_layers=8,
            hidden_size=hidden_size,
            vocab_size=len(tokenizer),
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    target = TargetModel.load(root / "target", dtype="float32")
    heads = {}
    for name, (variant, size) in HEADS.items():
        head = tiny_head(variant, target, draft_vocab_size=size)
        card = HeadCard(target=target.reference, family=family_of_head(head))
        heads[name] = save_head(root / name, head, card, dtype=torch.bfloat16)
    return Folders(target=root / "target", wide=root / "wide", heads=heads)


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("import", "export"):
        monkeypatch.setitem(headstart._COMMANDS, name, headstart._Command(f"infer.cli.{name}_head", ""))


def run(*arguments: str | Path) -> int:
    return headstart.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_comes_back_and_drafts_what_it_drafted(
    name: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files, a card of its own, and the same accepted lengths in every round of `generate`."""
    own, abroad, again = folders.head_for(name), tmp_path / "abroad", tmp_path / "again"
    assert run("export", own, "--to", name, "--out", abroad, *folders.target_for(name)) == 0
    assert sorted(path.name for path in abroad.iterdir()) == [CONFIG_FILE, FORMATS[name].weights_files[0]]
    assert str(own.parent) not in (abroad / CONFIG_FILE).read_text()
    assert run("import", abroad, "--target", folders.target, "--out", again, "--device", "cpu") == 0
    output = capsys.readouterr()
    assert output.out.split() == [str(abroad), str(again)]
    said = [line for line in output.err.splitlines() if "warning" in line]
    assert all("of the two Medusa layouts" in line for line in said), "a form that is ambiguous says how it was taken"
    for file in (WEIGHTS_FILE, CONFIG_FILE):
        assert (own / file).read_bytes() == (again / file).read_bytes()
    card = read_card(again)
    assert (card.target, card.family) == (read_card(own).target, FORMATS[name].family)
    assert (card.training["imported_from"], card.training["source"]) == (name, "abroad")
    assert card.vocabulary["target_fingerprint"] == card.target.fingerprint
    answers = []
    for head in (own, again):
        path = tmp_path / f"{head.name}.json"
        tree = ["--no-adaptive", "--nodes", "7", "--dtype", "float32", "--max-tokens", "16", "--device", "cpu"]
        assert run("generate", head, "--target", folders.target, "--prompt", "abc", *tree, "--json", path) == 0
        (answer,) = json.loads(path.read_text())
        answers.append((answer["token_ids"], answer["accepted_lengths"]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", FORMATS)
def test_a_fault_in_any_tensor_writes_nothing(
    name: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tensor left out, renamed, added, cut or not a number: the command names it, and no folder is left behind."""
    abroad, out = tmp_path / "abroad", tmp_path / "out"
    assert run("export", folders.head_for(name), "--to", name, "--out", abroad, *folders.target_for(name)) == 0
    path = abroad / FORMATS[name].weights_files[0]
    whole = load_file(path)
    left_out = {*FORMATS[name].copies, *FORMATS[name].own_or_copies}  # may be, for they can be the target's
    victim = min(key for key, tensor in whole.items() if tensor.ndim == 2 and key not in left_out)
    rest = {key: tensor for key, tensor in whole.items() if key != victim}
    broken = whole[victim].clone()
    broken[0, 0] = float("nan")
    faults: list[tuple[dict[str, torch.Tensor], str]] = [
        (rest, victim),
        ({**rest, f"{victim}_": whole[victim]}, victim),
        ({**whole, "stranger.weight": torch.ones(2)}, "stranger.weight"),
        ({**rest, victim: whole[victim][:, :-1].contiguous()}, victim),
        ({**rest, victim: broken}, victim),
    ]
    known = sorted(tmp_path.iterdir())
    capsys.readouterr()
    for tensors, named in faults:
        save_file(tensors, path)
        assert run("import", abroad, "--target", folders.target, "--out", out, "--device", "cpu", "--from", name) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert named in output.err
        assert output.err.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == known


def test_speculators_may_carry_the_target_s_embedding(folders: Folders, tmp_path: Path) -> None:
    abroad = tmp_path / "abroad"
    options = ["--target", folders.target, "--device", "cpu"]
    assert run("export", folders.head, "--to", "speculators", "--out", abroad, *options) == 0
    assert load_file(abroad / WEIGHTS_FILE)["embed_tokens.weight"].dtype == torch.bfloat16
    assert run("import", abroad, "--out", tmp_path / "again", *options) == 0
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (folders.head / WEIGHTS_FILE).read_bytes()


def test_a_correction_is_written_as_a_table(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The form has no other, and it is said."""
    target = TargetModel.load(folders.target, dtype="float32")
    head = tiny_head("dflash", target)
    own = save_head(tmp_path / "own", head, HeadCard(target=target.reference, family="dflash"))
    abroad = tmp_path / "abroad"
    options = ["--to", "speculators-dspark", "--target", folders.target, "--device", "cpu"]
    assert run("export", own, *options, "--out", abroad) == 0
    assert "written as a table of all tokens" in capsys.readouterr().err
    table = load_file(abroad / WEIGHTS_FILE)["markov_head.markov_w1.weight"]
    assert table.shape == (target.vocab_size, head.config.markov_rank)


def test_mistakes_are_one_line_and_leave_nothing(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails, and whenever: no folder and no staging folder is left behind."""
    abroad, out = tmp_path / "abroad", tmp_path / "out"
    assert run("export", folders.head, "--to", "specforge", "--out", abroad) == 0
    known = sorted(tmp_path.iterdir())
    capsys.readouterr()

    def refused(message: str, *arguments: str | Path) -> None:
        assert run(*arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert message in output.err
        assert output.err.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == known

    target = ["--target", folders.target, "--device", "cpu"]
    refused("hidden size 32", "import", abroad, "--target", folders.wide, "--device", "cpu", "--out", out)
    refused("exists already", "import", abroad, *target, "--out", abroad)
    refused("exists already", "export", folders.head, "--to", "vllm", "--out", folders.head)
    refused("already (it holds headstart.json)", "import", folders.head, *target, "--out", out)
    refused("read as safeailab: eagle_config", "import", abroad, *target, "--out", out, "--from", "safeailab")
    refused("has no headstart.json", "export", abroad, "--to", "vllm", "--out", out)
    refused("no target folder", "import", abroad, "--target", "./nowhere", "--out", out)
    wide = ["--target", folders.wide, "--device", "cpu"]
    refused("hidden size 32", "export", folders.head, "--to", "speculators", "--out", out, *wide)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        refused("no space left", "import", abroad, *target, "--out", out)
    refused("vllm-medusa is a form of Medusa heads", "export", folders.head, "--to", "vllm-medusa", "--out", out)
    tensors = load_file(abroad / WEIGHTS_FILE)
    tensors["d2t"].zero_()
    save_file(tensors, abroad / WEIGHTS_FILE)
    refused("d2t is all zeros", "import", abroad, *target, "--out", out)


def test_the_target_s_dtype_does_not_matter(folders: Folders, tmp_path: Path) -> None:
    """The fingerprint on the card and the head's bits are those of a look at the target in float32."""
    abroad = tmp_path / "abroad"
    target = ["--target", folders.target, "--device", "cpu"]
    assert run("export", folders.head, "--to", "speculators", "--out", abroad, *target) == 0
    assert run("import", abroad, *target, "--out", tmp_path / "again", "--dtype", "bfloat16") == 0
    assert read_card(tmp_path / "again").target == read_card(folders.head).target
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (folders.head / WEIGHTS_FILE).read_bytes()

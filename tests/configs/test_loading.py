"""Recipes: every mistake is refused with a way out, and what is written back loads to the same thing."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from configs.loading import (
    describe_settings,
    dump_config,
    load_config,
    parse_config,
    recipe_names,
    recipe_path,
    write_config,
)
from configs.schema import DataConfig, HeadSettings, RunConfig, TrainSettings

MINIMAL: dict[str, Any] = {"name": "small", "train": {"steps": 3}}


def _write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_defaults() -> None:
    """A recipe needs a name and a budget; all else has a default."""
    config = parse_config(MINIMAL)
    assert config == RunConfig(name="small", train=TrainSettings(steps=3))


@pytest.mark.parametrize(
    ("override", "section", "value"),
    [
        ("optim.lr=5e-4", "optim.lr", 5e-4),  # YAML 1.1 reads this as text: it has no dot
        ("optim.lr=1", "optim.lr", 1.0),
        ("train.steps=1e3", "train.steps", 1000),
        ("optim.grad_clip=null", "optim.grad_clip", None),
        ("optim.betas=[0.8, 0.99]", "optim.betas", (0.8, 0.99)),
        ("head.taps=[2, 15, 27]", "head.taps", (2, 15, 27)),
        ("head.taps=4", "head.taps", (4,)),
        ("data.train=a.jsonl", "data.train", ("a.jsonl",)),
        ("data.train=[a.jsonl, b.jsonl]", "data.train", ("a.jsonl", "b.jsonl")),
        ("train.feature_cache=false", "train.feature_cache", False),
        ("name=123", "name", "123"),
        ("name=1e3", "name", "1e3"),
        ("tracking.wandb=offline", "tracking.wandb", "offline"),
        ("tracking.entity=null", "tracking.entity", None),
        ("target.device=cuda:1", "target.device", "cuda:1"),
    ],
)
def test_override_types(override: str, section: str, value: object) -> None:
    """An override's text becomes the declared type, exactly."""
    given: Any = parse_config(MINIMAL, [override])
    for part in section.split("."):
        given = getattr(given, part)
    assert given == value
    assert type(given) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"no setting optim\.lrr; did you mean optim\.lr\?"),
        ("minutes=1", r"no setting minutes; did you mean train\.minutes\?"),
        ("optimm.lr=1", r"no setting optimm; did you mean optim\?"),
        ("train.zzz=1", r"no setting train\.zzz; known: train\.minutes"),
        ("optim.lr.x=1", r"optim\.lr is a setting with no keys below it"),
        ("optim=1", r"optim is a section; override one of its keys: .*optim\.lr"),
        ("optim.lr", r"does not read section\.key=value"),
        ("=3", r"does not read section\.key=value"),
        ("optim.lr=fast", r"optim\.lr is 'fast'; it must be a number"),
        ("optim.lr=", r"optim\.lr is None; it must be a number"),
        ("optim.lr=.nan", r"it must be a number"),
        ("optim.lr=-1", r"optim\.lr is -1\.0; it must be above 0"),
        ("optim.betas=[0.9]", r"optim\.betas is \[0\.9\]; it must be \[a number, a number\]"),
        ("optim.betas=[0.9, 1.0]", r"both must be at least 0 and below 1"),
        ("train.steps=2.5", r"train\.steps is 2\.5; it must be a whole number or null"),
        ("train.steps=true", r"train\.steps is True; it must be a whole number or null"),
        ("train.feature_cache=1", r"it must be true or false"),
        ("train.loss=lkk", r"train\.loss is 'lkk'; it must be one of lk, "),
        ("tracking.wandb=off", r"tracking\.wandb is 'off'; it must be one of auto, online, "),
        ("head.taps=[3, 1]", r"ascending, without repeats"),
        ("head.taps=[]", r"head\.taps is empty"),
        ("head.taps=[a]", r"head\.taps\[0\] is 'a'; it must be a whole number"),
        ("data.train=[a, b", r"the value in the override .* is not YAML"),
        ("name=../evil", r"it names a folder"),
        ("name=", r"name is ''; it must be text"),
    ],
)
def test_refused_overrides(override: str, message: str) -> None:
    """What cannot be meant is refused before anything loads, and the error names the way out."""
    with pytest.raises(ValueError, match=message) as caught:
        parse_config(MINIMAL, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"name": "a", "train": {"stepz": 3}},
            r"recipe\.yaml: there is no setting train\.stepz; did you mean train\.steps",
        ),
        ({"name": "a"}, r"no budget; set train\.minutes"),
        ({"train": {"steps": 3}}, r"name is missing"),
        ({"name": "a", "train": 3}, r"train is 3; it is a section"),
        ({"name": 3, "train": {"steps": 3}}, r"name is 3; it must be text"),
        ([1, 2], r"holds a list; a recipe is a mapping"),
        (
            {"name": "a", "train": {"steps": 3}, "tracking": {"wandb": False}},
            r"wandb is False; it must be one of",
        ),
    ],
)
def test_refused_files(tmp_path: Path, content: object, message: str) -> None:
    """Mistakes in a file name the file."""
    with pytest.raises(ValueError, match=message):
        load_config(_write(tmp_path / "recipe.yaml", content))


def test_repeated_key_is_refused(tmp_path: Path) -> None:
    """PyYAML silently keeps the last of two equal keys, so a setting could be lost without a word."""
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\ntrain:\n  steps: 3\n  steps: 4\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the key 'steps' appears twice"):
        load_config(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no recipe file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match=r"is a folder; give the recipe file in it"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match="no shipped recipe is called 'zzz'"):
        recipe_path("zzz")


def test_overrides_apply_in_order_and_create_sections() -> None:
    """The last of two overrides of one key wins, and a section absent from the file may be overridden."""
    config = parse_config(MINIMAL, ["eval.prompts=3", "eval.prompts=4"])
    assert config.eval.prompts == 4
    assert MINIMAL == {"name": "small", "train": {"steps": 3}}, "the caller's mapping was changed"


def test_round_trip(tmp_path: Path) -> None:
    """A configuration with no default left as it was loads back equal, through plain YAML."""
    config = parse_config(
        MINIMAL,
        [
            "data.train=[a.jsonl, b.jsonl]",
            "data.eval=c.jsonl",
            "head.taps=[1, 2]",
            "head.draft_vocab_size=null",
            "optim.lr=3e-5",
            "optim.betas=[0.8, 0.99]",
            "train.minutes=0.5",
            "eval.temperatures=[0, 0.7, 1]",
            "tracking.tags=['yes', '7']",
        ],
    )
    path = tmp_path / "config.yaml"
    write_config(config, path)
    assert load_config(path) == config
    assert parse_config(dump_config(config)) == config
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_every_field_can_be_written_and_read() -> None:
    """Each field of the schema has a type that loading knows: a new one cannot be forgotten."""
    config = parse_config(MINIMAL)
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for field in dataclasses.fields(value):
            with pytest.raises(ValueError, match=rf"{section.name}\.{field.name} "):
                parse_config({**MINIMAL, section.name: {field.name: {"not": "a scalar"}}})


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain paths belong to the working folder, dotted ones to the recipe's; both are kept relative.

    A written configuration must work after its project has moved, and must not hold private absolute paths.
    """
    project = tmp_path / "project"
    (project / "recipes").mkdir(parents=True)
    content = {**MINIMAL, "data": {"train": ["data/a.jsonl", "./b.jsonl", "../data/c.jsonl"]}}
    recipe = _write(project / "recipes" / "mine.yaml", content)
    monkeypatch.chdir(project)
    config = load_config(recipe, ["data.eval=./d.jsonl"])
    assert config.data.train == ("data/a.jsonl", "recipes/b.jsonl", "data/c.jsonl")
    assert config.data.eval == ("d.jsonl",)
    run = project / "runs"
    run.mkdir()
    write_config(config, run / "config.yaml")
    assert load_config(run / "config.yaml") == config

    outside = load_config(recipe, ["target.model=../models/big"])
    assert outside.target.model == str(tmp_path / "models" / "big")


def test_held_out_text_is_required_and_disjoint() -> None:
    """The best checkpoint is chosen on text that was not trained on, so there has to be some."""
    with pytest.raises(ValueError, match="no text is left"):
        DataConfig(holdout_fraction=0.0)
    with pytest.raises(ValueError, match="holds training files"):
        DataConfig(train=("a", "b"), eval=("b",))
    with pytest.raises(ValueError, match="at least 16"):
        HeadSettings(draft_vocab_size=3)


def test_shipped_recipes_load() -> None:
    """Every recipe in the package loads by its bare name, and is named after its file."""
    assert recipe_names()
    for name in recipe_names():
        assert load_config(name) == load_config(recipe_path(name))


def test_every_setting_is_listed_with_what_it_does() -> None:
    """`headstart train --settings` is where settings are looked up: none may be missing, and only plain ones go without
    words.
    """
    listed = describe_settings().splitlines()
    names = [line.split(" = ")[0] for line in listed if " = " in line and not line.startswith(" ")]
    wanted = [
        f"{section}.{field.name}"
        for section, kind in get_type_hints(RunConfig).items()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    ]
    assert names == wanted
    assert "data.holdout_fraction = 0.05" in listed
    assert "head.init_from = null" in listed
    settings = [line for line in listed if not line.startswith(" ")]
    says = {line: after for line, after in itertools.pairwise(listed) if after.startswith("    ")}
    plain = ("optim.", "train.seed", "train.log_every", "eval.seed", "tracking.")
    assert not [line for line in settings[1:] if line not in says and not line.startswith(plain)]

"""Recipes from YAML files and `section.key=value` overrides, checked against `configs.schema`.

Unknown keys, repeated keys and values of the wrong type are errors that say what would have been right.

Relative paths in `target.model`, `data.train` and `data.eval` are relative to the folder the command runs
in, so that a shipped recipe finds `data/...` and `models/...` of the user's project. A path that starts
with `./` or `../` is relative to the file it stands in (for an override: to the working folder). Either way
the loaded configuration holds a path relative to the working folder where it lies inside it, so what is
written back moves with the project.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from configs.schema import RunConfig

__all__ = ["dump_config", "load_config", "parse_config", "recipe_names", "recipe_path", "write_config"]

_PATH_FIELDS = frozenset(
    {
        "target.model",
        "target.adapter",
        "target.features",
        "data.train",
        "data.eval",
        "data.decontaminate",
        "head.init_from",
        "deepspeed.config",
    }
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a recipe file, or a shipped recipe by its bare name, and apply overrides in order."""
    file = _find_recipe(path)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {_one_line(error)}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; a recipe is a mapping of sections")
    try:
        return parse_config(content, overrides, folder=file.parent)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def parse_config(content: Mapping[str, Any], overrides: Sequence[str] = (), *, folder: Path | None = None) -> RunConfig:
    """Build a configuration from nested mappings; `./` in them is relative to `folder` (default: here)."""
    merged = _resolve_paths(_copy_tree(content), folder or Path.cwd())
    for override in overrides:
        _apply_override(merged, override)
    config = _build_section(RunConfig, merged, prefix="")
    assert isinstance(config, RunConfig)
    return config


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain mappings, lists and scalars; `parse_config` turns it into an equal one."""
    plain = _plain(dataclasses.asdict(config))
    assert isinstance(plain, dict)
    return plain


def write_config(config: RunConfig, path: str | Path) -> None:
    """Write the configuration as YAML that `load_config` reads back to an equal one."""
    text = yaml.safe_dump(dump_config(config), sort_keys=False, allow_unicode=True)
    partial = Path(f"{path}.partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def describe_settings() -> str:
    """Every setting as `section.key = default`, each with what the schema says of it."""
    lines = ["name: text (names the run and its folder)"]
    for section, field_type in get_type_hints(RunConfig).items():
        if not dataclasses.is_dataclass(field_type):
            continue
        assert isinstance(field_type, type)
        says = _field_texts(field_type)
        for field in dataclasses.fields(field_type):
            default = field.default if field.default is not dataclasses.MISSING else None
            value = yaml.safe_dump(_as_plain(default), default_flow_style=True).replace("\n...", "").strip()
            lines += [f"{section}.{field.name} = {value}"] + [f"    {line}" for line in says.get(field.name, ())]
    return "\n".join(lines)


def _field_texts(section: type) -> dict[str, list[str]]:
    """The text under each field of a section in the schema's source."""
    (tree,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in itertools.pairwise(tree.body):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            found[statement.target.id] = inspect.cleandoc(str(following.value.value)).splitlines()  # type: ignore[attr-defined]
    return found


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, given its bare name."""
    known = recipe_names()
    if name not in known:
        raise ValueError(f"no shipped recipe is called {name!r}; {_suggest(name, known)}")
    return Path(__file__).parent / f"{name}.yaml"


def _find_recipe(path: str | Path) -> Path:
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give the recipe file in it, such as {file / 'config.yaml'}")
    if len(file.parts) == 1 and file.suffix not in (".yaml", ".yml"):
        return recipe_path(str(path))
    raise FileNotFoundError(f"there is no recipe file {file}; {_suggest(file.stem, recipe_names())}")


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.1, except that a repeated key is an error: PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice in one section", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _copy_tree(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_tree(value) if isinstance(value, Mapping) else value for key, value in content.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


class _Override(NamedTuple):
    """A value from the command line: its text is kept for fields that want text (`name=123`)."""

    text: str
    value: Any


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ValueError(f"the override {override!r} does not read section.key=value, such as optim.lr=5e-4")
    field_type = _leaf_type(key)
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value in the override {override!r} is not YAML: {_one_line(error)}") from error
    if key in _PATH_FIELDS:
        value = _localise(value, Path.cwd())
    *sections, leaf = key.split(".")
    for section in sections:
        below = tree.get(section)
        if below is None:
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise ValueError(f"{section} holds {below!r}; it is a section and needs keys below it")
        tree = below
    tree[leaf] = _Override(text.strip(), value) if _wants_text(field_type) else value


def _leaf_type(key: str) -> Any:
    """The declared type of a dotted key; an error if there is no such setting."""
    section: Any = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        hints = get_type_hints(section)
        prefix = "".join(f"{name}." for name in parts[:depth])
        if part not in hints:
            raise ValueError(_unknown_key(prefix, part, hints))
        section = hints[part]
        is_last = depth == len(parts) - 1
        if is_last and dataclasses.is_dataclass(section):
            raise ValueError(f"{key} is a section; override one of its keys: {_listing(get_type_hints(section), key)}")
        if not is_last and not dataclasses.is_dataclass(section):
            raise ValueError(f"{prefix}{part} is a setting with no keys below it, so {key} means nothing")
    return section


def _wants_text(field_type: Any) -> bool:
    options = _options(field_type)
    return str in options or any(get_origin(option) is Literal for option in options)


def _resolve_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    for dotted in _PATH_FIELDS:
        section, key = dotted.split(".")
        below = tree.get(section)
        if isinstance(below, dict) and key in below:
            below[key] = _localise(below[key], folder)
    return tree


def _localise(value: Any, folder: Path) -> Any:
    """Rewrite `./` and `../` paths to be relative to the working folder, or absolute outside it."""
    if isinstance(value, list):
        return [_localise(entry, folder) for entry in value]
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    absolute = os.path.abspath(folder / value)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def _build_section(section: type[Any], content: Mapping[str, Any], *, prefix: str) -> Any:
    hints = get_type_hints(section)
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key in content:
        if key not in hints:
            raise ValueError(_unknown_key(prefix, str(key), hints))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        full_name = f"{prefix}{name}"
        field_type = hints[name]
        if dataclasses.is_dataclass(field_type):
            # A section without a default may still be built from its own defaults, or say what it lacks.
            if name in content or field.default_factory is dataclasses.MISSING:
                below = content.get(name)
                below = {} if below is None else below
                if not isinstance(below, Mapping):
                    raise ValueError(f"{full_name} is {below!r}; it is a section and needs keys below it")
                assert isinstance(field_type, type)
                values[name] = _build_section(field_type, below, prefix=f"{full_name}.")
        elif name in content:
            values[name] = _coerce(content[name], field_type, full_name)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{full_name} is missing; give it in the recipe or override {full_name}=...")
    return section(**values)


def _coerce(given: Any, field_type: Any, name: str) -> Any:
    """`given` as the declared type, or an error naming both."""
    value, text = (given.value, given.text) if isinstance(given, _Override) else (given, None)
    if value is None and type(None) in _options(field_type):
        return None
    for option in _options(field_type):
        if option is type(None):
            continue
        fitted = _fit(value, text, option, name)
        if fitted is not _MISFIT:
            return fitted
    shown = text if text is not None else value
    raise ValueError(f"{name} is {shown!r}; it must be {_describe(field_type)}")


_MISFIT = object()


def _fit(value: Any, text: str | None, option: Any, name: str) -> Any:
    origin = get_origin(option)
    if origin is Literal:
        allowed = get_args(option)
        candidate = value if isinstance(value, str) or text is None else text
        return candidate if candidate in allowed else _MISFIT
    if origin is tuple:
        return _fit_tuple(value, option, name)
    if option is bool:
        return value if isinstance(value, bool) else _MISFIT
    if option is str:
        if isinstance(value, str):
            return value
        # `name=123` on the command line can only mean the text; in a file, quotes are the way to say so.
        return text if text else _MISFIT
    number = _number(value)
    if number is None:
        return _MISFIT
    if option is float:
        return float(number)
    assert option is int, f"{name}: the schema uses a type that loading does not know: {option}"
    return int(number) if number == int(number) else _MISFIT


def _fit_tuple(value: Any, option: Any, name: str) -> Any:
    arguments = get_args(option)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        value = [value]  # one entry may stand without a list
    if not isinstance(value, (list, tuple)):
        return _MISFIT
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        return _MISFIT
    return tuple(
        _coerce(entry, argument, f"{name}[{index}]")
        for index, (entry, argument) in enumerate(zip(value, arguments, strict=True))
    )


def _number(value: Any) -> int | float | None:
    """A finite number; YAML 1.1 reads `1e-3` (no dot) as text, so text that spells a number counts."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < float("inf") else None


def _options(field_type: Any) -> tuple[Any, ...]:
    return get_args(field_type) if get_origin(field_type) in (Union, types.UnionType) else (field_type,)


def _describe(field_type: Any) -> str:
    return " or ".join(_describe_one(option) for option in _options(field_type))


def _describe_one(option: Any) -> str:
    if option is type(None):
        return "null"
    if get_origin(option) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(option))
    if get_origin(option) is tuple:
        first, *rest = get_args(option)
        if rest == [Ellipsis]:
            return f"a list of {_describe_one(first)}"
        return "[" + ", ".join(_describe_one(entry) for entry in (first, *rest)) + "]"
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    return names[option]


def _unknown_key(prefix: str, key: str, known: Iterable[str]) -> str:
    elsewhere = [] if prefix else [f"{name}.{key}" for name in known if key in _keys_below(name)]
    if elsewhere:
        return f"there is no setting {key}; did you mean {' or '.join(elsewhere)}?"
    return f"there is no setting {prefix}{key}; {_suggest(key, list(known), prefix=prefix)}"


def _keys_below(section: str) -> Iterable[str]:
    field_type = get_type_hints(RunConfig)[section]
    return get_type_hints(field_type) if dataclasses.is_dataclass(field_type) else ()


def _suggest(given: str, known: Sequence[str], *, prefix: str = "") -> str:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"known: {', '.join(f'{prefix}{name}' for name in known) or 'none'}"


def _listing(known: Iterable[str], section: str) -> str:
    return ", ".join(f"{section}.{name}" for name in known)

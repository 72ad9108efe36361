"""The frame around the packages: directions of imports, the command and its errors, the wheel's contents."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart
from configs.loading import recipe_names

# In the order in which imports may point: each package may use those before it.
PACKAGES = ("configs", "heads", "infer", "train")
SERVING = {"fastapi", "httpx", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"}
EXTRAS = {"datasets", "deepspeed", "gguf", "llguidance", "matplotlib", "peft", "wandb", *SERVING}
CORE = {"torch", "transformers", "safetensors", "numpy", "yaml", "triton"}


def _sources(repository: Path, package: str) -> list[Path]:
    return sorted((repository / package).rglob("*.py"))


def _imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement that runs on import; `if TYPE_CHECKING:` and the bodies of functions do not."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(repository: Path, package: str) -> None:
    """configs <- heads <- infer <- train: no package imports a later one, anywhere, nor the public face."""
    later = {*PACKAGES[PACKAGES.index(package) + 1 :], "headstart"}
    offences = [
        f"{path.relative_to(repository)} imports {name}"
        for path in _sources(repository, package)
        for name in _imported(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] in later
    ]
    assert _sources(repository, package)
    assert offences == []


@pytest.mark.parametrize("package", PACKAGES)
def test_extras_are_imported_where_used(repository: Path, package: str) -> None:
    """Importing any module works without the optional parts: decoding must not need wandb or deepspeed."""
    offences = [
        f"{path.relative_to(repository)} imports {name}"
        for path in _sources(repository, package)
        for name in _imported(_module_level(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] in EXTRAS - (SERVING if path.parent.name == "serve" else set())
    ]
    assert offences == []


def test_core_imports_only_the_core(repository: Path) -> None:
    """`heads` and the core of `infer` (all but its commands) import only what computing needs; the server also what
    serving needs. Nothing but the server and the commands imports the server."""
    allowed = CORE | set(PACKAGES) | set(sys.stdlib_module_names)
    paths = [*_sources(repository, "heads"), *_sources(repository, "infer")]
    offences = [
        f"{path.relative_to(repository)} imports {name}"
        for path in paths
        if path.parent.name not in ("cli", "serve")
        for name in _imported(_module_level(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] not in allowed or name.startswith("infer.serve")
    ]
    offences += [
        f"{path.relative_to(repository)} imports {name}"
        for path in _sources(repository, "infer/serve")
        for name in _imported(_module_level(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] not in allowed | SERVING
    ]
    assert offences == []


def test_triton_is_imported_by_its_kernels_alone(repository: Path) -> None:
    """And they are imported where they run: without Triton every other module must load."""
    offences = [
        f"{path.relative_to(repository)} imports {name}"
        for package in ("heads", "infer")
        for path in _sources(repository, package)
        if not path.stem.endswith("_triton")
        for name in _imported(_module_level(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] == "triton" or name.endswith("_triton")
    ]
    assert offences == []


def test_overview_imports_nothing_heavy(repository: Path) -> None:
    """`headstart --help` and `import headstart` must not load torch or any of our packages."""
    code = (
        "import sys, headstart; status = headstart.main(['--help']); "
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'torch', 'transformers', 'numpy', 'yaml', 'configs', 'heads', 'infer', 'train'}), status)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize("name", headstart.__all__)
def test_public_names_resolve(name: str) -> None:
    """Each name in `__all__` exists, and comes from the module the table says."""
    assert getattr(headstart, name) is not None
    assert name in dir(headstart)


def test_unknown_public_name() -> None:
    """A missing name raises AttributeError, which `hasattr` and `from ... import` rely on."""
    assert not hasattr(headstart, "Enigne")


def test_version_agrees(repository: Path) -> None:
    """The version in the code is the version of the distribution."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert headstart.__version__ == project["version"]


@pytest.mark.parametrize("name", headstart._COMMANDS)
def test_command_interface(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself, and the examples it gives are ones that its own parser accepts, of recipes that are
    shipped."""
    with pytest.raises(SystemExit) as stop:
        headstart.main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert "example:" in capsys.readouterr().out

    module = importlib.import_module(headstart._COMMANDS[name].module)
    parser = headstart._command_parser(name, module)
    example = module.EXAMPLE.replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in example.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith(f"headstart {name}")]
    assert commands, f"the example of {name} shows no `headstart {name}`"
    for recipe in (words[2] for words in commands if name in ("compare", "features", "plan", "train")):
        assert recipe in recipe_names() or recipe.endswith(".yaml") or recipe.startswith("--"), recipe
    for words in commands:
        stop_at = next((index for index, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
        parser.parse_args(words[1 + len(name.split()) : stop_at])


def _fake_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    module = types.ModuleType("infer.cli.fake")

    def run(args: object) -> int:
        raise error

    vars(module).update(HELP="fake", EXAMPLE="headstart fake", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "infer.cli.fake", module)
    monkeypatch.setitem(headstart._COMMANDS, "fake", headstart._Command("infer.cli.fake", "fails"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("given 3;\nexpected 4"), 2),
        (FileNotFoundError("no such file"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_user_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    """A user's mistake is one line on stderr and a status that scripts can tell apart, never a traceback."""
    _fake_command(monkeypatch, error)
    assert headstart.main(["fake"]) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"headstart: [^\n]+\n", output.err)


def test_our_own_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug keeps its traceback."""
    _fake_command(monkeypatch, AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        headstart.main(["fake"])


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt command names the nearest one."""
    assert headstart.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert headstart.main(["--trian"]) == 2
    assert "unknown option" in capsys.readouterr().err


@pytest.mark.parametrize("shadow", ["train.py", "configs.py", "infer/__init__.py"])
def test_shadowed_package_is_refused(tmp_path: Path, repository: Path, shadow: str) -> None:
    """`python -m headstart` looks in the working folder first: a user's train.py there is named, not run."""
    file = tmp_path / shadow
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('the wrong module was run')\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "fetch", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert f"hidden by {file}" in result.stderr
    assert "Traceback" not in result.stderr


def test_wheel_contents(tmp_path: Path, repository: Path) -> None:
    """The wheel holds the public face, the four packages and their data: no tests, benchmarks or models."""
    # Found, not imported: importing setuptools replaces distutils under every later test.
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("building without isolation needs setuptools")
    # Built from a copy, so that the source tree keeps no build products.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "headstart.py"):
        shutil.copy(repository / name, source)
    for name in (*PACKAGES, "tests", "benchmarks"):
        if (repository / name).exists():
            shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {"headstart.py", *PACKAGES}
    shipped = {
        str(path.relative_to(repository))
        for package in PACKAGES
        for path in (repository / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".jsonl", ".cpp", ".h")
    }
    assert shipped <= names, f"not in the wheel: {sorted(shipped - names)}"

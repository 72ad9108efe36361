"""The Triton kernels compiled for GPUs, on a machine that may have none: the interpreter takes more than a compiler.

A process of its own compiles, since within this one Triton may be interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {90: 232448, 80: 166912, 86: 101376}
"""What a program may have, by compute capability."""


def compiled(arch: int, cases: list[dict[str, object]], folder: Path, repository: Path) -> list[dict[str, object]]:
    """Shared memory, registers and bytes spilled of each kernel."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(repository),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [sys.executable, __file__, json.dumps({"arch": arch, "cases": cases})]
    result = subprocess.run(arguments, cwd=repository, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, object]] = json.loads(result.stdout.splitlines()[-1])
    return found


TREE = {"kernel": "tree", "dtype": "bf16", "window": 0}
CASES = {
    90: [
        {**TREE, "size": 128, "heads": [32, 8], "rows": 1},
        {**TREE, "size": 128, "heads": [32, 8], "rows": 16},
        {**TREE, "size": 128, "heads": [32, 8], "rows": 33},
        {**TREE, "size": 80, "heads": [32, 32], "rows": 33, "dtype": "fp16", "window": 1024},
        {"kernel": "path", "dtype": "bf16", "size": 128, "heads": [32, 8], "window": 0},
        {"kernel": "path", "dtype": "bf16", "size": 256, "heads": [8, 4], "window": 4096},
        {"kernel": "tail", "dtype": "bf16", "size": 128, "heads": [32, 8], "window": 0},
        {"kernel": "merge"},
        {"kernel": "draw"},
        {"kernel": "walk"},
        {"kernel": "noise"},
    ],
    86: [
        {**TREE, "size": 128, "heads": [32, 8], "rows": 33},
        {"kernel": "path", "dtype": "bf16", "size": 128, "heads": [32, 8], "window": 0},
    ],
}
SPILL_FREE = 90
FEW_BYTES = 64
"""Of registers that one compiler or another puts on the stack all the same (3.7 of Triton 24 bytes in one kernel)."""


@pytest.mark.parametrize("arch", CASES)
def test_kernels_compile_and_fit(arch, tmp_path: Path, repository: Path) -> None:
    """At the sizes chosen for common models; at the capability they were chosen for, all but without spilling."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not ((tools / "ptxas").exists() and (tools / "cuobjdump").exists()):
        pytest.skip("Triton has no ptxas here")
    for case, found in zip(CASES[arch], compiled(arch, CASES[arch], tmp_path, repository), strict=True):
        assert found["shared"] <= SHARED_BYTES[arch], (case, found)
        if arch == SPILL_FREE:
            assert found["stack"] <= FEW_BYTES, (case, found)


def main() -> None:
    """In the process that compiles: the cases of the last argument."""
    asked = json.loads(sys.argv[1])
    print(json.dumps([_compile(asked["arch"], case) for case in asked["cases"]]))


def _compile(arch: int, case: dict) -> dict[str, int]:
    import re
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants, warps, stages = _described(case, arch)
    names = [parameter.name for parameter in kernel.params]
    remaining = iter(types)
    signature = {name: "constexpr" if name in constants else next(remaining) for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    program = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"shared": program.metadata.shared, "registers": int(found[1]), "stack": int(found[2])}


def _described(case: dict, arch: int) -> tuple:
    """A kernel, the types of its arguments, its constants, warps and stages."""
    from types import SimpleNamespace

    from infer.kernels.gpu import match_walk_triton, path_attention_triton, tree_attention_triton
    from infer.kernels.gpu.blocks_triton import Machine, padded

    machine = Machine(num_processors=132, has_wide_memory=arch in (80, 90))
    kind = case["kernel"]
    if kind == "draw":
        constants = {"SPLIT": match_walk_triton._SPLIT, "TILE": match_walk_triton._TILE}
        types = ["*bf16", "i32", "*i64", "*fp32", "*fp32", "*i32", "i32", "i32", "i32"]
        return match_walk_triton._draw, types, constants, 4, 3
    if kind == "walk":
        types = ["*fp32", "*i32", "*i64", "*i64", "*i32", "*i32", "*i64", "*i1", "i32", "i32"]
        return match_walk_triton._walk, types, {"DEPTH": 8, "ROWS": 64, "SPLITS": 32}, 1, 3
    if kind == "noise":
        types = ["*i64", "*i64", "*fp32", "i32"]
        return match_walk_triton._gumbel_rows, types, {"TILE": match_walk_triton._TILE}, 4, 3
    if kind == "merge":
        types = ["*fp32", "*fp32", "*i32", "*bf16", "i32", "i32"]
        return tree_attention_triton._merge, types, {"VALUE_SIZE": 128, "PADDED_VALUE_SIZE": 128}, 2, 3
    size, (num_heads, num_kv_heads), dtype = case["size"], case["heads"], "*" + case["dtype"]
    constants = {
        "GROUPS": num_heads // num_kv_heads,
        "SIZE": size,
        "VALUE_SIZE": size,
        "PADDED_SIZE": padded(size),
        "PADDED_VALUE_SIZE": padded(size),
        "WINDOW": case["window"],
        "HAS_SOFTCAP": False,
    }
    if kind == "tree":
        sizes = tree_attention_triton.sizes_for(
            SimpleNamespace(max_rows=case["rows"], num_requests=1, max_prefix=4096),  # type: ignore[arg-type]
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            element_size=2,
            machine=machine,
        )
        types = [dtype] * 3 + ["*i32", "*i64", *["*i32"] * 4, "*fp32", "*fp32", *["i32"] * 10, "fp32", "fp32"]
        constants |= {"ROWS": sizes.rows, "COLUMNS": sizes.columns}
        return tree_attention_triton._split, types, constants, sizes.warps, sizes.stages
    types = [dtype] * 3 + ["*i32", "*i64", "*i32", "*i32"]
    if kind == "path":
        rows, columns, warps, stages = path_attention_triton.tile_for(size, 2, machine)
        types += ["*fp32", "*fp32", *["i32"] * 8, "fp32", "fp32"]
        return path_attention_triton._chunk, types, {**constants, "ROWS": rows, "COLUMNS": columns}, warps, stages
    assert kind == "tail"
    types += ["*i32", "*fp32", "*fp32", dtype, *["i32"] * 8, "fp32", "fp32"]
    constants |= {"TAIL": 48, "PADDED_TAIL": 64, "PADDED_REQUESTS": 1}
    return path_attention_triton._tail, types, constants, 4, 3


if __name__ == "__main__":
    main()

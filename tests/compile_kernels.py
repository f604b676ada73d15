"""Compile the kernels for a card that is not here: python tests/compile_kernels.py CAPABILITY TILES DIM.

Prints one JSON object: {kernel: {"registers", "stack" (bytes that spill), "shared" (bytes a program)}}. Run without
TRITON_INTERPRET; Triton brings the assembler, and no driver is needed.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash import block_attention
from dflash.block_attention import OWN, STEP, constants, power
from dflash.gated import COLUMNS as GATED_COLUMNS
from dflash.kernels import attention, gated, head

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "*i64": {"low", "high", "targets"},
    "*i32": {"begins", "ends"},
    "*fp32": {"lse", "delta", "picked", "highest", "weights", "grow"},
    "*bf16": {"q", "k", "v", "own_k", "own_v", "out", "d_out", "dq", "dk", "dv", "d_own_k", "d_own_v",
              "logits", "gate_up", "d_product", "product", "d_gate_up"},
    "fp32": {"scale", "natural", "cap"},
}  # fmt: skip


def kind(name: str) -> str:
    return next((kind for kind, names in POINTERS.items() if name in names), "i32")


def compiled(kernel: Any, fixed: dict[str, Any], capability: int, **kinds: str) -> dict[str, int]:
    """Registers, spilt bytes and shared memory of a kernel with these constants (and warps and stages)."""
    options = {name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, kind(name)) for name in names}
    even = [n for n, what in signature.items() if what[0] == "*" or n.endswith("stride") or n in ("anchors", "context")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        words = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": made.metadata.shared}


def main(capability: int, name: str, dim: int) -> None:
    chosen, found = getattr(block_attention, name), {}
    for which, tile in (("own", OWN), ("forward", chosen.forward), ("rows", chosen.rows), ("keys", chosen.keys)):
        kernel = getattr(attention, f"{which}_kernel")
        fixed = constants(tile, 16, 4, dim, 0, torch.bfloat16) | {"STEP": STEP}
        fixed["OWN"] = power(fixed["COUNT"] * 16)
        fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names or key.startswith("num_")}
        found[which] = compiled(kernel, fixed, capability)
    found["gated"] = compiled(gated.backward_kernel, {"COLUMNS": GATED_COLUMNS, "num_warps": 8}, capability)
    row = {"HAS_CAP": True, "BLOCK": head.COLUMNS, "num_warps": 8}
    found["head"] = compiled(head._rows_kernel, dict(row), capability)
    found["gradient"] = compiled(head._gradient_kernel, row | {"NARROW": False}, capability)
    if capability >= 90:
        found["narrow"] = compiled(head._gradient_kernel, row | {"NARROW": True}, capability, out="*fp8e4nv")
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

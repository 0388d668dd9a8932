"""The kernels of the full-size model, and a table of what they take on each GPU architecture.

    python -m clover.plugins.kernels.model_kernels [--cache DIRECTORY] [--sm 90 --sm 120 …]

prints the Markdown table of docs/kernels.md. It needs Triton and no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from clover.plugins.bidirectional_gdn import kernel_launch as gdn
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.compile import ARCHITECTURES, compile_kernel
from clover.plugins.kernels.cubin import Cubin
from clover.plugins.kernels.plan import Kernel
from clover.plugins.moe_coreset_routing import kernel_launch as routing
from clover.plugins.moe_coreset_routing.spec import CoresetAttributes
from clover.plugins.moe_experts import kernel_launch as experts
from clover.plugins.moe_experts.spec import ExpertsAttributes


def full_model_kernels() -> list[tuple[str, Kernel]]:
    """(what it is, kernel) for every kernel of the 35B model: BF16 activations, INT4 (group 128) and BF16 experts."""
    found = [(k.function, k) for k in gdn.kernels(GatedDeltaNetAttributes(16, 32, 128, 128, 32, 128**-0.5))]
    found.append(("route_block", routing.kernel(CoresetAttributes(8, 8), experts=256)))
    int4 = experts.ExpertShapes(ExpertsAttributes(8, 512, 128), 2048, 256)
    bf16 = experts.ExpertShapes(ExpertsAttributes(8, 512, 0), 2048, 256, weight="bf16")
    for shapes, weights in ((int4, "INT4"), (bf16, "BF16")):
        for rows in (32, 64):
            ks = experts.kernels(shapes, tile_rows=rows)
            found += [(f"{k.function}, {weights}, ≤ {rows} rows", k) for k in (ks.gate_up, ks.down)]
    shared = experts.kernels(int4, tile_rows=32)
    return found + [(k.function, k) for k in (shared.choose, shared.list_rows, shared.combine)]


def table(architectures: Sequence[int], cache: Path | None = None) -> str:
    """Markdown: one line per kernel, per architecture registers, shared memory (KiB) and spilled bytes per thread."""
    head = ["kernel", "warps", *(f"sm_{sm}" for sm in architectures)]
    lines = [head, ["---"] * len(head)]
    for what, kernel in full_model_kernels():
        cells = [_cell(compile_kernel(kernel, sm, cache=cache)) for sm in architectures]
        lines.append([what, str(kernel.num_warps), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(cubin: Cubin) -> str:
    return f"{cubin.registers} / {round(cubin.shared_bytes / 1024, 1):g} / {cubin.spill_store_bytes + cubin.spill_load_bytes}"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="directory that keeps compiled kernels between runs")
    parser.add_argument(
        "--sm", type=int, action="append", help="compute capability times ten; repeatable; default: all"
    )
    arguments = parser.parse_args()
    print(table(arguments.sm or ARCHITECTURES, arguments.cache))


if __name__ == "__main__":
    main()

"""The GPU kernels on a GPU: checked against the float64 references, then timed.

    python benchmarks/kernels.py [--only NAME] [--json]

For every case: relative error, time (CUDA graph, cold L2 cache, median), the bytes the operation cannot avoid, GB/s, and
the share of the card's own copy bandwidth measured in the same run. With cuda-bindings installed, the cubins a bundle
would hold are checked through the runtime's launcher as well. Needs torch with CUDA and Triton; without a GPU it says
so and ends. With TRITON_INTERPRET=1 it checks small cases on the CPU and times nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clover.plugins.bidirectional_gdn import kernel_launch as gdn
from clover.plugins.bidirectional_gdn.reference import bidirectional_gated_delta_net
from clover.plugins.bidirectional_gdn.spec import GatedDeltaNetAttributes
from clover.plugins.kernels.plan import Plan
from clover.plugins.moe_coreset_routing import kernel_launch as routing
from clover.plugins.moe_coreset_routing.reference import moe_coreset_routing
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, CoresetAttributes
from clover.plugins.moe_experts import kernel_launch as experts
from clover.plugins.moe_experts.reference import moe_experts
from clover.plugins.moe_experts.spec import ExpertsAttributes

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = 1e-2  # relative, for BF16 inputs and outputs
COPY_BYTES = 1 << 30


@dataclass
class Case:
    """One operator at one step's shape. `wanted` gives the float64 outputs by name; `nbytes` the unavoidable traffic."""

    name: str
    plan: Plan
    tensors: dict[str, torch.Tensor]
    wanted: Callable[[], dict[str, Array]]
    nbytes: int
    kept_alive: Any = None


@dataclass
class Result:
    name: str
    error: float
    cubin_error: float | None
    microseconds: float | None
    megabytes: float
    gigabytes_per_second: float | None
    share_of_copy: float | None


def main() -> int:
    """Command line; returns the exit status: 0, or 1 when a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"The kernels were not run: this benchmark needs torch and Triton ({error}).")
        return 0
    if not INTERPRETED and not torch.cuda.is_available():
        print("The kernels were not run: torch sees no CUDA device here.")
        return 0
    device = torch.device("cpu" if INTERPRETED else "cuda")
    copy = None if INTERPRETED else copy_bandwidth(device)
    cases = small_cases(device) if INTERPRETED else full_cases(device)
    results = [measure(case, copy) for case in cases if (arguments.only or "") in case.name]
    card = "interpreter" if INTERPRETED else torch.cuda.get_device_name(device)
    if arguments.json:
        print(json.dumps({"card": card, "copy_gigabytes_per_second": copy, "cases": [vars(r) for r in results]}))
    else:
        print(f"{card}: copy bandwidth {copy:.0f} GB/s" if copy else f"{card}: numbers only, no times")
        for r in results:
            print(line(r))
    wrong = [r.name for r in results if max(r.error, r.cubin_error or 0.0) > TOLERANCE]
    if wrong:
        print(f"relative error above {TOLERANCE} in: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def line(r: Result) -> str:
    text = f"{r.name:34} error {r.error:.1e}"
    if r.cubin_error is not None:
        text += f" (cubin {r.cubin_error:.1e})"
    if r.microseconds is not None:
        text += f"  {r.microseconds:8.1f} µs  {r.megabytes:8.2f} MB  {r.gigabytes_per_second:7.0f} GB/s"
        text += f"  {100 * (r.share_of_copy or 0):5.1f} % of copy"
    return text


# -- measuring ------------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large device copy, reads and writes both counted."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return float(2 * COPY_BYTES / do_bench(lambda: target.copy_(source), return_mode="median") / 1e6)


def measure(case: Case, copy: float | None) -> Result:
    """Checks one case and, on a GPU, times it."""
    from clover.plugins.kernels.triton_run import run, run_on

    wanted = case.wanted()
    buffers = run(case.plan, case.tensors)
    error = worst_error(case, wanted)
    result = Result(case.name, error, None, None, case.nbytes / 1e6, None, None)
    if copy is None:
        return result
    import torch
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run_on(case.plan, {**case.tensors, **buffers})
    milliseconds = float(do_bench(graph.replay, return_mode="median"))
    result.microseconds = 1e3 * milliseconds
    result.gigabytes_per_second = case.nbytes / milliseconds / 1e6
    result.share_of_copy = result.gigabytes_per_second / copy
    result.cubin_error = cubin_error(case, wanted)
    return result


def worst_error(case: Case, wanted: dict[str, Array]) -> float:
    """Largest relative error over the outputs; infinite for a NaN."""
    errors = [0.0]
    for name, want in wanted.items():
        got, exact = case.tensors[name].double().cpu().numpy(), want.astype(np.float64)
        error = float(np.linalg.norm(got - exact)) / max(float(np.linalg.norm(exact)), 1e-9)
        errors.append(error if np.isfinite(error) else float("inf"))
    return max(errors)


def cubin_error(case: Case, wanted: dict[str, Array]) -> float | None:
    """As worst_error, for the kernels a bundle holds, launched as the runtime does; None without cuda-bindings."""
    import torch

    from clover.plugins.kernels.compile import compile_kernels
    from clover.plugins.kernels.launch import KernelLibrary

    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    major, minor = torch.cuda.get_device_capability()
    library = KernelLibrary(compile_kernels([launch.kernel for launch in case.plan.launches], 10 * major + minor))
    workspace = torch.empty(max(case.plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    for name in wanted:
        case.tensors[name].fill_(float("nan"))
    pointers = {name: tensor.data_ptr() for name, tensor in case.tensors.items()}
    library.prepare(case.plan).launch(pointers, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    error = worst_error(case, wanted)
    library.close()
    return error


# -- cases ----------------------------------------------------------------------------------------


def full_cases(device: torch.device) -> Iterator[Case]:
    """Shapes of the 35B model, block size 32."""
    net = GatedDeltaNetAttributes(16, 32, 128, 128, 32, 128**-0.5)
    yield gdn_case("gdn denoise, 32 rows", net, device, 1, 0, 32)
    yield gdn_case("gdn commit 32 + denoise 32", net, device, 1, 32, 32)
    yield gdn_case("gdn prefill, 512 rows", net, device, 1, 512, 0)
    yield gdn_case("gdn autoregressive, 1 row", net, device, 1, 1, 0)
    yield gdn_case("gdn denoise, 8 sequences", net, device, 8, 0, 32)
    yield routing_case("routing, 32 rows", CoresetAttributes(8, 8), device, 32, 256)
    yield routing_case("routing, 64 rows", CoresetAttributes(8, 8), device, 64, 256)
    int4, floats = ExpertsAttributes(8, 512, 128), ExpertsAttributes(8, 512, 0)
    for rows, distinct in ((1, 8), (32, 16), (32, 48), (64, 64), (512, 256)):
        yield experts_case(f"experts INT4, {rows} rows, {distinct} experts", int4, device, rows, 2048, 256, distinct)
    yield experts_case("experts BF16, 32 rows, 48 experts", floats, device, 32, 2048, 256, 48)


def small_cases(device: torch.device) -> Iterator[Case]:
    """The same operators, small enough for the interpreter (float products: it multiplies BF16 wrongly)."""
    yield gdn_case("gdn commit 5 + denoise 8", GatedDeltaNetAttributes(1, 2, 32, 16, 32, 0.2), device, 2, 5, 8)
    yield routing_case("routing, 8 rows", CoresetAttributes(2, 2), device, 8, 16)
    yield experts_case("experts INT4, 4 rows", ExpertsAttributes(2, 64, 64), device, 4, 128, 8, 3)


def gdn_case(
    name: str, a: GatedDeltaNetAttributes, device: torch.device, sequences: int, commit: int, preview: int
) -> Case:
    import torch

    generator = torch.Generator().manual_seed(0)
    rows, heads, channels = commit + preview, a.num_value_heads, 2 * a.key_width + a.value_width
    state = (sequences, heads, a.key_head_dim, a.value_head_dim)

    def normal(*shape: int, scale: float = 1.0, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(kind).to(device)

    def lengths(n: int) -> torch.Tensor:
        return torch.full((sequences,), n, dtype=torch.int64, device=device)

    x = {
        "qkv": normal(sequences, rows, channels),
        "a": normal(sequences, rows, heads),
        "b": normal(sequences, rows, heads),
        "conv_state": normal(sequences, 3, channels),
        "recurrent_state": normal(*state, kind=torch.float32),
        "conv_weight": normal(channels, 4, scale=0.5),
        "conv_right": normal(channels, 3, scale=0.3),
        "decay_scale": -normal(heads, kind=torch.float32).exp(),
        "dt_bias": normal(heads, kind=torch.float32),
        "logit_scale": normal(heads, scale=5, kind=torch.float32),
        "history_bias": normal(heads, kind=torch.float32),
        "history_c": normal(heads, kind=torch.float32),
        "commit_length": lengths(commit),
        "row_length": lengths(rows),
    }
    outputs = {
        "o": torch.full((sequences, rows, a.value_width), float("nan"), dtype=torch.bfloat16, device=device),
        "new_conv_state": torch.full_like(x["conv_state"], float("nan")),
        "new_recurrent_state": torch.full_like(x["recurrent_state"], float("nan")),
    }

    def wanted() -> dict[str, Array]:
        wide = {n: t.double().cpu().numpy() if t.is_floating_point() else t.cpu().numpy() for n, t in x.items()}
        return dict(zip(outputs, bidirectional_gated_delta_net(**wide, attributes=a), strict=True))

    nbytes = sum(t.nbytes for t in (*x.values(), *outputs.values()))
    return Case(name, gdn.plan(a, sequences=sequences, rows=rows), {**x, **outputs}, wanted, nbytes)


def routing_case(name: str, a: CoresetAttributes, device: torch.device, rows: int, count: int) -> Case:
    import torch

    logits = torch.randn((1, rows, count), generator=torch.Generator().manual_seed(0)) * 2
    x = {
        "logits": logits.to(device),
        "commit_length": torch.zeros(1, dtype=torch.int64, device=device),
        "row_length": torch.full((1,), rows, dtype=torch.int64, device=device),
        "top_p": torch.tensor([0.9], device=device),
    }
    routed = torch.full_like(x["logits"], float("nan"))

    def wanted() -> dict[str, Array]:
        n = np.array([rows])
        return {
            "routed_logits": moe_coreset_routing(logits.numpy(), 0 * n, n, np.full(1, 0.9, np.float32), attributes=a)
        }

    plan = routing.plan(a, sequences=1, rows=rows, experts=count)
    return Case(name, plan, {**x, "routed_logits": routed}, wanted, 2 * logits.nbytes)


def experts_case(
    name: str, a: ExpertsAttributes, device: torch.device, rows: int, hidden: int, count: int, distinct: int
) -> Case:
    """Only the first `distinct` experts are allowed, as by a coreset, and only they have weights."""
    import torch

    generator = torch.Generator().manual_seed(0)
    group = a.group_size

    def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not group:
            return (torch.randn((distinct, n, k), generator=generator) * 0.03).to(torch.bfloat16), None
        packed = torch.randint(0, 256, (distinct, n, k // 2), dtype=torch.uint8, generator=generator)
        scales = torch.rand((distinct, n, k // group), generator=generator) * 0.01 + 0.001
        return packed, scales.to(torch.bfloat16)

    def wide(t: torch.Tensor) -> Array:
        return t.numpy() if t.dtype == torch.uint8 else t.double().numpy()

    gate_up, gate_up_scales = matrix(2 * a.intermediate, hidden)
    down, down_scales = matrix(hidden, a.intermediate)
    weights = (gate_up, gate_up_scales, down, down_scales)
    resident = [None if t is None else t.to(device) for t in weights]
    table = [
        [0 if t is None or e >= distinct else t[e].data_ptr() for e in range(count)] for t in resident
    ]  # a kernel that touches another expert faults
    logits = torch.randn((rows, count), generator=generator) * 2
    logits[:, distinct:] = EXCLUDED_LOGIT
    x = {
        "hidden": torch.randn((rows, hidden), generator=generator).to(torch.bfloat16).to(device),
        "router_logits": logits.to(device),
        "expert_table": torch.tensor(table, dtype=torch.int64, device=device),
    }
    mixed = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=device)

    def wanted() -> dict[str, Array]:
        y = moe_experts(
            x["hidden"].double().cpu().numpy(),
            logits.double().numpy(),
            wide(gate_up),
            None if gate_up_scales is None else wide(gate_up_scales),
            wide(down),
            None if down_scales is None else wide(down_scales),
            attributes=a,
        )
        return {"mixed": y}

    touched = len(np.unique(np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, : a.top_k]))
    per_expert = sum(t[0].nbytes for t in weights if t is not None)
    shapes = experts.ExpertShapes(
        a, hidden, count, weight="u8" if group else "bf16", multiply="fp32" if INTERPRETED else None
    )
    return Case(
        name,
        experts.plan(shapes, rows=rows),
        {**x, "mixed": mixed},
        wanted,
        touched * per_expert + x["hidden"].nbytes + logits.nbytes + mixed.nbytes,
        kept_alive=resident,
    )


if __name__ == "__main__":
    sys.exit(main())

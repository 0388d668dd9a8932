"""Which kernels MoEExperts launches, with which grids, arguments and workspace. No Triton here.

On a GPU the op's four weight inputs are replaced by one: `expert_table`, int64 [4, E], the device-visible addresses
of each expert's gate_up, gate_up_scales, down and down_scales in the layouts of the spec (scales 0 for float weights).
Every address must be a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clover.plugins.kernels.plan import Constant, Dtype, Kernel, Launch, Plan, cdiv, lay_out, next_power_of_two
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT
from clover.plugins.moe_experts.spec import ExpertsAttributes
from clover.runtime.errors import CloverError

_MODULE = "clover.plugins.moe_experts.kernel"
ROUTE_ROWS = 8  # rows of one `choose_experts` program
FEW_ROWS = 16  # an expert with no more rows than this takes the small tile, whatever the step's size
GATE_UP_COLUMNS = 32  # columns of the result of one program; it holds two sums of them, hence fewer than below
DOWN_COLUMNS = 64
COMBINE = 1024  # columns of one `combine` program


@dataclass(frozen=True)
class ExpertShapes:
    """What the kernels are specialised for.

    hidden, experts: H and E. activation types hidden, inner and mixed. weight: "u8" for INT4 pairs, or a float type.
    scale types the INT4 scales. multiply is the type of the tensor-core product; None: the activation's.
    """

    attributes: ExpertsAttributes
    hidden: int
    experts: int
    activation: Dtype = "bf16"
    weight: Dtype = "u8"
    scale: Dtype = "bf16"
    multiply: Literal["bf16", "fp16", "fp32"] | None = None

    def __post_init__(self) -> None:
        group = self.attributes.group_size
        if (self.weight == "u8") != (group > 0):
            raise CloverError(f"group_size is {group} with {self.weight} expert weights; INT4 needs one, floats none")
        if group and (group not in (32, 64, 128) or self.hidden % group or self.attributes.intermediate % group):
            raise CloverError(
                f"group_size is {group}; the expert kernels take 32, 64 or 128, dividing hidden size {self.hidden} "
                f"and intermediate size {self.attributes.intermediate}"
            )
        if not group and (self.hidden % 16 or self.attributes.intermediate % 16):
            raise CloverError(
                f"hidden size {self.hidden} and intermediate size {self.attributes.intermediate} must be multiples "
                "of 16 for the expert kernels"
            )


@dataclass(frozen=True)
class ExpertKernels:
    """In launch order."""

    choose: Kernel
    list_rows: Kernel
    gate_up: Kernel
    down: Kernel
    combine: Kernel

    @property
    def all(self) -> tuple[Kernel, ...]:
        return self.choose, self.list_rows, self.gate_up, self.down, self.combine


def block_rows(rows: int) -> int:
    """Rows of one product tile for a step of `rows` rows: all an expert can have, up to 64."""
    return 32 if rows <= 32 else 64


def kernels(shapes: ExpertShapes, *, tile_rows: int) -> ExpertKernels:
    """The op's kernels; `tile_rows` (32 or 64, see `block_rows`) matters to the two products only."""
    attributes, hidden, experts = shapes.attributes, shapes.hidden, shapes.experts
    top_k, intermediate = attributes.top_k, attributes.intermediate
    multiply = shapes.multiply or shapes.activation
    x = f"*{shapes.activation}"
    product: tuple[tuple[str, Constant], ...] = (
        ("WEIGHT", _TRITON_NAMES[shapes.weight]),
        ("SCALE", _TRITON_NAMES[shapes.scale]),
        ("INT4", attributes.group_size > 0),
        ("DOT", _TRITON_NAMES[multiply]),
        ("PRECISION", "tf32x3" if multiply == "fp32" else "ieee"),
        ("FEW_ROWS", FEW_ROWS),
        ("BLOCK_ROWS", tile_rows),
    )
    sizes: tuple[tuple[str, Constant], ...] = (
        ("HIDDEN", hidden),
        ("INTERMEDIATE", intermediate),
        ("EXPERTS", experts),
    )
    lists = (("counts", "*i32"), ("lists", "*i32"))
    return ExpertKernels(
        Kernel(
            _MODULE,
            "choose_experts",
            (("router_logits", "*fp32"), ("ids", "*i32"), ("weights", "*fp32"), ("rows", "i32")),
            (
                *(("EXPERTS", experts), ("TOP_K", top_k), ("EXCLUDED", EXCLUDED_LOGIT), ("BLOCK_ROWS", ROUTE_ROWS)),
                *(("BLOCK_EXPERTS", next_power_of_two(experts)), ("BLOCK_K", next_power_of_two(top_k))),
            ),
            num_warps=4,
            num_stages=1,
        ),
        Kernel(
            _MODULE,
            "list_rows",
            (("ids", "*i32"), *lists, ("rows", "i32")),
            (("TOP_K", top_k), ("BLOCK", 512)),
            num_warps=4,
            num_stages=1,
        ),
        Kernel(
            _MODULE,
            "gate_up_product",
            (("hidden", x), ("expert_table", "*i64"), *lists, ("inner", x), ("rows", "i32")),
            (
                *(*sizes, ("TOP_K", top_k), *product, ("BLOCK_N", _columns(GATE_UP_COLUMNS, intermediate))),
                *(("BLOCK_K", _step(attributes.group_size, hidden)), ("STAGES", 3)),
            ),
            num_warps=4,
            num_stages=3,
        ),
        Kernel(
            _MODULE,
            "down_product",
            (("inner", x), ("expert_table", "*i64"), *lists, ("outer", "*fp32"), ("rows", "i32")),
            (
                *(*sizes, *product, ("BLOCK_N", _columns(DOWN_COLUMNS, hidden))),
                *(("BLOCK_K", _step(attributes.group_size, intermediate)), ("STAGES", 3)),
            ),
            num_warps=4,
            num_stages=3,
        ),
        Kernel(
            _MODULE,
            "combine",
            (("outer", "*fp32"), ("weights", "*fp32"), ("mixed", x)),
            (("HIDDEN", hidden), ("TOP_K", top_k), ("BLOCK", _columns(COMBINE, hidden))),
            num_warps=4,
            num_stages=1,
        ),
    )


_TRITON_NAMES = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32", "u8": "tl.uint8"}


def _columns(most: int, width: int) -> int:
    return min(most, max(next_power_of_two(width), 16))


def _step(group_size: int, width: int) -> int:
    """Inputs of one product step: a scale group, or for float weights the largest power of two up to 64."""
    return group_size or min(width & -width, 64)


def plan(shapes: ExpertShapes, *, rows: int) -> Plan:
    """Launches for hidden [rows, H] (S·T rows: sequences need not be told apart here).

    Tensors: hidden, router_logits, expert_table in; mixed out. A row whose every logit is EXCLUDED_LOGIT (padding,
    as MoECoresetRouting marks it) touches no expert and gives zeros.
    """
    ks = kernels(shapes, tile_rows=block_rows(rows))
    intermediate, top_k, experts = shapes.attributes.intermediate, shapes.attributes.top_k, shapes.experts
    return Plan(
        (
            Launch(ks.choose, (cdiv(rows, ROUTE_ROWS), 1, 1), ("router_logits", "ids", "weights", rows)),
            Launch(ks.list_rows, (experts, 1, 1), ("ids", "counts", "lists", rows)),
            Launch(
                ks.gate_up,
                (cdiv(intermediate, _columns(GATE_UP_COLUMNS, intermediate)), experts, 1),
                ("hidden", "expert_table", "counts", "lists", "inner", rows),
            ),
            Launch(
                ks.down,
                (cdiv(shapes.hidden, _columns(DOWN_COLUMNS, shapes.hidden)), experts, 1),
                ("inner", "expert_table", "counts", "lists", "outer", rows),
            ),
            Launch(
                ks.combine,
                (rows, cdiv(shapes.hidden, _columns(COMBINE, shapes.hidden)), 1),
                ("outer", "weights", "mixed"),
            ),
        ),
        lay_out(
            [
                ("ids", "i32", (rows, top_k)),
                ("weights", "fp32", (rows, top_k)),
                ("counts", "i32", (experts,)),
                ("lists", "i32", (experts, rows)),
                ("inner", shapes.activation, (rows * top_k, intermediate)),
                ("outer", "fp32", (rows * top_k, shapes.hidden)),
            ]
        ),
    )

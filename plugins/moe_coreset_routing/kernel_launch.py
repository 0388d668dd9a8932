"""Which kernel MoECoresetRouting launches, with which grid and arguments. No Triton here."""

from __future__ import annotations

from clover.plugins.kernels.plan import Dtype, Kernel, Launch, Plan, cdiv, next_power_of_two
from clover.plugins.moe_coreset_routing.spec import EXCLUDED_LOGIT, CoresetAttributes
from clover.runtime.errors import CloverError

ROWS = 16  # rows of one program, and of one step over the votes


def kernel(attributes: CoresetAttributes, *, experts: int, length: Dtype = "i64") -> Kernel:
    """The op's one kernel. Raises CloverError for more experts per row than experts, or more than 1024 experts."""
    if attributes.top_k > experts or experts > 1024:
        raise CloverError(
            f"top_k is {attributes.top_k} of {experts} experts; the routing kernel takes up to 1024 experts and no "
            "larger top_k than experts"
        )
    n = f"*{length}"
    return Kernel(
        "clover.plugins.moe_coreset_routing.kernel",
        "route_block",
        (
            *(("logits", "*fp32"), ("commit_length", n), ("row_length", n)),
            *(("top_p", "*fp32"), ("routed_logits", "*fp32"), ("rows", "i32")),
        ),
        (
            ("EXPERTS", experts),
            ("TOP_K", attributes.top_k),
            ("MIN_EXPERTS", attributes.min_experts),
            ("EXCLUDED", EXCLUDED_LOGIT),
            ("BLOCK_ROWS", ROWS),
            ("BLOCK_EXPERTS", next_power_of_two(experts)),
        ),
        num_warps=8,
        num_stages=1,
    )


def plan(attributes: CoresetAttributes, *, sequences: int, rows: int, experts: int, length: Dtype = "i64") -> Plan:
    """One launch for logits [sequences, rows, experts]. Tensors are named as in the op's spec; no workspace.

    Not in place: a program reads the other row tiles' logits while they write theirs.
    """
    one = kernel(attributes, experts=experts, length=length)
    arguments: tuple[str | int | float, ...] = (*(name for name, _ in one.signature[:-1]), rows)
    return Plan((Launch(one, (max(cdiv(rows, ROWS), 1), sequences, 1), arguments),), ())

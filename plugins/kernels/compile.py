"""Compiles kernels ahead of time to cubins, on a machine with or without a GPU, with Triton's own assembler.

The same kernel, Triton version and architecture always give the same bytes: line information, which would carry this
machine's paths, is left out. Results are cached by a hash of the kernel's source file and all that specialises it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clover.plugins.kernels.cubin import SHARED_MEMORY_LIMIT, Cubin, source_digest
from clover.plugins.kernels.image import check_image
from clover.plugins.kernels.plan import Kernel
from clover.runtime.errors import BundleError, CloverError

# 10.0 and 10.3 compile too, but of the layouts Triton picks there (tensor memory) nothing could be run anywhere yet.
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)


def compile_kernels(kernels: Iterable[Kernel], sm: int, *, cache: Path | None = None) -> list[Cubin]:
    """`compile_kernel` for each kernel, in order; equal kernels are compiled once."""
    done: dict[Kernel, Cubin] = {}
    for kernel in kernels:
        if kernel not in done:
            done[kernel] = compile_kernel(kernel, sm, cache=cache)
    return list(done.values())


def compile_kernel(kernel: Kernel, sm: int, *, cache: Path | None = None) -> Cubin:
    """Compiles one kernel for compute capability sm / 10, taking it from directory `cache` when it is there.

    Raises CloverError for an architecture outside ARCHITECTURES, a missing Triton, or a kernel that needs more shared
    memory than a block of that architecture has.
    """
    if sm not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise CloverError(
            f"kernels can't be compiled for compute capability {sm / 10}; choose one of {known} (times ten)"
        )
    if importlib.util.find_spec("triton") is None:
        raise CloverError("compiling GPU kernels needs Triton; install triton==3.9.0 on the build machine")
    entry = cache / _cache_key(kernel, sm) if cache else None
    if entry is not None:
        with contextlib.suppress(BundleError):
            return Cubin.read(entry / f"{kernel.name}-sm{sm}.json")
    cubin = _compile(kernel, sm)
    if cubin.shared_bytes > SHARED_MEMORY_LIMIT[sm]:
        raise CloverError(
            f"{kernel.function} needs {cubin.shared_bytes} bytes of shared memory; compute capability {sm / 10} has "
            f"{SHARED_MEMORY_LIMIT[sm]} per block"
        )
    check_image(cubin)
    if entry is not None:
        cubin.write(entry)
    return cubin


def _cache_key(kernel: Kernel, sm: int) -> str:
    import triton

    facts = [kernel.to_json(), source_digest(kernel.module), sm, triton.__version__, _POINTER_ALIGNMENT, _OPTIONS]
    options = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(Path(__file__).read_bytes() + options.encode()).hexdigest()[:24]


_POINTER_ALIGNMENT = 16  # bytes, promised for every pointer argument
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


def _compile(kernel: Kernel, sm: int) -> Cubin:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from clover.plugins.kernels.triton_run import triton_constants, triton_function

    function = triton_function(kernel)
    if knobs.runtime.interpret:
        raise CloverError("kernels can't be compiled in a process started with TRITON_INTERPRET=1; unset it")
    runtime, constants = dict(kernel.signature), triton_constants(kernel)
    names: Sequence[str] = function.arg_names
    if [n for n in names if n not in constants] != list(runtime) or set(constants) - set(names):
        raise CloverError(
            f"{kernel.function} takes {names}; its description says {list(runtime)} and {list(constants)}"
        )
    source = ASTSource(
        fn=function,
        signature={name: runtime.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", _POINTER_ALIGNMENT]]
            for index, name in enumerate(names)
            if runtime.get(name, "").startswith("*")
        },
    )
    log = io.StringIO()
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, **_OPTIONS}
    with (
        tempfile.TemporaryDirectory() as directory,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = directory
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True  # registers and spills are printed, and nowhere else
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        ptx, image = compiled.asm["ptx"], compiled.asm["cubin"]
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise CloverError(f"{kernel.function} needs scratch memory on sm_{sm}, which the launcher does not provide")
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise CloverError(
            f"{kernel.function} needs a cluster or cooperative launch on sm_{sm}, which the launcher lacks"
        )
    parameters = re.findall(r"\.param \.(\w+)", ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))])
    hidden = parameters[len(runtime) :]
    if any(kind not in ("u64", "b64") for kind in hidden):
        raise CloverError(
            f"{kernel.function} has unexpected hidden parameters {hidden} with Triton {triton.__version__}"
        )
    return Cubin(
        kernel=kernel,
        sm=sm,
        target=_match(r"^\.target (\w+)", ptx),
        entry=metadata.name,
        image=image,
        shared_bytes=metadata.shared,
        hidden_parameters=len(hidden),
        registers=int(_match(r"Used (\d+) registers", log.getvalue())),
        spill_store_bytes=int(_match(r"(\d+) bytes spill stores", log.getvalue())),
        spill_load_bytes=int(_match(r"(\d+) bytes spill loads", log.getvalue())),
        triton=triton.__version__,
        assembler=(knobs.nvidia.ptxas if sm < 90 else knobs.nvidia.ptxas_blackwell).version,
        source=source_digest(kernel.module),
    )


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise CloverError(f"the assembler's output lacks {pattern!r}; this Triton version is not supported")
    return found[1]

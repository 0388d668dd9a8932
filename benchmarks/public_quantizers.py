"""Symmetric INT4 by public packages, in the form that our own has: integers and a scale per group of a row.

None of them is a dependency: each is imported when it is asked for. They bring other versions of torch and transformers
than tests use, so install them into an environment of their own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from clover.runtime.errors import CloverError

Floats = npt.NDArray[np.float32]
Quantizer = Callable[[Floats, int], tuple[Floats, Floats]]  # [N, K], group -> integers [N, K], scales [N, K / group]


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CloverError(
            f"{package} is not installed ({error}); run `pip install {package}` in an environment of its own, or leave "
            "it out."
        ) from None


def _llm_compressor(observer: str) -> Quantizer:
    """What llm-compressor's weight observers and compressed-tensors' `quantize` do to a Linear's weight."""

    def quantize(weight: Floats, group: int) -> tuple[Floats, Floats]:
        observers = _need("llmcompressor.observers", "llmcompressor")
        tensors = _need("compressed_tensors.quantization", "llmcompressor")
        forward = _need("compressed_tensors.quantization.lifecycle.forward", "llmcompressor")
        import torch

        form = tensors.QuantizationArgs(
            num_bits=4, type="int", symmetric=True, strategy="group", group_size=group, observer=observer
        )
        w = torch.from_numpy(weight)
        found = observers.Observer.load_from_registry(observer, base_name="weight", args=form)(w).get_qparams()
        integers = forward.quantize(w, found["scale"], found["zero_point"], form)
        return integers.float().numpy(), found["scale"].float().numpy()

    return quantize


def _auto_round(function: str) -> Quantizer:
    """AutoRound without its tuning (iters=0): `quant_tensor_rtn_sym`, or `quant_tensor_opt_rtn_sym`, its scale search."""

    def quantize(weight: Floats, group: int) -> tuple[Floats, Floats]:
        module = _need("auto_round.data_type.int", "auto-round")
        import torch

        restored, scale, _ = getattr(module, function)(torch.from_numpy(weight), bits=4, group_size=group)
        scales = scale.float().numpy().reshape(len(weight), -1)
        groups = restored.float().numpy().reshape(*scales.shape, group)
        return np.rint(groups / scales[:, :, None]).reshape(weight.shape), scales

    return quantize


def _torchao(weight: Floats, group: int) -> tuple[Floats, Floats]:
    """torchao's affine quantisation with symmetric mapping, as Int4WeightOnlyConfig's users get it for group-wise INT4."""
    primitives = _need("torchao.quantization.quant_primitives", "torchao")
    import torch

    w, block = torch.from_numpy(weight), (1, group)
    form: tuple[Any, ...] = (torch.int8, -8, 7)
    scale, zero = primitives.choose_qparams_affine(w, primitives.MappingType.SYMMETRIC, block, *form)
    integers = primitives.quantize_affine(w, block, scale, zero, *form)
    return integers.float().numpy(), scale.float().numpy().reshape(len(weight), -1)


# name -> (package, quantiser)
PUBLIC: dict[str, tuple[str, Quantizer]] = {
    "llm-compressor, minmax": ("llmcompressor", _llm_compressor("memoryless_minmax")),
    "llm-compressor, mse search": ("llmcompressor", _llm_compressor("memoryless_mse")),
    "torchao, symmetric": ("torchao", _torchao),
    "auto-round, RTN (signed)": ("auto-round", _auto_round("quant_tensor_rtn_sym")),
    "auto-round, scale search (signed)": ("auto-round", _auto_round("quant_tensor_opt_rtn_sym")),
}
PACKAGES = tuple(dict.fromkeys(package for package, _ in PUBLIC.values()))


def restore(name: str, weight: Floats, group: int) -> Floats:
    """`weight` [N, K] after the quantiser `name`: integer times scale, in float32."""
    integers, scales = PUBLIC[name][1](np.ascontiguousarray(weight), group)
    if integers.min() < -8 or integers.max() > 7:
        raise CloverError(f"{name} gave integers outside -8…7; its version is not one that this benchmark knows.")
    groups = integers.reshape(*scales.shape, group) * scales[:, :, None]
    return groups.reshape(weight.shape).astype(np.float32)


def version(package: str) -> str:
    """Its installed version. Raises CloverError when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CloverError(
            f"{package} is not installed; run `pip install {package}` in an environment of its own, or leave it out."
        ) from None

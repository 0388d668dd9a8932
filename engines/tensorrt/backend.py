"""Finds TensorRT-RTX or TensorRT, whose Python modules have the same interface, and what their libraries need."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from clover.runtime.errors import CloverError

TensorRt = Literal["tensorrt-rtx", "tensorrt"]
MODULES: dict[TensorRt, str] = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
INSTALL: dict[TensorRt, str] = {
    "tensorrt-rtx": "pip install tensorrt-rtx-cu13",
    "tensorrt": "pip install tensorrt-cu13, on a machine with such a card: its engines can't be built without one",
}


def load(backend: TensorRt) -> Any:
    """The backend's module. Raises CloverError saying what to install."""
    try:
        return importlib.import_module(MODULES[backend])
    except (ImportError, OSError) as error:
        raise CloverError(f"{backend} can't be loaded ({error}); {INSTALL[backend]}.") from None


def version(backend: TensorRt) -> str:
    """The installed version, without loading the libraries. Raises CloverError when it is not installed."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    module = MODULES[backend]
    try:
        names = packages_distributions().get(module, [])
        return str(version(names[0]))
    except (IndexError, PackageNotFoundError):
        raise CloverError(f"{backend} is not installed; {INSTALL[backend]}.") from None


@contextmanager
def library_environment(backend: TensorRt) -> Iterator[dict[str, str]]:
    """Environment variables for a process that parses ONNX with plugins.

    The parser then opens its own library once more under its unversioned name, which the wheel lacks, and aborts the
    process when the loader can't find it. A link in a temporary directory on the loader's path is all it wants.
    """
    environment = dict(os.environ)
    folder = _library_folder(backend)
    if folder is None or sys.platform == "win32":
        if folder is not None:
            environment["PATH"] = os.pathsep.join((str(folder), environment.get("PATH", "")))
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="clover-tensorrt-") as links:
        for library in folder.glob("lib*.so.*"):
            plain = Path(links) / f"{library.name.partition('.so')[0]}.so"
            if not plain.exists():
                plain.symlink_to(library)
        given = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join((links, str(folder), *([given] if given else [])))
        yield environment


def _library_folder(backend: TensorRt) -> Path | None:
    """Where the wheel keeps its shared libraries; None when they come from the system."""
    spec = importlib.util.find_spec(f"{MODULES[backend]}_libs")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None

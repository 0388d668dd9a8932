"""Files that a verb's --out names: refused before the work where they can't be written, and never half-written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from clover.runtime.errors import CloverError


def check_out(out: Path) -> None:
    """Raises CloverError for an `--out` in no directory, or in one that this user can't write to."""
    if not out.parent.is_dir():
        raise CloverError(f"--out {out}: {out.parent} is not a directory; create it or give another path.")
    if out.is_dir():
        raise CloverError(f"--out {out} is a directory; give the path of a file.")
    if not os.access(out.parent, os.W_OK):
        raise CloverError(f"--out {out} can't be written ({out.parent} is read-only here); give another path.")


def write_out(out: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file beside `out` and renames it there. Raises CloverError when either fails."""
    work = out.with_name(f".{out.name}.partial")
    try:
        write(work)
        work.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only file system this fails even where there is nothing
            work.unlink(missing_ok=True)
        raise CloverError(f"--out {out} can't be written ({error.strerror}); give another path.") from None

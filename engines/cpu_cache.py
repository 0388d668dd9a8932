"""Weights packed for this CPU, kept on disk so that sessions map them instead of holding private copies.

ONNX Runtime rearranges the weights of its matrix products for the CPU's instructions when a session is made: a
private copy of nearly the whole model. Here that copy is written once, in pieces of bounded size, to
`BUNDLE/.cache/onnxruntime-KEY/` (or the user's cache directory when the bundle is read-only), from where the system
pages it in and out, for any number of processes. KEY stands for the CPU, its instruction sets, ONNX Runtime's
version, the graph and the manifest; a stamp in the entry repeats it with the size, time and hash of every file. An
entry that is foreign, damaged or half-written is never used: it is made again, or done without. See docs/memory.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover.engines import verified
from clover.engines.bundle import Bundle, Verify
from clover.engines.cpu_memory import available_memory
from clover.engines.lock import exclusive
from clover.engines.manifest import MANIFEST
from clover.engines.verified import RECEIPTS, damaged_file, hash_file, note_checked

STAMP = "stamp.json"
MODEL = "step.onnx"
PREFIX, PARTIAL = "onnxruntime-", "partial"
FORMAT = 1
MIN_BYTES = 64 * 2**20  # packing less than this again at every load costs nothing worth a file
ENTRIES_KEPT = 2  # the newest: a bundle on a shared disk may serve two kinds of machine

NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)  # then the next place is tried

log = logging.getLogger("clover")


@dataclass(frozen=True)
class CacheEntry:
    """One kept set of packed weights. `current`: made for this machine, this onnxruntime and this bundle."""

    directory: Path
    nbytes: int
    cpu: str
    onnxruntime: str
    current: bool


def packed_model(bundle: Bundle, *, verify: Verify = False) -> Path | None:
    """The step graph over packed weights, made now when there is none; None when it is better done without.

    `verify`: check the hashes of the cached files, as Bundle.open does; otherwise sizes and times only. Never fails: what
    goes wrong (a full disk, no place to write) is logged in one line.
    """
    if bundle.nbytes < MIN_BYTES:
        return None
    identity = cache_identity(bundle)
    name = PREFIX + _digest(identity)[:16]
    for root in cache_roots(bundle):
        if _is_intact(bundle, root / name, identity, verify):
            return root / name / MODEL
    from clover.engines.cpu_pack import packable_bytes

    if packable_bytes(bundle) < MIN_BYTES:
        return None
    reason = "there is no place to write"
    for root in cache_roots(bundle):
        try:
            root.mkdir(parents=True, exist_ok=True)
            with exclusive(root / ".lock", f"another process is packing the weights of {bundle.directory}"):
                if not _is_intact(bundle, root / name, identity, verify):  # made while we waited
                    _make_entry(bundle, root, name, identity)
            return root / name / MODEL
        except Exception as error:  # onnxruntime has no one class of errors
            log.debug("packing failed", exc_info=True)
            if type(error).__module__.startswith("onnxruntime"):  # a paragraph of C++
                reason = "onnxruntime failed to pack or to write them"
            else:
                reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
            if getattr(error, "errno", None) not in NOT_WRITABLE:
                break
            reason = f"{root} can't be written ({reason})"
    log.warning("the packed weights of %s can't be cached: %s", bundle.directory, reason)
    return None


def fits_in_memory(bundle: Bundle) -> bool:
    """Whether the packed weights fit into memory without a cache; when not, one line of the log says so."""
    from clover.engines.cpu_pack import packable_bytes

    if bundle.nbytes < MIN_BYTES or (free := available_memory()) is None:
        return True
    needed = packable_bytes(bundle) * 9 // 8
    if needed > free:
        log.warning(
            "the packed weights of %s would take %.1f GB of memory and %.1f GB are free: it runs on weights as they are "
            "stored, many times slower; free disk for the cache, or memory",
            bundle.directory,
            needed / 1e9,
            free / 1e9,
        )
    return needed <= free


def cache_roots(bundle: Bundle) -> tuple[Path, ...]:
    """Where entries of a bundle may lie: beside its files, else in the user's cache directory."""
    return verified.cache_roots(bundle.directory)


def cache_entries(bundle: Bundle) -> list[CacheEntry]:
    """Every entry of a bundle, of any machine, newest first."""
    current, found = _digest(cache_identity(bundle))[:16], []
    for directory in _entries(bundle):
        identity = (_read_stamp(directory) or {}).get("identity")
        parts = identity if isinstance(identity, dict) else {}
        size = sum(p.stat().st_size for p in directory.iterdir() if p.is_file())
        found.append(
            CacheEntry(
                directory,
                size,
                str(parts.get("cpu", "unknown")),
                str(parts.get("onnxruntime", "unknown")),
                directory.name == PREFIX + current,
            )
        )
    return found


def clear_cache(bundle: Bundle) -> int:
    """Removes every entry of a bundle and returns the bytes freed. Raises BundleError while one is being written."""
    freed = sum(entry.nbytes for entry in cache_entries(bundle))
    for root in cache_roots(bundle):
        if any(root.glob("*")):
            with exclusive(root / ".lock", f"another process is packing the weights of {bundle.directory}"):
                for directory in [*root.glob(f"{PREFIX}*"), *root.glob(PARTIAL)]:
                    shutil.rmtree(directory)
                (root / RECEIPTS).unlink(missing_ok=True)
            with suppress(OSError):
                root.rmdir()
    return freed


def cache_identity(bundle: Bundle) -> dict[str, str]:
    """What packed weights depend on."""
    import onnxruntime

    return {
        "format": str(FORMAT),
        "cpu": cpu_name(),
        "instructions": hashlib.sha256(cpu_features().encode()).hexdigest(),
        "onnxruntime": str(onnxruntime.__version__),
        "system": f"{platform.system()} {platform.machine()}",
        "graph": hashlib.sha256(bundle.graph_bytes).hexdigest(),
        "manifest": _manifest_hash(bundle),
    }


# -- this CPU -------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The CPU's model."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    fields = _cpuinfo()
    numbers = " ".join(fields[n] for n in ("cpu family", "model", "CPU implementer", "CPU part") if n in fields)
    # platform.processor() on Windows: family, model and stepping
    return f"{fields.get('model name') or platform.processor() or platform.machine()} {numbers}".strip()


def cpu_features() -> str:
    """The CPU's instruction sets as the system lists them; on Windows the model stands for them."""
    if sys.platform == "darwin":
        return _sysctl("hw.optional") + _sysctl("machdep.cpu.features") + _sysctl("machdep.cpu.leaf7_features")
    fields = _cpuinfo()
    return " ".join(sorted((fields.get("flags") or fields.get("Features") or "").split()))


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


# -- entries --------------------------------------------------------------------------------------


def _make_entry(bundle: Bundle, root: Path, name: str, identity: dict[str, str]) -> None:
    """Writes an entry aside and renames it into place. The caller holds the lock."""
    from clover.engines.cpu_pack import cache_bytes, pack_weights

    work = root / PARTIAL
    if work.exists():  # of a process that was killed
        shutil.rmtree(work)
    needed, free = cache_bytes(bundle), shutil.disk_usage(root).free
    if needed > free:
        raise OSError(0, f"{root} has no room: it needs {needed:,} bytes and {free:,} are free")
    # a warning, so that it shows by default: minutes for a large model, and disk that the user may want to know of
    log.warning("packing weights for this CPU, once: up to %.1f GB in %s", needed / 1e9, root)
    work.mkdir()
    try:
        hashing: dict[Path, Future[str]] = {}
        with ThreadPoolExecutor(1) as pool:  # a file is hashed while the next is packed, as long as memory holds it
            model = pack_weights(
                bundle, work, lambda path: hashing.setdefault(path, pool.submit(_flush_and_hash, path))
            )
            (work / MODEL).write_bytes(model)
            hashing[work / MODEL] = pool.submit(_flush_and_hash, work / MODEL)
        hashes = {path: hashed.result() for path, hashed in sorted(hashing.items())}
        begun = time.time_ns()  # nobody else writes into the directory of whoever holds the lock
        stamp = {
            "identity": identity,
            "files": {p.name: {**_size_and_time(p), "sha256": sha256} for p, sha256 in hashes.items()},
        }
        (work / STAMP).write_text(json.dumps({**stamp, "sha256": _digest(stamp)}, indent=1), encoding="utf-8")
        if (root / name).exists():
            shutil.rmtree(root / name)
        work.rename(root / name)
        note_checked(bundle.directory, {root / name / p.name: sha256 for p, sha256 in hashes.items()}, begun)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for old in _entries(bundle)[ENTRIES_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _is_intact(bundle: Bundle, directory: Path, identity: dict[str, str], verify: Verify) -> bool:
    """Whether an entry is whole, unchanged and of this very machine, runtime and bundle."""
    stamp = _read_stamp(directory)
    if stamp is None or stamp["identity"] != identity:
        return False
    try:
        files: dict[Path, dict[str, Any]] = {directory / name: entry for name, entry in stamp["files"].items()}
        present = {path: _size_and_time(path) for path in files}
        if any(present[p]["bytes"] != entry["bytes"] for p, entry in files.items()):
            return False
        # a copied bundle has other times: then the hashes decide
        if verify or any(present[p]["mtime_ns"] != entry["mtime_ns"] for p, entry in files.items()):
            hashes = {path: str(entry["sha256"]) for path, entry in files.items()}
            return damaged_file(bundle.directory, hashes, recheck=verify == "all") is None
    except (OSError, KeyError, TypeError, AttributeError):
        return False
    return True


def _read_stamp(directory: Path) -> dict[str, Any] | None:
    """An entry's stamp; None when it is missing or was changed."""
    try:
        stamp: dict[str, Any] = json.loads((directory / STAMP).read_text(encoding="utf-8"))
        digest = stamp.pop("sha256")
        return stamp if digest == _digest(stamp) and MODEL in stamp["files"] and "identity" in stamp else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entries(bundle: Bundle) -> list[Path]:
    def found() -> Iterator[tuple[int, Path]]:
        for root in cache_roots(bundle):
            for directory in root.glob(f"{PREFIX}*"):
                with suppress(OSError):
                    yield directory.stat().st_mtime_ns, directory

    return [directory for _, directory in sorted(found(), reverse=True)]


def _size_and_time(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _flush_and_hash(path: Path) -> str:
    """Puts a file on the disk before anything names it; returns its sha256. Raises OSError when it does not fit."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    return hash_file(path)


def _manifest_hash(bundle: Bundle) -> str:
    return hash_file(bundle.directory / MANIFEST)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

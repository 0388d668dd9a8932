"""The .safetensors files of a checkpoint directory: one, or the shards that an index names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clover.exporter.config import read_json
from clover.exporter.safetensors_file import SafetensorsFile
from clover.runtime.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_LISTED = 20


def open_shards(directory: Path) -> list[SafetensorsFile]:
    """Every shard that the index names, or the single file. Raises CheckpointError."""
    index_path, single = directory / INDEX, directory / SINGLE
    if not index_path.exists():
        if single.exists():
            return [SafetensorsFile(single)]
        others = sorted(path.name for path in directory.glob("*.safetensors"))
        found = f"only {', '.join(others[:3])}{' …' * (len(others) > 3)}" if others else "no .safetensors file at all"
        raise CheckpointError(
            f"{directory} has neither {SINGLE} nor {INDEX} ({found}{_unfinished(directory)}); download the missing file."
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_path} has no weight_map of tensor names to files; download it again.")
    shards = sorted(set(weight_map.values()))
    if wrong := [s for s in shards if Path(s).name != s or "\\" in s or not s.endswith(".safetensors")]:
        raise CheckpointError(f"{index_path} names the shard {wrong[0]!r}, which is no .safetensors file beside it.")
    if single.exists() and SINGLE not in shards:
        raise CheckpointError(f"{directory} holds both {SINGLE} and {INDEX}, two checkpoints; remove one of them.")
    if missing := [s for s in shards if not (directory / s).exists()]:
        raise listed(
            f"{len(missing)} of {len(shards)} shards that {index_path} names are not there"
            f"{_unfinished(directory) or ' (still downloading?)'}",
            missing,
        )
    files = {s: SafetensorsFile(directory / s) for s in shards}
    holders = {name: s for s, file in files.items() for name in file.tensors}
    problems = [
        f"{name} should be in {shard} but is {'in ' + holders[name] if name in holders else 'in none of the shards'}"
        for name, shard in weight_map.items()
        if name not in files[shard].tensors
    ]
    problems += [
        f"{name} is in {shard} but not in the index" for name, shard in holders.items() if name not in weight_map
    ]
    if problems:
        raise listed(f"{index_path} and its shards disagree", problems)
    return list(files.values())


def _unfinished(directory: Path) -> str:
    """`, and a download is unfinished: …` with the files that a download left or is writing; empty when there are none."""
    places = [directory, directory / ".cache" / "huggingface" / "download"]
    if directory.parent.name == "snapshots":  # of the Hugging Face cache, whose files grow beside it
        places.append(directory.parent.parent / "blobs")
    files = sorted(path for place in places for path in place.glob("*.incomplete"))
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    names = ", ".join(str(path.relative_to(directory) if directory in path.parents else path) for path in files[:3])
    return f", and a download is unfinished: {names}{more}" if files else ""


def listed(what: str, items: Sequence[str]) -> CheckpointError:
    """One error that names up to twenty of the items."""
    more = f"; and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return CheckpointError(f"{what}: {'; '.join(items[:MAX_LISTED])}{more}.")

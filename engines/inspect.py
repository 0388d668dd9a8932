"""`clover inspect`: what a checkpoint or a bundle holds: parameters, precisions and bytes by class, options, files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.engines.manifest import MANIFEST
from clover.engines.planner.parameters import PARAMETER_CLASSES, count_parameters, parameter_class
from clover.exporter.config import ModelConfig
from clover.exporter.source import is_repository_id, resolve_source
from clover.runtime.errors import CloverError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clover.engines.bundle import Bundle
    from clover.engines.validate.weights import WeightError

WORST_LISTED = 10


def inspect_path(source: str | Path, checkpoint: str | Path | None = None, *, verify: bool = False) -> dict[str, Any]:
    """JSON data of a checkpoint (org/name: as the Hugging Face cache has it) or a bundle; with `checkpoint`, a bundle's
    quantisation error as well; with `verify`, after hashing each of its files again.

    Raises CloverError when it is neither, or `checkpoint` is not what the bundle was made from.
    """
    path = Path(source)
    if (path / MANIFEST).is_file():
        return inspect_bundle(path, checkpoint, verify=verify)
    if verify:
        raise CloverError(f"--verify checks the hashes of a bundle's files, and {path} holds no {MANIFEST}.")
    if checkpoint is not None:
        raise CloverError(f"--checkpoint compares a bundle with its checkpoint, and {path} holds no {MANIFEST}.")
    if path.is_dir() or is_repository_id(source):
        path = resolve_source(source, fetch="nothing")
    if (path / "config.json").is_file():
        return inspect_checkpoint(path)
    if not path.is_dir():
        raise CloverError(f"{path} is not a directory; give a checkpoint or a bundle.")
    raise CloverError(f"{path} holds neither {MANIFEST} nor config.json, so it is no bundle and no checkpoint.")


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Parameters, dtypes and bytes by class, files and the options in force."""
    from clover.engines.build import assumed_options
    from clover.exporter.checkpoint import Checkpoint

    config = ModelConfig.load(path)
    checkpoint = Checkpoint.open(path, config)
    bytes_of: dict[str, float] = dict.fromkeys(PARAMETER_CLASSES, 0.0)
    dtypes: dict[str, set[str]] = {c: set() for c in PARAMETER_CLASSES}
    for name in checkpoint.names():
        kind = parameter_class(name)
        if kind is None:
            continue
        bytes_of[kind] += checkpoint.nbytes(name)
        dtypes[kind].add(checkpoint.dtype(name))
    files = [p for p in sorted(path.iterdir()) if p.suffix in (".safetensors", ".json", ".jinja")]
    return {
        "kind": "checkpoint",
        "path": str(path),
        "model": _model(config),
        "fingerprint": checkpoint.fingerprint(),
        "classes": _classes(config, {c: "/".join(sorted(d)) for c, d in dtypes.items()}, bytes_of),
        "options": assumed_options(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "files": {p.name: p.stat().st_size for p in files},
    }


def inspect_bundle(path: Path, checkpoint: str | Path | None = None, *, verify: bool = False) -> dict[str, Any]:
    """What the manifest and the weight store say. Raises BundleError when a file is missing or of another size, and with
    `verify` when its hash is another."""
    from clover.engines.bundle import Bundle
    from clover.exporter.checkpoint import expected_tensors
    from clover.exporter.store_plan import store_plan

    bundle = Bundle.open(path, verify="all" if verify else False)
    manifest, plan = bundle.manifest, bundle.manifest.precision_plan
    config = manifest.config
    bytes_of: dict[str, float] = dict.fromkeys(PARAMETER_CLASSES, 0.0)
    shapes = expected_tensors(config)
    for item in store_plan(config, plan):
        if item.tensor_class:
            bytes_of[item.tensor_class] += sum(t.nbytes for t in item.tensors())
        else:  # float32, and its sources may be of several classes (the router and the shared expert's gate)
            for source in item.sources:
                bytes_of[parameter_class(source) or "small"] += 4 * math.prod(shapes[source])
    quantisable: dict[str, str] = {str(name): precision for name, precision in plan.classes.items()}
    precisions = {c: quantisable.get(c, "fp32") for c in PARAMETER_CLASSES}
    data = {
        "kind": "bundle",
        "path": str(path),
        "model": {"name": manifest.model.name, **_model(config)},
        "fingerprint": manifest.model.checkpoint,
        "target": manifest.target.model_dump(mode="json"),
        "versions": {
            "clover": manifest.clover_version,
            "format": manifest.version,
            manifest.target.backend: manifest.target.backend_version,
        },
        "precision": plan.to_json(),
        "calibration": manifest.calibration.model_dump(mode="json") if manifest.calibration else None,
        "accuracy_level": manifest.graph.accuracy_level,
        "engines": [engine.model_dump(mode="json") for engine in manifest.engines],
        "checks": _gpu_checks(bundle) if manifest.engines else [],
        "with_logits": manifest.graph.with_logits,
        "classes": _classes(config, precisions, bytes_of, untied=True),
        "options": dict(manifest.options),
        "defaults": dict(manifest.defaults),
        "block_sizes": list(manifest.block_sizes),
        "block_size": manifest.trained_block_size,
        "max_context": manifest.max_context,
        "mask_token_id": manifest.mask_token_id,
        "eos_token_ids": list(manifest.eos_token_ids),
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "bytes": bundle.nbytes,
        "verified": verify,
    }
    if checkpoint is not None:
        data["quantisation"] = _quantisation(bundle, checkpoint)
    return data


def _gpu_checks(bundle: Bundle) -> list[dict[str, str]]:
    """What `clover validate` checks without a card, but for what reads whole files."""
    from clover.engines.tensorrt.checks import static_checks
    from clover.engines.tensorrt.machine import detected_cards

    return [check.to_json() for check in static_checks(bundle, detected_cards(), read_all=False)]


def _model(config: ModelConfig) -> dict[str, Any]:
    counts = count_parameters(config)
    return {
        "model_type": config.model_type,
        "parameters": counts.total,
        "active_parameters": counts.active(config),
        "layers": config.num_hidden_layers,
        "gdn_layers": len(config.gdn_layers),
        "attention_layers": len(config.attention_layers),
        "hidden_size": config.hidden_size,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }


def _classes(
    config: ModelConfig, precision: dict[Any, str], bytes_of: dict[str, float], *, untied: bool = False
) -> dict[str, dict[str, Any]]:
    """Per class: parameters, precision, bytes, bits per weight (scales included). A bundle stores a tied head again."""
    counts = dict(count_parameters(config).by_class)
    if untied and config.tie_word_embeddings:
        counts["lm_head"] = counts["embed"]
    return {
        c: {
            "parameters": counts[c],
            "precision": precision[c],
            "bytes": round(bytes_of[c]),
            "bits_per_weight": 8 * bytes_of[c] / counts[c],
        }
        for c in PARAMETER_CLASSES
        if counts[c]
    }


def _quantisation(bundle: Bundle, checkpoint: str | Path) -> dict[str, Any]:
    from clover.engines.validate.bundle_tensors import WeightStore
    from clover.engines.validate.weights import compare_weights, open_source, snr_db

    errors = compare_weights(WeightStore(bundle), open_source(bundle, checkpoint))

    def total(some: Sequence[WeightError]) -> float | None:
        snr = snr_db(sum(e.signal for e in some), sum(e.noise for e in some))
        return None if snr == float("inf") else snr  # JSON has no infinity; null is no error at all

    kinds = {e.tensor_class or "never quantised" for e in errors}
    return {
        "snr_db": total(errors),
        "classes": {k: total([e for e in errors if (e.tensor_class or "never quantised") == k]) for k in sorted(kinds)},
        "worst": [e.to_json() for e in sorted(errors, key=lambda e: e.snr_db)[:WORST_LISTED] if e.noise],
    }


# -- for the terminal -----------------------------------------------------------------------------


def render_inspection(data: dict[str, Any]) -> RenderableType:
    """Tables of `inspect_path`'s data."""
    from rich.console import Group
    from rich.text import Text

    m = data["model"]
    head = (
        f"{data['path']}: {data['kind']}, {m['model_type']}, {m['parameters']:,} parameters "
        f"({m['active_parameters']:,} active), {m['layers']} layers ({m['gdn_layers']} GDN, {m['attention_layers']} "
        f"attention), {m['experts']} experts, top {m['experts_per_token']}"
    )
    parts: list[RenderableType] = [Text(head), _class_table(data)]
    facts = {"fingerprint": data["fingerprint"][:16]}
    if data["kind"] == "bundle":
        target = data["target"]
        facts |= {
            "target": f"{target['name']} ({target['backend']})" + (f", SM {target['sm']}" if target["sm"] else ""),
            "versions": _pairs(data["versions"]),
            "group size": str(data["precision"]["group_size"]),
            "calibration": _calibration(data["calibration"]),
            "GPU engines": ", ".join(e["file"] for e in data["engines"]) or "none",
            "activations on the CPU": "8-bit where weights are integers" if data["accuracy_level"] == 4 else "float32",
            "logits given out": "yes" if data["with_logits"] else "no",
            "block sizes": f"{', '.join(map(str, data['block_sizes']))} (trained with {data['block_size']})",
            "max context": f"{data['max_context']:,}",
            "decode defaults": _pairs(data["defaults"]),
        }
        if data["verified"]:
            facts["hashes"] = "right, of every file"
    else:
        facts |= {"block size": str(data["block_size"]), "max context": f"{m['max_position_embeddings']:,}"}
    facts |= {
        "mask token, ends": f"{data['mask_token_id']}; {', '.join(map(str, data['eos_token_ids']))}",
        "options": _pairs(data["options"]),
        "files": _files(data["files"]),
    }
    parts += [Text(f"{name}: {value}") for name, value in facts.items()]
    if data.get("checks"):
        from clover.engines.tensorrt.checks import Check
        from clover.engines.validate.static import checks_table

        parts.append(checks_table("GPU engine", [Check(**check) for check in data["checks"]]))
    if "quantisation" in data:
        parts += _quantisation_parts(data["quantisation"])
    return Group(*parts)


def _class_table(data: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table()
    table.add_column("class", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    for heading in ("parameters", "bytes", "bits/weight"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, c in data["classes"].items():
        table.add_row(
            name, c["precision"], f"{c['parameters']:,}", _size(c["bytes"]), f"{c['bits_per_weight']:.2f}"
        )  # fmt: skip
    weights, size = (sum(c[k] for c in data["classes"].values()) for k in ("parameters", "bytes"))
    table.add_row("total", "", f"{weights:,}", _size(size), f"{8 * size / weights:.2f}", style="bold")
    return table


def _quantisation_parts(found: dict[str, Any]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    def decibel(value: float | None) -> str:
        return "exact" if value is None else f"{value:.1f} dB"

    classes = ", ".join(f"{name} {decibel(value)}" for name, value in found["classes"].items())
    parts: list[RenderableType] = [Text(f"weights to quantisation noise: {decibel(found['snr_db'])} ({classes})")]
    if found["worst"]:
        table = Table(title="Worst tensors")
        for heading in ("tensor", "precision", "SNR", "scale"):
            table.add_column(heading, no_wrap=True)
        for e in found["worst"]:
            table.add_row(e["name"], e["precision"], decibel(e["snr_db"]), f"{e['scale']:.5f}")
        parts.append(table)
    return parts


def _calibration(used: dict[str, Any] | None) -> str:
    if used is None:
        return "none"
    rare = sum(len(experts) for experts in used["weight_only_experts"].values())
    return (
        f"{used['sha256'][:16]} ({used['prompts']} prompts, {used['rows']:,} rows), in {len(used['tensors'])} matrices; "
        f"{rare} experts by their weights alone"
    )


def _files(files: dict[str, int]) -> str:
    """Every file with its size; of a folder with many, how many and their size."""
    folders: dict[str, list[str]] = {}
    for name in files:
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    shown = []
    for folder, names in folders.items():
        if folder and len(names) > 4:
            shown.append(f"{folder}/ ({len(names)} files) {_size(sum(files[n] for n in names))}")
        else:
            shown += [f"{name} {_size(files[name])}" for name in names]
    return ", ".join(shown)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_pairs(value)})"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"

"""Where a checkpoint comes from: a directory, the Hugging Face cache, or `org/name` on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from clover.runtime.errors import CheckpointError

REPOSITORY_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
SMALL = ("*.json", "*.jinja")
WANTED = (*SMALL, "*.safetensors")  # no pickles, no other frameworks' weights

Fetch = Literal["all", "config", "nothing"]  # what may be downloaded: the checkpoint, all but its weights, nothing


def resolve_source(source: str | Path, fetch: Fetch = "all") -> Path:
    """The directory that holds the checkpoint's config.json: every verb that takes a checkpoint finds it here.

    `source` is that directory, a repository's folder in the Hugging Face cache (`models--org--name`), or `org/name`,
    which is looked up in the cache and, as far as `fetch` goes, downloaded. Raises CheckpointError with what to do.
    """
    path = Path(source)
    if path.is_dir():
        return _snapshot(path) if (path / "snapshots").is_dir() and not (path / "config.json").exists() else path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds the checkpoint's config.json.")
    if is_repository_id(source):
        return _from_hub(str(source), fetch)
    raise CheckpointError(f"{path} does not exist; give a checkpoint's directory or org/name of the Hugging Face hub.")


def is_repository_id(source: str | Path) -> bool:
    """Whether `source` could be `org/name`."""
    return REPOSITORY_ID.match(str(source)) is not None


def _snapshot(repository: Path) -> Path:
    """The snapshot of a cached repository that its `main` points to, else its only one."""
    snapshots = sorted(p for p in (repository / "snapshots").iterdir() if p.is_dir())
    main = repository / "refs" / "main"
    if main.is_file():
        chosen = repository / "snapshots" / main.read_text(encoding="utf-8").strip()
        if chosen.is_dir():
            return chosen
    if len(snapshots) == 1:
        return snapshots[0]
    names = ", ".join(p.name for p in snapshots) or "none"
    raise CheckpointError(f"{repository} has no snapshot that refs/main names (there are: {names}); give one's path.")


def _from_hub(repository: str, fetch: Fetch) -> Path:
    """Downloads what is missing of `repository`, or takes the cached copy when the hub can't be reached or asked."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{repository} is no directory here, and huggingface_hub is not installed to find or download it; "
            "run `pip install huggingface_hub` or give a directory."
        ) from None
    try:
        return Path(
            snapshot_download(
                repository,
                allow_patterns=list(SMALL if fetch == "config" else WANTED),
                local_files_only=fetch == "nothing",
            )
        )
    except LocalEntryNotFoundError:
        if fetch == "nothing":
            raise CheckpointError(
                f"{repository} is no directory here and not in the Hugging Face cache; "
                f"run `hf download {repository}`, or give the checkpoint's directory."
            ) from None
        raise CheckpointError(
            f"{repository} is no directory here and not in the Hugging Face cache, and the hub can't be reached; check the "
            "path, go online, or download the checkpoint elsewhere and give its directory."
        ) from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "an error")
        raise CheckpointError(
            f"{repository} is no directory here, and the Hugging Face hub answers {status} for it; "
            "check the name, and log in with `hf auth login` if it is private."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{repository} could not be downloaded ({error}); try again.") from None

"""Opens a bundle with as many slots as the server wants."""

from __future__ import annotations

from pathlib import Path

from clover.engines.bundle import Bundle
from clover.engines.open import choose_provider, open_session
from clover.runtime.clover import TOKENIZER_DIRECTORY, Clover, load_template
from clover.runtime.server.settings import ServeSettings
from clover.runtime.text.tokenizer import Tokenizer


def load_engine(directory: Path, settings: ServeSettings) -> Clover:
    """The model of a bundle. Raises BundleError or RequestError."""
    bundle = Bundle.open(directory)
    folder = bundle.directory / TOKENIZER_DIRECTORY
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    template = load_template(folder, tokenizer) if tokenizer else None
    session = open_session(
        bundle,
        sequences=settings.slots,
        max_context=settings.max_context,
        threads=settings.threads,
        cache=settings.cache,
        provider=choose_provider(bundle, settings.provider),
    )
    return Clover(bundle, session, tokenizer, template)

"""Errors that are a user's to mend: one clear sentence each, no traceback."""

from __future__ import annotations


class CloverError(Exception):
    """A mistake in what the user gave us. The message says what is wrong, where, and what to do.

    The command line prints the message and exits with `exit_code`; the server answers 4xx with it.
    """

    exit_code = 2


class CheckpointError(CloverError):
    """The checkpoint can't be read as a Clover model."""


class BundleError(CloverError):
    """The bundle is damaged, incomplete, or made for another runtime."""


class RequestError(CloverError):
    """A field of a request can't be honoured. `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        """Copies and pickles keep the field: errors cross process borders in pools of workers."""
        return type(self), (self.field, str(self))

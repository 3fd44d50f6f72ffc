"""Few kinds of error, each saying what to do.

DilocoError
|-- ConfigError             the spec or the user's code is wrong: fix it
|-- RunMismatch             the blackboard holds another run than the one meant, or none: stop, write nothing
|-- IncompatibleModel       this island's model or data are not the run's: make them equal
|-- StoreUnavailable        the store did not answer or refused: retry later, the outcome of a write is UNKNOWN
|-- CorruptObject           an object is not what its record says: refuse it, name it
|-- MissingPayload          a payload is gone (collected as garbage): re-read the head and take a newer one
`-- Fenced                  a newer life of this island exists: exit
"""

from __future__ import annotations


class DilocoError(Exception):
    """Base of every error that this project raises on purpose; its message is one sentence for a person."""


class ConfigError(DilocoError):
    """Raised when the spec, or code that the spec names, cannot be used as written."""


class RunMismatch(DilocoError):
    """Raised when `run.json` is absent or names another run id than the caller's."""


class IncompatibleModel(DilocoError):
    """Raised when the fragment table of a local model, or the fingerprint of its data, differs from `log/0`."""


class StoreUnavailable(DilocoError):
    """Raised when a store operation failed; for a write, whether it took effect is unknown."""


class CorruptObject(DilocoError):
    """Raised when an object's size, hash, dtype, shape or contents differ from what its record promises."""


class MissingPayload(DilocoError):
    """Raised when a payload that a record names is no longer in the store."""


class Fenced(DilocoError):
    """Raised in a life of an island that has been replaced by a newer one."""

"""The exceptions a user can meet; each message names what was wrong and how to fix it."""


class VsmError(Exception):
    """Base of every error this package raises on purpose; the command line exits with its code."""

    exit_code = 2


class DocumentError(VsmError, ValueError):
    """A file is no regular file, is too large, or has invalid contents; ``reason`` says which."""

    def __init__(self, source: object, reason: str) -> None:
        super().__init__(source, reason)
        self.reason = reason

    def __str__(self) -> str:
        return "{}: {}".format(*self.args)


class SettingsError(VsmError, ValueError):
    """A setting has an invalid value."""


class DataError(VsmError):
    """A dataset is missing, damaged, or does not hold what was requested."""


class BackboneError(VsmError):
    """A custom backbone cannot be found, or breaks the contract of a backbone."""


class EpisodeError(VsmError, ValueError):
    """An episode was requested that the dataset cannot supply."""


class RunError(VsmError):
    """A run directory is missing, damaged, or in the way."""


class MemoryFileError(VsmError):
    """A memory cannot be changed or used as asked: another encoder's, or an unknown class."""


class StoreError(VsmError):
    """A store cannot be opened or used as asked: another encoder's, or of another version."""


class NotStoredError(StoreError):
    """A store does not hold the requested item."""


class StoreFullError(StoreError):
    """A store has reached its limit."""


class StoreUnavailableError(StoreError):
    """A store cannot be reached or written now; it may be later."""

    exit_code = 1


class ClassifierError(VsmError, ValueError):
    """A classifier was given examples, labels or queries that it cannot use."""


class ClassifierTypeError(ClassifierError, TypeError):
    """Features contain something that is not a number."""


class ExportError(VsmError):
    """A model cannot be written in another format: something is missing, or it would differ."""


class BenchmarkError(VsmError):
    """A benchmark could not be run."""


class ProcessLostError(VsmError, ConnectionError):
    """Another process of the same job ended or stopped responding."""

    exit_code = 1

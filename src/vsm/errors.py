"""The exceptions a user can meet; each message names what was wrong and how to fix it."""


class VsmError(Exception):
    """Base of every error this package raises on purpose; the command line exits with its code."""

    exit_code = 2


class DocumentError(VsmError, ValueError):
    """A file is no regular one, too large, or does not hold what it should.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, source: object, reason: str) -> None:
        super().__init__(source, reason)
        self.reason = reason

    def __str__(self) -> str:
        return "{}: {}".format(*self.args)


class SettingsError(VsmError, ValueError):
    """A setting has a value that cannot work."""


class DataError(VsmError):
    """A dataset is missing, damaged, or does not hold what was asked of it."""


class BackboneError(VsmError):
    """A custom backbone cannot be found, or does not do what a backbone must."""


class EpisodeError(VsmError, ValueError):
    """An episode was requested that the dataset cannot supply."""


class RunError(VsmError):
    """A run directory is missing, damaged, or in the way."""


class MemoryFileError(VsmError):
    """A memory cannot be changed or used as asked: another encoder's, or an unknown class."""


class StoreError(VsmError):
    """A store cannot be opened or used as asked: another encoder's, or of another version."""


class NotStoredError(StoreError):
    """A store does not hold what was asked for."""


class StoreFullError(StoreError):
    """A store holds as much as it may already."""


class StoreUnavailableError(StoreError):
    """A store cannot be reached or written now; it may be later."""

    exit_code = 1


class ClassifierError(VsmError, ValueError):
    """A classifier was given examples, labels or queries that it cannot use."""


class ClassifierTypeError(ClassifierError, TypeError):
    """Something among the features is no number."""


class ExportError(VsmError):
    """A model cannot be written in another format: something is missing, or it would differ."""


class BenchmarkError(VsmError):
    """A measurement of speed could not be carried out."""


class ProcessLostError(VsmError, ConnectionError):
    """Another process of the same job ended or fell silent."""

    exit_code = 1

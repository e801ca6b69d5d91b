"""The errors of fedlora. Most are also a `ValueError`, so that plain Python code can catch them without importing us.
Errors about failed work are not: `WorkerDied` is a `RuntimeError`, and `ClientFailed` is only ours.

A message says what happened, with numbers; the likely cause; and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping


class FedLoRAError(Exception):
    """Base of every error that fedlora raises on purpose. Errors pickle, because they travel between processes.

    Example:
        >>> try:
        ...     build("gloras")
        ... except FedLoRAError as error:
        ...     print(str(error).partition(";")[0])
        no method is called 'gloras'
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.args, self.__dict__)


def escaped(text: str) -> str:
    """The text with each unprintable letter (control, line break, direction mark, half a letter) shown by its code."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _code(c) for c in text)


def counted(number: int, what: str, many: str | None = None) -> str:
    """A number with its noun. many: the plural, if adding an s is not enough."""
    return f"{number} {what if number == 1 else many or what + 's'}"


def repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def complaints(*checks: Callable[[], object]) -> Iterator[str]:
    """What each of these refuses, so that all is told at once."""
    for check in checks:
        try:
            check()
        except FedLoRAError as error:
            yield str(error)


def refuse(found: Iterable[str], where: str = "") -> None:
    """Raise `ConfigError` with all of these sentences, if there is one. where: before them."""
    if lines := list(dict.fromkeys(found)):
        raise ConfigError(where + " ".join(lines))


def _code(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def _again(kind: type[FedLoRAError], args: tuple[object, ...], facts: dict[str, object]) -> FedLoRAError:
    """Restores a pickled error without its `__init__`, which may take other arguments than the message."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class ShapeError(FedLoRAError, ValueError):
    """The factors' shapes do not make a LoRA update B (d_out, r) @ A (r, d_in)."""


class HyperparameterError(FedLoRAError, ValueError):
    """A method, server or trainer got an impossible value or an unknown name."""


class FactorNotShared(FedLoRAError, ValueError):
    """The code asked for a factor that, by its role, did not travel."""


class RankMismatch(FedLoRAError, ValueError):
    """A method that needs one common rank got several, or a rank that it cannot serve."""


class LostUpdate(FedLoRAError, ValueError):
    """The mean update is not zero, but the part that the server would keep is."""


class MethodFault(FedLoRAError, ValueError):
    """A method raised, or returned something that its protocol forbids."""


class UploadRefused(FedLoRAError, ValueError):
    """One client's upload cannot be used. Carries `client` and `reason`."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"upload of client {client!r} refused: {reason}")
        self.client = client
        self.reason = reason


class QuorumNotMet(FedLoRAError, ValueError):
    """Too few uploads were accepted for the round to count. `refused` names each client left out, and says why."""

    def __init__(self, message: str, refused: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.refused = dict(refused or {})


class NoGlobalModel(FedLoRAError, ValueError):
    """The code asked for a global model, but the method keeps none (FedSA-LoRA)."""


class KeptStateError(FedLoRAError, ValueError):
    """A client's kept parts do not fit what the server sent."""


class AdapterFormatError(FedLoRAError, ValueError):
    """A PEFT adapter cannot be read, or means something other than W0 + s B A.

    The message is one line of printable letters, whatever the names of files and folders.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


class CheckpointError(FedLoRAError, ValueError):
    """A checkpoint is damaged, belongs to another run, or cannot be written."""


class ConfigError(FedLoRAError, ValueError):
    """fedlora cannot run this configuration as written."""


class DataError(FedLoRAError, ValueError):
    """Training or test data cannot be read, or partitioned as requested."""


class ClientFailed(FedLoRAError):
    """A client's local work failed. Carries `client` and `round`; the cause is chained."""

    def __init__(self, client: str, round: int, why: str) -> None:
        super().__init__(f"client {client!r} failed in round {round}: {why}")
        self.client = client
        self.round = round


class WorkerDied(FedLoRAError, RuntimeError):
    """A worker process died during its work."""


class LedgerError(FedLoRAError, ValueError):
    """A privacy ledger or journal is damaged, for another population, or cannot be written."""


class BudgetSpent(FedLoRAError, ValueError):
    """A release would exceed the privacy budget. Nothing was charged, and nothing may be released."""

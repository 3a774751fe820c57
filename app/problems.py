"""All that is wrong with what a user gave, collected over several checks and said at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moebius.checkpoint.errors import CheckpointError
from moebius.errors import ConfigErrors, UserError, all_problems

_EXPECTED = (UserError, CheckpointError)


class Problems:
    """Collects what independent checks raise, each problem once, in the order of the checks."""

    def __init__(self) -> None:
        self._errors: list[UserError | CheckpointError] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps an error about what the user gave for `refuse`; any other leaves."""
        try:
            yield
        except _EXPECTED as error:
            if str(error) not in [str(one) for one in self._errors]:
                self._errors.append(error)

    def refuse(self) -> None:
        """Raises a single problem as it was, several as one ConfigError with a line for each."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines = [line for error in self._errors for line in _lines(error)]
            raise all_problems(lines, f"{len(lines)} problems have to be solved first")


def _lines(error: UserError | CheckpointError) -> tuple[str, ...]:
    """Returns the problems that an error names, without its summary."""
    return error.details if isinstance(error, ConfigErrors) else (str(error),)

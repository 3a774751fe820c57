"""Typed access to a checkpoint's config.json that remembers what was asked for."""

from __future__ import annotations

from typing import Any

from moebius.models.errors import ModelConfigError

_MISSING = object()


class HfKeys:
    """One JSON object. Every getter takes alternative spellings of a key and an optional default.

    A key that is absent, or null where a default exists, yields the default; a wrong type or an absent
    required key raises ModelConfigError naming file, key and value.
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self._values = values
        self._asked: set[str] = set()

    def with_values(self, **values: Any) -> HfKeys:
        """Returns the same object with other values of some keys; what is asked of either counts for both."""
        changed = HfKeys(self.source, self._values | values)
        changed._asked = self._asked
        return changed

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys that no reader asked for, sorted."""
        return tuple(sorted(set(self._values) - self._asked))

    def skip(self, *names: str) -> None:
        """Declare keys harmless: they steer training, generation defaults or another library."""
        self._asked.update(names)

    def _get(self, names: tuple[str, ...], default: object) -> Any:
        self._asked.update(names)
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is _MISSING:
            raise ModelConfigError(f"{self.source}: required key {' or '.join(names)} is missing")
        return default

    def has(self, name: str) -> bool:
        """Returns whether the key is there and not null; counts as asked for."""
        self._asked.add(name)
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns whether the key is there, but null; counts as asked for."""
        self._asked.add(name)
        return name in self._values and self._values[name] is None

    def value(self, name: str) -> Any:
        """Returns a key's value as it is; None when absent."""
        return self._get((name,), None)

    def error(self, name: str, value: object, allowed: str) -> ModelConfigError:
        """The error for a value we can not serve."""
        return ModelConfigError(f"{self.source}: {name} = {value!r} is not supported; allowed: {allowed}")

    def integer(self, *names: str, default: int | object = _MISSING, minimum: int = 1) -> int:
        """Returns an integer of at least `minimum`."""
        value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(names[0], value, f"an integer >= {minimum}")
        return value

    def number(self, *names: str, default: float | object = _MISSING) -> float:
        """Returns a finite number greater than zero."""
        value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(names[0], value, "a number > 0")
        return float(value)

    def boolean(self, *names: str, default: bool | object = _MISSING) -> bool:
        """Returns True or False."""
        value = self._get(names, default)
        if not isinstance(value, bool):
            raise self.error(names[0], value, "true or false")
        return value

    def string(self, *names: str, default: str | object = _MISSING) -> str:
        """Returns a string."""
        value = self._get(names, default)
        if not isinstance(value, str):
            raise self.error(names[0], value, "a string")
        return value

    def integers(self, *names: str) -> tuple[int, ...]:
        """Returns an integer or a list of integers; absent: empty."""
        value = self._get(names, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.error(names[0], value, "an integer or a list of integers")
        return tuple(items)

    def numbers(self, *names: str) -> tuple[float, ...]:
        """Returns a list of finite numbers greater than zero."""
        value = self._get(names, _MISSING)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item < float("inf")
            for item in value
        ):
            raise self.error(names[0], value, "a list of numbers > 0")
        return tuple(float(item) for item in value)

    def strings(self, *names: str) -> tuple[str, ...]:
        """Returns a list of strings; absent: empty."""
        value = self._get(names, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(names[0], value, "a list of strings")
        return tuple(value)

    def section(self, *names: str) -> HfKeys | None:
        """Returns a nested object; None when absent."""
        value = self._get(names, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(names[0], value, "an object")
        return HfKeys(f"{self.source}: {names[0]}", value)

    def refuse(self, name: str, *harmless: object) -> None:
        """Raise unless the key is absent, null, false or one of the harmless values."""
        value = self._get((name,), None)
        if value is not None and value is not False and value not in harmless:
            allowed = ", ".join(["absent", *(repr(item) for item in harmless)])
            raise self.error(name, value, allowed)

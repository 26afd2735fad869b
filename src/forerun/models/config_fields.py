"""Typed reading of a model's config.json: a missing or senseless value becomes an error that names it.

No knowledge of any architecture lives here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from forerun.errors import ModelError

T = TypeVar("T")

LARGEST = 2**31 - 1


class ConfigFields:
    """Fields of one JSON object. `where` is what error messages call that object.

    A field that is absent and a field that is null are the same thing, except that null overrides a default.
    Every method raises ModelError when the value is not what the method's name says.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def value(self, name: str) -> Any:
        """The field as it stands, None when it is absent."""
        return self._values.get(name)

    def optional_integer(self, name: str, minimum: int = 1, maximum: int = LARGEST) -> int | None:
        """A whole number from `minimum` to `maximum`, or None."""
        value = self.value(name)
        if value is None:
            return None
        if not _is_finite(value) or value != math.floor(value) or not minimum <= value <= maximum:
            raise self._wrong(name, f"a whole number from {minimum} to {maximum}")
        return int(value)

    def integer(self, name: str, minimum: int = 1, maximum: int = LARGEST) -> int:
        """A whole number from `minimum` to `maximum`."""
        return self._required(name, self.optional_integer(name, minimum, maximum))

    def optional_number(self, name: str, above: float = 0.0) -> float | None:
        """A finite number greater than `above`, or None."""
        value = self.value(name)
        if value is None:
            return None
        if not _is_finite(value) or value <= above:
            raise self._wrong(name, f"a finite number greater than {above:g}")
        return float(value)

    def number(self, name: str, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        return self._required(name, self.optional_number(name, above))

    def flag(self, name: str) -> bool:
        """true or false; null and absent are false."""
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self._required(name, self.value(name))
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def sequence(self, name: str) -> Sequence[Any]:
        """A list; null and absent are the empty one."""
        value = self.value(name)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(name, "a list")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object; null and absent are the empty one."""
        value = self.value(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return value

    def _required(self, name: str, value: T | None) -> T:
        if value is None:
            raise ModelError(
                f"{self._where} has no field '{name}', which this model needs; add it or fetch the file again"
            )
        return value

    def _wrong(self, name: str, allowed: str) -> ModelError:
        return ModelError(f"{self._where}: '{name}' is {self.value(name)!r}; it must be {allowed}")


def _is_finite(value: Any) -> bool:
    """Whether it is a number that float32 can hold; NaN compares false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38

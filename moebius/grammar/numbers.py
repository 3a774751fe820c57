"""JSON's numbers within bounds as terminals of a grammar: exact, and of a limited number of digits.

Bounds are compared as decimals, digit by digit, so it does not matter what a float64 can hold. Each bound is
an expression of its own; a number satisfies both (`&`). Digits are bounded, since models that are forced into
an unwanted form write digits without end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from moebius.grammar.errors import GrammarError, Unsatisfiable, quoted

# Digits of a number before and after the point; more where a bound has more.
MOST_DIGITS = 40
_MOST_OF_BOUND = 100
_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Numbers of at most 8 digits before the point: with any of these exponents they are within a float64.
_WITH_EXPONENT = r"-?(0|[1-9][0-9]{0,7})(\.[0-9]{1,40})?[eE][+-]?[12]?[0-9]{1,2}"


@dataclass(frozen=True)
class Bounds:
    """What a number is between; filled by `read_bounds`. None: no bound."""

    least: Decimal | None = None
    most: Decimal | None = None
    above: bool = False  # `least` is excluded
    below: bool = False  # `most` is excluded

    def integers(self) -> tuple[int | None, int | None]:
        """Returns the least and the greatest integer. Raises Unsatisfiable where there is none."""
        least = most = None
        if self.least is not None:
            least = int(self.least.to_integral_value(ROUND_CEILING))
            least += self.above and least == self.least
        if self.most is not None:
            most = int(self.most.to_integral_value(ROUND_FLOOR))
            most -= self.below and most == self.most
        if least is not None and most is not None and least > most:
            raise Unsatisfiable(f"no integer is {self}")
        return least, most

    def check(self) -> None:
        """Raises Unsatisfiable where no number is within them."""
        if self.least is None or self.most is None:
            return
        if self.least > self.most or (self.least == self.most and (self.above or self.below)):
            raise Unsatisfiable(f"no number is {self}")

    def __str__(self) -> str:
        parts = [f"{'above' if self.above else 'at least'} {self.least}"] if self.least is not None else []
        parts += [f"{'below' if self.below else 'at most'} {self.most}"] if self.most is not None else []
        return " and ".join(parts)


def read_bounds(schema: Mapping[str, Any]) -> Bounds:
    """Returns the bounds that a schema has, in the style of any draft.

    Raises:
        GrammarError: a bound is no number, or has too many digits.
    """
    values = {name: schema[name] for name in _KEYWORDS if schema.get(name) is not None}
    above, below = values.pop("exclusiveMinimum", False), values.pop("exclusiveMaximum", False)
    least = exact(values["minimum"], "minimum") if "minimum" in values else None
    most = exact(values["maximum"], "maximum") if "maximum" in values else None
    is_above, is_below = above is True, below is True  # as draft 4 says that a bound is excluded
    if not isinstance(above, bool):
        other = exact(above, "exclusiveMinimum")
        if least is None or other >= least:
            least, is_above = other, True
    if not isinstance(below, bool):
        other = exact(below, "exclusiveMaximum")
        if most is None or other <= most:
            most, is_below = other, True
    return Bounds(least, most, is_above, is_below)


def exact(value: Any, keyword: str) -> Decimal:
    """Returns the decimal that a number of a schema is. Raises GrammarError naming the keyword."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GrammarError(f"{keyword} is {value!r:.100}; it is a number")
    if isinstance(value, int) and abs(value) >= 10**_MOST_OF_BOUND:
        raise GrammarError(f"{keyword} has more than {_MOST_OF_BOUND} digits")
    number = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    whole, fraction = _digits(number.copy_abs())
    if max(len(whole), len(fraction)) > _MOST_OF_BOUND:
        raise GrammarError(f"{keyword} has more than {_MOST_OF_BOUND} digits")
    return number or Decimal(0)  # which may have had a sign


def integer_terminal(bounds: Bounds) -> str:
    """Returns the body of a terminal for the integers within bounds, each spelled in one way.

    Raises:
        Unsatisfiable: there is none.
    """
    least, most = bounds.integers()
    digits = max(MOST_DIGITS, *(len(str(abs(bound))) for bound in (least or 0, most or 0)))
    if least is None and most is None:
        return f"/0|-?[1-9][0-9]{{0,{digits - 1}}}/"
    conditions = []
    if least is not None:
        from_least = _whole_from(max(least, 0), digits)
        negative = f"|-({_whole_to(-least, zero=False)})" if least < 0 else ""
        conditions.append(f"/{from_least}{negative}/")
    if most is not None:
        if most < 0:
            conditions.append(f"/-({_whole_from(-most, digits)})/")
        else:
            conditions.append(f"/{_whole_to(most)}|-[1-9][0-9]{{0,{digits - 1}}}/")
    return " & ".join(conditions)


def number_terminal(bounds: Bounds) -> str:
    """Returns the body of a terminal for the numbers within bounds; those with a bound are written without
    exponent.

    Raises:
        Unsatisfiable: there is none.
    """
    bounds.check()
    given = [bound for bound in (bounds.least, bounds.most) if bound is not None]
    digits = max([MOST_DIGITS, *(len(part) + 1 for bound in given for part in _digits(bound.copy_abs()))])
    sizes = _Magnitudes(digits)
    if not given:
        return f"/-?({sizes.any})|{_WITH_EXPONENT}/"
    conditions = []
    if bounds.least is not None:
        if bounds.least >= 0:
            conditions.append(f"/{sizes.at_least(bounds.least, bounds.above)}/")
        else:
            conditions.append(f"/{sizes.any}|-({sizes.at_most(bounds.least.copy_negate(), bounds.above)})/")
    if bounds.most is not None:
        if bounds.most < 0:
            conditions.append(f"/-({sizes.at_least(bounds.most.copy_negate(), bounds.below)})/")
        elif bounds.most == 0 and bounds.below:
            conditions.append(f"/-({sizes.at_least(bounds.most, True)})/")
        else:
            conditions.append(f"/{sizes.at_most(bounds.most, bounds.below)}|-({sizes.any})/")
    return " & ".join(conditions)


def constant_terminal(value: float) -> str:
    """Returns the body of a terminal for one number."""
    number = exact(value, "a constant")
    whole, fraction = _digits(number.copy_abs())
    return quoted(f"{'-' if number < 0 else ''}{whole}{'.' + fraction if fraction else ''}")


class _Magnitudes:
    """Expressions for numbers without a sign, with limits on digits before and after the point."""

    def __init__(self, digits: int) -> None:
        self._digits = digits
        self._more = f"[0-9]{{0,{digits}}}"
        self._not_zero = f"0{{0,{digits}}}[1-9]{self._more}"  # digits that are not all zero
        self._fraction = rf"(\.[0-9]{{1,{digits}}})?"
        self.any = rf"(0|[1-9][0-9]{{0,{digits - 1}}}){self._fraction}"

    def at_least(self, bound: Decimal, excluded: bool) -> str:
        whole, fraction = _digits(bound)
        larger = f"({_whole_from(int(whole) + 1, self._digits)}){self._fraction}"
        return f"{larger}|{whole}{self._fraction_from(fraction, excluded)}"

    def at_most(self, bound: Decimal, excluded: bool) -> str:
        whole, fraction = _digits(bound)
        found = [f"({_whole_to(int(whole) - 1)}){self._fraction}"] if int(whole) > 0 else []
        if fraction:
            found.append(rf"{whole}(\.({self._fraction_to(fraction, excluded)}))?")
        elif not excluded:
            found.append(rf"{whole}(\.0{{1,{self._digits}}})?")
        return "|".join(found)

    def _fraction_from(self, fraction: str, excluded: bool) -> str:
        if not fraction:
            return rf"\.{self._not_zero}" if excluded else self._fraction
        found = [
            f"{fraction[:place]}[{int(digit) + 1}-9]{self._more}"
            for place, digit in enumerate(fraction)
            if digit != "9"
        ]
        found.append(fraction + (self._not_zero if excluded else self._more))
        return rf"\.({'|'.join(found)})"

    def _fraction_to(self, fraction: str, excluded: bool) -> str:
        found = [
            f"{fraction[:place]}[0-{int(digit) - 1}]{self._more}"
            for place, digit in enumerate(fraction)
            if digit != "0"
        ]
        found += [fraction[:length] for length in range(1, len(fraction))]
        if not excluded:
            found.append(f"{fraction}0{{0,{self._digits}}}")
        return "|".join(found)


def _digits(number: Decimal) -> tuple[str, str]:
    """Returns the digits before and after the point, without zeros that say nothing."""
    whole, _, fraction = f"{number:f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _whole_from(least: int, digits: int) -> str:
    """Returns whole numbers from `least` >= 0 on, of at most `digits` digits."""
    if least == 0:
        return f"0|[1-9][0-9]{{0,{digits - 1}}}"
    text = str(least)
    found = [
        f"{text[:place]}[{int(digit) + 1}-9]{_any(len(text) - place - 1)}"
        for place, digit in enumerate(text)
        if digit != "9"
    ]
    found.append(text)
    if len(text) < digits:
        found.append(f"[1-9][0-9]{{{len(text)},{digits - 1}}}")
    return "|".join(found)


def _whole_to(most: int, zero: bool = True) -> str:
    """Returns whole numbers from 0, or 1, to `most`."""
    text = str(most)
    found = ["0"] if zero else []
    if most == 0:
        return "0"
    if len(text) > 1:
        found.append(f"[1-9][0-9]{{0,{len(text) - 2}}}")
    for place, digit in enumerate(text):
        first = 1 if place == 0 else 0
        if int(digit) > first:
            found.append(f"{text[:place]}[{first}-{int(digit) - 1}]{_any(len(text) - place - 1)}")
    return "|".join([*found, text])


def _any(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""

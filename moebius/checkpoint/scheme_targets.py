"""Which schemes a module may have: those that name it, then its class, then all modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moebius.checkpoint.weight_schemes import WeightScheme

_PATTERN = "re:"
# Every matrix here is one; compressed-tensors' targets may be names of classes.
_CLASS = "Linear"


@dataclass(frozen=True)
class SchemeTargets:
    """Look-up by module name; made by `of`. There may be a scheme for each of thousands of modules."""

    # By module name, or the end of one behind a dot.
    names: Mapping[str, WeightScheme]
    patterns: tuple[tuple[re.Pattern[str], WeightScheme], ...]
    # Of the class, then of all modules.
    others: tuple[WeightScheme, ...]

    @staticmethod
    def of(schemes: tuple[WeightScheme, ...]) -> SchemeTargets:
        """The earlier of two schemes wins where both are as specific."""
        names: dict[str, WeightScheme] = {}
        patterns: list[tuple[re.Pattern[str], WeightScheme]] = []
        for scheme in schemes:
            for target in scheme.targets:
                if target.startswith(_PATTERN):
                    patterns.append((re.compile(target.removeprefix(_PATTERN)), scheme))
                elif target != _CLASS:
                    names.setdefault(target, scheme)
        of_class = (scheme for scheme in schemes if _CLASS in scheme.targets)
        of_all = (scheme for scheme in schemes if not scheme.targets)
        return SchemeTargets(names, tuple(patterns), (*of_class, *of_all))

    def applying(self, module: str) -> list[WeightScheme]:
        """Most specific first."""
        # By identity: hashing a scheme costs more than all else here.
        return list({id(scheme): scheme for scheme in self._applying(module)}.values())

    def _applying(self, module: str) -> Iterator[WeightScheme]:
        ending = module if self.names else ""
        while ending:
            if ending in self.names:
                yield self.names[ending]
            ending = ending.partition(".")[2]
        yield from (scheme for pattern, scheme in self.patterns if pattern.match(module))
        yield from self.others

"""Which modules a quantisation leaves as they were, as its configuration lists them.

Only plans of checkpoints that are not there ask: what is stored says it by itself (`matrix_finder`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from moebius.checkpoint.quantisation import quantisation_config

# As transformers, vLLM, compressed-tensors, ModelOpt and Quark spell the list.
_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
_REGEX, _LAYERS = "re:", "layers."


@dataclass(frozen=True, slots=True)
class ExcludedModules:
    """Entries of such lists; filled by `read_excluded`."""

    entries: tuple[str, ...]

    def has(self, module: str) -> bool:
        """Returns whether a module is left as it was; `module`: its name in the form of `model.layers.0.mlp`.

        Entries are regular expressions after "re:", patterns with "*", or names, whole or parts between dots,
        of modules or of what contains them. Where both name a layer what comes before it may differ, as
        models with images have longer names.
        """
        return any(self._matches(entry, module) for entry in self.entries)

    @staticmethod
    def _matches(entry: str, module: str) -> bool:
        if entry.startswith(_REGEX):
            return re.match(entry.removeprefix(_REGEX), module) is not None
        if _LAYERS in entry and _LAYERS in module:
            entry, module = (_LAYERS + name.partition(_LAYERS)[2] for name in (entry, module))
        if "*" in entry:
            return fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*")
        return f".{entry}." in f".{module}."


def read_excluded(directory: str | Path) -> ExcludedModules:
    """Returns the modules that the configuration in a directory excludes; none where nothing is quantised.

    Raises CheckpointError for a file that cannot be read.
    """
    found = quantisation_config(directory) or {}
    lists = (found.get(key) for key in _KEYS)
    return ExcludedModules(tuple(str(entry) for entries in lists for entry in entries or ()))

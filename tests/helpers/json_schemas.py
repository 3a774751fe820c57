"""Schemas of the public JSON-Schema-Test-Suite that can be enforced, and what must not satisfy them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

_FILE = Path(__file__).parent.parent / "data" / "json_schema_suite.json"


@dataclass(frozen=True)
class SuiteSchema:
    """One group of the suite."""

    name: str
    schema: Any  # an object, or true
    invalid: list[Any]  # instances that do not satisfy it

    @property
    def text(self) -> str:
        """The schema's JSON."""
        return json.dumps(self.schema)

    def check(self, text: str) -> None:
        """Raises unless `text` is JSON that satisfies the schema, by another implementation."""
        value = json.loads(text)
        if self.schema is not True:
            validator = jsonschema.validators.validator_for(
                self.schema, default=jsonschema.Draft202012Validator
            )
            validator(self.schema).validate(value)


@functools.cache
def suite() -> tuple[SuiteSchema, ...]:
    """Returns all of them, in the suite's order."""
    groups = json.loads(_FILE.read_text())["schemas"]
    return tuple(
        SuiteSchema(f"{group['file']}: {group['description']}", group["schema"], group["invalid"])
        for group in groups
    )

"""A plan as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moebius.app.planning.capacity import CapacityPlan
from moebius.app.planning.speed import Speed
from moebius.errors import UserError


def document(plan: CapacityPlan) -> dict[str, Any]:
    """All fields, and the sums that follow from them; bytes, seconds."""
    found = asdict(plan)
    found["total"] = plan.total
    found["totals"] = {place: plan.total_of(place) for place in plan.places}
    found["kv"]["tokens"] = plan.kv.tokens
    held = plan.residency
    found["residency"] |= {"count": held.count, "share": held.share, "by_layer": held.by_layer}
    found["decode"] = [_speed(row) for row in plan.decode]
    found["prefill"] = _speed(plan.prefill)
    found["serve_flags"] = plan.serve_flags
    return found


def _speed(row: Speed) -> dict[str, Any]:
    found = asdict(row)
    found["seconds"] |= {"total": row.seconds.total, "bound_by": row.seconds.bound_by}
    return found


def write_document(plan: CapacityPlan, path: Path) -> None:
    """Raises UserError when the file can not be written."""
    try:
        path.write_text(json.dumps(document(plan), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None

"""Guards the number of requests that are served at once."""

from __future__ import annotations

import pytest

from gateway.schemas.errors import ApiError
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.admission import Admission


def test_admission_counts_places() -> None:
    """Exactly `limit` requests fit, and a place that is given back can be taken again."""
    admission = Admission(2, GatewayMetrics())
    admission.enter()
    admission.enter()
    with pytest.raises(ApiError) as caught:
        admission.enter()
    assert caught.value.headers() == {"Retry-After": "1"}
    admission.leave()
    admission.enter()
    assert admission.in_flight == 2

"""Guards the limit of `bench`: where memory bandwidth is none, stderr says why."""

from __future__ import annotations

import pytest

from app.bench.limit_doubts import limit_doubts, print_doubts

HERE, FAR = "http://127.0.0.1:8000", "https://gpu.example.com/v1"
MANY = 10_000_000_000


@pytest.mark.parametrize(
    ("url", "step_bytes", "ratios", "said"),
    [
        (HERE, MANY, (0.3, 0.9), ()),
        (HERE, MANY, (), ()),
        (FAR, MANY, (0.1,), ("may be on another one (gpu.example.com)",)),
        (HERE, 1e6, (0.2,), ("a step reads 1.0 MB of weights, which the CPUs' caches hold",)),
        (HERE, MANY, (0.2, 3.5), ("3.50 of the limit was measured",)),
        (FAR, 1e6, (2.0,), ("another one", "caches hold", "2.00 of the limit")),
    ],
)
def test_a_limit_that_is_none_is_doubted(
    url: str, step_bytes: float, ratios: tuple[float, ...], said: tuple[str, ...]
) -> None:
    """A server elsewhere, weights in caches, and figures above the limit are named, each by itself."""
    found = limit_doubts(url, step_bytes, ratios, cached_bytes=32_000_000)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_doubts_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The table on stdout stays one."""
    print_doubts(HERE, MANY, [5.0])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("the limit means little: 5.00 of the limit was measured")

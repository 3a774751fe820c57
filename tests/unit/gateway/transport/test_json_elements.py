"""Guards that elements of an array are found however the body is cut, and that a wrong body is refused."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from gateway.schemas.errors import ApiError
from gateway.transport.json_elements import ElementReader

ELEMENTS = [{"a": 'x"]}\\'}, {}, {"b": [1, {"c": "東京"}], "d": "]"}, {"e": 1.5e300}]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_elements_of_pieces(size: int, indent: int | None) -> None:
    """Text and value of each, also where a character or an element lies in two pieces."""
    body = json.dumps({"items": ELEMENTS}, ensure_ascii=False, indent=indent).encode()
    reader = ElementReader("items", 1000)
    found = [element for at in range(0, len(body), size) for element in reader.feed(body[at : at + size])]
    found += reader.finish()
    assert [value for _, value in found] == ELEMENTS
    assert [json.loads(text) for text, _ in found] == ELEMENTS
    assert reader.count == len(ELEMENTS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"items": [',
        b'{"items": [{}',
        b'{"items": [{}]',
        b'{"items": [{"a": ]}',
        b'{"items": [{},]}',
        b'{"items": [{}], "more": 1}',
        b'{"items": [{}]} {}',
        b'{"other": []}',
        b'{"items": [{}, 1]}',
        b'{"items": [{} {}]}',
        b'{"items": [{"a": "\xff"}]}',
        b'{"items": [{"a": ' + b"[" * 100_000,
        b" " * 2000,
    ],
)
def test_what_is_no_such_body_is_refused(body: bytes) -> None:
    """Incomplete, followed by more, of other elements or fields, or no UTF-8."""
    reader = ElementReader("items", 1_000_000)
    with pytest.raises(ApiError) as refused:
        list(chain(reader.feed(body), reader.finish()))
    assert refused.value.status == 400
    assert "above max_body_mib" in refused.value.message


def test_an_element_has_a_bound() -> None:
    """A request that is too long for memory is refused before it is complete."""
    reader = ElementReader("items", 1000)
    list(reader.feed(b'{"items": [{"a": "'))
    with pytest.raises(ApiError, match="larger than") as refused:
        list(chain.from_iterable(reader.feed(b"x" * 200) for _ in range(20)))
    assert refused.value.status == 413

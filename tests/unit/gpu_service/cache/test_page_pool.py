"""Guards the page pool: free + owned + cached is every page exactly once, whatever the order of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.cache.request_cache import OutOfPages, PagePool


def test_page_zero_is_never_handed_out() -> None:
    """The dummy page belongs to padding; a request that owned it would read others' garbage."""
    pool = PagePool(5)
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


def test_too_few_pages_takes_none() -> None:
    """A failed allocation leaves the pool as it was."""
    pool = PagePool(4)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free of 3"):
        pool.alloc(4)
    assert pool.available == 3


@pytest.mark.parametrize("page", [0, 3, 7])
def test_bad_free_is_refused(page: int) -> None:
    """Double frees and frees of the dummy or unknown pages would corrupt someone else's KV."""
    pool = PagePool(4)
    pool.alloc(2)
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        pool.free([page])


def test_a_pool_without_a_usable_page_is_refused() -> None:
    """One page would be the dummy only."""
    with pytest.raises(ValueError, match="num_pages must be at least 2"):
        PagePool(1)


def test_integrity_check_notices_a_leak() -> None:
    """The checker itself works: a page without an owner, or with two, is reported."""
    pool = PagePool(6)
    pages = pool.alloc(2)
    with pytest.raises(AssertionError, match="pages lost"):
        pool.check_integrity(pages[:1], [])
    with pytest.raises(AssertionError, match="recorded state"):
        pool.check_integrity(pages[:1], pages[1:])


@given(
    st.lists(st.tuples(st.sampled_from(["alloc", "free", "cache", "evict"]), st.integers(0, 6)), max_size=60)
)
def test_every_page_is_in_one_set(operations: list[tuple[str, int]]) -> None:
    """Pages are in the sets of a model with three plain lists."""
    pool, owned, cached = PagePool(12), list[int](), list[int]()
    for name, count in operations:
        if name == "alloc" and count <= pool.available:
            owned += pool.alloc(count)
        elif name == "free":
            pool.free(owned[:count])
            owned = owned[count:]
        elif name == "cache":
            pool.hand_to_cache(owned[:count])
            cached += owned[:count]
            owned = owned[count:]
        elif name == "evict":
            pool.free(cached[:count])
            cached = cached[count:]
        pool.check_integrity(owned, cached)
        assert pool.available + len(owned) + len(cached) == pool.usable

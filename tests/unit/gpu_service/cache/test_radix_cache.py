"""Guards the prefix tree: it returns exactly the pages inserted for exactly the tokens asked for."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_service.cache.radix_cache import PrefixHandle, RadixCache

PAGE = 2
RUNS = st.lists(st.integers(0, 1), min_size=0, max_size=10)


def whole(tokens: list[int]) -> list[int]:
    """Returns the tokens that fill pages."""
    return tokens[: len(tokens) // PAGE * PAGE]


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, matches, locks and evictions against a dictionary from prefix to page."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixCache(PAGE, most_kept_pages=3)
        self.next_page, self.now_s = 1, 0.0
        self.page_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked: list[tuple[str, list[int], PrefixHandle]] = []

    def expected(self, namespace: str, tokens: list[int]) -> list[int]:
        """Returns the pages of the longest known prefix."""
        pages = []
        for end in range(PAGE, len(tokens) + 1, PAGE):
            page = self.page_of.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    @rule(tokens=RUNS, namespace=st.sampled_from(["", "salt"]))
    def insert(self, tokens: list[int], namespace: str) -> None:
        tokens = whole(tokens)
        pages = list(range(self.next_page, self.next_page + len(tokens) // PAGE))
        self.next_page += len(pages)
        before = self.expected(namespace, tokens)
        result = self.tree.insert(tokens, pages, namespace)
        assert result.already_cached == len(before) * PAGE
        for index in range(len(before), len(pages)):
            self.page_of[namespace, tuple(tokens[: (index + 1) * PAGE])] = pages[index]
        assert list(result.handle.pages) == self.expected(namespace, tokens)

    @rule(tokens=RUNS, namespace=st.sampled_from(["", "salt"]), lock=st.booleans())
    def match(self, tokens: list[int], namespace: str, lock: bool) -> None:
        handle = self.tree.match(tokens, namespace)
        assert list(handle.pages) == self.expected(namespace, tokens)
        assert handle.num_tokens == len(handle.pages) * PAGE
        if lock:
            self.tree.lock(handle)
            self.locked.append((namespace, tokens[: handle.num_tokens], handle))

    @rule(tokens=RUNS, namespace=st.sampled_from(["", "salt"]), seconds=st.floats(0, 5))
    def keep(self, tokens: list[int], namespace: str, seconds: float) -> None:
        self.tree.keep(self.tree.match(tokens, namespace), seconds)
        assert self.tree.kept_pages <= self.tree.evictable_pages

    @rule(seconds=st.floats(0, 3))
    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.tree.advance(self.now_s)

    @precondition(lambda self: bool(self.locked))
    @rule(index=st.integers(0, 100))
    def unlock(self, index: int) -> None:
        _, _, handle = self.locked.pop(index % len(self.locked))
        self.tree.unlock(handle)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        evictable = self.tree.evictable_pages
        freed = self.tree.evict(count)
        assert len(freed) >= min(count, evictable)
        gone = set(freed)
        self.page_of = {key: page for key, page in self.page_of.items() if page not in gone}

    @invariant()
    def consistent(self) -> None:
        self.tree.check_integrity()
        in_tree = sorted(page for node in self.tree.nodes() for page in node.pages)
        assert in_tree == sorted(self.page_of.values())
        for namespace, tokens, handle in self.locked:
            assert list(handle.pages) == self.expected(namespace, tokens), "a locked prefix was evicted"


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=30, deadline=None)


def test_least_recently_used_leaf_goes_first() -> None:
    """A prefix that was just matched survives one that was not."""
    tree = RadixCache(PAGE)
    tree.insert([1, 1], [1])
    tree.insert([2, 2], [2])
    tree.match([1, 1])
    assert tree.evict(1) == [2]


def test_kept_prefixes_go_last_until_their_time_is_over() -> None:
    """What is kept outlives what was used later, is given up when nothing else is left, and stays cached
    memory: experts may not have it, requests may."""
    tree = RadixCache(PAGE, most_kept_pages=2)
    tree.advance(100.0)
    kept = tree.insert([1, 1, 5, 5], [1, 2]).handle
    tree.keep(kept, 60.0)
    tree.insert([2, 2], [3])
    tree.insert([3, 3], [4])
    assert (tree.kept_pages, tree.evictable_pages) == (2, 4)
    tree.lock(kept)
    assert tree.kept_pages == 0
    tree.unlock(kept)
    assert tree.kept_pages == 2
    assert tree.evict(3, until=tree.time) == [3, 4]
    assert tree.evict(4) == [1, 2]
    kept = tree.insert([1, 1], [1]).handle
    tree.keep(kept, 60.0)
    tree.insert([2, 2], [3])
    tree.advance(161.0)
    assert tree.kept_pages == 0
    assert tree.evict(1) == [1]


def test_more_than_may_be_kept_is_given_up_by_its_last_use() -> None:
    """A client cannot keep others out of the cache by keeping all of it."""
    tree = RadixCache(PAGE, most_kept_pages=1)
    for number in (1, 2):
        tree.keep(tree.insert([number] * PAGE, [number]).handle, 60.0)
    tree.insert([3] * PAGE, [3])
    assert tree.kept_pages == 2
    assert tree.evict(2) == [1, 2]


def test_both_parts_of_a_split_prefix_are_kept() -> None:
    """Another prompt that shares its beginning changes nothing for the rest."""
    tree = RadixCache(PAGE, most_kept_pages=9)
    tree.keep(tree.insert([1, 1, 5, 5], [1, 2]).handle, 60.0)
    tree.insert([1, 1, 6, 6], [1, 3])
    assert tree.kept_pages == 2
    assert tree.evict(1) == [3]


def test_namespaces_do_not_share() -> None:
    """Two salts with equal tokens never see each other's pages."""
    tree = RadixCache(PAGE)
    tree.insert([1, 1], [1], "alice")
    assert tree.match([1, 1], "bob").pages == ()


def test_bad_calls_are_refused() -> None:
    """Unaligned inserts and unlocks without a lock are programming errors that would corrupt counts."""
    tree = RadixCache(PAGE)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 pages of 2"):
        tree.insert([1, 2, 3], [1])
    handle = tree.insert([1, 2], [1]).handle
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(handle)

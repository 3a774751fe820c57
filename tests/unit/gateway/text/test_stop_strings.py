"""Guards stop strings: the cut does not depend on how the text was cut into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tokenizer import StopStrings

# Two letters make overlaps and near misses common.
WORDS = st.text("ab", min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Returns the definition: the text is cut at the match that is complete first; the longer one
    on a tie.
    """
    for end in range(1, len(text) + 1):
        matches = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if matches:
            return text[:end] if include else text[: end - len(matches[-1])], matches[-1]
    return text, None


def run(parts: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Returns the text that the streaming version shows in total."""
    machine, shown = StopStrings(stops, include), ""
    for part in parts:
        result = machine.feed(part)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + machine.flush(), None


@given(
    st.lists(st.text("abc", max_size=5), max_size=8), st.lists(WORDS, min_size=1, max_size=4), st.booleans()
)
def test_streamed_equals_definition(parts: list[str], stops: list[str], include: bool) -> None:
    """Any cutting of the text shows what the definition shows, and never takes back a character."""
    assert run(parts, stops, include) == reference("".join(parts), stops, include)


def test_only_possible_beginnings_are_held_back() -> None:
    """Text that cannot become a stop string is shown at once; the rest waits for the next token."""
    machine = StopStrings(["END"])
    assert machine.feed("The E").text == "The "
    assert machine.feed("N").text == ""
    assert machine.feed("T").text == "ENT"
    assert machine.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    """No stop strings: nothing is held."""
    assert StopStrings([]).feed("text").text == "text"

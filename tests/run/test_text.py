"""Bytes of tokens become text: whole characters, and nothing of a stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufmoe.run.text import TextStream


def streamed(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    """What is shown piece by piece; the last entry is what ``finish`` gives."""
    stream = TextStream(stop)
    return [*(stream.feed(piece) for piece in pieces), stream.finish()]


def up_to_first(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that is complete first; of two that end together, the longer one."""
    for end in range(len(text) + 1):
        found = [each for each in stop if each and text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@st.composite
def pieces_of_text(draw: st.DrawFn, alphabet: str) -> tuple[str, list[bytes]]:
    """A text and its UTF-8 bytes, cut anywhere."""
    text = draw(st.text(alphabet, max_size=30))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    return text, [raw[start:end] for start, end in itertools.pairwise(cuts)]


@given(pieces_of_text("ab歪🙂é\n"))
def test_any_split_gives_the_whole(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    assert "".join(streamed(pieces)) == text


@given(pieces_of_text("ab🙂"), st.lists(st.text("ab🙂", max_size=4), max_size=3))
def test_any_split_ends_at_the_first_stop_string(case: tuple[str, list[bytes]], stop: list[str]) -> None:
    text, pieces = case
    assert "".join(streamed(pieces, stop)) == up_to_first(text, stop)


@given(pieces_of_text("ab"), st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_become_a_stop(case: tuple[str, list[bytes]], stop: str) -> None:
    stream, shown, fed = TextStream([stop]), "", b""
    for piece in case[1]:
        shown, fed = shown + stream.feed(piece), fed + piece
        held = fed.decode()[len(shown) :]
        assert stream.stopped or held == "" or (stop.startswith(held) and held != stop)


def test_a_character_waits_for_its_last_byte() -> None:
    assert streamed([b"\xf0", b"\x9f\x99", b"\x82!"]) == ["", "", "🙂!", ""]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"a\xe6\xad"], "a\ufffd"),  # ends inside a character
        ([b"a\xff", b"b"], "a\ufffdb"),  # no UTF-8 at all
        ([b"\xe6", b"A"], "\ufffdA"),
        ([b"\xed\xa0\xbd"], "\ufffd" * 3),  # a surrogate is no character
        ([b"a\x00b"], "a\x00b"),
        ([], ""),
    ],
)
def test_bytes_that_are_no_text_show_as_replacement(pieces: list[bytes], text: str) -> None:
    assert "".join(streamed(pieces)) == text


@pytest.mark.parametrize("pieces", [[b"baa"], [b"ba", b"a"], [b"b", b"a", b"a"]])
def test_the_stop_string_that_is_complete_first_counts(pieces: list[bytes]) -> None:
    assert "".join(streamed(pieces, ["baa", "a"])) == "b"
    assert "".join(streamed(pieces, ["ba", "a"])) == ""


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(["###"])
    assert [
        stream.feed(b"a#"),
        stream.feed(b"#"),
        stream.feed(b"#b"),
        stream.feed(b"c"),
        stream.finish(),
    ] == [
        "a",
        "",
        "",
        "",
        "",
    ]
    assert stream.stopped


def test_a_false_start_is_shown_in_the_end() -> None:
    assert streamed([b"a#", b"#"], ["###"]) == ["a", "", "##"]
    assert streamed([b"aab"], ["ab"]) == ["a", ""]
    assert streamed([b"aa", b"ab"], ["aab"]) == ["", "a", ""]


def test_a_stop_string_can_end_in_the_last_character() -> None:
    assert streamed([b"x\xf0\x9f", b"\x99\x82"], ["🙂"]) == ["x", "", ""]
    # the replacement of an unfinished character can be one too
    assert streamed([b"x\xf0\x9f"], ["\ufffd"]) == ["x", ""]

"""Sizes for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.base.units import format_bytes, format_count, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("4k", 4 << 10),
        ("500G", 500 << 30),
        ("64GiB", 64 << 30),
        ("64 gb", 64 << 30),
        ("1.5T", 3 << 39),
        (" 2P ", 2 << 50),
        ("7b", 7),
    ],
)
def test_sizes_parse(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "5X", "5 G B", "0x10", "1,5G", "5%", "nan"])
def test_what_is_no_size_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (500 << 30, "500 GiB"), (3 << 50, "3 PiB")],
)
def test_sizes_format(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_printed_size_parses_to_about_the_same(size_bytes: int) -> None:
    again = parse_bytes(format_bytes(size_bytes))
    assert abs(again - size_bytes) <= 0.006 * size_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1000, "1,000 files")]
)
def test_one_is_not_plural(count: int, text: str) -> None:
    assert format_count(count, "file") == text

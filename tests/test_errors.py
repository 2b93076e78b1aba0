"""Messages of errors."""

from __future__ import annotations

from unshard.errors import listed


def test_a_list_names_the_first_and_counts_the_others() -> None:
    assert listed([]) == ""
    assert listed("ab") == "a, b"
    assert listed("abc") == "a, b, c"
    assert listed(iter("abcde")) == "a, b, c and 2 more"
    assert listed(range(4), most=2) == "0, 1 and 2 more"

"""Messages of errors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from unshard import errors
from unshard.errors import listed

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()


def test_a_list_names_the_first_and_counts_the_others() -> None:
    assert listed([]) == ""
    assert listed("ab") == "a, b"
    assert listed("abc") == "a, b, c"
    assert listed(iter("abcde")) == "a, b, c and 2 more"
    assert listed(range(4), most=2) == "0, 1 and 2 more"


def test_every_error_has_a_cause_and_a_remedy() -> None:
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    types = {
        name: each
        for name, each in vars(errors).items()
        if inspect.isclass(each) and each.__module__ == "unshard.errors"
    }
    assert len(types) > 15 and sections.keys() == types.keys()
    for name, each in types.items():
        text = sections[name]
        assert text.count("- **Cause:** ") == text.count("- **Remedy:** ") == 1, name
        assert f"(#{name.lower()})" in PAGE, f"{name} is not in the table"
        said = text.partition("- **Cause")[0]
        bases = {base for own in each.__mro__ for base in own.__bases__ if own.__module__ == "unshard.errors"}
        for base in bases - {Exception} - set(types.values()):
            assert f"{base.__name__}`" in said, f"{name} is also a {base.__name__}"

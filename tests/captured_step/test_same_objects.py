"""What every call of a captured step compares with the call before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unshard.captured_step.arguments import Arguments
from unshard.captured_step.optimizer_settings import OptimizerSettings
from unshard.captured_step.same_objects import SameObjects
from unshard.captured_step.signatures import Signature


def test_the_same_objects() -> None:
    one, other = torch.ones(1), torch.ones(4)
    same = SameObjects([one, None], {"a": other})
    assert same.followed_by([one, None], {"a": other}) is same
    assert same == SameObjects([one, None], {"a": other})
    assert list(same) == [one, None, other] and same.tensors() == [one, other]


@pytest.mark.parametrize("size", [1, 4])
def test_equal_tensors_are_not_the_same(size: int) -> None:
    tensor = torch.ones(size)
    for equal in (torch.ones(size), tensor.view(size), tensor.detach(), torch.nn.Parameter(tensor)):
        for mine, theirs in (([tensor], [equal]), ({"a": tensor}, {"a": equal}), ([equal], [tensor])):
            same = SameObjects(mine)
            assert same.followed_by(theirs) is not same
            assert same != SameObjects(theirs)
    number = SameObjects([1.0])
    assert number.followed_by([torch.ones(())]) is not number


def test_containers_that_change_in_place() -> None:
    tensors = [torch.ones(1)]
    entry: dict[str, Any] = {"a": torch.ones(1)}
    same = SameObjects(tensors, entry)
    tensors[0] = torch.ones(1)
    assert same.followed_by(tensors, entry) is not same
    same = SameObjects(tensors, entry)
    entry["b"] = None
    changed = same.followed_by(tensors, entry)
    assert changed is not same
    assert changed.followed_by(tensors, entry) is changed
    assert same.followed_by(tensors) is not same


def test_a_mode_of_the_program_sees_nothing() -> None:
    """The comparison may run in a mode, such as that of `torch.set_default_device`."""
    tensor = torch.ones(1)
    same = SameObjects([tensor])
    with torch.device("meta"):
        assert same.followed_by([tensor]) is same
        assert same.followed_by([torch.ones(1)]) is not same
        assert torch.ones(1).is_meta


def settings_of(**settings: Any) -> tuple[OptimizerSettings, dict[str, Any]]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **settings)
    settings_seen = OptimizerSettings([optimizer])
    settings_seen.look()
    return settings_seen, optimizer.param_groups[0]


def test_settings_that_are_assigned() -> None:
    settings, group = settings_of(lr=1.0)
    before = settings.compared
    settings.look()
    assert settings.compared is before
    for name, value in (("weight_decay", 0.5), ("betas", (0.5, 0.5)), ("lr", 2.0)):
        before = settings.compared
        group[name] = value
        settings.look()
        assert settings.compared != before


def test_settings_that_change_in_place() -> None:
    lr = torch.tensor(1.0)
    settings, group = settings_of(lr=lr)
    group["betas"] = [0.9, 0.99]
    settings.look()
    assert settings.tensors.tensors() == [lr]
    for change in (lambda: lr.fill_(2.0), lambda: group["betas"].__setitem__(0, 0.5)):
        before = settings.compared
        change()
        settings.look()
        assert settings.compared != before


@pytest.mark.parametrize(
    "kwargs", [{}, {"scale": 1.0}, {"mask": None, "flag": True}, {"nested": {"a": [1, torch.ones(1)]}}]
)
def test_arguments_are_put_together_again(kwargs: dict[str, Any]) -> None:
    tensor = torch.ones(2)
    args, found = Arguments((tensor, 3), kwargs).static().run(lambda *args, **kwargs: (args, kwargs))
    assert torch.equal(args[0], tensor) and args[0] is not tensor and args[1:] == (3,)
    assert found == kwargs


def test_plain_arguments_and_their_names() -> None:
    tensor = torch.ones(2)
    calls = [
        ((tensor, 1), {}),
        ((tensor,), {"a": 1}),
        ((tensor,), {"b": 1}),
        (([tensor, 1],), {}),
        ((tensor, True), {}),
    ]
    signatures = [Arguments(args, kwargs).signature() for args, kwargs in calls]
    for number, signature in enumerate(signatures):
        assert signatures.index(signature) == number
        assert Arguments(*calls[number]).signature() == signature


def test_signatures_as_keys() -> None:
    trained: Any = (1, 2)
    one, equal, other = Signature((1,), trained), Signature((1,), trained), Signature((2,), trained)
    assert {one: "found"}[equal] == "found" and hash(one) == hash(equal)
    assert one != other and other not in {one: None}
    assert one != "no signature"

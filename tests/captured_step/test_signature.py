"""Every call of a captured step compares objects, settings and arguments with the previous call."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from unshard.captured_step.signature import Arguments, OptimizerSettings, SameObjects
from unshard.captured_step.trained import Trained


def test_the_same_objects() -> None:
    objects = [torch.ones(1), None, torch.ones(4), 1.0]
    same = SameObjects(objects)
    assert same.followed_by(list(objects)) is same
    assert same == SameObjects(list(objects))
    assert same.tensors() == [objects[0], objects[2]]
    for other in (objects[:3], objects[::-1], [*objects, None], []):
        assert same.followed_by(other) is not same
        assert same != SameObjects(other)


@pytest.mark.parametrize("size", [1, 4])
def test_equal_tensors_are_not_the_same(size: int) -> None:
    tensor = torch.ones(size)
    for equal in (torch.ones(size), tensor.view(size), tensor.detach(), torch.nn.Parameter(tensor), 1.0):
        same = SameObjects([tensor])
        assert same.followed_by([equal]) is not same
        assert same != SameObjects([equal])


class Odd:
    def __eq__(self, other: object) -> bool:
        raise AssertionError


def test_equality_of_objects_is_not_used() -> None:
    odd = Odd()
    same = SameObjects([odd])
    assert same.followed_by([odd]) is same
    assert same.followed_by([Odd()]) is not same


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


def test_settings_of_other_types() -> None:
    """Numbers by value, other objects by identity, and no object gets the id of one that was freed."""
    settings, group = settings_of(lr=1.0)
    group["weight_decay"] = Fraction(1, 2)
    settings.look()
    before = settings.compared
    group["weight_decay"] = Fraction(1, 2)
    settings.look()
    assert settings.compared == before
    found = []
    for _ in range(50):
        group["own"] = {"a": 1}
        settings.look()
        found.append(settings.compared)
        assert found.count(settings.compared) == 1
    group["own"] = (torch.ones(4), [torch.ones(5)])
    settings.look()
    assert settings.tensors.tensors() == [group["own"][0], group["own"][1][0]]


def test_names_of_parameters_are_no_settings() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).named_parameters())
    settings = OptimizerSettings([optimizer])
    settings.look()
    before = settings.compared
    settings.look()
    assert settings.compared is before
    assert "param_names" not in dict(before[0])


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


def test_arguments_that_the_step_changes() -> None:
    """A gradient penalty makes its input require a gradient."""
    static = Arguments((torch.ones(2),), {}).static()
    static.run(lambda x: x.requires_grad_())
    static.fill([torch.full((2,), 3.0)])
    assert torch.equal(static.run(lambda x: x.detach()), torch.full((2,), 3.0))


def test_signatures_as_keys() -> None:
    model = torch.nn.Linear(2, 2)
    trained = Trained([model], [], None)
    trained.look()
    one, equal, other = (trained.signature((number,), ()) for number in (1, 1, 2))
    assert {one: "found"}[equal] == "found" and hash(one) == hash(equal)
    assert one != other and other not in {one: None}
    assert one != "no signature"
    model.eval()
    assert one != trained.signature((1,), ())

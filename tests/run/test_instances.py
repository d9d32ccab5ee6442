"""Objects are found among all of the process, and no other thread notices."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stowplan.run.instances import instances_of, with_subclasses

pytestmark = pytest.mark.torch


class Own(nn.Linear):
    pass


def test_instances_are_found_by_their_type() -> None:
    linear, own, tensor = nn.Linear(2, 2), Own(2, 2), torch.ones(2)
    modules = {id(found) for found in instances_of(with_subclasses(nn.Module))}
    assert {id(linear), id(own)} <= modules
    assert id(own) not in {id(found) for found in instances_of([nn.Linear])}
    assert id(tensor) in {id(found) for found in instances_of([Tensor])}
    assert {type(found) for found in instances_of([Tensor, nn.Parameter])} == {Tensor, nn.Parameter}


def test_threads_build_tuples_meanwhile() -> None:
    """A tuple that is being built must be held by nobody else when it grows."""
    faults, ended = list[BaseException](), threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(64):
            time.sleep(0)
            yield number

    def build() -> None:
        try:
            while not ended.is_set():
                assert len(tuple(numbers())) == 64
        except BaseException as fault:
            faults.append(fault)

    builders = [threading.Thread(target=build) for _ in range(4)]
    for builder in builders:
        builder.start()
    for _ in range(60):
        instances_of([nn.Linear])
    ended.set()
    for builder in builders:
        builder.join()
    assert faults == []

"""Objects that belong to a process refuse to be copied or pickled, by an error that names the class and what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unisono as un


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_object_of_a_process_is_refused_by_name_when_it_is_copied(how: Callable[[Any], Any]) -> None:
    with un.init() as world, un.GradientReducer(world) as reducer, un.Pool(1) as pool:
        work = world.allreduce(np.ones(2), wait=False)
        advice = {world: r"dup\(\)", work: r"wait\(\)", reducer: r"state_dict\(\)", pool: "make another"}
        for refused, text in advice.items():
            name = type(refused).__name__
            with pytest.raises(un.UsageError, match=f"a {name} cannot be copied or pickled: .*{text}"):
                how(refused)
            with pytest.raises(un.UsageError, match=f"a {name} cannot be copied"):
                how({"in": [refused]}) if how is not copy.copy else how(refused)
        assert work.wait().tolist() == [1.0, 1.0]
        assert world.allreduce(np.ones(2)).tolist() == [1.0, 1.0]


def test_values_of_the_library_can_be_copied() -> None:
    with un.init() as world:
        for value in (un.Options(timeout_s=3), un.Message(0, 1, "int8", 2), un.ANY_SOURCE, un.ANY_TAG, world.stats()):
            assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value

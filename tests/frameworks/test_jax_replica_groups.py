"""The groups of devices that the text of a compiled program of XLA names."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.frameworks.jax.replica_groups import groups_of

_GLOBAL = ", use_global_device_ids=true"


def line(collective: str, groups: str, rest: str = "") -> str:
    return f'  %x.3 = f32[2]{{0}} {collective}(%param.1), channel_id=1, {groups}{rest}, metadata={{op_name="f"}}'


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups={{0},{5,1}}", [(0,), (5, 1)]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=4] {'z'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'y','x'}", [(0, 4, 2, 6), (1, 5, 3, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups=mesh['x'=8] {'x':(4)2,'x':(1)2}", [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ("replica_groups=mesh[a=4,b=2], device_ids=(7,6,5,4,3,2,1,0) {b}", [(7, 6), (5, 4), (3, 2), (1, 0)]),
        ("replica_groups=of_another_form", []),
    ],
)
def test_groups_are_read_in_each_form(text: str, groups: list[tuple[int, ...]]) -> None:
    assert groups_of(line("all-reduce", text, _GLOBAL), np.arange(8).reshape(1, 8)) == groups


def test_numbers_are_those_of_the_device_assignment() -> None:
    program = line("all-gather", "replica_groups={{0,1},{2,0}}", ", dimensions={0}" + _GLOBAL)
    assert groups_of(program, np.array([[6144, 0, 2048]])) == [(6144, 0), (2048, 6144)]


@pytest.mark.parametrize(
    ("program", "groups"),
    [
        (line("all-reduce", "replica_groups={{0,1}}").replace("channel_id=1, ", ""), [(0, 3), (1, 4), (2, 5)]),
        (line("all-reduce", "replica_groups={{0,1}}"), [(0, 1, 2, 3, 4, 5)]),
        (line("all-to-all", "replica_groups={{0,2}}"), [(0, 2), (3, 5)]),
        (line("collective-permute", "source_target_pairs={{0,1},{1,0}}"), [(0, 1, 2), (3, 4, 5)]),
    ],
)
def test_numbers_mean_replicas_or_partitions_as_xla_defines_it(program: str, groups: list[tuple[int, ...]]) -> None:
    assert groups_of(program, np.arange(6).reshape(2, 3)) == groups


def test_group_of_several_collectives_is_returned_once_and_other_lines_are_passed_over() -> None:
    lines = ["HloModule f", "%a = f32[] add(%b, %c)", *[line("all-reduce", "replica_groups={{0,1}}", _GLOBAL)] * 2]
    assert groups_of("\n".join(lines), np.array([[4, 5]])) == [(4, 5)]

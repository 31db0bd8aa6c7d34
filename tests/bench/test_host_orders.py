"""The study of the order of far hosts: its maps, and that ours is nearly the best of all orders."""

from __future__ import annotations

import random

from unisono.bench.studies.host_orders import map_of, random_area, simulated


def test_order_of_calls_takes_at_most_five_per_cent_longer_than_the_best_one() -> None:
    rows = simulated(1, seed=2)
    assert {row["hosts"] for row in rows} == {5}
    assert len({row["call"] for row in rows}) == 4
    for row in rows:
        assert row["ours"] <= 1.05
        assert row["median"] <= row["worst"]
    assert max(row["worst"] for row in rows) > 1.5


def test_map_of_an_area_has_its_delays_and_rates() -> None:
    area = random_area(5, random.Random(1))
    network = map_of(area)
    for i, j in network.pairs:
        assert network.delay_s[i][j] == network.delay_s[j][i] == area.way(i, j).delay_ms / 1e3
        assert 8e-6 / network.per_byte_s[i][j] < area.way(i, j).mbit_s

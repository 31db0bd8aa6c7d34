"""Tests that only the part of a cut network that has a quorum goes on. The hosts are network namespaces."""

from __future__ import annotations

from pathlib import Path

from support.hosts import needs_namespaces
from support.swarms import SwarmProcesses

from unisono.bench.namespaces import SUBNET, address, inside, network, plug

PROGRAM = """
one = {name: 10 ** index for index, name in enumerate("ABC")}
with un.Swarm(places, serve=name == "A", quorum_timeout_s=2.0, **settings) as swarm:
    while not has_mark(folder, "end"):
        try:
            total = int(swarm.allreduce(np.array([one[name]]), "sum")[0])
        except un.QuorumLostError:
            mark(f"{name} has no quorum")
            swarm.enter()
            mark(f"{name} entered again")
            continue
        names = sorted(member.name for member in swarm.last_call.contributors)
        assert total == sum(one[member] for member in names)
        mark(f"{name} with {''.join(names)}{' again' if has_mark(folder, 'mended') else ''}")
        time.sleep(0.01)
"""


@needs_namespaces
def test_only_the_larger_part_of_a_cut_network_goes_on_and_the_other_enters_again(tmp_path: Path) -> None:
    with network(3) as hosts, SwarmProcesses(tmp_path, f"tcp://{address(0)}:29400") as swarm:
        for name, host in zip("ABC", hosts, strict=True):
            swarm.start(name, PROGRAM, {"UNISONO_BIND_ADDRESS": SUBNET}, inside(host))
        swarm.await_marks(*(f"{name} with ABC" for name in "ABC"))
        (tmp_path / "mark C with C").unlink(missing_ok=True)  # it may have founded the swarm
        plug(hosts, 2, "down")
        swarm.await_marks("A with AB", "B with AB", "C has no quorum")
        plug(hosts, 2, "up")
        swarm.mark("mended")
        swarm.await_marks("C entered again", *(f"{name} with ABC again" for name in "ABC"))
        assert not (tmp_path / "mark C with C").exists()  # alone, it founds no second swarm
        swarm.mark("end")
        for name in "ABC":
            assert swarm.processes[name].wait(100) is not None

"""The parts of this machine that matter for communication: processors, caches, NUMA nodes, GPUs, network interfaces."""

from __future__ import annotations

import contextlib
from pathlib import Path

from unisono.foundation.records import record
from unisono.tuning.machine.gpu_inventory import Gpu, gpus
from unisono.tuning.machine.levels import Processors, processors, ranges

_NETWORKS = Path("/sys/class/net")
_UNKNOWN = -1


@record
class Interface:
    """A network interface.

    Attributes:
        name: such as "eth0".
        addresses: its addresses, IPv4 before IPv6.
        bits_per_s: the speed of its link; 0 if the driver does not report one, as in virtual machines.
        numa: the NUMA node of its device; -1 if the system does not report one.
    """

    name: str
    addresses: tuple[str, ...]
    bits_per_s: float
    numa: int

    def __str__(self) -> str:
        """Return the interface in words, such as ``eth0 10.0.0.7 (25 Gbit/s, NUMA node 1)``."""
        speed = f"{self.bits_per_s / 1e9:g} Gbit/s" if self.bits_per_s else "speed unknown"
        node = f", NUMA node {self.numa}" if self.numa >= 0 else ""
        return f"{self.name} {' '.join(self.addresses)} ({speed}{node})"


@record
class Machine:
    """The hardware and software of this machine.

    Attributes:
        processors: the sets of processors that share a core, a cache, a NUMA node or a socket.
        numa_distances: for each NUMA node, its distance to each node, in the units of ACPI: 10 is the node itself.
        gpus: the GPUs, according to NVML.
        interfaces: the network interfaces that have an address beyond this machine.
    """

    processors: Processors
    numa_distances: tuple[tuple[int, ...], ...]
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]

    def describe(self) -> dict[str, str]:
        """Return each kind of part in words."""
        levels = self.processors.levels
        sets = {name: ", ".join(ranges(sorted(each)) for each in groups) for name, groups in levels.items()}
        return {
            "processors": "; ".join(f"{name}: {text}" for name, text in sets.items()) or "no levels are known",
            "gpus": ", ".join(gpu.name for gpu in self.gpus) or "none",
            "network": ", ".join(map(str, self.interfaces)) or "loopback only",
        }


@record
class Topology:
    """Where the ranks of a communicator are, and the parts of this rank's machine.

    Attributes:
        hosts: the ranks of each host, in the order of their lowest ranks.
        host: the index of this rank's host in `hosts`.
        machine: the machine of this rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    machine: Machine


def machine() -> Machine:
    """Return the parts of this machine. Reads /sys and asks NVML, which takes milliseconds."""
    return Machine(processors(), _numa_distances(), gpus(), interfaces())


def interfaces(root: Path = _NETWORKS) -> tuple[Interface, ...]:
    """Return the network interfaces of this process that have an address beyond this machine."""
    from ipaddress import ip_address

    import ifaddr

    found = []
    for adapter in ifaddr.get_adapters():
        numeric = [ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0]) for ip in adapter.ips]
        usable = [address for address in numeric if not address.is_link_local and not address.is_loopback]
        if usable:
            folder = root / str(adapter.name)
            speed = _number(folder / "speed")
            found.append(
                Interface(
                    str(adapter.name),
                    tuple(str(address) for address in sorted(usable, key=lambda address: address.version)),
                    speed * 1e6 if speed > 0 else 0.0,
                    _number(folder / "device/numa_node"),
                )
            )
    return tuple(sorted(found, key=lambda interface: interface.name))


def _numa_distances(root: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    files = sorted(root.glob("node[0-9]*/distance"), key=lambda path: int(path.parent.name.removeprefix("node")))
    return tuple(tuple(map(int, path.read_text().split())) for path in files)


def _number(path: Path) -> int:
    """Return the number in a file; -1 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return _UNKNOWN

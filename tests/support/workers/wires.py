"""Workers in network namespaces of their own, joined by a switch; a wire can be cut without a word."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_DEVICE, _BRIDGE = "eth0", "bridge0"


@dataclass(frozen=True, slots=True)
class Wires:
    """Namespaces `name-0`, `name-1`, ... and `name-switch`."""

    name: str
    count: int

    @property
    def meeting(self) -> str:
        """Where workers meet: at the first of them."""
        return f"tcp://{_address(0)}:29511"

    def enter(self, rank: int) -> None:
        """From now on this process has no network but the worker's wire."""
        with open(f"/run/netns/{self.name}-{rank}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = _DEVICE

    def cut(self, rank: int) -> None:
        """Nothing comes through the worker's wire any more, and nobody is told."""
        _ip("-n", f"{self.name}-switch", "link", "set", f"to-{rank}", "down")

    def _lay(self) -> None:
        switch = f"{self.name}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", switch, "link", "set", _BRIDGE, "up")
        for rank in range(self.count):
            own, wire = f"{self.name}-{rank}", f"to-{rank}"
            _ip("netns", "add", own)
            _ip("-n", switch, "link", "add", wire, "type", "veth", "peer", "name", _DEVICE, "netns", own)
            _ip("-n", switch, "link", "set", wire, "master", _BRIDGE, "up")
            _ip("-n", own, "address", "add", f"{_address(rank)}/24", "dev", _DEVICE)
            _ip("-n", own, "link", "set", "lo", "up")
            _ip("-n", own, "link", "set", _DEVICE, "up")

    def _tear(self) -> None:
        for end in ("switch", *range(self.count)):
            subprocess.run(["ip", "netns", "del", f"{self.name}-{end}"], capture_output=True, check=False)


@contextmanager
def wires(count: int) -> Iterator[Wires]:
    """So many workers' wires; `CalledProcessError` or `FileNotFoundError` where that is not permitted."""
    laid = Wires(f"stowplan-{os.getpid()}", count)
    try:
        laid._lay()
        yield laid
    finally:
        laid._tear()


def _address(rank: int) -> str:
    return f"10.57.9.{rank + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

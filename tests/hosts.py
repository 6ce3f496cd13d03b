"""Several hosts on one machine: network namespaces, each with an address of its own on a common bridge."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

_networks = itertools.count()


class Host:
    def __init__(self, name: str, ip: str) -> None:
        self.name, self.ip = name, ip
        self.within = ("ip", "netns", "exec", name)
        """A command that runs another one there."""

    def cut_off(self) -> None:
        """Pull its cable."""
        _ip("link", "set", f"{self.name}v", "down")

    def plug_in(self) -> None:
        _ip("link", "set", f"{self.name}v", "up")


class Network:
    """A bridge, on which this machine has an address, too."""

    def __init__(self) -> None:
        number = os.getpid() % 200 + next(_networks)
        self.name = f"frt{os.getpid()}"[:11]
        self._prefix = f"198.18.{number}"  # RFC 2544: for tests of networks
        self.ip = f"{self._prefix}.1"
        """Of this machine."""
        self._hosts: list[Host] = []
        _ip("link", "add", self.name, "type", "bridge")
        _ip("addr", "add", f"{self.ip}/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    def add_host(self) -> Host:
        number = len(self._hosts) + 2
        host = Host(f"{self.name}{number}", f"{self._prefix}.{number}")
        self._hosts.append(host)
        outside = f"{host.name}v"
        _ip("netns", "add", host.name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", outside, "master", self.name, "up")
        for command in (f"addr add {host.ip}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip("-n", host.name, *command.split())
        return host

    def close(self) -> None:
        """Whoever still runs there keeps the namespace until it ends."""
        for host in self._hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self.name)


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where this machine lets nobody make one."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("several hosts need network namespaces: root, and Debian's iproute2")
    try:
        made = Network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

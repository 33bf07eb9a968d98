"""Says by which addresses other hosts may reach this one, and which of another host's can be reached from here."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, on Linux
_CONNECT_SECONDS = 2.0


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this host's interfaces, the loopback's left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def reachable(hosts: Sequence[str], port: int) -> str:
    """Returns the first of a host's names and addresses at which somebody listens on a port; else the first.

    Where names are not resolved, or a host has networks that this one is not in, not all of them lead there.
    """
    for host in hosts:
        with suppress(OSError), socket.create_connection((host, port), _CONNECT_SECONDS):
            return host
    return hosts[0]

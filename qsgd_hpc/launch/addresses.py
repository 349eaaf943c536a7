"""Names and addresses of this host, for the launcher and for ranks."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["own_addresses"]


def own_addresses() -> list[str]:
    """Return names and addresses of this host for other hosts, the most likely first."""
    host = socket.gethostname()
    found = [host]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]
    # The address of the interface with the default route; nothing is sent by connecting UDP.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]

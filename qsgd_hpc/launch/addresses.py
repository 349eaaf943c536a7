"""Names and addresses of this host, for the launcher and for ranks."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["own_addresses"]


def own_addresses() -> list[str]:
    """Return names and addresses of this host for other hosts, the most likely first."""
    host = socket.gethostname()
    found = [host]
    with contextlib.suppress(OSError):
        # As bytes, since a str would load the IDNA codec, which takes 4 ms.
        answers = socket.getaddrinfo(os.fsencode(host), None, socket.AF_INET)
        found += [str(answer[4][0]) for answer in answers]
    # The address of the interface with the default route; nothing is sent by connecting UDP.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    return [*dict.fromkeys(found), "127.0.0.1"]

"""Where ranks meet: names and addresses of this host, and a port that is reserved for them.

As a program, it prints the port, and exits when the reader has ended. A job script runs this file
by its path and reads the port, so it uses the standard library only.

The port is bound, but nothing listens on it: the kernel does not assign it to others that request a
free port, but torch's store can still listen there, because both set SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

__all__ = ["held_port", "main", "own_addresses"]


def held_port(port: int = 0) -> socket.socket:
    """Return a socket that reserves a port of this host until it is closed; 0: any free port.

    Raises:
        OSError, OverflowError: another process uses it, or the number is invalid.
    """
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", port))
    except BaseException:
        holder.close()
        raise
    return holder


def main() -> None:
    """Print a port and reserve it until the reader closes standard output."""
    with held_port() as holder:
        os.write(1, b"%d\n" % holder.getsockname()[1])
        closed = select.poll()
        closed.register(1, 0)  # report only errors, such as the end of the reader
        closed.poll()


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


if __name__ == "__main__":
    main()

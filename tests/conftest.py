"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure():
    """Give children of a pytest that a shell has started in the background their Ctrl-C back."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Start the files with slow tests first: two workers share the files, and end together then."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

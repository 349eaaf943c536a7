"""Builds and releases this package; no part of what is installed."""

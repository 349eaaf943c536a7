"""Build and release of this package; not installed."""

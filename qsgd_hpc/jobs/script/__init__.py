"""Job scripts, rendered from a request and a site profile."""

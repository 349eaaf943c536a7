"""Logic of the framework modules that needs no framework, written once."""

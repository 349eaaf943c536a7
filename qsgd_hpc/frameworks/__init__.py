"""Code shared by the framework modules, independent of any framework."""

"""What the framework modules share, independent of any framework."""

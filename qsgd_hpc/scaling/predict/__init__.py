"""What training would take on more nodes than were measured: a prediction, never a measurement."""

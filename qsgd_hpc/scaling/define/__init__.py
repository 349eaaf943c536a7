"""The definition of a study: what is trained, at which points, on which networks."""

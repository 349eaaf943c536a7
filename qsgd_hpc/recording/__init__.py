"""Records of a training: user records, steps, the engine and the host."""

"""What a training writes down about itself: records, steps, the engine and the host."""

"""Records of jobs under $QSGD_HOME: requests, states, events, keys."""

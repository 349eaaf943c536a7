"""Records of a training: user records, steps, the engine and the host."""

__all__ = ["STEP_MARK"]

STEP_MARK = "qsgd_hpc.step."  # prefix of the names of operations that only mark a step

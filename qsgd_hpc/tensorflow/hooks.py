"""Hooks for the sessions of TF1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from qsgd_hpc.tensorflow.variables import broadcast_global_variables

__all__ = ["BroadcastGlobalVariablesHook"]


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that broadcasts root_rank's variables after a session has set or restored them.

    Args:
        root_rank: the rank whose values are copied.
        device: the device of the operations; default: that of the variables.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self._root_rank = root_rank
        self._device = device
        self._broadcast: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, once for each graph."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device or None):
                self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast; called on every rank, each with its own session."""
        session.run(self._broadcast)

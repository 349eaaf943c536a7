"""``broadcast`` as a collective that JAX can execute, compile and differentiate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from qsgd_hpc.frameworks.eager import start_broadcast
from qsgd_hpc.jax.ops._allreduce import Allreduce
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import Arrays, Collective, Shape, run
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Average, Handle

__all__ = ["Broadcast"]


@dataclass(frozen=True)
class Broadcast(Collective):
    """A broadcast of one rank's arrays to all ranks of a process set."""

    root_rank: int
    """A rank of the job."""

    kind: ClassVar[str] = "broadcast"

    @property
    def in_place(self) -> bool:
        """Whether results replace the arguments: the core uses one buffer for both."""
        return True

    def start_one(self, index: int, array: Any) -> Handle:
        """Start replacing a copy of an array."""
        name = self.names[index]
        return start_broadcast(
            ARRAYS, array, self.root_rank, name, self.process_set, in_place=False
        )

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the root rank."""
        return {"root": self.root_rank}

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return the mean of all ranks' cotangents on the root, else 0."""
        means = run(Allreduce(**self.transposed_names(), op=Average), cotangents)
        # Hide the condition from JAX and XLA: on ranks other than the root, they would remove the
        # unused means or reorder them, and the ranks' programs would differ.
        hidden: Any = jax.lax.optimization_barrier
        root = hidden(jnp.asarray(basics.rank() == self.root_rank))
        return [jnp.where(root, mean, jnp.zeros_like(mean)) for mean in means]

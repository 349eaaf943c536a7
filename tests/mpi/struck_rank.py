"""Trains, or loops over one collective, until this rank is struck in the phase that is asked for.

Called by test_failures_phases.py: struck_rank.py PHASE ACTION VICTIM [STOP_S].
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

PHASE, ACTION, VICTIM = sys.argv[1], sys.argv[2], int(sys.argv[3])
STOP_S = sys.argv[4] if len(sys.argv) > 4 else "2"
ME = next(int(os.environ[n]) for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ)
STEPS, STRIKE_AT = 6, 3
DELAY_S = 0.2


def strike() -> None:
    """Do to this rank what is asked for; returns only after a stop."""
    print(f"struck at {time.time()}", flush=True)
    if ACTION == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ACTION == "raise":
        raise ValueError(f"struck in {PHASE}")
    if ACTION == "exit":
        sys.exit(0)
    subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def reach(phase: str, step: int = STRIKE_AT) -> None:
    """Strike where this is the place."""
    if (phase, ME, step) == (PHASE, VICTIM, STRIKE_AT):
        strike()


reach("before_import")

import torch  # noqa: E402

import qsgd_hpc.torch as hvd  # noqa: E402

torch.set_num_threads(1)
reach("before_init")
hvd.init()
reach("before_first")


class Place(torch.nn.Module):
    """A layer in the midst of the network, in whose forward and backward pass a rank is struck."""

    step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass x on."""
        reach("forward", self.step)
        x.register_hook(lambda _: reach("backward", self.step))
        return x


def train() -> None:
    """Train a few steps; the gradients behind the place are under way when backward reaches it."""
    layer = [torch.nn.Linear(400, 400) for _ in range(4)]
    place = Place()
    model = torch.nn.Sequential(*layer[:2], place, *layer[2:])
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    sgd.register_step_pre_hook(lambda *_: reach("step", place.step))
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), compression=hvd.Compression.qsgd(bits=4)
    )
    hvd.broadcast_parameters(model.state_dict())
    for place.step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 400)).square().mean().backward()
        optimizer.step()


COLLECTIVES = {
    "allreduce": lambda x: hvd.allreduce(x, name="x"),
    "coded allreduce": lambda x: hvd.allreduce(x, name="x", compression=hvd.Compression.qsgd(4)),
    "grouped allreduce": lambda x: hvd.grouped_allreduce([x, x], name="x"),
    "broadcast": lambda x: hvd.broadcast(x, 0, name="x"),
    "allgather": lambda x: hvd.allgather(x, name="x"),
    "alltoall": lambda x: hvd.alltoall(x, name="x"),
    "reducescatter": lambda x: hvd.reducescatter(x, name="x"),
    "barrier": lambda _: hvd.barrier(),
}


def loop(collective: str) -> None:
    """Call one collective again and again; it is struck in the midst of it, or between two."""
    x = torch.ones(hvd.size() * 50_000)
    struck = []

    def on_alarm(*_: object) -> None:
        if ACTION != "kill":  # else all ranks might end before this one is killed
            struck.append(True)
        strike()

    if ME == VICTIM and ACTION in ("kill", "stop"):
        # Wherever the exchange is just then: a handler would run where Python looks for signals.
        threading.Timer(DELAY_S, on_alarm).start()
    elif ME == VICTIM:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, DELAY_S)
    going_on = True
    while going_on:
        COLLECTIVES[collective](x)
        going_on = not hvd.broadcast_object(bool(struck), VICTIM)


if PHASE in COLLECTIVES:
    loop(PHASE)
else:
    train()
if PHASE == "shutdown" and ME == VICTIM:
    time.sleep(DELAY_S)  # the others have gone ahead
    strike()
hvd.shutdown()
print(f"finished {ME}", flush=True)

"""Commit a training's state, and resume from the last commit after a failure.

MPI can neither continue without a rank nor add ranks. Therefore a job that has lost a rank ends.
With ``QSGD_ELASTIC_CHECKPOINT=FILE`` (or ``@elastic.run(checkpoint=FILE)``) every
``state.commit()`` writes the state to a file, and the next job, on any number of ranks, resumes
from it. After failures that leave all ranks alive (different shapes on the ranks, NaN in a
gradient) the job continues: every rank returns to the last commit and tries again.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from qsgd_hpc import env
from qsgd_hpc._notices import report
from qsgd_hpc.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    RankFailedError,
    UsageError,
)
from qsgd_hpc.frameworks.parts import ElasticShares, Part, SamplerPart, StatefulPart, ValuePart
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.feedback import (
    Shares,
    error_feedback_state,
    load_error_feedback_state,
    own_shares,
    parts_of,
    sum_of_shares,
)
from qsgd_hpc.runtime.objects import broadcast_object

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run"]


# The state of this process whose commits a file has.
_owners: dict[Path, object] = {}


class State:
    """Named values that are committed together; they are attributes of this object.

    Args:
        attributes: picklable values, or objects with ``state_dict`` and ``load_state_dict``, such
            as schedulers and loss scalers.
    """

    def __init__(self, **attributes: Any) -> None:
        self._parts: dict[str, Part] = {}
        self._callbacks: list[Callable[[], Any]] = []
        self._file: Path | None = None
        self._own = object()  # stands for this state in _owners, and does not keep it alive
        self._in_file = False  # whether the file has a commit of this training
        # Residuals of error feedback at the last commit: with a file all, without it this rank's.
        self._owed: dict[str, Any] = {}
        self._shares: Shares = {}
        self._committed: dict[str, Any] = {}
        self._commits = 0
        for name, value in attributes.items():
            self._parts[name] = self._part(value)
        self.save()

    def _part(self, value: Any) -> Part:
        if isinstance(value, Part):
            return value
        if isinstance(value, ElasticShares):
            return SamplerPart(value)
        stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        return StatefulPart(value) if stateful else ValuePart(value)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {})
        if name not in parts:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return parts[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__.get("_parts", {})
        if name not in parts:
            super().__setattr__(name, value)
        elif isinstance(parts[name], ValuePart):
            parts[name].value = value
        else:
            parts[name] = self._part(value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register callbacks without arguments, called after the job has been formed again.

        They also run in the next job, after it has resumed from a file: its number of ranks may
        differ. Rank 0's state is copied to all ranks after them.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a job that has been formed again."""
        for part in self._parts.values():
            part.begin_again()
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Hook for derived classes, called before the reset callbacks; does nothing here."""

    def keep_in(self, file: str | os.PathLike[str]) -> None:
        """Also write every commit to this file; ``elastic.run`` calls it if a file is set."""
        self._file = Path(file).absolute()

    def save(self) -> None:
        """Keep a copy of the state in memory, on this rank only."""
        self._committed = {name: part.capture() for name, part in self._parts.items()}

    def restore(self) -> None:
        """Return to the copy of ``save`` or ``commit``, on this rank only."""
        for name, captured in self._committed.items():
            self._parts[name].put_back(captured)

    def commit(self) -> None:
        """Keep a copy in memory, and in the file of ``keep_in``, if set.

        With a file it is collective: every rank must call it, between two steps. Rank 0 replaces
        the file atomically; the residuals of error feedback are included.
        """
        self.save()
        if self._file is None:
            self._shares = self._own_shares()
        else:
            self._owed = error_feedback_state()
            self._write_file(self._file)
            self._in_file = True
            _owners[self._file] = self._own
        self._commits += 1  # an incomplete one does not make another attempt succeed
        self.check_host_updates()

    def _own_shares(self) -> Shares:
        try:
            return own_shares() if basics.is_initialized() else {}
        except UsageError:  # reductions are in flight, and with them their residuals
            return {}

    def check_host_updates(self) -> None:
        """Do nothing: a batch job's hosts do not change, so there is no interrupt to raise."""

    def sync(self) -> None:
        """Copy the state of rank 0 to every rank, and keep a copy; collective."""
        for part in self._parts.values():
            part.sync()
        self.save()

    def _continues(self) -> bool:
        """Return whether the file has this state's own commits, which are not newer than it.

        Collective if there is a file.

        Raises:
            UsageError: it has those of another state of this process.
        """
        if self._file is None:
            return False
        if not broadcast_object(basics.rank() == 0 and self._file.exists(), 0, None):
            _owners.pop(self._file, None)  # removed, to start from the beginning
        owner = _owners.get(self._file)
        if owner not in (None, self._own):
            raise UsageError(
                f"{self._file} has the commits of another state of this process; give each its "
                'own file: @elastic.run(checkpoint="...")'
            )
        return owner is not None

    def _write_file(self, file: Path) -> None:
        parts = {n: self._parts[n].merge(captured) for n, captured in self._committed.items()}
        content = {"parts": parts, "owed": self._owed}
        if basics.rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f".{file.name}.new")
            with new.open("wb") as stream:
                self._dump(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            new.replace(file)

    def resume(self) -> bool:
        """Return to the last commit in the file, if there is one; collective.

        Returns:
            Whether there was one. Rank 0 then has the state of the file; ``sync`` distributes it.
        """
        file = self._file
        found = file is not None and basics.rank() == 0 and file.exists()
        if not broadcast_object(found, 0, None):
            return False
        self._in_file = True
        if self._file is not None:
            _owners[self._file] = self._own
        owed = None
        if found and file is not None:
            report(f"resuming from the commit in {file}")
            with file.open("rb") as stream:
                content = self._load(stream)
            for name, captured in content["parts"].items():
                if name in self._parts:
                    part = self._parts[name]
                    if difference := part.difference(captured):
                        report(
                            f"{name}{difference}. The training goes on with the file's. "
                            "If the model has changed, remove the file to start from the beginning"
                        )
                    part.put_back(captured)
            owed = content["owed"]
        self._owed = broadcast_object(owed, 0, None)
        load_error_feedback_state(self._owed)
        return True

    def _owe_again(self) -> None:
        """Restore the residuals of the last commit in a job that has been formed again."""
        known = basics.context().process_sets  # sets that were added later are not there
        owed = sum_of_shares(self._shares) if self._file is None else self._owed
        load_error_feedback_state(
            {
                name: values
                for name, values in owed.items()
                if (of_set := parts_of(name)[0]) == 0 or of_set in known
            }
        )

    def _dump(self, content: Any, stream: BinaryIO) -> None:
        pickle.dump(content, stream)

    def _load(self, stream: BinaryIO) -> Any:
        return pickle.load(stream)


class ObjectState(State):
    """A :class:`State` for scripts that create it with Horovod's arguments.

    Args:
        bcast_object: accepted for compatibility.
        get_rank: accepted for compatibility.
        attributes: as of a :class:`State`.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any) -> None:
        super().__init__(**attributes)


def run(
    func: Callable[..., Any] | None = None, *, checkpoint: str | os.PathLike[str] | None = None
) -> Any:
    """Decorate a function whose first argument is a :class:`State`, so that it survives failures.

    Before the function starts, the state is resumed from the commit in the file, if there is one,
    and the reset callbacks are called; then rank 0's state is copied to all ranks. If a collective
    fails (``HorovodInternalError``), every rank returns to the last commit. Then,

    - if all ranks are alive, they form the job again, the reset callbacks are called, and the
      function is called again. A second failure without a ``commit()`` in between is raised,
      because it would occur again;
    - if a rank has died, ``RankFailedError`` is raised; its message names the last commit.

    Args:
        func: the function.
        checkpoint: file for the commits; default: ``QSGD_ELASTIC_CHECKPOINT``, else none. If the
            file exists, the training resumes from it; remove it to start from the beginning.
    """
    if func is None:
        return functools.partial(run, checkpoint=checkpoint)

    @functools.wraps(func)
    def resumed(state: State, *args: Any, **kwargs: Any) -> Any:
        file = checkpoint or env.get("QSGD_ELASTIC_CHECKPOINT")
        if file:
            state.keep_in(file)
        if not state._continues() and state.resume():
            state.on_reset()
        return _attempts(func, state, args, kwargs)

    return resumed


def _attempts(func: Callable[..., Any], state: State, args: Any, kwargs: Any) -> Any:
    failed_at = -1  # commits before the last failure
    sync = True
    numbers = basics.object_numbers()
    while True:
        try:
            if sync:
                state.sync()
            return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            sync = not interrupt.skip_sync
        except HorovodInternalError as error:
            state.restore()
            sync = True
            if not _all_alive(error):
                raise RankFailedError(_final_message(state, error)) from error
            if state._commits == failed_at:
                raise
            failed_at = state._commits
        basics.restart()
        # Objects that func makes get the names of its first call, not those of the surviving ones.
        basics.context().counters.update(numbers)
        state._owe_again()
        state.on_reset()


def _all_alive(error: HorovodInternalError) -> bool:
    left = isinstance(error, RankFailedError) and basics.RESTARTING not in str(error)
    return not left and not basics.context().engine.aborted()


def _final_message(state: State, error: Exception) -> str:
    if state._in_file:
        remedy = f"The last commit is in {state._file}: restart the job to resume from it."
    elif state._file is not None:
        remedy = f"No commit is in {state._file} yet: a restarted job starts from the beginning."
    else:
        remedy = (
            "Set QSGD_ELASTIC_CHECKPOINT to a file and call state.commit() periodically, so that "
            "a restarted job resumes from it."
        )
    return f"{error}\nThis job cannot continue without that rank. {remedy}"

"""Autotuning: the search alone, and a tuner on a real engine of two ranks."""

from __future__ import annotations

import csv
import math
import shutil
import sys
import threading
import time

import numpy as np
import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import autotune, planning
from qsgd_hpc.runtime.autotune import MIB, Search, Settings, Space, Tuner, require_optuna
from tests.engine.ranks import on_ranks

SPACE = Space(algorithms=("auto", "ring", "direct"), bits=(2, 4, 8))


def speed(settings):
    """Peak at 16 MiB, 1 ms, ring, 4 bits: 1.0; every step away from it costs."""
    away = abs(math.log2(settings.fusion_bytes / (16 * MIB)))
    away += abs(settings.cycle_time_ms - 1.0) + (settings.algorithm != "ring")
    return 1 / (1 + 0.2 * (away + abs(math.log2(settings.bits / 4))))


def searched(space=SPACE, allowed=lambda settings: True, **options):
    search = Search(space, **{"seed": 3, "trials": 60, "patience": 60, **options})
    tried = []
    while not search.finished:
        settings = search.ask()
        tried.append(settings)
        search.tell(settings, speed(settings), allowed=allowed(settings))
    return search, tried


def test_search_comes_near_the_best_settings():
    search, tried = searched()
    assert search.best_speed == speed(search.best) == max(map(speed, tried))
    assert search.best_speed > 0.8
    assert search.best.algorithm == "ring"


def test_search_beats_as_many_settings_at_random():
    rng = np.random.default_rng(1)
    at_random = [
        max(
            speed(Settings(int(2 ** rng.uniform(0, 8)) * MIB, rng.choice(SPACE.cycle_time_ms),
                           rng.choice(SPACE.algorithms), rng.choice(SPACE.bits)))
            for _ in range(30)
        )
        for _ in range(20)
    ]  # fmt: skip
    found = [searched(seed=seed, trials=30)[0].best_speed for seed in range(3)]
    assert np.mean(found) > np.mean(at_random)


def test_the_same_seed_tries_the_same():
    assert searched(trials=25)[1] == searched(trials=25)[1]
    assert searched(trials=25)[1] != searched(trials=25, seed=4)[1]


def test_settings_of_the_last_run_are_tried_first():
    first = Settings(32 * MIB, 2.5, "direct", 8), Settings(16 * MIB, 1.0, "ring", 4)
    search, tried = searched(first=first)
    assert tuple(tried[:2]) == first
    assert search.best == first[1]


def test_first_settings_outside_of_the_space_are_brought_into_it():
    odd = Settings(1 << 40, 77.0, "sra", 3)
    _, tried = searched(first=(odd,), trials=1)
    assert tried[0].fusion_bytes == 256 * MIB
    assert tried[0].algorithm in SPACE.algorithms


def test_search_stops_when_nothing_gets_better():
    first = (Settings(16 * MIB, 1.0, "ring", 4),)
    _, tried = searched(first=first, patience=7)
    assert len(tried) == 1 + 7


def test_what_is_not_allowed_is_never_kept():
    search, tried = searched(allowed=lambda settings: settings.bits == 8)
    assert any(settings.bits != 8 for settings in tried)
    assert search.best.bits == 8


def test_what_the_environment_fixes_is_left_alone(monkeypatch):
    monkeypatch.setenv("QSGD_FUSION_BYTES", "1000")
    monkeypatch.setenv("QSGD_ALGORITHM", "ring")
    space = autotune.space_from_environment(4)
    assert (space.fusion_mib, space.algorithms, space.bits) == ((), (), ())
    assert Search(space, trials=1).ask().fusion_bytes is None


def test_bits_are_tried_under_a_budget_alone(monkeypatch):
    monkeypatch.setenv("QSGD_BITS", "4")
    assert autotune.space_from_environment(4).bits == ()
    monkeypatch.setenv("QSGD_NMSE_BUDGET", "0.1")
    assert autotune.space_from_environment(4).bits == (2, 4, 8)
    monkeypatch.setenv("QSGD_RULES", "*head*=8")
    assert autotune.space_from_environment(4).bits == ()
    monkeypatch.delenv("QSGD_RULES")
    for other in ("3", "auto"):  # to which the core cannot be tuned back
        monkeypatch.setenv("QSGD_BITS", other)
        assert autotune.space_from_environment(4).bits == ()


def test_segments_are_tried_where_gradients_are_compressed(monkeypatch):
    assert autotune.space_from_environment(4).segment_elements == ()
    monkeypatch.setenv("QSGD_BITS", "4")
    space = autotune.space_from_environment(4)
    assert 0 in space.segment_elements
    search = Search(space, trials=40)
    tried = set()
    while not search.finished:
        settings = search.ask()
        tried.add(settings.segment_elements)
        search.tell(settings, 2.0 if settings.segment_elements == 1 << 16 else 1.0)
    assert tried == set(space.segment_elements)
    assert search.best.segment_elements == 1 << 16
    monkeypatch.setenv("QSGD_SEGMENT_ELEMENTS", "65536")
    assert autotune.space_from_environment(4).segment_elements == ()


def test_a_missing_optimiser_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"qsgd-hpc\[autotune\]"):
        require_optuna()


class Training:
    """An engine whose gradients come in a burst every 20 ms, faster the better it is tuned."""

    def __init__(self, nmse=None):
        self.told = []
        self._nmse = nmse or {}
        self._began = time.monotonic()

    def tune(self, **settings):
        self.told.append(settings)

    def stats(self):
        steps = int((time.monotonic() - self._began) / 0.02)
        return {"gradient_bytes": steps * 1000 * len(self.told)}

    def quality(self):
        steps = int((time.monotonic() - self._began) / 0.02)
        nmse = self._nmse.get(self.told[-1].get("bits"), 0.0)
        return {"w": {"nmse": nmse, "reductions": steps}, "once": {"nmse": 0.9, "reductions": 1}}


def tuned(tmp_path, engine, search, **options):
    """Run a tuner to its end; return what it chose and its log."""
    ended = threading.Event()
    found = []
    tuner = Tuner(
        engine, search, window_s=0.05, log=tmp_path / "log.csv",
        on_best=lambda best, speed: (found.append(best), ended.set()), **options,
    )  # fmt: skip
    tuner.start()
    assert ended.wait(60)
    tuner.stop()
    with (tmp_path / "log.csv").open() as file:
        return found[0], list(csv.DictReader(file))


def test_a_log_that_cannot_be_written_is_named_and_does_not_end_the_search(tmp_path, capfd):
    search = Search(Space(cycle_time_ms=(0.0, 1.0)), seed=1, trials=2)
    folder = tmp_path / "logs"
    log, ended = folder / "log.csv", threading.Event()
    tuner = Tuner(
        Training(), search, window_s=0.05, log=log, on_best=lambda best, speed: ended.set()
    )
    with pytest.raises(UsageError, match=r"\(QSGD_AUTOTUNE_LOG\).*log.csv: No such file"):
        tuner.start()
    folder.mkdir()
    tuner.start()
    shutil.rmtree(folder)
    assert ended.wait(60)
    tuner.stop()
    assert capfd.readouterr().err.count("later trials are not logged") == 1


def test_a_tuner_tries_settings_and_leaves_the_best(tmp_path):
    space = Space(cycle_time_ms=(0.0, 1.0), algorithms=("auto", "ring"))
    engine = Training()
    best, rows = tuned(tmp_path, engine, Search(space, seed=1, trials=4))
    assert [row["trial"] for row in rows] == ["1", "2", "3", "4"]
    fastest = max(rows, key=lambda row: float(row["gradient_mb_per_s"]))
    assert fastest["kept"] == "1"
    assert (str(best.fusion_bytes), best.algorithm) == (
        fastest["fusion_bytes"],
        fastest["algorithm"],
    )
    assert len(engine.told) == 4 + 1
    assert engine.told[-1] == {
        "fusion_bytes": best.fusion_bytes,
        "cycle_time_s": best.cycle_time_ms / 1e3,
        "algorithm": best.algorithm,
    }


def test_bits_beyond_the_budget_are_not_kept(tmp_path):
    space = Space(fusion_mib=(), cycle_time_ms=(), algorithms=(), bits=(2, 8))
    search = Search(space, first=(Settings(bits=8), Settings(bits=2)), trials=2)
    engine = Training({2: 0.5, 8: 0.001})
    best, rows = tuned(tmp_path, engine, search, nmse_budget=0.01)
    assert [(row["bits"], row["nmse"]) for row in rows] == [("8", "0.001"), ("2", "0.5")]
    assert best.bits == 8


def test_a_tuner_that_may_keep_nothing_returns_to_the_first_settings(tmp_path, capsys):
    space = Space(fusion_mib=(), cycle_time_ms=(0.0, 1.0), algorithms=(), bits=(2, 4))
    first = Settings(cycle_time_ms=1.0, bits=4)
    search = Search(space, first=(first, Settings(cycle_time_ms=0.0, bits=2)), trials=2)
    engine = Training({2: 0.5, 4: 0.1})
    tuner = Tuner(engine, search, window_s=0.05, nmse_budget=0.01)
    tuner.start()
    tuner._thread.join(60)
    assert [told["bits"] for told in engine.told] == [4, 2, 4]
    assert engine.told[-1] == engine.told[0] == {"cycle_time_s": 1e-3, "bits": 4}
    assert "QSGD_NMSE_BUDGET" in capsys.readouterr().err


def test_a_tuner_changes_a_real_engine_while_two_ranks_train(tmp_path):
    found = []

    def program(me):
        x = np.random.default_rng(me.rank).standard_normal(40_000).astype(np.float32)
        space = Space(cycle_time_ms=(0.0, 1.0), algorithms=("auto", "ring"))
        tuner = None
        if me.rank == 0:
            tuner = Tuner(
                me.engine, Search(space, trials=3), window_s=0.02, log=tmp_path / "log.csv",
                on_best=lambda best, speed: found.append(speed),
            )  # fmt: skip
            tuner.start()
        go_on = np.ones(1, np.float32)
        deadline = time.monotonic() + 60
        while go_on[0]:
            handles = [me.allreduce(f"t{i}", x.copy(), "average") for i in range(4)]
            for handle in handles:
                handle.wait()
            time.sleep(0.01)
            go_on[0] = me.rank == 0 and not found and time.monotonic() < deadline
            me.allreduce("go on", go_on).wait()
        if tuner is not None:
            tuner.stop()

    assert on_ranks(2, program) == [None, None]
    with (tmp_path / "log.csv").open() as file:
        speeds = [float(row["gradient_mb_per_s"]) for row in csv.DictReader(file)]
    assert len(speeds) == 3
    assert found[0] / 1e6 == pytest.approx(max(speeds), abs=1e-3)


def test_a_tuner_stops_at_once_when_the_job_leaves():
    class Idle:
        def tune(self, **settings):
            pass

        def stats(self):
            return {"gradient_bytes": 0}

    tuner = Tuner(Idle(), Search(Space(), trials=4))
    tuner.start()
    began = time.monotonic()
    tuner.stop()
    assert time.monotonic() - began < 2


def test_the_next_job_finds_what_was_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    key = planning.Key("laptop", "MPICH 5", 4, 2, 1)
    other = planning.Key("laptop", "MPICH 5", 8, 2, 1)
    best = Settings(16 * MIB, 1.0, "ring", None)
    assert autotune.load(key) is None
    path = autotune.save(key, best, 1e6)
    assert autotune.load(key) == best
    assert autotune.load(other) is None
    path.write_text("{")
    assert autotune.load(key) is None
    assert "is damaged" in capsys.readouterr().err


def test_a_result_that_cannot_be_kept_costs_a_warning_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "tuned").write_text("not a folder")
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    key = planning.Key("laptop", "MPICH 5", 4, 2, 1)
    autotune._keep(key, Settings(16 * MIB, 1.0, "ring", None), 1e6)
    said = capsys.readouterr().err
    assert str(tmp_path / "tuned") in said and "starts from the beginning" in said

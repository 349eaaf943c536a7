"""The study's folder: nothing measured is lost or edited, whatever happens."""

from __future__ import annotations

import os

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.study import Point, plan
from qsgd_hpc.scaling.store import StudyFolder, finished, parse_records
from tests.scaling.samples import CASE, attempt, attempts, study, written


def test_attempts_come_back_as_they_were_written(tmp_path):
    found = attempts(study())
    folder = written(tmp_path / "s", study(), found)
    assert folder.attempts() == (found, [])
    assert folder.study() == study()


@pytest.mark.parametrize("lost_bytes", [1, 2, 40, 500])
def test_a_torn_last_line_is_reported_and_the_next_attempt_is_whole(tmp_path, lost_bytes):
    first, second, third = attempts(study(bits=(32, 4)))
    folder = written(tmp_path, study(), [first, second])
    size = folder.collection.stat().st_size
    os.truncate(folder.collection, size - lost_bytes)
    before = folder.collection.read_bytes()
    kept, torn = folder.attempts()
    # A line that lacks nothing but its newline is whole.
    assert (kept, torn) == (([first, second], []) if lost_bytes == 1 else ([first], [2]))
    folder.append(third)
    assert folder.collection.read_bytes().startswith(before)
    assert folder.attempts() == ([*kept, third], torn)


def test_a_failed_point_is_not_finished(tmp_path):
    point = Point(CASE, 1, 1, 32, 1)
    bad = attempt(point, speed=1.0, ranks=3)
    assert finished([bad]) == {}
    assert finished([bad, attempt(point, speed=2.0, number=2)])[point.key].number == 2


def test_another_definition_is_refused_with_its_differences(tmp_path):
    folder = written(tmp_path, study(), [])
    with pytest.raises(UsageError) as caught:
        folder.create(study(nodes=(1, 4), epochs=2))
    text = str(caught.value)
    assert "nodes: the folder has 1,2, this command has 1,4" in text
    assert "epochs: the folder has nothing, this command has 2" in text
    assert folder.study() == study()


def test_a_definition_with_which_all_points_failed_may_be_replaced(tmp_path):
    other, bad = study(nodes=(1, 4)), attempt(Point(CASE, 1, 1, 32, 1), speed=1.0, ranks=3)
    folder = written(tmp_path, study(), [bad])
    with folder.locked(), pytest.raises(UsageError, match="another qsgd-hpc scale"):
        folder.create(other)
    folder.create(other)
    assert folder.study() == other
    folder.append(attempt(Point(CASE, 1, 1, 32, 1), speed=2.0, number=2))
    with pytest.raises(UsageError, match="another definition"):
        folder.create(study())


def test_a_replaced_definition_leaves_no_job_to_follow(tmp_path):
    bad = attempt(Point(CASE, 1, 1, 32, 1), speed=1.0, ranks=3)
    folder = written(tmp_path, study(), [bad])
    under_way = folder.next_attempt(Point(CASE, 2, 2, 32, 1))
    under_way.path.mkdir(parents=True)
    under_way.write_note({"job": "local-7"})
    folder.create(study())
    assert under_way.note() == {"job": "local-7"}
    folder.create(study(args=("--model", "resnet50")))
    assert not under_way.note()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(UsageError, match=r"file.*cannot be written"):
        StudyFolder(blocker / "s").create(study())
    with pytest.raises(UsageError, match="contains no study"):
        StudyFolder(tmp_path).study()


def test_two_runs_cannot_work_in_one_folder(tmp_path):
    folder = written(tmp_path, study(), [])
    second = pytest.raises(UsageError, match="another qsgd-hpc scale")
    with folder.locked(), second, folder.locked():
        pass
    with folder.locked():
        pass


def test_attempts_are_numbered_on(tmp_path):
    folder = written(tmp_path, study(), [])
    point = plan(study())[0]
    assert [folder.new_attempt(point).number for _ in range(11)] == list(range(1, 12))
    assert [a.number for a in folder.attempt_folders(point)] == list(range(1, 12))


def test_a_study_of_another_format_is_refused(tmp_path):
    folder = written(tmp_path, study(), [])
    file = tmp_path / "study.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(UsageError, match="format 99"):
        folder.study()
    file.write_text("{torn")
    with pytest.raises(UsageError, match="cannot be read"):
        folder.study()


def test_records_of_a_killed_rank_are_read_up_to_the_tear():
    text = '{"event": "epoch"}\n{"event": "fi'
    assert parse_records(text) == (({"event": "epoch"},), 1)
    assert parse_records("") == ((), 0)

"""``qsgd-hpc bench`` refuses what it cannot measure before it starts anything."""

from __future__ import annotations

import json
import os

import pytest

from qsgd_hpc import cli
from qsgd_hpc.bench import cli as bench_cli
from qsgd_hpc.launch.claims import OF_ONE_RANK


@pytest.fixture
def bench(monkeypatch, capsys):
    """Return call(*words) -> (exit code, stdout, stderr), outside of any MPI job."""
    for name in [name for name in os.environ if OF_ONE_RANK.fullmatch(name)]:
        monkeypatch.delenv(name)

    def call(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", *words])
        out = capsys.readouterr()
        return end.value.code, out.out, out.err

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["allreduce"], "pass -np 2"),
        (["allreduce", "-np", "1"], "-np 1: at least 2 ranks"),
        (["allreduce", "-np", "0"], "-np 0: at least 2 ranks"),
        (["allreduce", "-np", "2", "--sizes", "4Q"], "size '4Q'"),
        (["allreduce", "-np", "2", "--network", "1gbps"], "the unit is 'gbps'"),
        (["--explain", "-np", "2", "--network", "0mbit"], "must be above 0"),
        (["--explain", "4Q", "-np", "2"], "size '4Q'"),
        (["--explain"], "pass -np 2"),
        (["allreduce", "-np", "2", "--trial"], "add --explain"),
        (["allreduce", "-np", "2", "--bits", "9"], "1 to 8, 32"),
        (["allreduce", "-np", "2", "--algorithm", "rings"], "'rings' is not one of auto, direct"),
        (["allreduce", "-np", "2", "--algorithm", "ring", "--bits", "8,4"], "suits none of"),
        (["allreduce", "-np", "2", "--algorithm", "sra", "--bits", "32"], "suits none of"),
        (["allreduce", "-np", "2", "--scheme", "qsgd,topk"], "'topk' has no choice of bits"),
        (["allreduce", "-np", "2", "--json", "/nowhere/x.json"], "there is no such folder"),
        (["allreduce", "-np", "2", "--seconds", "nan"], "nan is not a finite number"),
        (["allreduce", "-np", "2", "--seconds", "-1"], "-1.0 is not in the range"),
        (["allreduce", "-np", "2", "--bandwidth", "inf"], "inf is not a finite number"),
        (["codec", "--json", "/nowhere/x.json"], "there is no such folder"),
        (["codec", "--json", "/"], "is a directory"),
        (["codec", "--size", "1K,2K"], "one size"),
        (["codec", "--bits", "32"], "1 to 8"),
        (["codec", "--threads", "0"], "at least 1"),
        (["codec", "--scheme", "huffman"], "unknown scheme 'huffman'"),
        (["codec", "--dtype", "float8"], "'float8' is not one of float32, float16, bfloat16"),
        (["codec", "--instruction-set", "mmx"], "instruction set 'mmx': this machine has"),
    ],
)
def test_bad_requests_end_in_a_message(bench, words, said):
    code, _, err = bench(*words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", [[], ["codec"], ["allreduce"]])
def test_help_teaches_by_example(bench, verb):
    code, out, _ = bench(*verb, "--help")
    assert code == 0
    assert out.count("qsgd-hpc bench ") >= 3


def test_codec_prints_its_table_and_writes_it(bench, tmp_path):
    path = tmp_path / "codec.json"
    code, out, _ = bench(
        "codec", "--size", "1M", "--bits", "8,4", "--rounds", "2", "--json", str(path)
    )
    assert code == 0
    record = json.loads(path.read_text())
    assert record["schema"] == 1
    operations = [r["operation"] for r in record["rows"]]
    assert operations[:2] == ["max-abs scan", "y += x"]
    assert operations.count("encode") == operations.count("decode and add") >= 2
    assert all(r["samples"] == 2 and r["gb_per_s"] > 0 for r in record["rows"])
    assert "of max-abs scan" in out
    assert "of y += x" in out


def test_codec_times_other_types_and_instruction_sets(bench, tmp_path):
    path = tmp_path / "codec.json"
    code, out, _ = bench(
        *("codec", "--size", "1M", "--bits", "4", "--rounds", "1", "--threads", "1"),
        *("--dtype", "float16,bfloat16", "--instruction-set", "scalar", "--json", str(path)),
    )
    assert code == 0
    record = json.loads(path.read_text())
    assert record["instruction_set"] == "scalar"
    operations = [r["operation"] for r in record["rows"]]
    assert operations[2:] == [
        *("encode float16", "decode float16"),
        *("encode bfloat16", "decode bfloat16"),
    ]
    assert "scalar" in out


STEP = {"SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "started"),
    [
        ({"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALNRANKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PALS_RANKID": "3"}, True),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"}, True),
        (BATCH_SCRIPT, False),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, False),  # srun --pty bash
        ({}, False),
    ],
)
def test_a_launched_rank_is_told_from_a_shell(environ, started):
    assert bench_cli.launched(environ, 2) == started


def test_one_launched_rank_is_one_if_no_more_are_asked_for():
    assert bench_cli.launched({"PMI_SIZE": "1"})

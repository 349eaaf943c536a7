"""The verb check: what it prints, its exit codes, and what --fix writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qsgd_hpc.cli import VERBS, main
from qsgd_hpc.eight_steps.check import RULES
from qsgd_hpc.eight_steps.check.cli import check_command
from qsgd_hpc.errors import UsageError

GOOD = "import horovod.torch as hvd\n\nhvd.init()\n"
PRINTS = GOOD + "print(1)\n"
HANGS = GOOD + "if hvd.rank() == 0:\n    hvd.barrier()\n"
SERIAL = "import torch\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {"good": GOOD, "prints": PRINTS, "hangs": HANGS, "serial": SERIAL}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(check_command, words)


def test_the_verb_is_in_the_table():
    assert VERBS["check"][0] == "qsgd_hpc.eight_steps.check.cli:check_command"


def test_a_finding_has_place_rule_reason_and_remedy(folder):
    done = run("hangs.py")
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "hangs.py:5:5: error QH901 collective on some ranks only: hvd.barrier runs only where "
        "hvd.rank() == 0 (line 4); the other ranks never call it",
        "    Call it on every rank, outside of the branch.",
        "one script: one error",
    ]


def test_a_clean_script_ends_in_zero(folder):
    done = run("good.py")
    assert (done.exit_code, done.output) == (0, "one script: nothing to report\n")


def test_notes_alone_end_in_zero(folder):
    done = run("prints.py", "good.py")
    assert done.exit_code == 0
    assert done.output.endswith("two scripts: one note; --fix corrects 1\n")


def test_a_serial_script_is_sent_to_convert(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "good.py", "serial.py"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "one script: nothing to report" in said.out
    assert "serial.py: not a distributed script" in said.err
    assert "qsgd-hpc convert serial.py" in said.err


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("import torch.distributed as d\nd.init_process_group('gloo')\n", "torch.distributed."),
        ("from accelerate import Accelerator\n", "accelerate"),
        (
            "from accelerate import Accelerator\nfrom qsgd_hpc.torch.accelerate import compress\n",
            "accelerate",
        ),
        ("from wrapping import model\nfrom qsgd_hpc.torch.ddp import compress\n", "torch."),
        ("import deepspeed\n", "DeepSpeed"),
        ("from transformers import Trainer\nTrainer(m).train()\n", "transformers.Trainer()"),
    ],
)
def test_a_script_of_torch_distributed_is_not_sent_to_convert(folder, capsys, text, by):
    (folder / "ddp.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["check", "ddp.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"ddp.py: not examined, because it is distributed by {by}" in said
    assert "qsgd-hpc run -np 2 ddp.py" in said
    assert "convert" not in said


def test_what_is_no_python_is_a_usage_error(folder):
    (folder / "bad.py").write_text("def (:\n")
    done = run("bad.py")
    assert isinstance(done.exception, UsageError)
    assert "bad.py:1: not valid Python" in str(done.exception)


def test_json_says_the_same(folder):
    done = run("--json", "hangs.py", "prints.py")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert (told["schema"], told["scripts"], told["fixed"]) == (1, 2, 0)
    assert [(f["path"], f["line"], f["column"], f["rule"]) for f in told["findings"]] == [
        ("hangs.py", 5, 5, "QH901"),
        ("prints.py", 4, 1, "QH702"),
    ]
    assert told["findings"][1]["fixable"] is True
    assert told["findings"][1]["step"] == 7


def test_diff_shows_and_writes_nothing(folder):
    done = CliRunner().invoke(check_command, ["--diff", "prints.py"])
    assert "+if hvd.rank() == 0:\n+    print(1)\n" in done.stdout
    assert (folder / "prints.py").read_text() == PRINTS
    assert "one script: one note" in done.stderr


def test_fix_writes_and_counts(folder):
    done = run("--fix", "prints.py")
    assert done.output == "one finding fixed; one script: nothing else to report\n"
    assert (folder / "prints.py").read_text() == GOOD + "if hvd.rank() == 0:\n    print(1)\n"
    before = (folder / "prints.py").stat().st_mtime_ns
    assert run("--fix", "prints.py").output == "one script: nothing to report\n"
    assert (folder / "prints.py").stat().st_mtime_ns == before


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_fix_keeps_line_ends_and_encoding(folder, ends):
    text = b"# -*- coding: latin-1 -*-\n# \xe4\n" + PRINTS.encode()
    (folder / "old.py").write_bytes(text.replace(b"\n", ends))
    run("--fix", "old.py")
    written = (folder / "old.py").read_bytes()
    assert written.count(ends) == written.count(b"\n") == 7
    assert b"\xe4" in written


def test_outputs_exclude_each_other(folder):
    assert isinstance(run("--json", "--sarif", "good.py").exception, UsageError)
    assert isinstance(run("--json", "--diff", "good.py").exception, UsageError)


def test_a_module_beside_the_script_may_take_a_step(folder):
    (folder / "started.py").write_text(
        "import horovod.torch as hvd\n\n\ndef go():\n    hvd.init()\n"
    )
    (folder / "uses.py").write_text(
        "import horovod.torch as hvd\nimport started\n\nstarted.go()\nx = hvd.size()\n"
    )
    assert run("uses.py").exit_code == 0


def test_a_script_whose_module_is_distributed_is_not_called_serial(folder):
    (folder / "common.py").write_text(GOOD)
    (folder / "driver.py").write_text("import common\n\ncommon.train()\n")
    assert run("driver.py").exit_code == 0


def test_what_an_unread_module_may_do_is_no_error(folder):
    (folder / "uses.py").write_text(
        "import horovod.torch as hvd\nimport no_such_module_anywhere as n\n\n"
        "n.go()\nx = hvd.size()\n"
    )
    told = json.loads(run("--json", "uses.py").stdout)
    assert [(f["rule"], f["severity"]) for f in told["findings"]] == [("QH101", "warning")]
    assert "no_such_module_anywhere" in told["findings"][0]["reason"]


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("  # qsgd-hpc: ignore[QH702]", True),
        ("  # qsgd-hpc: ignore", True),
        ("  # qsgd-hpc: ignore[QH101, qh702] wanted", True),
        ("  # qsgd-hpc: ignore[QH101]", False),
        ("  # ignore[QH702]", False),
    ],
)
def test_comments_silence_their_line(folder, comment, silent):
    (folder / "some.py").write_text(GOOD + f"print(1){comment}\nprint(2)\n")
    told = json.loads(run("--json", "some.py").stdout)
    assert [f["line"] for f in told["findings"]] == ([5] if silent else [4, 5])


def test_sarif_has_the_structure_of_2_1_0(folder):
    (folder / "a b.py").write_text(PRINTS)
    log = json.loads(run("--sarif", "hangs.py", "a b.py").stdout)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (only,) = log["runs"]
    rules = only["tool"]["driver"]["rules"]
    assert [each["id"] for each in rules] == [each.id for each in RULES]
    assert only["columnKind"] == "unicodeCodePoints"
    hangs, prints = only["results"]
    for result in only["results"]:
        assert_result(result, rules)
    assert place(hangs) == {"startLine": 5, "startColumn": 5}
    assert hangs["level"] == "error"
    assert prints["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b.py"
    (fix,) = prints["fixes"]
    first = fix["artifactChanges"][0]["replacements"][0]
    assert first["insertedContent"]["text"] == "if hvd.rank() == 0:\n"
    assert first["deletedRegion"] == {
        "startLine": 4, "startColumn": 1, "endLine": 4, "endColumn": 1,
    }  # fmt: skip


def place(result: dict[str, Any]) -> Any:
    return result["locations"][0]["physicalLocation"]["region"]


def assert_result(result: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["level"] in ("error", "warning", "note")
    assert result["message"]["text"]
    assert min(place(result).values()) >= 1


def test_rules_are_told_apart_and_belong_to_steps():
    assert len({each.id for each in RULES}) == len(RULES)
    assert all(re.fullmatch(r"QH\d\d\d", each.id) for each in RULES)
    assert {each.step for each in RULES} == {*range(1, 9), None}

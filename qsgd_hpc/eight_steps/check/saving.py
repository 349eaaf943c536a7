"""Step 7: only rank 0 prints and writes checkpoints. The conversion knows the same writers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from qsgd_hpc.eight_steps.check.facts import Facts
from qsgd_hpc.eight_steps.check.finding import Edit, Finding, guard
from qsgd_hpc.eight_steps.check.reach import guarded, is_reference
from qsgd_hpc.eight_steps.reading import Script, argument, dotted, find, receiver

__all__ = ["ARRAYS", "OPEN", "RECORDS", "WRITES", "check", "is_temporary", "opens", "opens_path"]

# Functions that write the file that an argument names; a pattern, for larger ones.
WRITES = (
    r"torch\.save|numpy\.save\w*|joblib\.dump|matplotlib\.(pyplot|image)\.(savefig|imsave)"
    r"|scipy\.io\.savemat|cv2\.imwrite|torchvision\.utils\.save_image|safetensors\.(\w+\.)?save_(file|model)"
)
OPEN = re.compile(r"^((gzip|io|bz2|lzma|codecs)\.)?open$")
ARRAYS = re.compile(r"^(h5py\.File|netCDF4\.Dataset|zarr\.open\w*|tables\.open_file)$")
WRITING = re.compile(r"[wax][bt+]*")  # a mode
RECORDS = re.compile(r"^tensorflow\.(compat\.v1\.)?(io|python_io)\.TFRecordWriter$")
KERAS = r"(tensorflow\.|tf_keras\.)?keras\."
SAVES = re.compile(
    rf"^({WRITES}|tensorflow\.saved_model\.save)$"
    r"|^tensorflow\.(compat\.v1\.)?train\.(Checkpoint|CheckpointManager|Saver)\(\)\.(save|write)$"
    rf"|^{KERAS}(src\.)?(models\.)?(Sequential|Model|save_model)(\(\)\.(save|save_weights|export))?$"
    rf"|^{KERAS}applications\.[\w.]+\(\)\.(save|save_weights|export)$"
    rf"|^{KERAS}(src\.)?callbacks\.ModelCheckpoint$"
)
LOGS = re.compile(
    r"(^|\.)SummaryWriter$"
    r"|^tensorflow\.summary\.create_file_writer$"
    r"|^tensorflow\.(compat\.v1\.)?summary\.FileWriter$"
    rf"|^{KERAS}(src\.)?callbacks\.(TensorBoard|CSVLogger)$"
)
VALUE_FIRST = re.compile(
    r"^(torch\.save|joblib\.dump)$|saved_model\.save$|\.save_(image|file|model)$"
)
KERAS_SAVES = ("save_weights", "save_pretrained")
SESSIONS = re.compile(r"^tensorflow\.(compat\.v1\.)?train\.MonitoredTrainingSession$")
PATHS = (
    "path", "f", "fp", "file", "fname", "filepath", "filename", "file_prefix", "save_path",
    "log_dir", "backup_dir",
)  # fmt: skip


def is_temporary(script: Script, *paths: cst.CSTNode) -> bool:
    """Return whether a path is in a temporary folder: each rank has its own, with its own files."""
    pending, seen = [*paths], set[cst.CSTNode]()
    while pending:
        made = script.value(pending.pop())
        if script.called(made).startswith("tempfile."):
            return True
        if made not in seen:
            seen.add(made)
            pending += [n for n in script.inside(made) if isinstance(n, cst.Name | cst.Call)]
    return False


def opens(script: Script, call: cst.CSTNode) -> bool:
    """Return whether a call opens a file for writing, by each rank for itself."""
    if not isinstance(call, cst.Call):
        return False
    name, mode = script.called(call), argument(call, "mode", 1)
    writing = "wax" if OPEN.match(name) else "wax+" if ARRAYS.match(name) else ""
    together = argument(call, "driver") or argument(call, "parallel")  # one file, by MPI
    text = mode.raw_value if isinstance(mode, cst.SimpleString) else ""
    alone = not together and any(c in text for c in writing)
    return alone or bool(RECORDS.match(name)) or opens_path(script, call)


def opens_path(script: Script, call: cst.Call) -> bool:
    """Return whether a call is `path.open("w")`."""
    mode = find(call, "mode", 0)
    if receiver(call, "open") is None or OPEN.match(script.called(call)) or mode is None:
        return False
    text = mode.value.raw_value if isinstance(mode.value, cst.SimpleString) else ""
    # A function that has a path before its mode is not the method of a path.
    return mode is call.args[0] and bool(WRITING.fullmatch(str(text)))


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the faults of step 7."""
    if not facts.uses("init", "rank", "size", "DistributedOptimizer"):
        return
    done: set[cst.Call] = set()
    for event in facts.events:
        call = event.call
        kind = kind_of(facts, call)
        if not kind or call in done or names_rank(facts, call) or facts.guarded(event):
            continue
        if kind in ("QH701", "QH703") and used_by_some(facts, call):
            continue
        done.add(call)
        yield report(facts, call, kind)


def kind_of(facts: Facts, call: cst.Call) -> str:
    """Return the id of the rule that a call violates if every rank makes it, else ""."""
    name = facts.called[call]
    if name == "print":
        return "QH702"
    if SESSIONS.match(name):
        given = argument(call, "checkpoint_dir")
        return "QH701" if given is not None and facts.script.code(given) != "None" else ""
    if RECORDS.match(name):
        return "QH701"
    if SAVES.match(name) and not name.endswith(("Sequential", "Model")):
        return "QH701"
    # Ranks may write their own parts of a store of zarr.
    if ARRAYS.match(name) and not name.startswith("zarr.") and opens(facts.script, call):
        return "QH701"
    if receiver(call, *KERAS_SAVES):
        return "QH701"
    if facts.method(call) in ("save", "export") and own_model(facts, call):
        return "QH701"
    return "QH703" if LOGS.search(name) else ""


def used_by_some(facts: Facts, call: cst.Call) -> bool:
    """Return whether a callback, which writes when `fit` calls it, is used on some ranks only."""
    script, made = facts.script, facts.script.assigned(call)
    if ".callbacks." not in facts.called[call]:
        return False
    name = dotted(made)
    uses = [
        n
        for n in script.nodes
        if isinstance(n, (cst.Name, cst.Attribute))
        and dotted(n) == name != ""
        and is_reference(script, n)
        and n is not made
    ]
    return bool(uses) and all(guarded(script, script.branches(n)) for n in uses)


def own_model(facts: Facts, call: cst.Call) -> bool:
    """Return whether a method belongs to the script's own subclass of keras.Model."""
    model = receiver(call)
    bases = facts.script.bases(model) if model is not None else ()
    return any(re.search(rf"^{KERAS}(\w+\.)*Model$", base) for base in bases)


def names_rank(facts: Facts, call: cst.Call) -> bool:
    """Return whether a call's text or path depends on the rank, so that each rank has its own."""
    script = facts.script
    if facts.called[call] == "print":
        given = [each.value for each in call.args]
        names = {n for g in given for c in script.calls_in(g) for n in script.api_names(c)}
        if names & {"rank", "local_rank"}:
            return True
        # Only by name, because nearly every printed value depends on the rank in some way.
        return any("rank" in script.code(each) for each in given)
    named = [argument(call, name) for name in PATHS]
    place = 1 if VALUE_FIRST.search(facts.called[call]) else 0
    named.append(argument(call, "", place) or argument(call, "checkpoint_dir"))
    found = facts.reach(*(each for each in named if each is not None))
    if found.api & {"rank", "local_rank", "cross_rank", "compared_rank"}:
        return True
    return any(facts.called[each].startswith("tempfile.") for each in found.calls)


def report(facts: Facts, call: cst.Call, kind: str) -> Finding:
    code = facts.script.code(call.func)
    reasons = {
        "QH701": f"{code} runs on every rank, and all of them write the same file",
        "QH702": "this line is printed once for each rank",
        "QH703": f"{code} writes on every rank, and readers see each value several times",
    }
    return facts.finding(kind, call, reasons[kind], edits=guarded_edits(facts, call))


def guarded_edits(facts: Facts, call: cst.Call) -> tuple[Edit, ...]:
    """Put a call under `if hvd.rank() == 0` if it is a statement and calls no collective."""
    if not isinstance(facts.script.parents.get(call), cst.Expr):
        return ()
    # Unknown functions in the arguments may call a collective.
    if facts.reaches_collective(call) or not harmless(facts, call):
        return ()
    return guard(facts.script, call, f"{facts.script.alias}.rank() == 0")


def harmless(facts: Facts, call: cst.Call) -> bool:
    """Return whether the calls among the arguments are known to need no other rank."""
    for inner in facts.script.calls_in(call)[1:]:
        own = facts.script.definition(inner)
        top = facts.called[inner].partition(".")[0]
        if own is None and top in facts.helpers.unread:
            return False
    return True

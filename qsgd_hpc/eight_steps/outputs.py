"""Calls that write files, for the checks and the conversion."""

from __future__ import annotations

import re

import libcst as cst

from qsgd_hpc.eight_steps.reading import Script, argument

__all__ = ["ARRAYS", "OPEN", "RECORDS", "WRITES", "is_temporary", "opens"]

# Functions that write the file that an argument names; a pattern, for larger ones.
WRITES = (
    r"torch\.save|numpy\.save\w*|joblib\.dump|matplotlib\.pyplot\.savefig|cv2\.imwrite"
    r"|torchvision\.utils\.save_image|safetensors\.(\w+\.)?save_(file|model)"
)
OPEN = re.compile(r"^((gzip|io|bz2|lzma|codecs)\.)?open$")
ARRAYS = re.compile(r"^(h5py\.File|netCDF4\.Dataset|zarr\.open\w*|tables\.open_file)$")

RECORDS = re.compile(r"^tensorflow\.(compat\.v1\.)?(io|python_io)\.TFRecordWriter$")


def is_temporary(script: Script, *paths: cst.CSTNode) -> bool:
    """Return whether a path is in a temporary folder: each rank has its own, with its own files."""
    pending, seen = [*paths], set[cst.CSTNode]()
    while pending:
        made = script.value(pending.pop())
        if isinstance(made, cst.Call) and script.called(made).startswith("tempfile."):
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
    return bool(RECORDS.match(name)) or (not together and any(c in text for c in writing))

"""The modules next to a script; their use of Horovod's API counts as the script's."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import libcst as cst

from qsgd_hpc.eight_steps.reading import Script, dotted, is_distributed, parse
from qsgd_hpc.launch.frameworks import FRAMEWORKS

__all__ = ["Helpers", "api_names", "helpers", "own_module"]

INSTALLED = {"horovod", "qsgd_hpc", "torchvision", *(each.module for each in FRAMEWORKS)}
# Packages that wrap no optimizer, also where a script is checked in an environment without them.
COMMON = {
    "PIL", "absl", "chex", "cv2", "einops", "flax", "h5py", "joblib", "matplotlib", "mlflow",
    "netCDF4", "numpy", "optax", "orbax", "pandas", "scipy", "seaborn", "skimage", "sklearn",
    "tensorboard", "tensorboardX", "tensorflow_datasets", "timm", "torchaudio", "torchmetrics",
    "torchtext", "tqdm", "wandb", "xarray", "yaml", "zarr",
}  # fmt: skip
KNOWN = INSTALLED | COMMON | sys.stdlib_module_names
API = re.compile(r"horovod|qsgd_hpc|hvd")
MOST = 200  # most modules to read; a script with more is part of a library


@dataclass(frozen=True)
class Helpers:
    """The steps that the imported modules perform for a script.

    Attributes:
        names: names of Horovod's API that they use, "callbacks.MetricAverageCallback" and also its
            last part.
        read: first parts of the names of modules that were read.
        unread: modules that are neither installed nor next to the script.
        plain: names and attributes in them, such as "set_epoch".
    """

    names: frozenset[str]
    read: frozenset[str]
    unread: tuple[str, ...]
    plain: frozenset[str]


def api_names(script: Script) -> frozenset[str]:
    """Return the names of Horovod's API in a script, and the last part of each."""
    found: set[str] = set()
    for node in script.nodes:
        if isinstance(node, (cst.Name, cst.Attribute)):
            found |= script.api_names(node)
        if isinstance(node, cst.Attribute) and dotted(node.value) == "hvd":  # maybe a parameter
            found.add(node.attr.value)
    for each in script.imports:
        if is_distributed(each.module):
            found.add(each.module.rpartition(".")[2])
    return frozenset(found)


@lru_cache(maxsize=64)  # the scripts of a project import the same modules
def api_names_in(file: Path, text: str) -> frozenset[str]:
    """Return ``api_names`` of the text of a file."""
    return api_names(parse(text, file))


def outline(text: str) -> tuple[list[str], frozenset[str]]:
    """Return the modules that a text imports, and all names and attributes in it.

    Uses Python's parser, which is much faster than libcst, because a project has many files.
    """
    modules, names = [], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            joint = "" if not origin or origin.endswith(".") else "."
            modules += [origin, *(f"{origin}{joint}{each.name}" for each in node.names)]
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return modules, frozenset(names)


@cache
def installed(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def beside(folder: Path, module: str) -> Path | None:
    """Return the file of a module in this folder or its parent, or of a relative import."""
    level = len(module) - len(module.lstrip("."))
    parts = [part for part in module.lstrip(".").split(".") if part]
    roots = [folder, folder.parent] if level == 0 else [folder, *folder.parents][level - 1 : level]
    for root in roots:
        for end in range(len(parts), 0, -1):
            stem = root.joinpath(*parts[:end])
            for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                if file.is_file():
                    return file
    return None


def own_module(folder: Path, module: str) -> Path | None:
    """Return the file of a module as :func:`beside` does; None for well-known packages."""
    top = module.partition(".")[0]
    known = top in INSTALLED or top in sys.stdlib_module_names
    return None if known else beside(folder, module)


def helpers(script: Script) -> Helpers:
    """Read the modules next to a script that it imports, and those that they import."""
    names: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    tops: set[str] = set()
    unread: set[str] = set()
    seen = {script.path.resolve()}
    waiting = [(script.path.resolve().parent, each.module) for each in script.imports]
    while waiting and len(seen) < MOST:
        folder, module = waiting.pop(0)
        top = module.partition(".")[0]
        file = own_module(folder, module)
        if file is None:
            if top and top not in KNOWN and not installed(top):
                unread.add(top)
            continue
        tops.add(top)
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        try:
            text = file.read_text(encoding="utf-8")
            modules, found = outline(text)
            names |= api_names_in(file, text) if API.search(text) else frozenset()
        except (OSError, SyntaxError, ValueError):
            unread.add(top or module)
            continue
        plain |= found
        waiting += [(file.resolve().parent, each) for each in modules]
    return Helpers(names, frozenset(tops), tuple(sorted(unread)), plain)

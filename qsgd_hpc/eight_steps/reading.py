"""Reading of a training script: the meaning of its names, and its frameworks.

Names are resolved as far as the text allows: `optim.SGD` of `import torch.optim as optim` is
"torch.optim.SGD", the variable `optimizer = optim.SGD(...)` is "torch.optim.SGD()", and its method
"torch.optim.SGD().step". A parameter has the value of the only call of its function.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tokenize import detect_encoding

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from qsgd_hpc.eight_steps.names import (
    Binding,
    Import,
    bindings,
    dotted,
    has_own_rate,
    imports,
    is_optimizer_name,
    is_scheduler,
    names_in,
    receiver,
)
from qsgd_hpc.eight_steps.tree import (
    Branch,
    Collector,
    Loop,
    Tree,
    once_per_node,
    without_form_feeds,
)
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.frameworks import FRAMEWORKS
from qsgd_hpc.launch.options import notebook_fault

__all__ = [
    "Binding",
    "Branch",
    "Framework",
    "Import",
    "Loop",
    "Script",
    "argument",
    "distributed_without_hvd",
    "dotted",
    "find",
    "has_own_rate",
    "is_literal",
    "is_optimizer_name",
    "is_scheduler",
    "names_in",
    "parse",
    "read",
    "receiver",
    "source",
]

_DISTRIBUTED_CALLS = (
    "torch.distributed.init_process_group",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.init_device_mesh",
    "torch.distributed.device_mesh.init_device_mesh",
    "jax.distributed.initialize",
)
_DISTRIBUTED_LIBRARIES = {
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed, whose engine this package cannot compress",
    "lightning": "lightning, with Trainer(strategy=...)",
    "pytorch_lightning": "lightning, with Trainer(strategy=...)",
}
_TRAINERS = re.compile(r"^(transformers|trl)\.\w*Trainer$")
OPERANDS = (
    *(cst.Name, cst.Attribute, cst.Call, cst.Subscript),
    *(cst.Integer, cst.Float, cst.SimpleString),
)
_PLAYS = re.compile(r"(^|[._])envs?\.step$")
DEPTH = 12  # most names in a chain of names; longer ones are taken for a cycle


@dataclass(frozen=True, eq=False)
class Script(Tree):
    """A script, its tree, and the meaning of its names."""

    @cached_property
    def bindings(self) -> Mapping[tuple[cst.CSTNode, str], tuple[Binding, ...]]:
        """The bindings of each name in each scope, in the order of the text."""
        return bindings(self.nodes, self.scope, self.class_of)

    def bound(self, name: str, at: cst.CSTNode) -> tuple[Binding, ...]:
        """Return the bindings of a name in the scope around a node, of `self.name` in its class."""
        owner = self.class_of(at) if name.startswith("self.") else self.scope(at)
        return self.bindings.get((owner, name), ()) if owner is not None else ()

    @property
    def assignments(self) -> tuple[Binding, ...]:
        """The assignments of single values to names, in the order of the text."""
        each = (b for several in self.bindings.values() for b in several if b.how == "assign")
        return tuple(sorted(each, key=lambda b: self.start(b.at)))

    def candidates(self, node: cst.CSTNode, *, later: bool = False) -> tuple[Binding, ...]:
        """Return all possible bindings of a name (or `self.name`) at its position, in order.

        Args:
            node: the name.
            later: include bindings further down in the same function.
        """
        name = dotted(node)
        if name.startswith("self."):
            return self.bound(name, node)
        scope, own = self.scope(node), True
        while True:
            several = self.bindings.get((scope, name), ())
            if several and (own or not isinstance(scope, cst.ClassDef)):
                before = tuple(b for b in several if self.end(b.at) <= self.start(node))
                return before if own and before and not later else several
            if scope is self.module:
                return ()
            scope, own = self.scope(scope), False

    @once_per_node
    def binding(self, node: cst.CSTNode) -> Binding | None:
        """Return the last binding of a name before its use; skip `name = None` if possible."""
        several = self.candidates(node)
        real = [b for b in several if b.how != "assign" or dotted(b.value) != "None"] or several
        return real[-1] if real else None

    def _given(self, found: Binding) -> cst.BaseExpression | None:
        """Return the expression of a binding, if known."""
        if found.how == "parameter":
            return self.argument(found)
        return found.value if found.how in ("assign", "with") else None

    def value(self, node: cst.CSTNode) -> cst.CSTNode:
        """Follow a name to the expression of its value; else return the node itself."""
        for _ in range(DEPTH):
            found = self.binding(node) if dotted(node) else None
            given = self._given(found) if found is not None else None
            if given is None:
                break
            node = given
        return node

    def qualified(self, node: cst.CSTNode, depth: int = DEPTH) -> str:
        """Return the dotted name of a node's meaning, with () after the result of a call.

        A name without a binding (a builtin) or with an unknown value is returned unchanged; "" for
        nodes without a name.
        """
        if depth == 0:
            return dotted(node)
        if isinstance(node, cst.Call):
            return f"{self.qualified(node.func, depth - 1)}()"
        if isinstance(node, cst.Subscript):
            return f"{self.qualified(node.value, depth - 1)}[]"
        if isinstance(node, cst.Await):
            return self.qualified(node.expression, depth - 1)
        found = self.binding(node) if dotted(node) else None
        if found is not None:
            given = self._given(found)
            meaning = found.imported or (self.qualified(given, depth - 1) if given else "")
            return meaning or dotted(node)
        if isinstance(node, cst.Attribute):
            return f"{self.qualified(node.value, depth - 1)}.{node.attr.value}"
        return self._starred(node.value) if isinstance(node, cst.Name) else ""

    def _starred(self, name: str) -> str:
        """Return the meaning of an unbound name: the builtin, or a name of `from hvd import *`."""
        if hasattr(builtins, name):
            return name
        for each in self.distributed:
            if isinstance(each.node, cst.ImportFrom) and isinstance(
                each.node.names, cst.ImportStar
            ):
                return f"{each.module}.{name}"
        return name

    def called(self, node: cst.CSTNode | None) -> str:
        """Return the name of the called function: "torch.optim.SGD", "torch.optim.SGD().step".

        "" for nodes that are no calls.
        """
        return self.qualified(node.func) if isinstance(node, cst.Call) else ""

    @once_per_node
    def api(self, node: cst.CSTNode) -> str:
        """Return the name of a call or a name in Horovod's API ("rank"), "" for others."""
        return api_name(self.qualified(node.func if isinstance(node, cst.Call) else node))

    def api_names(self, node: cst.CSTNode) -> frozenset[str]:
        """Return a name in Horovod's API, complete and its last part; empty for others."""
        name = self.api(node)
        return frozenset({name, name.rpartition(".")[2]} - {""} if "()" not in name else ())

    @once_per_node
    def definition(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the script's own function of a call or a name; a class's __init__."""
        called = node.func if isinstance(node, cst.Call) else node
        if isinstance(called, cst.Attribute):
            owner = self.own_class(called.value)
            return self._method(owner, called.attr.value) if owner else None
        made = self._bound_at(called)
        if isinstance(made, cst.ClassDef):
            return self._method(made, "__init__")
        return made if isinstance(made, cst.FunctionDef) else None

    def _bound_at(self, called: cst.CSTNode) -> cst.CSTNode | None:
        """Return what binds a plain name: the definition of a function or a class, for instance."""
        found = self.binding(called) if isinstance(called, cst.Name) else None
        return found.at if found is not None else None

    def own_class(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Return the script's own class of an object."""
        if dotted(node) == "self":
            return self.class_of(node)
        made = self.value(node)
        owner = self._bound_at(made.func) if isinstance(made, cst.Call) else None
        return owner if isinstance(owner, cst.ClassDef) else None

    def bases(self, node: cst.CSTNode) -> tuple[str, ...]:
        """Return the names of the base classes, if an object is of the script's own class."""
        owner = self.own_class(node)
        return tuple(self.qualified(each.value) for each in owner.bases) if owner else ()

    def plays(self, call: cst.Call) -> bool:
        """Return whether a call, such as `env.step`, is one of an environment to learn from.

        An environment of the script is a class with a `reset` and a `step` that returns several
        values, such as a state, a reward and the end of an episode.
        """
        called = self.definition(call)
        owner = self.class_of(called) if called is not None else None
        step = self._method(owner, "step") if owner and self._method(owner, "reset") else None
        values = (n.value for n in self.inside(step) if isinstance(n, cst.Return)) if step else ()
        return any(isinstance(each, cst.Tuple) for each in values) or bool(
            _PLAYS.search(self.code(call.func))
        )

    def _method(self, owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
        found = self.bindings.get((owner, name), ())
        last = found[-1].at if found else None
        return last if isinstance(last, cst.FunctionDef) else None

    @cached_property
    def callers(self) -> Mapping[cst.FunctionDef, tuple[cst.Call, ...]]:
        """The calls of each of the script's plain functions (methods are not listed)."""
        found: dict[cst.FunctionDef, tuple[cst.Call, ...]] = {}
        for call in self.calls:
            function = self._bound_at(call.func)
            if isinstance(function, cst.FunctionDef):
                found[function] = (*found.get(function, ()), call)
        return found

    def callers_of(self, parameter: Binding) -> tuple[cst.Call, ...]:
        """Return the calls of the function that has this parameter."""
        owner = next((n for n in self.ancestors(parameter.at) if not is_parameters(n)), None)
        return self.callers.get(owner, ()) if isinstance(owner, cst.FunctionDef) else ()

    def argument(self, parameter: Binding) -> cst.BaseExpression | None:
        """Return the argument of a function's only call for a parameter, or its default."""
        calls = self.callers_of(parameter)
        if len(calls) != 1:
            return None
        return argument(calls[0], parameter.name, parameter.index) or parameter.value

    def calls_of(self, function: cst.FunctionDef | None) -> tuple[cst.Call, ...]:
        """Return the calls of one of the script's functions or methods; none of None."""
        return tuple(self._calls_by_function.get(function, ()))

    @cached_property
    def _calls_by_function(self) -> Mapping[cst.FunctionDef | None, Sequence[cst.Call]]:
        found: dict[cst.FunctionDef | None, list[cst.Call]] = {}
        for call in self.calls:
            if (function := self.definition(call)) is not None:
                found.setdefault(function, []).append(call)
        return found

    def passed(self, parameter: Binding) -> Iterator[cst.BaseExpression | None]:
        """Yield what each call of a function or method passes for its parameter, if anything."""
        owner = self.function(parameter.at)
        is_method = owner is not None and self.class_of(owner) is not None
        for call in self.calls_of(owner):
            yield argument(call, parameter.name, parameter.index - is_method)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """The modules imported, also inside functions."""
        return imports(self.nodes)

    @cached_property
    def frameworks(self) -> frozenset[Framework]:
        """The frameworks the script trains with."""
        return frameworks((i.module for i in self.imports), (self.called(c) for c in self.calls))

    @cached_property
    def distributed(self) -> tuple[Import, ...]:
        """The imports of horovod.* or qsgd_hpc.* that make this a distributed script."""
        return tuple(i for i in self.imports if is_distributed(i.module))

    @property
    def alias(self) -> str:
        """The script's name for the distributed module, "hvd" if it has none."""
        whole = (i for i in self.distributed if i.alias and not api_name(i.module))
        return next((i.alias for i in whole), "hvd")

    def name_of(self, module: str) -> str:
        """Return the script's name for a module, or ""."""
        aliases = [each.alias for each in self.imports]
        whole = (each.alias for each in self.imports if each.module == module and each.alias)
        return next(whole, module if any(a.startswith(f"{module}.") for a in aliases) else "")

    def assigned(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """Return the target of an assignment, without annotation, of a complete expression."""
        parent = self.parents.get(node)
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            return parent.targets[0].target
        return None

    def target(self, node: cst.CSTNode) -> str:
        """Return the name (or `self.name`) that a complete expression is assigned to, or ""."""
        parent = self.parents.get(node)
        name = dotted(parent.target if isinstance(parent, cst.AnnAssign) else self.assigned(node))
        return name if "." not in name or name.startswith("self.") else ""

    def operand(self, node: cst.BaseExpression) -> str:
        """Return the text of an expression as an operand, in parentheses if it needs them."""
        whole = node.lpar or isinstance(node, OPERANDS)
        return self.code(node) if whole else f"({self.code(node)})"

    @cached_property
    def entry(self) -> cst.If | cst.Module:
        """The ``if __name__ == "__main__":`` of the script, else the module."""
        for each in self.module.body:
            if isinstance(each, cst.If) and isinstance(each.test, cst.Comparison):
                names = {self.code(each.test.left)}
                names |= {self.code(c.comparator) for c in each.test.comparisons}
                if "__name__" in names and names & {'"__main__"', "'__main__'"}:
                    return each
        return self.module


def is_parameters(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Parameters, cst.Param))


def find(call: cst.Call, name: str, index: int = -1) -> cst.Arg | None:
    """Return the argument of a call with this name or at this position, from 0."""
    for place, each in enumerate(call.args):
        if each.keyword is not None and each.keyword.value == name:
            return each
        if each.star == "*" and 0 <= place <= index:
            index = -1  # the elements of the star are unknown
        elif not each.star and each.keyword is None and place == index:
            return each
    return None


def argument(call: cst.Call, name: str, index: int = -1) -> cst.BaseExpression | None:
    """Return the value of the argument of a call with this name or at this position, from 0."""
    found = find(call, name, index)
    return found.value if found is not None else None


def is_literal(node: cst.CSTNode | None) -> bool:
    """Return whether an expression is a literal number."""
    if isinstance(node, cst.UnaryOperation):
        node = node.expression
    return isinstance(node, cst.Integer | cst.Float)


def distributed_without_hvd(script: Script) -> str | None:
    """Return by what a script is distributed without hvd, and how to start it, or None."""
    start = f": start it by qsgd-hpc run -np 2 {script.path}"
    for module in (each.module.partition(".")[0] for each in script.imports):
        if module in _DISTRIBUTED_LIBRARIES:
            return f"distributed by {_DISTRIBUTED_LIBRARIES[module]}{start}"
    called = {script.called(call) for call in script.calls}
    for name in sorted(called):
        if _TRAINERS.match(name):
            return f"distributed by {name}(){start}"
    for name in _DISTRIBUTED_CALLS:
        if name in called:
            return f"distributed by {name}()" + (start if name.startswith("torch.") else "")
    if any(compresses_ddp(each.module) for each in script.imports):
        return f"distributed by torch.distributed{start}"
    return None


def decoded(source: str | bytes) -> tuple[str, str]:
    """Return a script's text and its encoding, from its byte order mark or first lines."""
    if isinstance(source, str):
        return source.removeprefix("\ufeff"), "utf-8"
    encoding, _ = detect_encoding(BytesIO(source).readline)
    return source.decode(encoding), encoding


def parse(source: str | bytes, path: Path = Path("<script>")) -> Script:
    """Read a script from its text.

    Raises:
        UsageError: the text is not Python; the message has the path and the line.
    """
    if fault := notebook_fault(path):  # its JSON may be valid Python
        raise UsageError(fault)
    try:
        text, encoding = decoded(source)
        plain, margins = without_form_feeds(text)
        wrapper = MetadataWrapper(cst.parse_module(plain), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        line, reason = _fault(text, error)
        raise UsageError(f"{path}:{line}: not valid Python: {reason}") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}:1: not text: {error}") from None
    collector = Collector()
    wrapper.module.visit(collector)
    return Script(
        path=path,
        text=text,
        encoding=encoding,
        module=wrapper.module,
        nodes=tuple(collector.nodes),
        calls=tuple(collector.calls),
        spans=collector.spans,
        positions=wrapper.resolve(PositionProvider),
        parents=collector.parents,
        scopes=collector.scopes,
        margins=margins,
    )


def _fault(text: str, error: cst.ParserSyntaxError) -> tuple[int, str]:
    """Return line and reason of a syntax error as Python has them: libcst may not know the line."""
    try:
        ast.parse(text)
    except SyntaxError as by_python:
        return by_python.lineno or 1, by_python.msg
    except ValueError as by_python:  # null bytes, before Python 3.12
        return 1, str(by_python)
    return error.raw_line, error.message.splitlines()[0]


def source(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        UsageError: the file does not exist or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


def read(path: Path) -> Script:
    """Read a script from a file.

    Raises:
        UsageError: the file does not exist, cannot be read, or is not Python.
    """
    return parse(source(path), path)


# The longest first: a name belongs to the first module that is a prefix of it.
DISTRIBUTED = tuple(
    f"{package}.{module}"
    for package in ("horovod", "qsgd_hpc")
    for module in ("tensorflow.keras", *(each.module for each in FRAMEWORKS))
)

# Modules for scripts that torch.distributed makes distributed.
_OF_DDP = tuple(
    f"qsgd_hpc.torch.{module}"
    for module in ("accelerate", "ddp", "fsdp", "lightning", "transformers")
)


class Framework(Enum):
    """A framework with its own form of the eight steps."""

    TORCH = "PyTorch"
    KERAS = "Keras"  # model.fit
    TF2 = "TensorFlow 2"  # a custom loop with GradientTape
    TF1 = "TensorFlow 1"  # graphs and sessions
    JAX = "JAX"


def is_distributed(module: str) -> bool:
    """Return whether importing this module makes a script distributed."""
    return _is_in(module, DISTRIBUTED) and not compresses_ddp(module)


def compresses_ddp(module: str) -> bool:
    """Return whether this module compresses DDP or FSDP2, without Horovod's API."""
    return _is_in(module, _OF_DDP)


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == known or module.startswith(f"{known}.") for known in packages)


def api_name(qualified: str) -> str:
    """Return the name within Horovod's API: "init" for "horovod.torch.init", "" for all others."""
    for known in DISTRIBUTED:
        if qualified == known:
            return ""
        if qualified.startswith(f"{known}."):
            return qualified[len(known) + 1 :]
    return ""


TF1_NAMES = (
    "tensorflow.compat.v1.", "tensorflow.Session", "tensorflow.InteractiveSession",
    "tensorflow.placeholder", "tensorflow.global_variables_initializer",
    "tensorflow.train.MonitoredTrainingSession", "tensorflow.train.MonitoredSession",
    "tensorflow.layers.", "tensorflow.estimator.", "tensorflow.app.run",
)  # fmt: skip
TF1_EITHER = (  # names of TensorFlow 1 that scripts for TensorFlow 2 use, too
    "tensorflow.compat.v1.logging.",
    "tensorflow.compat.v1.config.",
    "tensorflow.compat.v1.enable_",
)


def is_tf1(name: str) -> bool:
    return name.startswith(TF1_NAMES) and not name.startswith(TF1_EITHER)


def frameworks(modules: Iterable[str], calls: Iterable[str]) -> frozenset[Framework]:
    """Return the frameworks of a script that imports these modules and calls these names."""
    modules, calls = set(modules), list(calls)
    tops = {module.partition(".")[0] for module in modules}
    seconds = {module.split(".")[1] for module in modules if is_distributed(module)}
    found = set()
    if "torch" in tops | seconds:
        found.add(Framework.TORCH)
    if any(call.endswith("tensorflow.GradientTape") for call in calls):
        found.add(Framework.TF2)
    if any(is_tf1(call) for call in calls):
        found.add(Framework.TF1)
    keras = {"keras", "tensorflow", "tf_keras"} & (tops | seconds)
    if keras and any(call.rpartition(".")[2] in ("fit", "fit_generator") for call in calls):
        found.add(Framework.KERAS)
    if "jax" in tops | seconds:
        found.add(Framework.JAX)
    return frozenset(found)

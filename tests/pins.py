"""Print the versions of the development tools in this environment, as constraints for pip.

    python -m tests.pins > constraints.txt      what `make pins` does, after an upgrade

Tools are what the extras dev and docs ask for and what comes with them: a new release of one must
not fail a build that nobody has touched. What the package itself needs to run keeps its ranges, so
that the tests meet what users will install.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PACKAGE = "qsgd-hpc"
OLDEST_MINOR = 10  # requires-python of the package
TOOLS = ("dev", "docs")
RUN_TIME = ("mpich", "torch", "keras", "jax", "autotune", "data")
TENSORFLOW = ("tensorflow", "tensorflow-cpu")  # one package with two names


def needed(name: str, extras: Iterable[str]) -> list[tuple[str, frozenset[str]]]:
    """Return what a distribution asks for here: names, and the extras that it wants of them."""
    found = []
    for text in distribution(name).requires or ():
        each = Requirement(text)
        wanted = [{"extra": extra} for extra in ("", *extras)]
        if each.marker is None or any(each.marker.evaluate(extra) for extra in wanted):
            found.append((canonicalize_name(each.name), frozenset(each.extras)))
    return found


def closure(asked: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    """Return these distributions and all that they need, as far as they are installed."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = list(asked)
    while left:
        item = left.pop()
        if item in seen:
            continue
        try:
            left += needed(*item)
        except PackageNotFoundError:
            continue
        seen.add(item)
    return {name for name, _ in seen}


def condition(name: str) -> str:
    """Return for which Pythons this version is: a range, where it is not for all of ours."""
    asked = SpecifierSet(distribution(name).metadata["Requires-Python"] or "")
    minors = [minor for minor in range(OLDEST_MINOR, 20) if asked.contains(f"3.{minor}.99")]
    if not minors or minors[0] == OLDEST_MINOR:
        return ""
    return f' ; python_version >= "3.{minors[0]}"'


def main() -> int:
    """Print the pins, or with --names what would be pinned."""
    run_time = closure(
        [(PACKAGE, frozenset(RUN_TIME)), *((name, frozenset()) for name in TENSORFLOW)]
    )
    tools = closure([(PACKAGE, frozenset(TOOLS))]) - run_time
    if "--names" in sys.argv:
        print(*sorted(tools), sep="\n")
        return 0
    print("# The development tools that the tests are known to pass with; `make pins` renews it.")
    for name in sorted(tools):
        print(f"{name}=={distribution(name).version}{condition(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

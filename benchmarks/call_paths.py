"""How many functions, modules and call levels of reconbound a training, an audit and a sweep go through.

repeat is PrivateSGD.repeat, create is PrivateSGD(...), which checks model and data; the others are commands.

python benchmarks/call_paths.py [--modules] [--deepest] [repeat create audit sweep]"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import reconbound
from reconbound.__main__ import main
from reconbound.training.private_sgd import PrivateSGD, Settings

PACKAGE = Path(reconbound.__file__).parent


class Trace:
    """Counts the functions of the package that are called, and how deeply its frames are nested.

    Frames of other packages between two of reconbound's do not count as levels. Bodies of modules and classes,
    comprehensions and lambdas do not count as functions.
    """

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.deepest: list[str] = []
        self._stack: list[CodeType] = []
        self._own: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code not in self._own:
            own = code.co_filename.startswith(str(PACKAGE)) and code.co_filename.endswith(".py")  # not a template's
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # bodies of modules and classes are not
            self._own[code] = own and is_function and not code.co_name.startswith("<")
        if not self._own[code]:
            return
        if event == "call":
            self.functions.add(code)
            self._stack.append(code)
            if len(self._stack) > len(self.deepest):
                self.deepest = [f"{module_of(called)} {named(called)}" for called in self._stack]
        elif event == "return" and self._stack:
            self._stack.pop()

    @property
    def modules(self) -> Counter[str]:
        """The number of functions called, by module."""
        return Counter(map(module_of, self.functions))


def module_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def named(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # the name within its class: from Python 3.11 on


def learner() -> PrivateSGD:
    torch.manual_seed(0)
    x, y = torch.rand(40, 4), torch.arange(40) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    settings = Settings(1.0, 1.0, 0.25, seed=2**100, budget=1.0)
    return PrivateSGD(model, nn.CrossEntropyLoss(reduction="none"), x, y, settings, progress=False)


def create(folder: Path) -> None:
    learner()


LEARNER = learner()  # before anything is traced


def repeat(folder: Path) -> None:
    LEARNER.repeat(2, steps=5)


def audit(folder: Path) -> None:
    command("audit", "digits", "--limit", "200", "--steps", "20", "--runs", "2", "--out", str(folder / "a"))


def sweep(folder: Path) -> None:
    grid = ("--grid", "noise_multiplier=0.7,1", "--steps", "5,10")
    command("sweep", "wine", *grid, "--out", str(folder / "s"))


def command(*arguments: str) -> None:
    sys.argv, quiet = ["reconbound", *arguments], io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
        main()


PATHS: dict[str, Callable[[Path], None]] = {"repeat": repeat, "create": create, "audit": audit, "sweep": sweep}


def trace(run: Callable[[Path], None]) -> Trace:
    found = Trace()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setprofile(found)
        try:
            run(Path(folder))
        finally:
            sys.setprofile(None)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="path", help=f"of {', '.join(PATHS)}; all when left out")
    parser.add_argument("--modules", action="store_true", help="list the modules, with the functions called of each")
    parser.add_argument(
        "--deepest", action="store_true", help="list the functions of the deepest stack, outermost first"
    )
    asked = parser.parse_args()
    print("path    functions  modules  levels")
    for name in asked.paths or PATHS:
        found = trace(PATHS[name])
        print(f"{name:8}{len(found.functions):9}{len(found.modules):9}{len(found.deepest):8}", flush=True)
        if asked.modules:
            for module, count in sorted(found.modules.items()):
                print(f"    {count:3} {module}")
        if asked.deepest:
            print(*(f"    {called}" for called in found.deepest), sep="\n")

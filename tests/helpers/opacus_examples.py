"""Opacus's own examples, from its package, with three lines more, on random pictures in place of torchvision's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from opacus import PrivacyEngine
from torch.utils.data import TensorDataset

RECORDS = 48
IMPORT = {"from opacus import PrivacyEngine\n": "from reconbound.integrations.opacus import watch\n"}
#: After which lines of cifar10.py `watch` and `report` stand.
CIFAR10 = {
    "            grad_sample_mode=args.grad_sample_mode,\n        )\n": (
        "        ledger = watch(optimizer, train_loader, nn.CrossEntropyLoss())\n"
    ),
    "        time_per_epoch.append(train_duration)\n": '        ledger.report("report")\n',
}


def example(name: str) -> Path:
    """Returns where an example is; not all packages of Opacus have them."""
    return Path(inspect.getfile(PrivacyEngine)).parents[1] / "examples" / f"{name}.py"


def pictures(shape: tuple[int, ...], *_: Any, train: bool = True, **__: Any) -> TensorDataset:
    """Stands in for a data set of torchvision: few random pictures, small where the example takes any size."""
    generator = torch.Generator().manual_seed(int(train))
    labels = torch.randint(0, 10, (RECORDS,), generator=generator)
    return TensorDataset(torch.randn(RECORDS, *shape, generator=generator), labels)


@contextmanager
def without_torchvision(options: Sequence[str]) -> Iterator[None]:
    """Puts stand-ins in the place of torchvision, and options into the command line."""
    vision, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
    for kind in ("Compose", "ToTensor", "Normalize", "RandomCrop", "RandomHorizontalFlip"):
        setattr(transforms, kind, lambda *_, **__: None)
    datasets = ModuleType("torchvision.datasets")
    datasets.MNIST, datasets.CIFAR10 = partial(pictures, (1, 28, 28)), partial(pictures, (3, 8, 8))  # type: ignore[attr-defined]
    vision.datasets, vision.transforms = datasets, transforms  # type: ignore[attr-defined]
    here = {module.__name__: module for module in (vision, datasets, transforms)}
    modules, arguments = {name: sys.modules.get(name) for name in here}, sys.argv
    sys.modules.update(here)
    sys.argv = ["example", *options]
    try:
        yield
    finally:
        sys.argv = arguments
        for name, module in modules.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def run_example(name: str, options: Sequence[str], lines: Mapping[str, str], **others: Any) -> None:
    """Runs an example with an import and two lines more.

    Args:
        name: of the example.
        options: of its command line.
        lines: the lines after which others stand, and these.
        others: what takes the place of functions of the example.
    """
    text = example(name).read_text()
    for line, added in {**IMPORT, **lines}.items():
        assert text.count(line) == 1
        text = text.replace(line, line + added)
    assert text.count("\n") == example(name).read_text().count("\n") + 3
    with without_torchvision(options):
        found: dict[str, Any] = {"__name__": "example"}
        exec(compile(text, f"{name}.py", "exec"), found)
        found.update(others)
        found["main"]()

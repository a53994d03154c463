"""The function `reconbound.audit`: from data to reports in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconbound._internal.checks import InputError, file_path, flag
from reconbound.auditing import run
from reconbound.auditing.options import AuditOptions, default_options, finished
from reconbound.data import Dataset, load_dataset
from reconbound.report.folder import PUBLIC_REPORT, REPORT, read_run

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class AuditResult:
    """Says where a finished audit is, and what it found.

    Attributes:
        folder: of the audit; confidential apart from the public report, run.json and model.safetensors.
        report: page for the data's owner.
        public_report: page that can be shown.
        headline: what the mechanism guarantees, in sentences, as on the public page.
    """

    folder: Path
    report: Path
    public_report: Path
    headline: tuple[str, ...]


def audit(
    data: str | os.PathLike[str] | DataFrame | Dataset = "digits",
    *,
    target: str | None = None,
    private: Sequence[str] | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    options: AuditOptions | Mapping[str, Any] | None = None,
    publish_accuracy: bool = False,
    fresh: bool = False,
) -> AuditResult:
    """Trains privately on the data and writes a report on how well each record is protected.

    An audit that was stopped goes on when called again with the same arguments.

    Args:
        data: a path, the name of a built-in data set, a DataFrame, or what `load_dataset` returned.
        target: column to predict.
        private: columns to protect; None for every column of numbers.
        ranges: {column: (lowest, highest)}, known without the data.
        out: folder for the results; "audit-NAME" in the current folder when None.
        options: the whole options of the training, or a mapping of those that differ from the data set's defaults, such
            as {"noise_multiplier": 1.0, "runs": 5}.
        publish_accuracy: puts the accuracy on the test data on the public page; refused where the target is a number.
        fresh: forgets what the folder holds.

    Returns:
        The folder, its reports and the headline.

    Raises:
        InputError: names the argument that cannot be used, and why.
    """
    for name, given in (("publish_accuracy", publish_accuracy), ("fresh", fresh)):
        flag(name, given)
    if options is not None and not isinstance(options, AuditOptions | Mapping):
        raise InputError(
            "options",
            "must be AuditOptions, or a dictionary of the options that differ from the defaults",
            f"{options!r}"[:200],
        )
    if isinstance(data, Dataset):
        for name, value in (("target", target), ("private", private), ("ranges", ranges)):
            if value is not None:
                raise InputError(name, "is for data that are still to be read: give it to load_dataset", value)
        dataset = data
    else:
        dataset = load_dataset(data, target=target, private=private, ranges=ranges)
    chosen = options if isinstance(options, AuditOptions) else default_options(dataset, **(options or {}))
    folder = Path(file_path("out", out)) if out is not None else Path(f"audit-{folder_name(dataset.name)}")
    if fresh or not finished(folder, dataset, chosen, publish_accuracy=publish_accuracy):
        folder = run.audit(dataset, chosen, folder, publish_accuracy=publish_accuracy, fresh=fresh)
    return AuditResult(folder, folder / REPORT, folder / PUBLIC_REPORT, tuple(read_run(folder).headline))


def folder_name(name: str) -> str:
    """Returns the name of data as part of a folder's name.

    >>> folder_name("our people.csv")
    'our-people'
    """
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in name.split(".")[0])
    return kept.strip("-")[:60] or "data"

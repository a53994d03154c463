"""reconbound report: builds an audit's pages again, or compares several audits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import InputError
from reconbound.cli.options import (
    confidential_note,
    plain_errors,
    print_json,
    print_line,
    print_table,
    print_warnings,
    terminal,
)

if TYPE_CHECKING:
    from rich.console import Console

#: Columns that the terminal names; the page has all.
NAMED = 32
#: Columns of its tables that hold text.
TEXT = ("audit", "column", "of")
LEGEND = (
    "limit: the lowest of the floors' lower confidence limits (–: no record has one; without: records that have none).",
    "lowest, median: estimates, more often too high than too low. below guess: over all columns together.",
    "Floors are for unbiased attackers who know every other record and see every noisy step.",
    "ε is for replace-one neighbours.",
)


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Of finished audits.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where the comparison of several audits goes (default: comparison.html)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the pages are as JSON.")] = False,
) -> None:
    """Rebuild an audit's two pages, or compare several audits on one (confidential) page."""
    with plain_errors(received=", ".join(str(folder) for folder in folders)), print_warnings():
        from reconbound.report import build, compare

        if len(folders) > 1:
            page = out if out is not None else Path("comparison.html")
            replaces = _may_replace(page)
            _print_comparison(folders, compare(folders, page), as_json)
            if replaces:
                print_line(f"reconbound: {page} was there, and was replaced", error=True)
            return
        if out is not None:
            raise InputError("out", "is for comparing several folders; one audit's pages stay in its folder", str(out))
        own, public = build(folders[0])
        if as_json:
            print_json({"report": str(own), "public_report": str(public)})
        else:
            for written in (public, own):
                print_line(written)


def _may_replace(page: Path) -> bool:
    """Returns whether a comparison is there already; refuses to replace anything else."""
    from reconbound.report.comparison import is_comparison

    there = page.exists() and not page.is_dir()  # a folder is refused where it is written to
    if there and not (page.is_file() and is_comparison(page)):
        what = "must be a new file, or a comparison to write anew: what is there is something else"
        raise InputError("out", what, str(page))
    return there


def _print_comparison(folders: list[Path], page: Path, as_json: bool) -> None:
    """Prints the finding, what differs, the audits as tables, and the path of the page."""
    from reconbound.report.comparison import audit_row, comparison_facts
    from reconbound.report.formats import count

    found = comparison_facts(folders)
    confidential_note()
    if as_json:
        print_json({"comparison": str(page), **found})
        return
    console = terminal()
    for line in (*found["caveats"], *found["headline"]):
        console.print(line)
    for difference in found["differences"]:
        values = "; ".join(f"{name} {value}" for name, value in difference["values"].items())
        console.print(f"  {difference['what']}: {values}")
    rows = [audit_row(audit) for audit in found["audits"]]
    settings = {"audit": "name", "noise": "noise", "steps": "steps", "ε": "epsilon", "accuracy": "accuracy"}
    floors = {"audit": "name", "limit": "limit", "lowest": "worst", "median": "median", "guess": "guess"}
    for title, columns in (("Settings", settings),
                           ("Floors in ± share of the range", {**floors, "below guess": "below"})):  # fmt: skip
        print_table(console, title, list(columns), [[row[key] for key in columns.values()] for row in rows], TEXT)
    for line in LEGEND:
        console.print(line)
    for audit in found["audits"]:
        if audit["never_measured"]:
            some = count(audit["never_measured"], "record")
            were, they = ("was", "It counts") if audit["never_measured"] == 1 else ("were", "They count")
            console.print(f"{audit['name']}: {some} {were} never measured. {they} as below a guess.")
    _print_columns(found["columns"], console)
    for row in rows:
        private = "; ".join(f"{name} {range_}" for name, range_ in row["shown"])
        more = f"; and {len(row['more'])} more" if row["more"] else ""
        console.print(f"{row['name']} ({row['data']}, {row['records']} records), private: {private}{more}")
    print_line(page)


def _print_columns(columns: list[dict[str, Any]], console: Console) -> None:
    """Prints the single columns that the audits have in common, in their own units."""
    from reconbound.report.formats import guess_error, plus_minus

    if not columns:
        return
    rows = [
        (column["name"], name, plus_minus(c["lowest"], column["unit"], c["width"]), c["record_name"] or "–",
         guess_error(c["guess"], column["unit"]), f"{c['below']:,} of {c['of']:,}")
        for column in columns[:NAMED]
        for name, c in column["audits"].items()
    ]  # fmt: skip
    names = ["column", "audit", "lowest", "of", "guess", "below guess"]
    print_table(console, "Single columns, in their own units, by estimates", names, rows, TEXT)
    if len(columns) > NAMED:
        console.print(f"and {len(columns) - NAMED} columns more, on the page")

"""reconbound report and reconbound show: finished audits, as pages and in the terminal."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor
from reconbound.cli.options import confidential_note, noted, plain_errors

if TYPE_CHECKING:
    from numpy import ndarray
    from rich.console import Console

    from reconbound.report.view import View

#: A map is drawn with at most so many cells to a side.
CELLS = 32
SHADES, PLAIN = " ░▒▓█", " .:+#"


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Of finished audits.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where the comparison of several audits goes (default: comparison.html)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the pages are as JSON.")] = False,
) -> None:
    """Rebuild an audit's two pages, or compare several audits on one (confidential) page."""
    with plain_errors(received=", ".join(str(folder) for folder in folders)), noted():
        from reconbound.report import build, compare

        if len(folders) > 1:
            page = out if out is not None else Path("comparison.html")
            replaces = _may_replace(page)
            _compared(folders, compare(folders, page), as_json)
            if replaces:
                print(f"reconbound: {page} was there, and was replaced", file=sys.stderr)
            return
        if out is not None:
            raise InputError("out", "is for comparing several folders; one audit's pages stay in its folder", str(out))
        own, public = build(folders[0])
        if as_json:
            print(json.dumps({"report": str(own), "public_report": str(public)}, indent=2))
        else:
            print(f"{public}\n{own}")


def _may_replace(page: Path) -> bool:
    """Returns whether a comparison is there already; refuses to replace anything else."""
    from reconbound.report.comparison import is_comparison

    there = page.exists() and not page.is_dir()  # a folder is refused where it is written to
    if there and not (page.is_file() and is_comparison(page)):
        what = "must be a new file, or a comparison to write anew: what is there is something else"
        raise InputError("out", what, str(page))
    return there


def _compared(folders: list[Path], page: Path, as_json: bool) -> None:
    from reconbound.report.comparison import comparison_facts, format_range
    from reconbound.report.formats import count

    found = comparison_facts(folders)
    confidential_note()
    if as_json:
        print(json.dumps({"comparison": str(page), **found}, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for said in found["caveats"]:
        console.print(Text(said))
    for title, names, cells in (
        ("Settings", ("audit", "noise", "steps", "ε", "accuracy"), _settings),
        ("Floors in ± share of the range", ("audit", "limit", "lowest", "median", "guess", "below guess"), _floors),
    ):
        table = Table(title=title, title_justify="left")
        for name in names:
            table.add_column(Text(name), justify="left" if name == "audit" else "right", overflow="fold")
        for a in found["audits"]:
            table.add_row(*(Text(cell) for cell in (a["name"], *cells(a))))
        console.print(table)
    console.print(
        "limit: the lowest of the floors' lower confidence limits (without: records that have none, of which it says "
        "nothing; –: none has one, as after one run or two); lowest, median: of the estimates, which are more often "
        "too high than too low; below guess: over all columns together. Floors are for unbiased attackers who know "
        "every other record and see every noisy step. ε is for replace-one neighbours."
    )
    for a in found["audits"]:
        if a["never_measured"]:
            some = count(a["never_measured"], "record")
            verb, them = ("was", "it, and it counts") if a["never_measured"] == 1 else ("were", "them, and they count")
            said = f"{a['name']}: {some} {verb} never measured: nothing is known of {them} as below a guess"
            console.print(Text(said))
    _columns(found, console)
    for a in found["audits"]:
        named = "; ".join(f"{c['name']} {format_range(c)}" for c in a["private"][:CELLS])
        more = f"; and {len(a['private']) - CELLS} more" if len(a["private"]) > CELLS else ""
        console.print(Text(f"{a['name']} ({a['data']}, {a['records']:,} records), private: {named}{more}"))
    if found["warning"]:
        console.print(Text(found["warning"]))
    for d in found["differences"]:
        console.print(Text(f"  {d['what']}: " + "; ".join(f"{name} {said}" for name, said in d["values"].items())))
    print(page)


def _settings(a: dict[str, Any]) -> tuple[str, ...]:
    from reconbound.report.formats import amount

    m = a["mechanism"]
    return f"{m['noise_multiplier']:g}", f"{m['steps']:,}", amount(a["epsilon"], side="up"), a["accuracy_said"]


def _floors(a: dict[str, Any]) -> tuple[str, ...]:
    from reconbound.report.comparison import format_lowest_limit
    from reconbound.report.formats import guess_error, plus_minus

    found = a["floors"]
    limit = format_lowest_limit(found["lowest_lower_limit"], a["without_limit"])
    rest = (plus_minus(found["median_estimate"]), guess_error(a["guess"]), f"{a['below_guess']:,} of {a['records']:,}")
    return limit, plus_minus(found["lowest_estimate"]), *rest


def _columns(found: dict[str, Any], console: Console) -> None:
    """Single columns that the audits have in common, in their own units."""
    from rich.table import Table
    from rich.text import Text

    from reconbound.report.formats import guess_error, plus_minus

    if not found["columns"]:
        return
    table = Table(title="Single columns, in their own units, by estimates", title_justify="left")
    for name in ("column", "audit", "lowest", "of", "guess", "below guess"):
        table.add_column(Text(name), justify="left" if name in ("column", "audit", "of") else "right", overflow="fold")
    for column in found["columns"][:CELLS]:
        for name, c in column["audits"].items():
            cells = (column["name"], name, plus_minus(c["lowest"], column["unit"], c["width"]), c["record_name"] or "–",
                     guess_error(c["guess"], column["unit"]), f"{c['below']:,} of {c['of']:,}")  # fmt: skip
            table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if len(found["columns"]) > CELLS:
        console.print(f"and {len(found['columns']) - CELLS} columns more, on the page")


def show_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a finished audit.")],
    record: Annotated[
        str | None,
        typer.Option(help="A record's number (from 0) or name as the report has it; without it, the whole audit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (confidential).")] = False,
) -> None:
    """Show an audit, or what it found about one record, in the terminal (confidential)."""
    with plain_errors(received=str(folder)), noted():
        from reconbound.report import record_facts
        from reconbound.report.folder import read_audit
        from reconbound.report.view import View

        run, leakage = read_audit(folder)
        view = View(run, leakage)
        if as_json or record is None:
            confidential_note()
        if record is None:
            _show_all(view, folder, as_json)
            return
        number = found_record(view, record)
        facts = record_facts(leakage, run, number)
        floors = _pixel_floors(view, number)
        if as_json:
            pixels = {} if floors is None else {"pixel_floors": floors.tolist()}
            print(json.dumps({**facts, **pixels}, indent=2, allow_nan=False))
            return
        _print_record(view, facts, number, floors)


def found_record(view: View, given: str) -> int:
    """Returns the number of a record named by it, or by its name in any case ("row 22", "cat/1.png", "1.png").

    An InputError with near matches where there is none, or more than one.
    """
    text = given.strip()
    plain = text.lower().removeprefix("record ").replace(",", "")
    if re.fullmatch(r"-?[0-9]+", plain):
        if 0 <= int(plain) < view.records:
            return int(plain)
        raise InputError("record", f"must be from 0 to {view.records - 1:,}: there are {view.records:,} records", given)
    names = [name.lower() for name in view.names]
    for called in (names, [name.rpartition("/")[2] for name in names]):
        found = [i for i, name in enumerate(called) if name == text.lower()]
        if len(found) == 1:
            return found[0]
        if found:
            which = ", ".join(f"{i} ({view.record_name(i)})" for i in found[:5])
            raise InputError("record", f"must be one record's name or number; there are {len(found)}: {which}", given)
    if not names:
        raise InputError(
            "record", f"must be a number from 0 to {view.records - 1:,}: these records have no names", given
        )
    from difflib import get_close_matches

    near = [view.names[names.index(name)] for name in get_close_matches(text.lower(), names, n=3, cutoff=0.5)]
    hint = f" (like {', '.join(near)})" if near else f" (such as {view.names[0]})"
    raise InputError("record", f"must be the name of a record that was trained on{hint}, or a number", given)


def _show_all(view: View, folder: Path, as_json: bool) -> None:
    from reconbound.cli.audit import describe_columns, result

    found = result(folder)
    most = [int(i) for i in view.leakage.kept[: int(view.facts.get("most", 5))]]
    rows: list[dict[str, Any]] = [
        {
            "record": i,
            "name": view.record_name(i),
            "target": view.target(i),
            "floor_lower_limit": float(view.shown[i]) if view.limited(i) else None,
            "floor_estimate": float(view.floor[i]),
        }
        for i in most
    ]
    if as_json:
        print(json.dumps({**found, "most_exposed": rows}, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for line in found["verdict"]:
        console.print(line)
    over = "" if view.single or view.image else ", over all columns"
    table = Table(title=f"The most exposed, floors in ± {view.of_range}{over}", title_justify="left")
    named = ["name"] if view.names else []
    floors = [
        name for name in ("at least, with confidence", "estimate") if name == "estimate" or view.upper_floor is not None
    ]
    for name in ("record", *named, view.target_name, *floors):
        table.add_column(Text(name), justify="right" if name in ("record", *floors) else "left", overflow="fold")
    for row in rows:
        own_name = [str(row["name"])] if named else []
        limit, estimate = row["floor_lower_limit"], format_floor(row["floor_estimate"])
        both = (estimate,) if len(floors) == 1 else ("none" if limit is None else format_floor(limit), estimate)
        cells = (f"{row['record']:,}", *own_name, str(row["target"]), *both)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for line in (*describe_columns(found), found["accuracy_said"]):
        console.print(Text(line))
    own = shlex.quote(str(folder))
    one = shlex.quote(view.names[most[0]]) if most and view.names else str(most[0] if most else 0)
    console.print(Text(f"One record: reconbound show {own} --record {one}. Pages: {found['report']}"))


def _print_record(view: View, facts: dict[str, Any], record: int, floors: ndarray | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from reconbound.report import record_table
    from reconbound.report.headline import model_caveats

    console = Console(highlight=False, markup=False)
    for said in model_caveats(view.run):
        console.print(said)
    console.print(record_table(facts))
    place = view.place(record)
    if view.feature_floors(record) is None:
        console.print(
            f"Single {view.part}s were not measured for this {view.noun}: of data of this size only for some."
        )
        return
    if place is None:
        console.print(
            f"This {view.noun} is not among the most and the least exposed, which were looked at closely: its "
            f"{view.part}s' floors are rougher, and {'it' if view.image else 'its values'} "
            f"{'is' if view.image else 'are'} not kept in the folder."
        )
    if floors is None:
        return
    low, high = float(floors.min()), float(floors.max())
    what = "Where it is exposed" if place is None else "The image, and where it is exposed"
    console.print(f"{what} (darkest ±{format_floor(low)}, lightest ±{format_floor(high)} {view.of_range}):")
    import numpy as np

    heat = np.log(high / np.maximum(floors, np.finfo(float).tiny))
    right = draw(heat / heat.max() if heat.max() > 0 else heat)
    left = [] if place is None else draw(view.leakage.kept_inputs[place].double().numpy().mean(axis=0))
    beside = place is not None and 2 * len(left[0]) + 5 <= console.width
    lines = [f"  {a}   {b}" for a, b in zip(left, right, strict=True)] if beside else [*left, *right]
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=False)


def _pixel_floors(view: View, record: int) -> ndarray | None:
    """± floor of each pixel, (H, W): over the planes, that of the most exposed."""
    if not view.image or view.private is not None:
        return None
    floors = view.feature_floors(record)
    return None if floors is None else floors.reshape(view.leakage.kept_inputs.shape[1:]).min(axis=0)


def draw(picture: ndarray) -> list[str]:
    """Lines of shaded blocks, two characters to a cell, for values from 0 to 1, (H, W)."""
    import numpy as np

    height, width = picture.shape
    step = max(1, -(-max(height, width) // CELLS))
    rows = [picture[i : i + step] for i in range(0, height, step)]
    cells = np.array([[part[:, j : j + step].mean() for j in range(0, width, step)] for part in rows])
    shades = SHADES if (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf") else PLAIN
    at = np.clip((cells * len(shades)).astype(int), 0, len(shades) - 1)
    return ["".join(2 * shades[k] for k in row) for row in at]

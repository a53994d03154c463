"""reconbound report and reconbound show: finished audits, as pages and in the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._check import InputError
from .options import confidential_note, plain_errors

if TYPE_CHECKING:
    from numpy import ndarray

    from ..report.view import View

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
    with plain_errors():
        from ..report import build, compare

        if len(folders) > 1:
            page = compare(folders, out if out is not None else Path("comparison.html"))
            print(json.dumps({"comparison": str(page)}) if as_json else page)
            return
        if out is not None:
            raise InputError("out", "is for comparing several folders; one audit's pages stay in its folder", str(out))
        own, public = build(folders[0])
        if as_json:
            print(json.dumps({"report": str(own), "public_report": str(public)}, indent=2))
        else:
            print(f"{public}\n{own}")


def show_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a finished audit.")],
    record: Annotated[int | None, typer.Option(help="A record's number; without it, the whole audit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (confidential).")] = False,
) -> None:
    """Show an audit, or what it found about one record, in the terminal (confidential)."""
    with plain_errors():
        from ..report import record_facts
        from ..report.view import View
        from ..run_folder import read_leakage, read_run

        run, leakage = read_run(folder), read_leakage(folder)
        view = View(run, leakage)
        if as_json or record is None:
            confidential_note()
        if record is None:
            _show_all(view, folder, as_json)
            return
        facts = record_facts(leakage, run, record)
        floors = _pixel_floors(view, record)
        if as_json:
            pixels = {} if floors is None else {"pixel_floors": floors.tolist()}
            print(json.dumps({**facts, **pixels}, indent=2, allow_nan=False))
            return
        _print_record(view, facts, record, floors)


def _show_all(view: View, folder: Path, as_json: bool) -> None:
    from .audit import result

    found = result(folder)
    most = [int(i) for i in view.leakage.kept[: int(view.facts.get("most", 5))]]
    rows = [
        {"record": i, "name": view.record_name(i), "target": view.target(i), "floor": float(view.floor[i])}
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
    table = Table(title=f"The most exposed, floors in ± {view.of_range}", title_justify="left")
    for name in ("record", "name", view.target_name, "floor"):
        table.add_column(Text(name), justify="right" if name in ("record", "floor") else "left", overflow="fold")
    for row in rows:
        cells = (f"{row['record']:,}", str(row["name"]), str(row["target"]), f"{row['floor']:.3g}")
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    own = shlex.quote(str(folder))
    console.print(f"One record: reconbound show {own} --record {most[0] if most else 0}. Pages: {found['report']}")


def _print_record(view: View, facts: dict[str, Any], record: int, floors: ndarray | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from ..report import record_table

    console = Console(highlight=False, markup=False)
    console.print(record_table(facts))
    place = view.place(record)
    if place is None:
        console.print("Single features are kept for the most and the least exposed records alone.")
        return
    if floors is None:
        return
    image = view.leakage.kept_inputs[place].double().numpy().mean(axis=0)
    low, high = float(floors.min()), float(floors.max())
    console.print(f"The image, and where it is exposed (darkest ±{low:.3g}, lightest ±{high:.3g} {view.of_range}):")
    import numpy as np

    heat = np.log(high / np.maximum(floors, np.finfo(float).tiny))
    left, right = draw(image), draw(heat / heat.max() if heat.max() > 0 else heat)
    beside = 2 * len(left[0]) + 5 <= console.width
    lines = [f"  {a}   {b}" for a, b in zip(left, right, strict=True)] if beside else [*left, "", *right]
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=False)


def _pixel_floors(view: View, record: int) -> ndarray | None:
    """± floor of each pixel, (H, W), of a record kept whole: over the planes, that of the most exposed."""
    place = view.place(record)
    if place is None or not view.image or view.private is not None:
        return None
    floors = view.feature_floors(place)
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

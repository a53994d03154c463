"""reconbound show: an audit, or one of its records, in the terminal."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor
from reconbound.cli.options import confidential_note, plain_errors, print_json, print_table, print_warnings, terminal

if TYPE_CHECKING:
    from numpy import ndarray

    from reconbound.report.view import View

#: A map is drawn with at most this many cells to a side.
CELLS = 32
SHADES, PLAIN = " ░▒▓█", " .:+#"


def show_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a finished audit.")],
    record: Annotated[
        str | None,
        typer.Option(help="A record's number (from 0) or name as the report has it; without it, the whole audit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (confidential).")] = False,
) -> None:
    """Show an audit, or what it found about one record, in the terminal (confidential)."""
    with plain_errors(received=str(folder)), print_warnings():
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
        number = find_record(view, record)
        facts = record_facts(leakage, run, number)
        floors = _pixel_floors(view, number)
        if as_json:
            pixels = {} if floors is None else {"pixel_floors": floors.tolist()}
            print_json({**facts, **pixels})
            return
        _print_record(view, facts, number, floors)


def find_record(view: View, given: str) -> int:
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
    """Prints the finding, the most exposed records and the columns."""
    from reconbound.cli.audit import describe_columns, result

    found = result(folder)
    most = [int(i) for i in view.leakage.kept[: int(view.facts.get("most", 5))]] if view.unbiased else []
    rows: list[dict[str, Any]] = [
        {
            "record": i,
            "name": view.record_name(i),
            "target": view.target(i),
            "floor_lower_limit": float(view.shown[i]) if view.limited[i] else None,
            "floor_estimate": float(view.floor[i]),
        }
        for i in most
    ]
    if as_json:
        print_json({**found, "most_exposed": rows})
        return
    console = terminal()
    for line in found["verdict"]:
        console.print(line)
    _print_most_likely(view, console)
    over = "" if view.single or view.image else ", over all columns"
    title = f"The most exposed for attackers without outside knowledge, floors in ± {view.of_range}{over}"
    cells: dict[str, list[str]] = {"record": [f"{row['record']:,}" for row in rows]}
    if view.names:
        cells["name"] = [row["name"] for row in rows]
    cells[view.target_name] = [row["target"] for row in rows]
    if view.upper_floor is not None:
        limits = [row["floor_lower_limit"] for row in rows]
        cells["at least, with confidence"] = ["none" if limit is None else format_floor(limit) for limit in limits]
    cells["estimate"] = [format_floor(row["floor_estimate"]) for row in rows]
    if rows:
        print_table(console, title, list(cells), zip(*cells.values(), strict=True), ("name", view.target_name))
    for line in (*describe_columns(found), found["accuracy_said"]):
        console.print(line)
    own = shlex.quote(str(folder)).replace("\n", "?")
    one = shlex.quote(view.names[most[0]]) if most and view.names else str(most[0] if most else 0)
    console.print(f"One record: reconbound show {own} --record {one}. Pages: {found['report'].replace(chr(10), '?')}")


def _print_most_likely(view: View, console: Any) -> None:
    """Prints the records with the largest chances of success in the leading world, where they differ."""
    lead = view.success.leading
    most = [] if lead is None else lead.most_exposed()
    if lead is None or not most:
        return
    from reconbound.report.formats import chance

    title = f"The largest chances ({lead.name}), for every attacker who has 10% without"
    shown = [chance(float(lead.chances[i]), estimate=bool(lead.estimated[i])) for i in most]
    named = [(view.record_name(i), view.target(i), text) for i, text in zip(most, shown, strict=True)]
    print_table(console, title, ["record", view.target_name, "at most"], named, ("record", view.target_name))


def _print_record(view: View, facts: dict[str, Any], record: int, floors: ndarray | None) -> None:
    """Prints the facts of one record and, of an image, a map of its floors."""
    from reconbound.report import record_table
    from reconbound.report.headline import model_caveats

    console = terminal()
    for caveat in model_caveats(view.run.caveats):
        console.print(caveat)
    console.print(record_table(facts))
    place = view.places.get(record)
    if view.feature_floors(record) is None:
        console.print(f"Single {view.part}s were not measured for this {view.noun}: with so many, only some are.")
        return
    if place is None:
        kept = "it is" if view.image else "its values are"
        console.print(
            f"This {view.noun} is not among the most and the least exposed: its {view.part}s' floors are rougher, and "
            f"{kept} not kept in the folder."
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
        console.print(line, no_wrap=True, crop=False)


def _pixel_floors(view: View, record: int) -> ndarray | None:
    """Returns the ± floor of each pixel, (H, W): the lowest over its planes; None where it is not known."""
    if not view.image or view.private is not None:
        return None
    floors = view.feature_floors(record)
    return None if floors is None else floors.reshape(view.leakage.kept_inputs.shape[1:]).min(axis=0)


def draw(picture: ndarray) -> list[str]:
    """Returns lines of shaded blocks, two characters to a cell, for values from 0 to 1, (H, W)."""
    import numpy as np

    height, width = picture.shape
    step = max(1, -(-max(height, width) // CELLS))
    rows = [picture[i : i + step] for i in range(0, height, step)]
    cells = np.array([[part[:, j : j + step].mean() for j in range(0, width, step)] for part in rows])
    shades = SHADES if (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf") else PLAIN
    at = np.clip((cells * len(shades)).astype(int), 0, len(shades) - 1)
    return ["".join(2 * shades[k] for k in row) for row in at]

"""reconbound sweep and reconbound frontier: many trainings, and the best of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from reconbound._internal.checks import DataError, number
from reconbound._internal.formatting import format_floor, format_limit
from reconbound.cli import options as shared

Row = dict[str, Any]
GRID = "noise_multiplier, max_grad_norm, sample_rate, lr, momentum, clip, sampler or model"
URL = {"metavar": "URL", "envvar": shared.STORAGE}
#: Fields of `Sweep`; model and budget are those of the audits.
SWEEP: shared.Options = {
    "grid": (list[str], f"Values of {GRID}; for tpe also a range, 0.01:1:log. Repeatable.", {"metavar": "lr=0.1,0.5"}),
    "steps": (str, "Step counts (100,200,300); one training serves all of them.", {"metavar": "1000,2000"}),
    "runs": (shared.count, "Independent runs for each setting (1)."),
    "search": (str, "grid (every combination; default) or tpe (Optuna's search)."),
    "trials": (shared.count, "Settings to try, for --search tpe."),
    "floor": (str, "The floor that a search looks at (default: exact_max)."),
    "at_least": (float, "Search for the best accuracy with that floor at least this high."),
    "model": (str, "As in reconbound audit, for all settings."),
    "budget": (str, "As in reconbound audit."),
    "delta": (float, "Delta at which epsilon is reported (1e-5)."),
    "storage": (
        str,
        "A database for workers on several machines: postgresql+psycopg2://user@host/name (default: sweep.db in the "
        f"folder). What is stored there is confidential. With a password use the variable. {shared.HIDE}",
        URL,
    ),
    "name": (str, "Of the sweep in the storage (sweep)."),
    "together": (
        shared.count,
        "Settings that a worker trains at once: what keeps a GPU busy (20 to 40 for small networks). They share their "
        "batches, and a killed one begins anew.",
    ),
    "grace": (shared.count, "Seconds without a heartbeat after which a worker counts as dead (60)."),
    "seed": (int, f"Of the sweep (default: new, kept in the folder; secret). {shared.HIDE}", {"envvar": shared.SEED}),
}


@shared.takes(given=SWEEP, reading=shared.DATA)
def sweep_command(
    *,
    data: Annotated[str, typer.Argument(metavar="DATA", help="As in reconbound audit.")] = "digits",
    given: dict[str, Any],
    workers: Annotated[int, typer.Option(parser=shared.count, metavar="<int>", help="Processes on this machine.")] = 1,
    reading: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results (default: sweep-DATA).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON (confidential).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the page's path and nothing else.")] = False,
) -> None:
    """Train many settings and draw the frontier: accuracy against every floor.

    Run it again to go on where it was stopped, with more --workers, or on other machines with the same --storage.
    """
    resume = "; run the same command again to go on"
    with _needs_optuna(), shared.plain_errors(resume), shared.print_warnings(quiet=quiet):
        from reconbound.auditing.run import folder_name
        from reconbound.sweep import Sweep, parse_grid, parse_steps, sweep
        from reconbound.sweep.run import publish

        plan: dict[str, Any] = {name: given.pop(name) for name in ("model", "budget") if name in given}
        if "budget" in plan:
            plan["budget"] = shared.parse_budget(plan["budget"])
        config = Sweep(
            data=data,
            out=out or Path(f"sweep-{folder_name(Path(data).name)}"),
            space=parse_grid(given.pop("grid", [])),
            steps=parse_steps(given.pop("steps", "100,200,300")),
            load=shared.reading_options(reading),
            plan=plan,
            **given,
        )
        rows = sweep(config, workers=workers, show=not quiet)
        facts = publish(config.out, config.storage)
        if as_json:
            shared.confidential_note()
            _print_json({**facts, "rows": rows})
        elif quiet:
            for caveat in (facts.get("caveats") or {}).values():  # even so: it takes floors away
                shared.print_line(f"Note: {caveat}", error=True)
            if facts["page"]:
                shared.print_line(facts["page"])
        else:
            _print_sweep(facts, rows)
        if not rows:
            raise typer.Exit(1)


def frontier_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a sweep, finished or not.")],
    chance: Annotated[
        list[str] | None,
        typer.Option(help="A chance of success, such as success_removed_max or success_removed_median. Repeatable."),
    ] = None,
    at_most: Annotated[
        float | None, typer.Option(help="Only the best accuracy with the chance (0.15 is 15 %) so low.")
    ] = None,
    floor: Annotated[
        list[str] | None, typer.Option(help="A floor, such as exact_max, paper_q99, theorem1 or lecam. Repeatable.")
    ] = None,
    at_least: Annotated[
        float | None, typer.Option(help="Only the best accuracy with the floor (MSE, in squares of a range) so high.")
    ] = None,
    storage: Annotated[str | None, typer.Option(help="As given to reconbound sweep.", **URL)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (confidential).")] = False,
) -> None:
    """The best settings of a sweep, and its page and table anew.

    With --at-most the best accuracy for a chance of success, with --at-least for a floor.
    """
    with _needs_optuna(), shared.plain_errors(received=str(folder)):
        from reconbound.sweep import best, floors_in, pareto
        from reconbound.sweep.chances import NOT_MEASURED, chances_in
        from reconbound.sweep.frontier import CROSSED, describe_majority
        from reconbound.sweep.page import cautions, has_crossed
        from reconbound.sweep.run import publish, stored

        if at_least is not None:
            number("at_least", at_least, above=0.0)
        if at_most is not None:
            number("at_most", at_most, above=0.0, at_most=1.0)
        rows, _ = stored(folder, storage)
        if not rows:
            raise DataError(f"{folder} holds a sweep of which no setting is trained yet: run reconbound sweep again")
        asked = _requested_limits(rows, chance, at_most, floor, at_least)
        facts = publish(folder, storage)
        shared.confidential_note()
        if at_least is None and at_most is None:
            names = asked if chance or floor else [*chances_in(rows), *floors_in(rows)]
            fronts = {name: pareto(rows, name) for name in names}
            if as_json:
                _print_json({**facts, "fronts": fronts})
            else:
                notes = [] if chance or floor or chances_in(rows) else [NOT_MEASURED]
                _print_fronts(facts, {n: fronts[n] for n in asked}, [*cautions(rows, facts), *notes])
            return
        found = {name: best(rows, name, limit) for name, limit in asked.items()}
        if as_json:
            limits = {"at_most": at_most, "at_least": at_least}
            _print_json({**facts, **{n: limit for n, limit in limits.items() if limit is not None}, "best": found})
        else:
            for line in cautions(rows, facts):
                shared.print_line(line)
            for name, row in found.items():
                shared.print_line(_best_line(rows, name, asked[name], row, facts))
            if any(row is not None and has_crossed([row], name) for name, row in found.items()):
                print(CROSSED)
            for line in describe_majority(facts["guesses"]):
                shared.print_line(line)
        if None in found.values():
            raise typer.Exit(1)


def _requested_limits(
    rows: list[Row], chance: list[str] | None, at_most: float | None, floor: list[str] | None, at_least: float | None
) -> dict[str, Any]:
    """Returns the chances and floors that were asked for, with their limits; without any, the first of each."""
    from reconbound._internal.checks import InputError
    from reconbound.sweep.chances import chances_in, checked_chance
    from reconbound.sweep.frontier import checked_floor

    limited = at_most is not None or at_least is not None
    for kind, names, name, limit in (("chance", chance, "at_most", at_most), ("floor", floor, "at_least", at_least)):
        if names and limited and limit is None:
            raise InputError(name, f"must be given too for a {kind}", None)
    chances: list[str | None] = [*(chance or ())]
    floors: list[str | None] = [*(floor or ())]
    if not chance and (at_most is not None if limited else not floor and chances_in(rows)):
        chances = [None]
    if not floor and (at_least is not None if limited else not chance):
        floors = [None]
    found: dict[str, Any] = dict.fromkeys((checked_chance(rows, name) for name in chances), at_most)
    return found | dict.fromkeys((checked_floor(rows, name) for name in floors), at_least)


def _print_json(content: dict[str, Any]) -> None:
    """As JSON, with the chance without the record, and the names of the floors in it that are no guarantee."""
    from reconbound.report.success import SHOWN
    from reconbound.sweep.frontier import FLOORS, is_proved

    not_proved = [name for name in FLOORS if not is_proved(name)]
    shared.print_json({**content, "baseline": SHOWN, "not_proved": not_proved})


def _best_line(rows: list[Row], floor: str, limit: float, row: Row | None, facts: dict[str, Any]) -> str:
    from reconbound.bounds.bound import NOT_PROVED
    from reconbound.report.formats import paragraphs
    from reconbound.sweep.chances import CHANCES, format_chance
    from reconbound.sweep.frontier import crossed_of, describe_floor, describe_precision, is_proved
    from reconbound.sweep.page import has_crossed, measured_by
    from reconbound.sweep.space import PARAMETERS, format_setting

    chance, there = floor in CHANCES, [r[floor] for r in rows if r.get(floor) is not None]
    nearest = min(there, default=1.0) if chance else max(there, default=0.0)
    context: Row = {"floor": floor, "limit": limit, "row": row, "rows": rows, "nearest": nearest, "chance": chance}
    if row is not None:
        context |= {"described": describe_floor(floor), "shown": format_chance(row, floor)}
        context["how"] = describe_precision(floor, facts["runs"], row.get("measured_median"))
        if has_crossed([row], floor):
            context["how"] += f"; crossed {format_floor(row[crossed_of(floor) or ''], 4)}"
        context |= {"measure": measured_by(facts), "setting": format_setting(row, PARAMETERS)}
    return paragraphs("sweep-best.txt", **context, proved=is_proved(floor), not_proved=NOT_PROVED)[0]


def _print_sweep(facts: dict[str, Any], rows: list[Row]) -> None:
    failed = f", {facts['failed']} failed" if facts["failed"] else ""
    print(f"{facts['finished']} of {facts['trials']} settings trained{failed}. Confidential:")
    if facts["error"]:
        print(f"reconbound: the first failure: {shared.one_line(facts['error'])}", file=sys.stderr)
    if rows:
        from reconbound.sweep.frontier import checked_floor
        from reconbound.sweep.page import cautions, measured_by, verdict

        sentences = verdict(rows, checked_floor(rows), facts.get("guesses"), measured_by(facts))
        for line in (*cautions(rows, facts), *sentences):
            shared.print_line(line)
        for name in ("table", "page"):
            shared.print_line(facts[name])


def _print_fronts(facts: dict[str, Any], fronts: dict[str, list[Row]], cautions: list[str]) -> None:
    from reconbound.sweep.chances import CHANCES
    from reconbound.sweep.frontier import CROSSED, crossed_of, describe_binding, describe_floor, describe_majority
    from reconbound.sweep.page import has_crossed, measured_by, settings_in

    console = shared.terminal()
    for line in cautions:
        console.print(line)
    for floor, rows in fronts.items():
        if floor in CHANCES:
            _print_chances(console, floor, rows, measured_by(facts))
            continue
        title = f"{describe_floor(floor)} ({floor}){describe_binding(floor)}: no setting beats these"
        names, second = settings_in(rows), ["crossed (MSE)"] if has_crossed(rows, floor) else []
        cells = []
        for row in rows:
            values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row.get(name, "") for name in names)]
            given = [row.get(crossed_of(floor) or "")] if second else []
            more = ["" if value is None else format_floor(value, 4) for value in given]
            more.append("" if row.get("epsilon") is None else format_limit(row["epsilon"], 4))
            reached = (f"{row['accuracy']:.4f}", format_floor(row[floor], 4))
            cells.append((str(row["trial"]), *values, f"{row['steps']:,}", *reached, *more))
        columns = ("run", *names, "steps", measured_by(facts), "floor (MSE)", *second, "ε")
        shared.print_table(console, title, columns, cells)
    if any(has_crossed(rows, floor) for floor, rows in fronts.items()):
        console.print(CROSSED)
    for line in describe_majority(facts["guesses"]):
        console.print(line)
    delta = next((row["delta"] for rows in fronts.values() for row in rows if row.get("delta")), None)
    if delta is not None:
        console.print(f"ε is for replace-one neighbours at δ = {format_limit(delta, 6)}.")
    console.print(f"{facts['finished']} of {facts['trials']} settings trained.")
    shared.print_line(facts["page"])


def _print_chances(console: Any, chance: str, rows: list[Row], measure: str) -> None:
    from reconbound.sweep.chances import chances_in, format_chance, head_chance
    from reconbound.sweep.frontier import describe_floor
    from reconbound.sweep.page import settings_in

    names, shown = settings_in(rows), chances_in(rows)
    cells = []
    for row in rows:
        values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row.get(name, "") for name in names)]
        more = [format_chance(row, name) for name in shown]
        epsilon = "" if row.get("epsilon") is None else format_limit(row["epsilon"], 4)
        cells.append((str(row["trial"]), *values, f"{row['steps']:,}", f"{row['accuracy']:.4f}", *more, epsilon))
    title = f"{describe_floor(chance)} ({chance}), 10 % without the record, for any attacker: no setting beats these"
    columns = ("run", *names, "steps", measure, *map(head_chance, shown), "ε")
    shared.print_table(console, title, columns, cells)


@contextmanager
def _needs_optuna() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as reason:
        if reason.name not in ("optuna", "sqlalchemy", "alembic"):
            raise
        print("reconbound: this command needs Optuna: pip install 'reconbound[sweep]'", file=sys.stderr)
        raise typer.Exit(2) from None

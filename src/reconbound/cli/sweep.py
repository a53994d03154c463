"""reconbound sweep and reconbound frontier: many trainings, and the best of them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import DataError, number
from reconbound._internal.formatting import format_floor, format_limit, format_number
from reconbound.cli.options import SEED, STORAGE, confidential_note, count, one_line, plain_errors

if TYPE_CHECKING:
    from reconbound.sweep import Sweep

Whole = {"parser": count, "metavar": "<int>"}
Row = dict[str, Any]


def sweep_command(
    data: Annotated[str, typer.Argument(metavar="DATA", help="As in reconbound audit.")] = "digits",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="lr=0.1,0.5",
            help="A setting and its values: noise_multiplier, max_grad_norm, sample_rate, lr, momentum, clip, sampler "
            "or model. For --search tpe also a range: lr=0.01:1:log. Repeatable.",
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="1000,2000", help="Step counts; one training serves all of them.")
    ] = "100,200,300",
    runs: Annotated[int, typer.Option(**Whole, help="Independent runs for each setting.")] = 1,
    search: Annotated[str, typer.Option(help="grid (every combination) or tpe (Optuna's search).")] = "grid",
    trials: Annotated[int | None, typer.Option(**Whole, help="Settings to try, for --search tpe.")] = None,
    floor: Annotated[str | None, typer.Option(help="The floor that a search looks at (default: exact_max).")] = None,
    at_least: Annotated[
        float | None, typer.Option(help="Search for the best accuracy with that floor at least this high.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As in reconbound audit, for all settings.")] = None,
    budget: Annotated[str | None, typer.Option(help="As in reconbound audit.")] = None,
    delta: Annotated[float, typer.Option(help="Delta at which epsilon is reported.")] = 1e-5,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A database for workers on several machines: postgresql+psycopg2://user@host/name (default: "
            "sweep.db in the folder). What is stored there is confidential. With a password give it by the variable: "
            "other users of the machine see a command line.",
            envvar=STORAGE,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the sweep in the storage.")] = "sweep",
    workers: Annotated[int, typer.Option(**Whole, help="Processes on this machine.")] = 1,
    together: Annotated[
        int | None,
        typer.Option(
            **Whole,
            help="Settings that a worker trains at once, as one batch of models: what keeps a GPU busy (20 to 40 for "
            "small networks). They share their batches, and a killed one begins anew.",
        ),
    ] = None,
    grace: Annotated[
        int, typer.Option(**Whole, help="Seconds without a heartbeat after which a worker counts as dead.")
    ] = 60,
    seed: Annotated[
        int | None,
        typer.Option(
            envvar=SEED,
            help="Of the sweep (default: new, kept in the folder; secret). Other users of the machine see a command "
            "line; they do not see the variable.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    private: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="As in reconbound audit. Repeatable.")
    ] = None,
    category: Annotated[list[str] | None, typer.Option(metavar="A", help="As in reconbound audit. Repeatable.")] = None,
    range_: Annotated[
        list[str] | None, typer.Option("--range", metavar="age=0:120", help="As in reconbound audit. Repeatable.")
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", "--units", metavar="age=years", help="As in reconbound audit. Repeatable."),
    ] = None,
    data_folder: Annotated[Path | None, typer.Option(help="As in reconbound audit.")] = None,
    drop: Annotated[str | None, typer.Option(metavar="A,B", help="As in reconbound audit.")] = None,
    header: Annotated[str | None, typer.Option(metavar="A,B", help="As in reconbound audit.")] = None,
    size: Annotated[int | None, typer.Option(**Whole, help="As in reconbound audit.")] = None,
    test_share: Annotated[float | None, typer.Option(help="As in reconbound audit.")] = None,
    limit: Annotated[int | None, typer.Option(**Whole, help="Train on at most this many records.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results (default: sweep-DATA).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON (confidential).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the page's path and nothing else.")] = False,
) -> None:
    """Train many settings and draw the frontier: accuracy against every floor.

    Run it again to go on where it was stopped, with more --workers, or on other machines with the same --storage.
    """
    given = dict(locals())
    with _needs_optuna(), plain_errors("; run the same command again to go on"), _notes(quiet):
        config = _make_config(given)
        from reconbound.sweep import sweep
        from reconbound.sweep.run import publish

        rows = sweep(config, workers=workers, show=not quiet)
        facts = publish(config.out, config.storage)
        if as_json:
            confidential_note()
            _print_json({**facts, "rows": rows})
        elif quiet:
            for caveat in (facts.get("caveats") or {}).values():  # even so: it takes floors away
                print(f"Note: {caveat}", file=sys.stderr)
            if facts["page"]:
                print(facts["page"])
        else:
            _print_sweep(facts, rows)
        if not rows:
            raise typer.Exit(1)


def _make_config(given: dict[str, Any]) -> Sweep:
    from reconbound.auditing.run import folder_name
    from reconbound.cli.audit import parse_budget
    from reconbound.data.tables import read_ranges, read_units
    from reconbound.sweep import Sweep, parse_grid, parse_steps

    load = {"target": given["target"], "private": given["private"] or None, "limit": given["limit"]}
    load |= {"folder": given["data_folder"], "ranges": read_ranges(given["range_"] or []) or None}
    load |= {"units": read_units(given["unit"] or []) or None, "drop": given["drop"], "size": given["size"]}
    load |= {"header": None if given["header"] is None else given["header"].split(",")}
    if given["category"]:
        load["categories"] = given["category"]
    if given["test_share"] is not None:
        load["test_share"] = given["test_share"]
    plan = {"model": given["model"], "budget": parse_budget(given["budget"])}
    same = ("runs", "search", "trials", "floor", "at_least", "delta", "storage", "name", "seed", "grace", "together")
    return Sweep(
        data=given["data"],
        out=given["out"] or Path(f"sweep-{folder_name(Path(given['data']).name)}"),
        space=parse_grid(given["grid"] or []),
        steps=parse_steps(given["steps"]),
        load=load,
        plan={name: value for name, value in plan.items() if value is not None},
        **{name: given[name] for name in same},
    )


def frontier_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a sweep, finished or not.")],
    floor: Annotated[
        list[str] | None, typer.Option(help="A floor, such as exact_max, paper_q99, theorem1 or lecam. Repeatable.")
    ] = None,
    at_least: Annotated[
        float | None, typer.Option(help="Only the best accuracy with the floor (MSE, in squares of a range) so high.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", envvar=STORAGE, help="As given to reconbound sweep.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (confidential).")] = False,
) -> None:
    """The best settings of a sweep, and its page and table anew; with --at-least the best accuracy for a floor."""
    with _needs_optuna(), plain_errors(received=str(folder)):
        from reconbound.sweep import best, floors_in, pareto
        from reconbound.sweep.frontier import CROSSED, checked_floor, describe_majority
        from reconbound.sweep.page import cautions, has_crossed
        from reconbound.sweep.run import publish, stored

        if at_least is not None:
            number("at_least", at_least, above=0.0)
        rows, _ = stored(folder, storage)
        if not rows:
            raise DataError(f"{folder} holds a sweep of which no setting is trained yet: run reconbound sweep again")
        asked = [checked_floor(rows, name) for name in floor] if floor else [checked_floor(rows, None)]
        facts = publish(folder, storage)
        confidential_note()
        if at_least is None:
            fronts = {name: pareto(rows, name) for name in (asked if floor else floors_in(rows))}
            if as_json:
                _print_json({**facts, "fronts": fronts})
            else:
                _print_fronts(facts, {n: fronts[n] for n in asked}, cautions(rows, facts))
            return
        found = {name: best(rows, name, at_least) for name in asked}
        if as_json:
            _print_json({**facts, "at_least": at_least, "best": found})
        else:
            for line in cautions(rows, facts):
                print(line)
            for name, row in found.items():
                print(_best_line(rows, name, at_least, row, facts))
            if any(row is not None and has_crossed([row], name) for name, row in found.items()):
                print(CROSSED)
            for line in describe_majority(facts["guesses"]):
                print(line)
        if None in found.values():
            raise typer.Exit(1)


def _print_json(content: dict[str, Any]) -> None:
    """As JSON, with the names of the floors in it that are no guarantee."""
    from reconbound.sweep.frontier import FLOORS, is_proved

    not_proved = [name for name in FLOORS if not is_proved(name)]
    print(json.dumps({**content, "not_proved": not_proved}, indent=2, allow_nan=False))


def _best_line(rows: list[Row], floor: str, at_least: float, row: Row | None, facts: dict[str, Any]) -> str:
    from reconbound.bounds.bound import NOT_PROVED
    from reconbound.sweep.frontier import crossed_of, describe_precision, is_proved
    from reconbound.sweep.page import has_crossed, measured_by
    from reconbound.sweep.space import PARAMETERS, format_setting

    if all(r.get("accuracy") is None for r in rows):
        return f"{floor}: no setting has an accuracy to choose by: there were no test records"
    if row is None:
        highest = max((r[floor] for r in rows if r.get(floor) is not None), default=0.0)
        wanted, there = format_number(at_least, 4), format_floor(highest, 4)
        return f"{floor}: no setting has a floor of at least {wanted}; the highest is MSE {there}"
    how = describe_precision(floor, facts["runs"], row.get("measured_median"))
    if has_crossed([row], floor):
        how += f"; crossed {format_floor(row[crossed_of(floor) or ''], 4)}"
    mark = "" if is_proved(floor) else f" ({NOT_PROVED})"
    return (
        f"{floor}{mark} at least {format_number(at_least, 4)}: {measured_by(facts)} {row['accuracy']:.4f}, "
        f"floor MSE {format_floor(row[floor], 4)}, ±{format_floor(row[floor] ** 0.5)} of a range"
        f"{f' ({how})' if how else ''}: run {row['trial']}, {format_setting(row, PARAMETERS)}, {row['steps']:,} steps"
    )


def _print_sweep(facts: dict[str, Any], rows: list[Row]) -> None:
    failed = f", {facts['failed']} failed" if facts["failed"] else ""
    print(f"{facts['finished']} of {facts['trials']} settings trained{failed}. Confidential:")
    if facts["error"]:
        print(f"reconbound: the first failure: {one_line(facts['error'])}", file=sys.stderr)
    if rows:
        from reconbound.sweep.frontier import default_floor
        from reconbound.sweep.page import cautions, measured_by, verdict

        sentences = verdict(rows, default_floor(rows), facts.get("guesses"), measured_by(facts))
        for line in (*cautions(rows, facts), *sentences):
            print(line)
        print(f"{facts['table']}\n{facts['page']}")


def _print_fronts(facts: dict[str, Any], fronts: dict[str, list[Row]], cautions: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from reconbound.sweep.frontier import CROSSED, crossed_of, describe_binding, describe_floor, describe_majority
    from reconbound.sweep.page import has_crossed, measured_by, settings_in

    console = Console(highlight=False, markup=False)
    for line in cautions:
        console.print(line)
    for floor, rows in fronts.items():
        title = f"{describe_floor(floor)} ({floor}){describe_binding(floor)}: no setting beats these"
        table = Table(title=title, title_justify="left")
        names = settings_in(rows)
        second = ["crossed (MSE)"] if has_crossed(rows, floor) else []
        for column in ("run", *names, "steps", measured_by(facts), "floor (MSE)", *second, "ε"):
            table.add_column(column, justify="right", overflow="fold")
        for row in rows:
            values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row.get(name, "") for name in names)]
            given = [row.get(crossed_of(floor) or "")] if second else []
            more = ["" if value is None else format_floor(value, 4) for value in given]
            more.append("" if row.get("epsilon") is None else format_limit(row["epsilon"], 4))
            cells = (f"{row['accuracy']:.4f}", format_floor(row[floor], 4), *more)
            table.add_row(str(row["trial"]), *values, f"{row['steps']:,}", *cells)
        console.print(table)
    if any(has_crossed(rows, floor) for floor, rows in fronts.items()):
        console.print(CROSSED)
    for line in describe_majority(facts["guesses"]):
        console.print(line)
    delta = next((row["delta"] for rows in fronts.values() for row in rows if row.get("delta")), None)
    if delta is not None:
        console.print(f"ε is for replace-one neighbours at δ = {format_limit(delta, 6)}.")
    console.print(f"{facts['finished']} of {facts['trials']} settings trained. {facts['page']}")


@contextmanager
def _notes(quiet: bool) -> Iterator[None]:
    """Prints warnings about the data as notes, one line each."""
    from reconbound.data import DataWarning
    from reconbound.validate import KinkWarning

    confidential = False

    def shown(message: Any, category: Any = None, *_: Any, **__: Any) -> None:
        nonlocal confidential
        if quiet:
            return
        if not confidential and isinstance(category, type) and issubclass(category, DataWarning):
            confidential_note()  # they quote ranges and cells
            confidential = True
        print(f"Note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("once", DataWarning)
        warnings.simplefilter("ignore", KinkWarning)  # reported with the plan, and on the page
        warnings.showwarning = shown
        yield


@contextmanager
def _needs_optuna() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as reason:
        if reason.name not in ("optuna", "sqlalchemy", "alembic"):
            raise
        print("reconbound: this command needs Optuna: pip install 'reconbound[sweep]'", file=sys.stderr)
        raise typer.Exit(2) from None

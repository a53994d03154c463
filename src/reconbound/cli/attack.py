"""reconbound attack: floors below, real attacks above, for some records of an audit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound.cli import options as shared

if TYPE_CHECKING:
    from reconbound.report.attack import Attacked
    from reconbound.report.view import View


@shared.takes(reading=shared.DATA)
def attack_command(
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a finished audit.")],
    records: Annotated[
        str, typer.Option(metavar="GROUP:N,...", help="Which records: most-exposed:N, least-exposed:N, random:N.")
    ] = "most-exposed:8,least-exposed:8,random:8",
    trials: Annotated[int, typer.Option(parser=shared.count, metavar="<int>", help="Trainings of each kind.")] = 100,
    data: Annotated[
        str | None, typer.Option(help="The audit's data, read with the same options; not needed for built-in sets.")
    ] = None,
    reading: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON (confidential).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the report's path and nothing else.")] = False,
) -> None:
    """Attack some records of an audit in fresh trainings, and add a section to its report (confidential).

    It trains N times with each kind of data: as they are, without each record, and with a public value in its place.
    """
    with shared.plain_errors(received=str(folder)), shared.print_warnings(quiet=quiet):
        from reconbound.auditing.attack import attack_audit
        from reconbound.auditing.options import read_options
        from reconbound.data import load_dataset
        from reconbound.report.folder import REPORT, read_audit
        from reconbound.report.view import View

        _, name = read_options(folder)
        dataset = load_dataset(data or name, **shared.reading_options(reading))
        found = attack_audit(folder, dataset, records=records, trials=trials, show=not quiet)
        view = View(*read_audit(folder))
        if as_json:
            shared.confidential_note()
            shared.print_json(result(view, found))
            return
        if not quiet:
            shared.confidential_note()
            _print(view, found)
        shared.print_line(folder / REPORT)


def result(view: View, found: Attacked) -> dict[str, Any]:
    """Returns what the attacks found as JSON; confidential. Squared errors per feature, in the model's input units.

    Args:
        view: the audit.
        found: what the attacks found.
    """
    from reconbound.report.attack import record_facts

    rows = []
    for one in found.records:
        more = {"two_point": one.two_point, "close_chances": one.close_chances, "faults": one.faults}
        rows.append({"name": view.record_name(one.target.record), **record_facts(one), **_plain(more)})
    return {"confidential": True, **dict(found.facts), "records": rows}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in found.items()}


def _print(view: View, found: Attacked) -> None:
    """Prints the verdict and a table of records."""
    from reconbound.report.attack import attack_section

    section, console = attack_section(view, found), shared.terminal()
    for name, fault in section["faults"]:
        console.print(f"Fault: {name}: {fault}")
    if not section["faults"]:
        count = f"{section['count']} {view.noun}{'s' if section['count'] > 1 else ''}"
        console.print(
            f"No attack beat a floor that binds it: {count}, {section['trials']:,} fresh trainings of each kind."
        )
    if section["estimates"]:
        console.print(f"Of {section['estimates']} of them some of the audit's figures are estimates, not limits.")
    names = {"name": view.noun, "floor": "floor", "spread": "attack", "two_point": "any: floor", "both": "attack",
             "nats": "nats at most", "nats_low": "at least", "epsilon_low": "ε at least"}  # fmt: skip
    rows = [[row[name] for name in names] for row in section["rows"]]
    shared.print_table(console, "Floors and attacks", list(names.values()), rows, (view.noun,))

"""reconbound audit: from data to a report."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import number
from reconbound._internal.formatting import format_duration
from reconbound.cli import options as shared
from reconbound.cli.bound import OPTIONS

if TYPE_CHECKING:
    from reconbound.auditing.options import AuditOptions
    from reconbound.data import Dataset

#: Columns of which the terminal prints how many records are exposed.
NAMED = 12
TRAINING = {
    "model": (
        str,
        "auto, linear, mlp, cnn, or package.module:factory, called as factory(shape, outputs). A factory is code that "
        "will be run: name only what you trust.",
    ),
    "noise_multiplier": (float, "Noise std on the SUM of clipped gradients over the clip norm."),
    "max_grad_norm": (float, "The clip norm."),
    **{name: OPTIONS[name] for name in ("sample_rate", "steps", "epochs", "clip", "sampler")},
    "runs": (shared.count, "Independent runs: one is released, the others measure; 1 gives no confidence limits."),
    "lr": (float, "Learning rate."),
    "momentum": (float, "Momentum."),
    "budget": (str, "Records measured over records trained on (a number), or every: each batch."),
    "seed": (
        int,
        f"Repeats a run exactly. Whoever guesses it knows the noise: not for a release. {shared.HIDE}",
        {"envvar": shared.SEED},
    ),
}


@shared.takes(given=TRAINING, reading=shared.DATA)
def audit_command(
    *,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="digits (default), breast_cancer, diabetes, wine, mnist, cifar10, a .csv (.csv.gz), .parquet or .npz "
            "file, or a folder of images by class.",
        ),
    ] = "digits",
    given: dict[str, Any],
    reading: dict[str, Any],
    publish_accuracy: Annotated[
        bool,
        typer.Option(
            "--publish-accuracy",
            help="Put the accuracy into the public page too, in whole percent. No noise protects the held-out records "
            "that it is measured on; refused where the target is a number.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results (default: audit-DATA).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what the folder holds and start over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON (confidential).")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the report's path and nothing else.")] = False,
) -> None:
    """Train privately on your data and write a report on how well each record is protected.

    Run it again in the same folder to go on where it was stopped.
    """
    if "budget" in given:
        given["budget"] = shared.parse_budget(given["budget"])
    epochs = given.pop("epochs", None)
    if epochs is not None and "steps" in given:
        raise typer.BadParameter("does not go with --steps", param_hint="--epochs")
    resume = f"; run the same command again{', without --fresh,' if fresh else ''} to go on"
    with shared.plain_errors(resume):
        from reconbound.auditing.options import finished, open_folder, refuse_other
        from reconbound.auditing.run import check_publishable, folder_name, run_audit
        from reconbound.validate import KinkWarning

        dataset, notes = _load_data(data, shared.reading_options(reading))
        if publish_accuracy:
            check_publishable(dataset)
        options = _make_options(dataset, given, epochs)
        folder = out if out is not None else Path(f"audit-{folder_name(dataset.name)}")
        with _no_empty_folder(folder):
            open_folder(folder)
            if not fresh:
                refuse_other(folder, dataset, options)
            if notes and not quiet:
                shared.confidential_note()  # they quote ranges and cells
            for note in [] if quiet else notes:  # after all that may be wrong with the options
                shared.print_line(f"Note: {note}", error=True)
            if not fresh and finished(folder, dataset, options, publish_accuracy=publish_accuracy):
                done = (
                    f"Finished already: the audit in {folder} has these data and options; nothing was done. --fresh "
                    "starts over, more --runs add to it, reconbound report builds its pages again."
                )
                for line in [] if quiet else [done]:
                    shared.print_line(line, error=as_json)
            else:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*can be guessed")  # printed as a note
                    options = _print_notes(dataset, options, quiet)
                    for line in [] if quiet else describe_audit(dataset, options, folder, fresh):
                        shared.print_line(line, error=as_json)
                    warnings.simplefilter("ignore", KinkWarning)  # printed as a note, and kept in run.json
                    how = {"publish_accuracy": publish_accuracy, "fresh": fresh}
                    run_audit(dataset, options, folder, show=not quiet, **how)
            _print_result(folder, as_json, quiet)


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Removes the folder that was made for an audit if the audit fails before it writes anything."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there:
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()
        raise


def _load_data(data: str, reading: dict[str, Any]) -> tuple[Dataset, list[str]]:
    """Returns the data, and notes about them for their owner."""
    from reconbound.data import DataWarning, load_dataset

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        dataset = load_dataset(data, **reading)
    notes = [str(warning.message) for warning in caught]
    if dataset.inferred_ranges:
        notes.append("declare known ranges by --range COLUMN=LOWEST:HIGHEST, once for each column")
    return dataset, notes


def _make_options(dataset: Dataset, given: dict[str, Any], epochs: float | None) -> AuditOptions:
    from reconbound.auditing.options import default_options
    from reconbound.auditing.run import sampler_of
    from reconbound.training.sampling import steps_of

    options = default_options(dataset, **given)
    if epochs is None:
        return options
    steps = steps_of(sampler_of(dataset, options), epochs)
    number("steps", steps, at_most=1e15)
    return replace(options, steps=steps)


def _print_notes(dataset: Dataset, options: AuditOptions, quiet: bool) -> AuditOptions:
    """Prints what the model and the settings do not allow, and returns the options with which the audit can be run."""
    from reconbound.auditing.models import check_model
    from reconbound.auditing.options import without_derivative
    from reconbound.auditing.run import floors_of
    from reconbound.report.text import weaknesses

    caveats = check_model(dataset, options.model)
    options, notes = without_derivative(options, caveats), list(caveats.values())  # even if quiet: they void floors
    if not quiet:
        noun, protection = "image" if dataset.kind == "image" else "record", floors_of(dataset, options).protection
        notes += [protection.warning(noun), *weaknesses(len(dataset.inputs), protection, noun)]
        if options.settings.seed is not None:
            notes.append("whoever guesses the seed knows the noise: release no model that had --seed")
    for note in filter(None, notes):
        shared.print_line(f"Note: {note}", error=True)
    return options


def _print_result(folder: Path, as_json: bool, quiet: bool) -> None:
    """Prints the finding of a finished audit, and where its report is."""
    from reconbound.report.folder import REPORT

    found = {} if quiet and not as_json else result(folder)
    if found:
        shared.confidential_note()
    if as_json:
        shared.print_json(found)
        return
    if not quiet:
        for line in (*found["verdict"], *describe_columns(found), found["accuracy_said"]):
            shared.print_line(line)
    shared.print_line(folder / REPORT)


def describe_columns(found: dict[str, Any]) -> list[str]:
    """Returns the second view: what its floors do not cover, and a line for each column, the most exposed first."""
    from reconbound.report.text import column_sentence

    if not found["columns"]:
        return list(found["caveats"].values())
    rows = sorted(
        found["columns"], key=lambda c: (c["constant"], -c["below"], (c["lowest"] or 0.0) / (c["guess"] or 1.0))
    )
    more = [f"  and {len(rows) - NAMED} more, in the report"] if len(rows) > NAMED else []
    return [
        *found["caveats"].values(),
        f"Attackers who use no outside knowledge, on single columns of {found['columns_of']} (by estimates):",
        *(f"  {column_sentence(c)}" for c in rows[:NAMED]),
        *more,
    ]


def describe_audit(dataset: Dataset, options: AuditOptions, out: Path, fresh: bool) -> list[str]:
    """Returns what will be done, what the mechanism guarantees before any training, and how long it will take."""
    from reconbound.auditing.models import describe_model
    from reconbound.auditing.run import expected_seconds, floors_of, sampler_of
    from reconbound.report.folder import PLAN
    from reconbound.report.formats import paragraphs, pixel_scale

    context: dict[str, Any] = {"dataset": dataset, "options": options, "out": out, "pixel_scale": pixel_scale}
    context |= {"found": floors_of(dataset, options), "sampler": sampler_of(dataset, options)}
    context["model"] = describe_model(dataset, options.model)
    context["time"] = format_duration(expected_seconds(dataset, options))
    return paragraphs("audit-plan.txt", **context, begun=not fresh and (out / PLAN).exists())


def result(folder: Path) -> dict[str, Any]:
    """Returns the verdict of a finished audit and where it is; confidential."""
    from reconbound.report.folder import MODEL, PUBLIC_REPORT, REPORT, read_audit
    from reconbound.report.headline import accuracy_sentence, headline
    from reconbound.report.success import BASELINES
    from reconbound.report.text import columns_scope
    from reconbound.report.view import View, quantile

    run, leakage = read_audit(folder)
    view = View(run, leakage)
    names, exposed = {"lowest": 0.0, "1 %": 0.01, "median": 0.5}, view.exposed_in_some_column
    limits = None  # of the records that have one; those without are counted
    if view.limited.any():
        known = view.shown[view.limited]
        limits = {**{name: quantile(known, share) for name, share in names.items()}, "without": view.unlimited}
    floors = {name: quantile(view.floor[view.measured], share) for name, share in names.items() if view.unbiased}
    return {
        "confidential": True,
        "folder": str(folder),
        "report": str(folder / REPORT),
        "public_report": str(folder / PUBLIC_REPORT),
        "model": str(folder / MODEL),
        "verdict": headline(view),
        "success": [world.row(baseline) for world in view.success.worlds for baseline in BASELINES],
        "caveats": dict(run.caveats or {}),
        "floors_lower_limit": limits,
        "floors_estimate": floors or None,
        "meaningful": view.protection.meaningful,
        "success_at_1_percent": view.protection.success,
        "guess": view.guess,
        "unit": f"± {view.of_range}",
        "records": view.records,
        "below_guess": view.below(view.guess),
        "below_guess_on_some_column": None if exposed is None else {"below": exposed[0], "of": exposed[1]},
        "never_measured": view.unknown,
        "columns": view.columns,
        "columns_of": columns_scope(view) if view.columns else None,
        "accuracy": view.accuracy,
        "accuracy_baseline": view.facts.get("accuracy_baseline"),
        "accuracy_said": accuracy_sentence(view),
        "epsilon": run.guarantee.get("epsilon"),
    }

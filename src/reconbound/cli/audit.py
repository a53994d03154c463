"""reconbound audit: from data to a report."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import InputError, number, spelled
from reconbound.cli.options import SEED, confidential_note, count, plain_errors, ratio

if TYPE_CHECKING:
    from numpy import ndarray

    from reconbound.auditing.options import AuditOptions
    from reconbound.data import Dataset

Whole = {"parser": count, "metavar": "<int>"}
#: Columns of which the terminal says how many records are exposed.
NAMED = 12


def audit_command(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="digits (default), breast_cancer, diabetes, wine, mnist, cifar10, a .csv (.csv.gz), .parquet or .npz "
            "file, or a folder of images by class.",
        ),
    ] = "digits",
    model: Annotated[
        str | None,
        typer.Option(
            help="auto, linear, mlp, cnn, or package.module:factory, called as factory(shape, outputs). A factory is "
            "code that will be run: name only what you trust."
        ),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise std on the SUM of clipped gradients over the clip norm.")
    ] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="The clip norm.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(parser=ratio, metavar="<float>", help="Chance of a record to be in a batch.")
    ] = None,
    steps: Annotated[int | None, typer.Option(**Whole, help="Steps of a run.")] = None,
    epochs: Annotated[float | None, typer.Option(help="The same as passes over the data.")] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            **Whole, help="Independent runs: one is released, the others measure; 1 gives no confidence limits."
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum.")] = None,
    clip: Annotated[str | None, typer.Option(help="smooth (default) or hard.")] = None,
    sampler: Annotated[str | None, typer.Option(help="poisson (default), fixed or shuffle.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Records measured over records trained on (a number), or every: each batch.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            envvar=SEED,
            help="For a run to be repeated exactly. Whoever can guess it knows the noise: not for a release. Other "
            "users of the machine see a command line; they do not see the variable.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    private: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B", help="Private columns (default: all columns of numbers). Repeatable."),
    ] = None,
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="age=0:120", help="Range of a column, known without the data. Repeatable."),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", "--units", metavar="age=years", help="Unit of a column. Repeatable."),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder with mnist/ or cifar10/ (default: the variable RECONBOUND_DATA).")
    ] = None,
    drop: Annotated[str | None, typer.Option(metavar="A,B", help="Columns of a table to leave out.")] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="A", help="A column to take as categories, whatever it holds. Repeatable."),
    ] = None,
    header: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Names of a CSV file's columns, where it has no first row of them."),
    ] = None,
    size: Annotated[
        int | None, typer.Option(**Whole, help="Longest side, in pixels, to bring a folder's images to.")
    ] = None,
    test_share: Annotated[
        float | None, typer.Option(help="Share of the records held out for testing (0.2), where there is no test set.")
    ] = None,
    limit: Annotated[int | None, typer.Option(**Whole, help="Train on at most so many records.")] = None,
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
    changes = {
        "model": model,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "sample_rate": sample_rate,
        "steps": steps,
        "runs": runs,
        "lr": lr,
        "momentum": momentum,
        "clip": clip,
        "sampler": sampler,
        "budget": parse_budget(budget),
        "seed": seed,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if epochs is not None and steps is not None:
        raise typer.BadParameter("does not go with --steps", param_hint="--epochs")
    reading: dict[str, Any] = {"target": target, "private": private or None, "limit": limit, "folder": data_folder}
    reading |= {
        "categories": category or None,
        "drop": drop,
        "header": None if header is None else header.split(","),
        "size": size,
    }
    if test_share is not None:
        reading["test_share"] = test_share
    resume = f"; run the same command again{', without --fresh,' if fresh else ''} to go on"
    with plain_errors(resume):
        from reconbound.auditing.options import open_folder, refuse_other
        from reconbound.auditing.run import folder_name
        from reconbound.data.tables import read_ranges, read_units

        reading |= {"ranges": read_ranges(range_ or []) or None, "units": read_units(unit or []) or None}
        dataset, notes = _load_data(data, reading)
        if publish_accuracy:
            from reconbound.auditing.run import check_publishable

            check_publishable(dataset)
        options = _make_options(dataset, given, epochs)
        folder = out if out is not None else Path(f"audit-{folder_name(dataset.name)}")
        with _no_empty_folder(folder):
            open_folder(folder)
            if not fresh:
                refuse_other(folder, dataset, options)
            if notes and not quiet:
                confidential_note()  # they quote ranges and cells
            for note in [] if quiet else notes:  # after all that may be wrong with the options
                print(f"Note: {note}", file=sys.stderr)
            _run_audit(dataset, options, folder, publish_accuracy, fresh, as_json, quiet)


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Where an audit fails before it wrote anything, the folder that was made for it goes too."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there:
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()
        raise


def parse_budget(given: str | None) -> float | str | None:
    if given is None or given == "every":
        return given
    try:
        return number("budget", spelled(given), above=0.0)
    except InputError:
        raise InputError("budget", "must be a number greater than 0, or every", given) from None


def _load_data(data: str, reading: dict[str, Any]) -> tuple[Dataset, list[str]]:
    """Returns the data, and what their owner should know of them."""
    from reconbound.data import DataWarning, load_dataset

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        dataset = load_dataset(data, **reading)
    notes = [str(warning.message) for warning in caught]
    if dataset.inferred_ranges:
        notes.append(
            "declare ranges that are known without the data by --range COLUMN=LOWEST:HIGHEST, once for each column"
        )
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


def _run_audit(
    dataset: Dataset, options: AuditOptions, out: Path, publish_accuracy: bool, fresh: bool, as_json: bool, quiet: bool
) -> None:
    from reconbound.auditing.models import check_model
    from reconbound.auditing.options import finished
    from reconbound.auditing.run import run_audit
    from reconbound.validate import KinkWarning

    if not fresh and finished(out, dataset, options, publish_accuracy=publish_accuracy):
        if not quiet:
            print(
                f"Finished already: the audit in {out} was made with these data and options; nothing was done. "
                "--fresh starts over, more --runs add to it, reconbound report builds its pages again.",
                file=sys.stderr if as_json else sys.stdout,
            )
        _print_result(out, as_json, quiet)
        return
    if options.settings.seed is not None and not quiet:
        print("Note: whoever guesses the seed knows the noise: release no model that had --seed", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*can be guessed")  # said above
        for said in check_model(dataset, options.model).values():  # even if quiet: it takes floors away
            print(f"Note: {said}", file=sys.stderr)
        if not quiet:
            from reconbound.auditing.run import floors_of
            from reconbound.report.verdicts import weak

            noun, known = "image" if dataset.kind == "image" else "record", floors_of(dataset, options).protection
            for line in (known.warning(noun), *weak(len(dataset.inputs), known, noun)):
                if line:
                    print(f"Note: {line}", file=sys.stderr)
            for line in describe_plan(dataset, options, out, fresh):
                print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
        warnings.simplefilter("ignore", KinkWarning)  # said above, and kept in run.json
        folder = run_audit(dataset, options, out, show=not quiet, publish_accuracy=publish_accuracy, fresh=fresh)
    _print_result(folder, as_json, quiet)


def _print_result(folder: Path, as_json: bool, quiet: bool) -> None:
    """Prints the verdict of a finished audit, and where its report is."""
    from reconbound.report.folder import REPORT

    if as_json:
        confidential_note()
        print(json.dumps(result(folder), indent=2, allow_nan=False))
        return
    if not quiet:
        confidential_note()
        found = result(folder)
        for line in (*found["verdict"], *describe_columns(found), found["accuracy_said"]):
            print(line)
    print(folder / REPORT)


def describe_columns(found: dict[str, Any]) -> list[str]:
    """Returns a line for each column, the most exposed first: how many records are below a guess, and the lowest."""
    from reconbound.report.columns import sentence

    if not found["columns"]:
        return []
    rows = sorted(
        found["columns"], key=lambda c: (c["constant"], -c["below"], (c["lowest"] or 0.0) / (c["guess"] or 1.0))
    )
    more = [f"  and {len(rows) - NAMED} more, in the report"] if len(rows) > NAMED else []
    return [
        f"Single columns, of {found['columns_of']} (by estimates):",
        *(f"  {sentence(c)}" for c in rows[:NAMED]),
        *more,
    ]


def describe_plan(dataset: Dataset, options: AuditOptions, out: Path, fresh: bool) -> list[str]:
    """Returns what will be done, what the mechanism guarantees before any training, and how long it will take."""
    from reconbound._internal.formatting import format_floor, format_limit
    from reconbound.auditing.models import describe_model
    from reconbound.auditing.run import expected_seconds, floors_of, sampler_of
    from reconbound.report.figures import pixel_scale
    from reconbound.report.folder import PLAN

    settings = options.settings
    found, sampler = floors_of(dataset, options), sampler_of(dataset, options)
    epochs = options.steps / sampler.steps_per_epoch
    others = "the first is the release, the others only measure" if options.runs > 1 else "no confidence limits"
    others += "; confidence limits from two runs say next to nothing, from five they do" if options.runs == 2 else ""
    image = dataset.kind == "image"
    noun, pixel = "image" if image else "record", dataset.features[0]
    unit, of_range = (pixel.high - pixel.low, pixel_scale(pixel.low, pixel.high)) if image else (
        1.0, "of a column's range")  # fmt: skip
    whom = {
        "theorem1": f"an attacker unbiased for every {noun} there could be",
        "lecam": f"any attacker, on some conceivable {noun}, not on each",
    }
    says = [f"{name} ±{format_floor(found[name].rmse * unit)} ({who})" for name, who in whom.items()
            if not found[name].vacuous]  # fmt: skip
    epsilon = (
        ""
        if found.epsilon is None
        else f"; ε = {format_limit(found.epsilon)} (replace-one) at δ = {format_limit(found.delta, 6)}"
    )
    model = describe_model(dataset, options.model)
    seconds = expected_seconds(dataset, options)
    on = not fresh and (out / PLAN).exists()
    known = () if image else dataset.columns[1]
    return [
        dataset.summary(),
        *([f"Public, taken as known to the attacker: {', '.join(known)}."] if known else []),
        f"Model: {model}; {options.runs} run{'s' if options.runs > 1 else ''} of {options.steps:,} steps "
        f"({epochs:.3g} epochs), lr {settings.lr:g}: {others}.",
        f"Mechanism: noise multiplier {settings.noise_multiplier:g}, clip norm {settings.max_grad_norm:g} "
        f"({settings.clip}), {settings.sampler} batches, sample rate {sampler.sample_rate:.3g}{epsilon}.",
        f"Floors whatever the data, {of_range}: {', '.join(says) or 'none that says anything'}"
        f"{' (only with declared ranges: see the notes above)' if dataset.inferred_ranges else ''}. "
        f"The audit measures each {noun}'s own, for an attacker unbiased near it, and may find lower ones: report "
        "the lower.",
        f"Expected time: about {_duration(seconds)}{' if nothing is done yet' if on else ''}.",
        f"{'Goes on' if on else 'Writes'} in {out}, which is confidential apart from run.json, model.safetensors and "
        "report-public.html.",
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _quantile(values: ndarray, share: float) -> float:
    """Returns a quantile that some record has; 0 where there are none."""
    import numpy as np

    return float(np.quantile(values, share, method="lower")) if len(values) else 0.0


def result(folder: Path) -> dict[str, Any]:
    """Returns the verdict of a finished audit and where it is; confidential."""
    from reconbound.report import accuracy_line
    from reconbound.report.columns import anyone, counts, which
    from reconbound.report.folder import MODEL, PUBLIC_REPORT, REPORT, read_audit
    from reconbound.report.verdicts import sureness, verdict
    from reconbound.report.view import View

    run, leakage = read_audit(folder)
    view = View(run, leakage)
    names, exposed = {"lowest": 0.0, "1 %": 0.01, "median": 0.5}, anyone(view)
    limits = None  # of the records that have one; those without are counted
    if view.upper_floor is not None and (view.upper_floor > 0).any():
        known = view.upper_floor[view.upper_floor > 0]
        limits = {**{name: _quantile(known, share) for name, share in names.items()}, "without": view.unlimited}
    return {
        "confidential": True,
        "folder": str(folder),
        "report": str(folder / REPORT),
        "public_report": str(folder / PUBLIC_REPORT),
        "model": str(folder / MODEL),
        "verdict": [*verdict(view), *sureness(view)[:1]],
        "caveats": dict(run.caveats or {}),
        "floors_lower_limit": limits,
        "floors_estimate": {name: _quantile(view.floor[view.measured], share) for name, share in names.items()},
        "meaningful": view.protection.meaningful,
        "success_at_1_percent": view.protection.success,
        "guess": view.guess,
        "unit": f"± {view.of_range}",
        "records": view.records,
        "below_guess": view.below(view.guess),
        "below_guess_on_some_column": None if exposed is None else {"below": exposed[0], "of": exposed[1]},
        "never_measured": view.unknown,
        "columns": counts(view),
        "columns_of": which(view) if counts(view) else None,
        "accuracy": float(leakage.accuracy[-1]) if leakage.accuracy.numel() else None,
        "accuracy_baseline": view.facts.get("accuracy_baseline"),
        "accuracy_said": accuracy_line(view),
        "epsilon": run.guarantee.get("epsilon"),
    }

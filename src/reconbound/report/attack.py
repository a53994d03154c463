"""The section of attacks in the page for the data's owner: floors below, real attacks above, record by record.

attack.safetensors in the folder of an audit, confidential (mode 0600), belongs to one finished audit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal import files
from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound._internal.formatting import format_limit, format_number, format_percent
from reconbound._internal.large_files import write_sealed
from reconbound.attacks.limits import Distinguished, Reconstruction
from reconbound.attacks.sandwich import Sandwich, Stated, Target
from reconbound.report import charts
from reconbound.report.folder import ATTACK, Leakage
from reconbound.report.formats import for_plotly, guess_error, plus_minus
from reconbound.report.records import data_uri, picture
from reconbound.report.view import View

KIND, FORMAT = "attack", 1
_GROUPS = {"most-exposed": "most exposed", "least-exposed": "least exposed", "random": "drawn at random"}
_NUMBERS = ("floor", "cramer_rao", "guess")


@dataclass(frozen=True, repr=False)
class Attacked:
    """The result of attacks in fresh trainings around an audit's.

    Attributes:
        records: of each attacked record its floors and attacks.
        inputs: of the attacked records, as the model takes them, (R, *shape).
        facts: trials, confidence, reference (in words) and version.
    """

    records: tuple[Sandwich, ...]
    inputs: Tensor
    facts: Mapping[str, Any]


def write_attack(folder: str | os.PathLike[str], found: Attacked, run: str) -> None:
    """Writes the result of attacks, confidential, completely or not at all.

    Args:
        folder: the audit's.
        found: the result.
        run: the digest of the run that it belongs to, as the leakage file names it.
    """
    tensors = {"inputs": found.inputs, "truth": _stacked([one.truth for one in found.records])}
    tensors["reference"] = _stacked([one.reference for one in found.records])
    if all(one.examples is not None for one in found.records):
        tensors["examples"] = _stacked([one.examples for one in found.records])
    rows = [record_facts(one) for one in found.records]
    facts = {**found.facts, "kind": KIND, "format": FORMAT, "run": run, "records": rows}
    write_sealed(Path(folder) / ATTACK, tensors, facts)


def _stacked(parts: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(part) for part in parts]))


def record_facts(one: Sandwich) -> dict[str, Any]:
    """Returns all that was found about a record but its values, as JSON; infinite numbers are None."""
    found = {f.name: getattr(one, f.name) for f in fields(one) if f.name not in ("truth", "reference", "examples")}
    target = found.pop("target")
    found |= {"record": target.record, "group": target.group, "stated": asdict(target.stated)}
    for name in ("membership", "replaced", "likeliest", "probable"):
        found[name] = None if found[name] is None else asdict(found[name])
    return dict(_finite(found))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_attack(folder: str | os.PathLike[str], leakage: Leakage) -> Attacked | None:
    """Reads what attacks found in a folder; None where there was none, or where it was of another audit.

    Args:
        folder: the audit's.
        leakage: of the same folder.

    Raises:
        Unreadable: the file is damaged or something else; gives the reason.
    """
    path = Path(folder) / ATTACK
    if not path.exists():
        return None
    tensors, facts = files.unsealed(path)
    if facts.pop("kind", None) != KIND or facts.pop("format", None) != FORMAT:
        raise files.Unreadable(f"{path} is no file of attacks of this version of reconbound")
    if facts.pop("run", None) != leakage.facts.get("run"):
        return None
    try:
        rows = facts.pop("records")
        shown = {name: facts[name] for name in ("trials", "confidence", "reference")}
        whole("trials", shown["trials"], at_least=2)
        number("confidence", shown["confidence"], above=0.0, below=1.0)
        if not isinstance(shown["reference"], str):
            raise InputError("reference", "must be text", shown["reference"])
        for name in ("truth", "reference", "inputs"):
            _check_rows(name, tensors[name], len(rows))
        d = leakage.guess.numel()
        found = tuple(_read_record(row, k, tensors, len(leakage.measured)) for k, row in enumerate(rows))
        if leakage.kept_inputs.ndim == 4 and tensors["inputs"].shape[1:] != leakage.kept_inputs.shape[1:]:
            raise InputError("inputs", "must have the shape of the audit's records", tuple(tensors["inputs"].shape))
        if not found or d < 1:
            raise InputError("records", "must be at least one", len(found))
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as reason:
        raise files.Unreadable(f"{path} is not a file of reconbound's ({reason})") from None
    return Attacked(found, tensors["inputs"], shown)


def _check_rows(name: str, given: Tensor, rows: int) -> None:
    if not given.is_floating_point() or len(given) != rows or given.dim() < 2 or not bool(given.isfinite().all()):
        raise InputError(name, f"must be finite numbers of {rows} records", tuple(given.shape))


def _read_record(row: Mapping[str, Any], k: int, tensors: Mapping[str, Tensor], records: int) -> Sandwich:
    """Returns a sandwich from its facts. Raises errors of several kinds where they are none."""
    own = dict(row)
    kinds: dict[str, Any] = {"membership": Distinguished, "replaced": Distinguished}
    kinds |= {"likeliest": Reconstruction, "probable": Reconstruction}
    stated = {name: _number(name, value) for name, value in own.pop("stated").items()}
    record, group = whole("record", own.pop("record"), at_least=0), own.pop("group")
    if record >= records or group not in ("", *_GROUPS):
        raise InputError("record", f"must be below {records}, of a known group", (record, group))
    for name, kind in kinds.items():
        if own[name] is not None:
            own[name] = kind(**{n: math.inf if v is None else number(n, v) for n, v in own[name].items()})
            whole("trials", own[name].trials, at_least=2)
    for name in _NUMBERS:
        own[name] = _number(name, own[name], missing=math.inf if name == "cramer_rao" and own["likeliest"] else None)
    for name, shape in (("nats", (2, 2)), ("both", (3,)), ("close", (2,))):
        if own[name] is None:
            continue
        given = numbers(name, own[name])
        if given.shape != shape:
            raise InputError(name, f"must have shape {shape}", given.shape)
        own[name] = tuple(map(tuple, given.tolist())) if len(shape) == 2 else tuple(given.tolist())
    if own["close"] is not None:
        own["close"] = tuple(int(count) for count in own["close"])
    number("confidence", own["confidence"], above=0.0, below=1.0)
    examples = None
    if "examples" in tensors and own["probable"] is not None:
        examples = tensors["examples"][k].double().numpy()
        if examples.ndim != 2 or examples.shape[1] != tensors["truth"].shape[1] or not np.isfinite(examples).all():
            raise InputError("examples", "must be records", examples.shape)
    truth, reference = (tensors[name][k].double().numpy() for name in ("truth", "reference"))
    return Sandwich(Target(record, Stated(**stated), group), truth, reference, examples=examples, **own)


def _number(name: str, value: Any, missing: float | None = None) -> float | None:
    return missing if value is None else number(name, value)


# --- the section -----------------------------------------------------------------------------


def attack_section(view: View, found: Attacked) -> dict[str, Any]:
    """Returns the section's sentences, rows and pictures.

    Args:
        view: the audit.
        found: what the attacks found.
    """
    faults = [(view.record_name(one.target.record), fault) for one in found.records for fault in one.faults]
    return {
        "rows": [_row(view, one) for one in found.records],
        "cards": _cards(view, found) if view.image else [],
        "faults": faults,
        "estimates": sum(_estimated(view, one) for one in found.records),
        "rebuilt": any(one.probable is not None for one in found.records),
        "unbiased": any(one.likeliest is not None for one in found.records),
        "reference": found.facts["reference"],
        "trials": found.facts["trials"],
        "confidence": format_percent(float(found.facts["confidence"]), side="near"),
        "count": len(found.records),
    }


def _estimated(view: View, one: Sandwich) -> bool:
    """Returns whether something that the audit states of a record is an estimate, without a confidence limit."""
    record, upper = one.target.record, view.leakage.upper
    unsure = upper is None or not bool(torch.isfinite(upper[0, record]))
    nats = any(bool(world.estimated[record]) for world in view.success.worlds)
    return nats or (one.target.stated.floor is not None and unsure)


def _error(view: View, square: float | None) -> str:
    """Formats a mean square error in the page's unit, ±; "–" where there is none."""
    if square is None or not math.isfinite(square):
        return "–"
    return guess_error(view.unit * math.sqrt(max(square, 0.0)))


def _row(view: View, one: Sandwich) -> dict[str, Any]:
    """Returns a row of the table of one record."""
    stated, tried, close = one.target.stated, one.membership, one.close_chances
    floor = None if stated.floor is None else view.unit * math.sqrt(stated.floor)
    two_point = None if one.two_point is None else view.unit * math.sqrt(one.two_point)
    likeliest, probable = one.likeliest, one.probable
    return {
        "name": view.record_name(one.target.record),
        "group": _GROUPS.get(one.target.group, ""),
        "floor": plus_minus(floor),
        "spread": _error(view, None if likeliest is None else likeliest.variance),
        "biased": likeliest is not None and likeliest.biased,
        "two_point": plus_minus(two_point),
        "both": _error(view, None if one.both is None else one.both[0]),
        "error": _error(view, None if probable is None else probable.mse),
        "bias": _error(view, None if probable is None else max(probable.bias, 0.0)),
        "guess": _error(view, one.guess),
        "nats": "–" if stated.removed is None else format_limit(stated.removed),
        "nats_low": "–" if tried is None else format_number(tried.nats, 2),
        "learned": "–"
        if tried is None
        else f"{format_number(tried.learned, 2)} ± {format_number(tried.learned_error, 2)}",
        "epsilon_low": "–" if tried is None else format_number(tried.epsilon, 2),
        "mu_low": "–" if tried is None else format_number(tried.mu, 2),
        "close": "–"
        if close is None
        else f"{format_percent(close[0][0], side='near')} to {format_percent(close[0][1])}",
        "p_max": "–" if close is None or close[2] is None else format_percent(close[2]),
        "fault": bool(one.faults),
    }


def _cards(view: View, found: Attacked) -> list[dict[str, Any]]:
    """Returns the pictures of each record: the original and what the informed attacker made of it."""
    rows = []
    for one, image in zip(found.records, found.inputs.double().numpy(), strict=True):
        shown = []
        for answer in () if one.examples is None else one.examples:
            flat = image.reshape(-1).copy()
            flat[slice(None) if view.private is None else view.private] = answer
            shown.append(data_uri(picture(flat.reshape(image.shape))))
        rows.append({**_row(view, one), "original": data_uri(picture(image)), "answers": shown})
    return rows


def sandwich_chart(view: View, found: Attacked) -> charts.Chart | None:
    """Draws floors and attacks over the attacked records, the most exposed on the left; None where none was rebuilt.

    Args:
        view: the audit.
        found: what the attacks found.
    """
    if not any(one.probable is not None for one in found.records):
        return None
    order = sorted(found.records, key=lambda one: one.target.stated.floor or math.inf)
    places, unit = np.arange(len(order)), view.unit
    kinds = (
        ("floor, no outside knowledge", [one.target.stated.floor for one in order], charts.BLUE, "lines", "solid"),
        ("attack without outside knowledge (its spread)",
         [None if one.likeliest is None else one.likeliest.variance for one in order], charts.SKY, "markers", "solid"),
        ("floor of any attacker, mean of two values", [one.two_point for one in order], charts.VERMILLION,
         "lines", "dash"),
        ("attack that knows the same two", [None if one.both is None else one.both[0] for one in order],
         charts.ORANGE, "markers", "solid"),
        ("informed attack", [None if one.probable is None else one.probable.mse for one in order], charts.GREEN,
         "markers", "solid"),
        ("what the informed attacker guessed before", [one.guess for one in order], charts.GREY, "lines", "dot"),
    )  # fmt: skip
    data, keys, seen = [], [], []
    for text, squares, colour, mode, dash in kinds:
        values = [math.nan if v is None or not v > 0 or not math.isfinite(v) else unit * math.sqrt(v) for v in squares]
        if not np.isfinite(values).any():
            continue
        seen += [v for v in values if math.isfinite(v)]
        hover = [
            f"{for_plotly(view.record_name(one.target.record))}: {text} ±{format_number(v)}" if v == v else ""
            for one, v in zip(order, values, strict=True)
        ]
        how: dict[str, Any] = {"line": {"color": colour, "width": 2.5, "dash": dash}}
        if mode == "markers":
            how = {"marker": {"color": colour, "size": 9}}
        data.append(charts.scatter(places, charts.logs_of(values), hover, mode=mode, **how))
        keys.append(charts.Key(colour, text, "dot" if mode == "markers" else "line", dash))
    low, high = charts.shown_range(charts.logs_of(seen))
    for trace in data:
        trace["y"] = [None if y is None else min(max(y, low), high) for y in trace["y"]]
    y = charts.log_axis(low, high, f"± {view.of_range}")
    x = {"title": f"attacked {view.noun}s, by their floor", "fixedrange": True, "zeroline": False,
         "showticklabels": False}  # fmt: skip
    label = f"Floors and attacks of {len(order)} {view.noun}s"
    return charts.Chart("chart-attack", {"data": data, "layout": charts.layout(360, x, y)}, tuple(keys), "", label)

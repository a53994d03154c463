"""Single records: those shown on the page, with their pictures, and any other for the terminal."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reconbound._internal.checks import InputError, whole
from reconbound.mechanisms.base import BLIND
from reconbound.report import formats
from reconbound.report.folder import Leakage, Run
from reconbound.report.headline import BEYOND, WEAK_EPSILON
from reconbound.report.view import NO_LIMIT, View, quantile

#: Images shown of each kind (half as many rows of a table), and columns of one before the rest is folded away.
SHOWN, COLUMNS = 8, 8


def record_facts(leakage: Leakage, run: Run, record: int) -> dict[str, Any]:
    """Returns everything that is known about one record, as a dictionary for JSON; confidential.

    Args:
        leakage: of a finished audit (`folder.read_leakage`).
        run: of the same audit (`folder.read_run`).
        record: its number, from 0.

    Guarantee:
        - As the accountant's: the root mean square error, per feature, of an unbiased attacker who knows all else.
        - "success" has, by world, the largest chance of success where the same attack has 10 % in that world: for every
          attacker. "success_estimates" names the worlds in which it is an estimate without a confidence limit.
        - "floor_lower_limit" is the lower confidence limit; None where there is no useful one, as after one run.
        - "floor_estimate" is the estimate, more often too high than too low.
    """
    view = View(run, leakage)
    i = whole("record", record, at_least=0)
    if i >= view.records:
        raise InputError("record", f"must be below {view.records:,}, the number of records", record)
    rules = list(view.facts.get("rules", ["exact"]))
    known = bool(view.measured[i])
    found: dict[str, Any] = {"confidential": True, "record": i, "name": view.record_name(i)}
    facts: dict[str, Any] = {
        "success": {world.name: float(world.chances[i]) for world in view.success.worlds},
        "success_estimates": [w.name for w in view.success.worlds if w.estimated[i]],
        "measured": int(leakage.measured[i]),
        "dfil": {rule: _finite(float(leakage.dfil[k, i])) for k, rule in enumerate(rules)},
        "dfil_standard_error": {rule: _finite(float(leakage.error[k, i])) for k, rule in enumerate(rules)},
        "floor_lower_limit": float(view.shown[i]) if view.limited[i] else None,
        "floor_estimate": float(view.floor[i]),
        "floor_estimate_standard_error": view.floor_error(i),
        "runs": int(view.run.mechanism.get("runs", 1)),
        "unit": f"± {view.of_range}{'' if view.single else f' per {view.part}'}",
        "guess": view.guess,
        "floor_below_guess": bool(view.shown[i] < view.guess) if known else None,
        "rank": 1 + int((view.floor[view.measured] < view.floor[i]).sum()) if known else None,
        "of": int(view.measured.sum()),
    }
    if not view.image and (view.places.get(i) is not None or view.feature_floors(i) is not None):
        facts["columns"] = record_columns(view, i)
    taken = view.target_name in {*found, *facts, "columns", "pixel_floors"}  # for example a target called "name"
    return {**found, f"{view.target_name} (target)" if taken else view.target_name: view.target(i), **facts}


def record_columns(view: View, record: int) -> list[dict[str, Any]]:
    """Returns the private columns of a record, the most exposed first.

    Each has its value (for records kept whole), its floor and its guess, in the column's own unit.

    Args:
        view: the audit.
        record: its number, from 0.
    """
    floors, place = view.feature_floors(record), view.places.get(record)
    values = np.full(view.features, np.nan) if place is None else view.values(place)
    order = range(view.features) if floors is None else view.most_exposed_columns(floors)
    return [
        {
            "name": view.feature_name(j),
            "unit": view.feature_unit(j),
            "value": _finite(float(values[j])),
            "floor_estimate": None if floors is None else _finite(float(floors[j])),
            "width": float(view.scale[j]),
            "guess": float(view.guess_each[j]),
        }
        for j in order
    ]


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def record_table(facts: Mapping[str, Any]) -> RenderableType:
    """Formats the result of `record_facts` for the terminal. All text is shown literally, markup included."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, text in _lines(facts):
        table.add_row(Text(name), Text(text))
    parts: list[RenderableType] = [Text("Confidential: about a single record", style="bold red"), table]
    if facts.get("columns"):
        own = Table(title="Private columns, the most exposed first", title_justify="left")
        kept = any(c["value"] is not None for c in facts["columns"])
        for title in ("column", *(["value"] if kept else []), "floor (estimate)", "a guess errs by"):
            own.add_column(title, justify="left" if title == "column" else "right", overflow="fold")
        for c in facts["columns"]:
            unit = f" {c['unit']}" if c["unit"] else ""
            shown = "missing" if c["value"] is None else formats.value(c["value"]) + unit
            own_floor = c["floor_estimate"]
            floor = "value missing" if own_floor is None else formats.plus_minus(own_floor, c["unit"], c["width"])
            floor += f" ({BEYOND})" if formats.beyond(own_floor, c["width"]) else ""
            cells = (*([shown] if kept else []), floor, formats.guess_error(c["guess"], c["unit"]))
            own.add_row(Text(c["name"]), *(Text(cell) for cell in cells))
        parts.append(own)
    return Group(*parts)


def _lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = facts["name"] if facts["name"] == f"record {facts['record']:,}" else f"{facts['record']:,}, {facts['name']}"
    names = list(facts)
    target = names[names.index("name") + 1]
    found = [("record", named.removeprefix("record ")), (target, str(facts[target]))]
    unit = facts["unit"].removeprefix("± ")
    shown = formats.paragraphs("record.txt", facts=facts, unit=unit, no_limit=NO_LIMIT)
    return [*found, *((topic, text) for topic, _, text in (entry.partition(": ") for entry in shown))]


# --- for the page ----------------------------------------------------------------------------


def cards(view: View) -> dict[str, Any]:
    """Returns the most and the least exposed records, ready for the template; "heat": the maps' colour scale."""
    shown = SHOWN if view.image else SHOWN // 2
    kept = [int(r) for r in view.leakage.kept.tolist()]
    most = int(view.facts.get("most", (len(kept) + 1) // 2))
    groups = {"most": kept[:most][:shown], "least": kept[most:][-shown:]}
    diagonal, shape = view.leakage.kept_diagonal, tuple(view.leakage.kept_inputs.shape[1:])
    maps = None
    if view.image and diagonal is not None and len(diagonal):
        maps = pixel_information(diagonal.double().numpy(), shape, view.private)
    ends = None if maps is None else heat_range(maps)
    found: dict[str, Any] = {
        name: [_card(view, record, maps, ends) for record in group] for name, group in groups.items()
    }
    found["more"] = most if most > len(groups["most"]) else 0
    found["heat"] = None
    if ends is not None:
        low, high = (formats.plus_minus(view.unit * 10 ** (-end / 2)) for end in ends)
        found["heat"] = {"exposed": high, "protected": low, "colours": VIRIDIS}
    return found


def _card(view: View, record: int, maps: np.ndarray | None, ends: tuple[float, float] | None) -> dict[str, Any]:
    place = view.places[record]
    error = view.floor_error(record)
    rows = [] if view.image else [_row(c) for c in record_columns(view, record)]
    return {
        "record": record,
        "floor": formats.plus_minus(float(view.shown[record])),
        "kind": f"at {view.level} confidence" if view.limited[record] else "estimate, no confidence limit",
        "estimate": f"estimate {formats.plus_minus(float(view.floor[record]))}, " if view.limited[record] else "",
        "error": "s.e. over 50 %" if error is None else f"s.e. {formats.rough(error)}",
        "ratio": _ratio(float(view.shown[record]), view.guess),
        "picture": data_uri(picture(view.leakage.kept_inputs[place].numpy())) if view.image else None,
        "map": None if maps is None or ends is None else data_uri(heat(maps[place], ends)),
        "columns": rows[:COLUMNS],
        "more": rows[COLUMNS:],
        "public": [formats.clean(name, 60) for name in view.marks(place)],
    }


def _row(c: Mapping[str, Any]) -> dict[str, Any]:
    floor = c["floor_estimate"]
    share = 0.0 if floor is None else 1.0 if floor <= c["guess"] else c["guess"] / floor
    colour = viridis(np.array(share)).tolist()
    return {
        "name": c["name"],
        "unit": "" if formats.names_its_unit(c["name"], c["unit"]) else c["unit"],
        "beyond": formats.beyond(floor, c["width"]),
        "value": "missing" if c["value"] is None else formats.value(c["value"]),
        "floor": formats.plus_minus(floor, width=c["width"]),
        "guess": formats.guess_error(c["guess"]),
        "share": round(100 * share, 1),
        "colour": "#" + "".join(f"{part:02x}" for part in colour),
    }


def _ratio(floor: float, guess: float) -> str:
    if guess <= 0:
        return ""
    ratio = floor / guess
    return "over 1,000 × a guess" if ratio > 1000 else f"{formats.amount(ratio, side='down')} × a guess"


def tiles(view: View) -> list[dict[str, str]]:
    """Returns the few figures at the top of the page: title, figure, and a line below."""
    template = formats.templates(html=False).get_template("tiles.txt")
    context: dict[str, Any] = {"blind": BLIND, "ratio": _ratio, "weak_epsilon": WEAK_EPSILON}
    context["median"] = quantile(view.shown[view.measured], 0.5)
    parts = template.render(view=view, **context).strip().split("\n\n")
    return [dict(zip(("title", "figure", "below"), part.strip().split("\n"), strict=True)) for part in parts]


# --- pictures --------------------------------------------------------------------------------

#: Viridis, ten stops (Smith and van der Walt, public domain): dark to bright, also for the colour-blind.
VIRIDIS = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
)  # fmt: skip


def png(pixels: np.ndarray) -> bytes:
    """Encodes 8-bit pixels as a PNG file: (H, W) grey, (H, W, 3) colour or (H, W, 4) with opacity."""
    kind = {1: 0, 3: 2, 4: 6}[1 if pixels.ndim == 2 else pixels.shape[2]]
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(pixels.shape[0], -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def data_uri(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def picture(image: np.ndarray) -> np.ndarray:
    """Returns 8-bit pixels of an image (C, H, W) in [0, 1]: colour for three channels, otherwise their mean."""
    values = np.clip(np.nan_to_num(image.astype(np.float64)), 0, 1)
    shown = values.transpose(1, 2, 0) if len(values) == 3 else values.mean(0)
    return np.asarray(np.round(255 * shown), dtype=np.uint8)


def viridis(share: np.ndarray) -> np.ndarray:
    """Returns colours (…, 3), 8 bit, of numbers in [0, 1]."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in VIRIDIS], dtype=np.float64)
    place = np.clip(share, 0, 1) * (len(stops) - 1)
    colours = [np.interp(place, np.arange(len(stops)), channel) for channel in stops.T]
    return np.asarray(np.round(np.stack(colours, axis=-1)), dtype=np.uint8)


def pixel_information(diagonal: np.ndarray, shape: Sequence[int], private: np.ndarray | None) -> np.ndarray:
    """Returns the information about each pixel, (k, H, W): the mean over its private channels; NaN where it has none.

    Args:
        diagonal: information about each private feature, (k, d).
        shape: the shape of an image.
        private: flat indices of the private features; None for all.
    """
    flat = np.full((len(diagonal), int(np.prod(shape))), np.nan)
    flat[:, slice(None) if private is None else private] = np.nan_to_num(diagonal, nan=0.0, posinf=np.finfo(float).max)
    return np.asarray(np.ma.masked_invalid(flat.reshape(len(diagonal), *shape)).mean(1).filled(np.nan))


def heat_range(information: np.ndarray) -> tuple[float, float] | None:
    """Returns the ends of the colour scale, log10 of information: 2 % quantile and largest, at most 6 decades apart."""
    positive = information[np.isfinite(information) & (information > 0)]
    if positive.size == 0:
        return None
    high = float(np.log10(positive.max()))
    low = float(np.log10(np.quantile(positive, 0.02)))
    return min(max(low, high - 6), high - 0.05), high


def heat(information: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Returns colours (H, W, 4): bright where most leaks, clear where nothing is private.

    Args:
        information: about each pixel, (H, W).
        ends: of the colour scale, from `heat_range`.
    """
    low, high = ends
    logs = np.log10(np.where(information > 0, information, 10.0**low))
    colours = viridis((logs - low) / (high - low))
    opacity = np.where(np.isnan(information), 0, 255).astype(np.uint8)
    return np.concatenate([colours, opacity[..., None]], axis=-1)

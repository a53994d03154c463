"""The released model of an audit, ready for use: how a record enters it, and what its outputs mean.

model.safetensors      the released parameters (public)
inputs.json            columns in order, ranges, categories, classes (confidential: see `write_inputs`)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError, choice, file_path, number, whole
from reconbound._internal.files import (
    CONFIDENTIAL,
    Unreadable,
    file_digest,
    printable,
    refuse_special_files,
    sealed_json,
    unsealed_json,
    write_whole,
)
from reconbound.auditing.models import network, outputs_of
from reconbound.data import Dataset, Feature
from reconbound.data.frames import MISSING as BLANK
from reconbound.report.folder import MODEL, check_model

FORMAT = 1
INPUTS = "inputs.json"
NUMBER, MISSING, CATEGORY = "number", "missing", "category"
_FACTS = {NUMBER: "the range of {}", MISSING: "that {} has missing values", CATEGORY: "the categories of {}"}


def write_inputs(folder: str | os.PathLike[str], dataset: Dataset, model: str) -> None:
    """Writes inputs.json: everything that one needs to use the model, apart from its parameters.

    For its owner only (mode 0600).

    Categories, classes, columns with missing values, and ranges that were not declared are facts about the data. The
    guarantee takes all of them except such ranges as known, but only the owner may pass them on: `read_off_the_data`
    lists which of them are in the file.

    Args:
        folder: with model.safetensors, whose digest is included.
        dataset: the data of the audit.
        model: linear, mlp, cnn, or the factory that made it.
    """
    target, inputs = dataset.target, {}
    if dataset.kind == "image":
        pixel = dataset.features[0]
        inputs = {"unit": pixel.unit, "low": pixel.low, "high": pixel.high}
    elif dataset.kind == "tokens":
        inputs = {"vocabulary": dataset.vocabulary}
    content: dict[str, Any] = {
        "format": FORMAT,
        "confidential": "read_off_the_data lists facts about the data: pass this file on only where they are known",
        "kind": dataset.kind,
        "model": model,
        "shape": list(dataset.shape),
        "outputs": outputs_of(dataset),
        "task": dataset.task,
        "classes": list(dataset.class_names),
        "target": None,
        "inputs": inputs or [_input(feature) for feature in dataset.features],
        "read_off_the_data": _read_off(dataset),
        "model_sha256": file_digest(Path(folder) / MODEL),
    }
    if target is not None:
        content["target"] = {"name": target.name, "unit": target.unit, "low": target.low, "high": target.high}
    write_whole(Path(folder) / INPUTS, sealed_json(content), mode=CONFIDENTIAL)


def _input(feature: Feature) -> dict[str, Any]:
    """Describes one flat input of a table: a number by its range, or a one or zero."""
    column = feature.source
    if not feature.column and not feature.category:
        return {"column": column, "kind": NUMBER, "unit": feature.unit, "low": feature.low, "high": feature.high}
    if feature.name == f"{column} (missing)":
        return {"column": column, "kind": MISSING}
    value = feature.name.removeprefix(f"{column} = ")
    return {"column": column, "kind": CATEGORY, "value": "" if value == "(missing)" else value}


def _read_off(dataset: Dataset) -> list[str]:
    """Lists the content of the file that depends on the data."""
    found = ["the classes of the target"] if dataset.class_names else []
    if dataset.task == "number" and dataset.target is not None and not dataset.target.declared:
        found.append(f"the range of {dataset.target.name}")
    if dataset.kind == "tokens" and not dataset.features[0].declared:
        found.append("the vocabulary")
    for feature in dataset.features if dataset.kind == "table" else ():
        part = _input(feature)
        if part["kind"] != NUMBER or not feature.declared:
            found.append(_FACTS[part["kind"]].format(part["column"]))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Release:
    """A released model that takes records and returns predictions in the data's own units.

    Attributes:
        model: the torch module, on the CPU, in eval mode; takes the result of `inputs`.
        facts: the content of inputs.json.
    """

    model: nn.Module
    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        shape = self.facts["shape"]
        what = {"image": f"images {tuple(shape)}", "tokens": f"{shape[0]} tokens"}
        takes = what.get(self.facts["kind"], f"{len(self.columns)} columns")
        gives = f"{self.facts['outputs']} classes" if self.facts["task"] == "classes" else "a number"
        return f"Release({self.facts['model']}: {takes} -> {gives})"

    @property
    def columns(self) -> list[str]:
        """Returns the columns of a table that the model sees, in their order; empty for images and tokens."""
        parts = self.facts["inputs"] if self.facts["kind"] == "table" else ()
        return list(dict.fromkeys(part["column"] for part in parts))

    def inputs(self, records: Any) -> Tensor:
        """Converts records from the data's own units to the model's inputs, (N, *shape), float32; tokens are int64.

        Numbers become (value − low)/(high − low), moved into [0, 1]. A missing one becomes 0.5, and its column's mark 1
        where the model has one. A category becomes a one among zeros.

        Args:
            records: for a table {column: values} or a list of {column: value}, where None, "" and NaN are missing; for
                images an array (N, C, H, W), or (N, H, W) with one plane; for tokens whole numbers, (N, length).
        """
        if self.facts["kind"] == "image":
            return self._pictures(records)
        if self.facts["kind"] == "tokens":
            return self._tokens(records)
        table = _by_column(records, self.columns)
        parts = [_encoded(part, table[part["column"]]) for part in self.facts["inputs"]]
        self._check_categories(table)
        return torch.from_numpy(np.stack(parts, axis=1).astype(np.float32))

    def _pictures(self, records: Any) -> Tensor:
        shape = tuple(self.facts["shape"])
        array = np.asarray(records, dtype=np.float64)
        if array.shape[1:] == shape[1:] and shape[0] == 1:
            array = array[:, None]
        if array.shape[1:] != shape:
            raise InputError("records", f"must be images of shape {shape}", array.shape)
        low, high = (self.facts["inputs"][end] for end in ("low", "high"))
        return torch.from_numpy(np.clip((array - low) / (high - low), 0, 1).astype(np.float32))

    def _tokens(self, records: Any) -> Tensor:
        array, length, most = np.asarray(records), self.facts["shape"][0], self.facts["inputs"]["vocabulary"]
        if array.ndim != 2 or array.shape[1] != length or array.dtype.kind not in "iu":
            raise InputError("records", f"must be whole numbers of shape (N, {length})", f"{array.dtype} {array.shape}")
        if array.size and not (array.min() >= 0 and array.max() < most):
            raise InputError("records", f"must be tokens from 0 to {most - 1}", f"{array.min()} to {array.max()}")
        return torch.from_numpy(array.astype(np.int64))

    def _check_categories(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Refuses categories for which the model has no input."""
        for column in self.columns:
            values = [p["value"] for p in self.facts["inputs"] if p["column"] == column and p["kind"] == CATEGORY]
            for row, value in enumerate(table[column] if values else ()):
                if _text(value) not in values:
                    shown = ", ".join(repr(v) for v in values[:10])
                    raise InputError(f"{column} of record {row}", f"must be one of {shown}", value)

    def outputs(self, records: Any) -> Tensor:
        """Returns the model's outputs: (N, classes) of log-odds up to a constant, or (N, 1).

        Args:
            records: as in `inputs`.
        """
        with torch.no_grad():
            found: Tensor = self.model(self.inputs(records))
        return found

    def predict_proba(self, records: Any) -> np.ndarray:
        """Returns the probabilities of the classes, (N, classes).

        Args:
            records: as in `inputs`.
        """
        if self.facts["task"] != "classes":
            raise InputError("predict_proba", "is for classes, and this model predicts", self.facts["task"])
        return np.asarray(self.outputs(records).double().softmax(dim=1).numpy())

    def predict(self, records: Any) -> np.ndarray:
        """Returns the names of the most likely classes, (N,), or numbers in the target's own unit, (N,).

        Args:
            records: as in `inputs`.
        """
        found = self.outputs(records)
        if self.facts["task"] == "classes":
            known = self.facts["classes"]  # a class that no record had has no name
            names = [*known, *map(str, range(len(known), found.shape[1]))]
            return np.asarray(np.array(names)[found.argmax(dim=1).numpy()])
        target = self.facts["target"]
        return np.asarray(target["low"] + (target["high"] - target["low"]) * found.double().numpy()[:, 0])


def load_release(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Release:
    """Loads the released model of an audit's folder, ready to predict from records in the data's own units.

    Args:
        folder: with model.safetensors and inputs.json.
        model: a module for the parameters, where the audit used its owner's (--model package.module:factory): no code
            is run because a file names it.

    Returns:
        The released model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file_path("folder", folder)
    if model is not None and not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch.nn.Module", model)
    facts = read_inputs(folder)
    path = Path(folder) / MODEL
    if not path.exists():
        raise Unreadable(f"{path} does not exist: reconbound audit with the same data and options restores it")
    if model is None and ":" in facts["model"]:
        raise InputError("model", f"must be given: this audit's was made by {printable(facts['model'])}", None)
    try:
        tensors = load_file(path)  # its digest is known: read_inputs
    except SafetensorError as reason:  # which says nothing of who made it
        raise Unreadable(f"{path} is not a file of reconbound's ({reason})") from None
    fitting = _own_model(folder, facts, tensors) if model is None else model
    try:
        fitting.load_state_dict(tensors)
    except RuntimeError as reason:
        what = f"must have the parameters that were released ({' '.join(str(reason).split())[:300]})"
        raise InputError("model", what, type(fitting).__name__) from None
    return Release(fitting.eval(), facts)


def _own_model(folder: str | os.PathLike[str], facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Creates the model that the facts describe. Refuses it, before any memory is taken, if the tensors do not fit."""
    image = facts["kind"] == "image"
    vocabulary = facts["inputs"]["vocabulary"] if facts["kind"] == "tokens" else None
    shape = tuple(facts["shape"])
    make = partial(network, facts["model"], shape, facts["outputs"], image=image, vocabulary=vocabulary)
    try:
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in make().state_dict().items()}
    except (ValueError, TypeError, RuntimeError) as reason:
        raise Unreadable(f"{Path(folder) / INPUTS} describes no model of reconbound's ({reason})") from None
    if shapes != {name: value.shape for name, value in tensors.items()}:
        raise Unreadable(f"{Path(folder) / INPUTS} describes another model than {MODEL}")
    return make()


def read_inputs(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of inputs.json. Raises Unreadable if it or the model is missing, changed or damaged."""
    refuse_special_files(folder)
    path = Path(folder) / INPUTS
    try:
        facts = unsealed_json(path)
        if facts.get("format") != FORMAT:
            raise Unreadable(f"{path} is not a file of reconbound's (another format)")
        _check_facts(facts)
        check_model(folder, facts["model_sha256"])
    except (FileNotFoundError, NotADirectoryError):
        raise Unreadable(f"{path} does not exist: without it nobody knows how a record enters the model") from None
    except OSError as reason:
        raise Unreadable(f"{reason.filename} cannot be read ({reason.strerror})") from None
    except (KeyError, TypeError, AttributeError, InputError) as reason:
        raise Unreadable(f"{path} is not a file of reconbound's ({type(reason).__name__}: {reason})") from None
    return facts


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raises an error where the facts are not as `write_inputs` writes them: a digest does not say who made them."""
    choice("kind", facts["kind"], ("image", "table", "tokens"))
    choice("task", facts["task"], ("classes", "number"))
    whole("outputs", facts["outputs"])
    for length in facts["shape"]:
        whole("shape", length)
    if facts["kind"] == "tokens":
        whole("vocabulary", facts["inputs"]["vocabulary"])
        if len(facts["shape"]) != 1:
            raise InputError("shape", "must be one length", facts["shape"])
    parts = [facts["inputs"]] if facts["kind"] == "image" else facts["inputs"] if facts["kind"] == "table" else []
    ranges = [part for part in parts if part.get("kind", NUMBER) == NUMBER]
    ranges += [facts["target"]] if facts["task"] == "number" else []
    for part in ranges:
        number("high", part["high"], above=number("low", part["low"]))
    texts = [facts["model"], facts["model_sha256"], *facts["classes"]]
    if facts["kind"] == "table":
        if len(parts) != math.prod(facts["shape"]):
            raise InputError("inputs", f"must be {math.prod(facts['shape'])}", len(parts))
        texts += [part["column"] for part in parts]
        texts += [part["value"] for part in parts if choice("kind", part["kind"], tuple(_FACTS)) == CATEGORY]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name is no text")
    if facts["task"] == "classes" and len(facts["classes"]) > facts["outputs"]:
        raise InputError("classes", f"must be at most {facts['outputs']}", len(facts["classes"]))


def _by_column(records: Any, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Returns {column: values} of a mapping or of a list of rows."""
    if isinstance(records, Mapping) or hasattr(records, "columns"):  # a dictionary, or a data frame
        rows: dict[str, list[Any]] = {str(name): list(np.atleast_1d(records[name])) for name in records}
    else:
        try:
            listed = list(records)
        except TypeError:
            what = "must be {column: values}, a data frame or a list of {column: value}"
            raise InputError("records", what, records) from None
        rows = {name: [row[name] for row in listed] for name in columns if all(name in row for row in listed)}
    missing = [name for name in columns if name not in rows]
    if missing:
        raise InputError("records", f"must have the columns {printable(', '.join(columns))}", f"no {missing[0]}")
    if len({len(rows[name]) for name in columns}) != 1:
        raise InputError("records", "must have as many values in each column", {n: len(rows[n]) for n in columns})
    return {name: rows[name] for name in columns}


def _encoded(part: Mapping[str, Any], values: Sequence[Any]) -> np.ndarray:
    """Returns one flat input of all records, (N,)."""
    if part["kind"] == CATEGORY:
        return np.array([_text(value) == part["value"] for value in values], dtype=np.float64)
    found = np.array([_number(part["column"], value) for value in values], dtype=np.float64)
    if part["kind"] == MISSING:
        return np.isnan(found).astype(np.float64)
    low, high = part["low"], part["high"]
    return np.asarray((np.clip(np.where(np.isnan(found), low / 2 + high / 2, found), low, high) - low) / (high - low))


def _text(value: Any) -> str:
    """Returns the name of a category, "" where it is missing."""
    text = "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()
    return "" if text.lower() in BLANK else text


def _number(column: str, value: Any) -> float:
    text = _text(value)
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise InputError(column, "must be a number", value) from None

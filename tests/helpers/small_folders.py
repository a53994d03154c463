"""Small audits of every kind, one small sweep from the command line and the report of a training with Opacus, for tests
that copy and spoil them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import calling
import injecting

SWEEP = ["--limit", "60", "--grid", "noise_multiplier=0.5,1", "--grid", "lr=0.5", "--model", "linear", "--steps", "3,6"]
#: Of private numbers; of a number and a category; of texts; by a model without derivatives.
AUDITS = ("audit", "category", "tokens", "jumps")
_TEXTS = "texts.npz"
_OWN = {"category": ["--private", "age,job"], "jumps": ["--model", "auditing:binned"]}


def audit_words(base: Path, out: str, kind: str = "audit") -> list[str]:
    words = ["audit", str(base / "people.csv"), "--target", "<b>pay</b>", "--range", "age=0:120"]
    words += ["--range", "hours=0:100", *calling.QUICK, *_OWN.get(kind, ())]
    if kind == "tokens":
        words = ["audit", str(base / _TEXTS), *calling.QUICK, "--model", "auto"]
    return [*words, "--quiet", "--out", str(base / out)]


def sweep_words(base: Path, out: str) -> list[str]:
    return ["sweep", "digits", *SWEEP, "--seed", "1", "--quiet", "--out", str(base / out)]


def write_data(base: Path) -> None:
    """Writes what the audits are of: people.csv and texts.npz."""
    calling.write_people(base / "people.csv")
    tokens = np.random.default_rng(0).integers(0, 9, (40, 3))
    np.savez(base / _TEXTS, tokens=tokens, y=(tokens[:, 0] > 4).astype(np.int64), vocabulary=9)


def make(base: Path, *more: str) -> Path:
    """Makes the folder with the data, a finished audit in audit/ and a finished sweep in sweep/.

    Args:
        base: the folder.
        more: further kinds of audits, each in a folder of that name.
    """
    write_data(base)
    for words in (*(audit_words(base, kind, kind) for kind in ("audit", *more)), sweep_words(base, "sweep")):
        done = injecting.ended(words)
        assert done.status == 0, done.err
    return base


def make_watched(base: Path) -> None:
    """Writes the report of a training with Opacus into watch/, with a world beside "removed"."""
    import beside_opacus
    import reconbound as rb
    from reconbound.integrations.opacus import Measuring

    made = beside_opacus.private(noise_multiplier=2.0)
    worlds = {"<b>first</b>": rb.Replacement(0.0, [0])}
    ledger = made.watch(measure=Measuring(made.network, epochs=2, worlds=worlds))
    made.train(2)
    ledger.report(base / "watch", name="lengths")

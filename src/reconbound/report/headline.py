"""The first paragraph of every report: one finding in at most three short sentences.

`headline` is the terminal's answer, and report.html opens with the same parts. `public_headline` opens
report-public.html and run.json. A warning comes before the finding where the guarantee means little or is not proved
for the model. The words of the finding are in templates/success.txt.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from reconbound.mechanisms.base import read_protection
from reconbound.report.folder import Run, line, terms
from reconbound.report.formats import clean, paragraphs
from reconbound.report.view import NEGLIGIBLE, View

#: A larger ε than this is called weak.
WEAK_EPSILON = 10.0
#: Largest chances, from 10 %, at which little protection, or almost none, is shown of a record.
LITTLE, ALMOST_NONE = 0.5, 0.9
#: A floor that is wider than the column's range.
BEYOND = "more than the whole range"


def headline(view: View) -> list[str]:
    """Returns the first sentences of the owner's report: warnings, then the finding.

    Args:
        view: the audit.
    """
    return [*warnings(view), *finding(view), *describe_shown(view)]


def describe_shown(view: View) -> list[str]:
    """Returns a sentence on a report that is about some of the records; nothing where it is about all."""
    if view.all_records == view.records:
        return []
    shown = f"This report is about {view.records:,} of the {view.all_records:,} {view.noun}s"
    return [f"{shown}, drawn at random, and the most exposed of all; ledger.safetensors has every one."]


def warnings(view: View) -> list[str]:
    """Returns what comes before the finding: a weak guarantee, little protection, or floors that are not proved."""
    lead, weak = view.success.leading, view.protection.warning(view.noun)
    if lead is None:
        return [*([weak] if weak else []), *model_caveats(view.run.caveats)]
    if weak:
        return [weak]
    row = lead.row()
    if row["max"] < ALMOST_NONE:
        return []
    if row["median"] >= ALMOST_NONE:
        return [f"Almost no protection of any {view.noun} can be shown."]
    most = f"almost no protection of the most exposed {view.noun}"
    if row["median"] >= LITTLE:
        return [f"Little protection of most {view.noun}s can be shown, and {most}."]
    return [f"{most.capitalize()} can be shown."]


def model_caveats(caveats: Mapping[str, str] | None) -> list[str]:
    """Returns what the floors do not cover of this model, as the check before training found it."""
    return [clean(caveat, 600) for caveat in (caveats or {}).values()]


def finding(view: View) -> list[str]:
    """Returns the largest chances of success against the records; in folders without them, the unbiased floors."""
    lead = view.success.leading
    if lead is None:
        return unbiased_finding(view)
    names = [view.feature_name(j) for j in range(view.features)]
    unit = view.feature_unit(names.index(lead.name)) if lead.name in names else ""
    return paragraphs("success.txt", view=view, lead=lead, unit=unit)


def unbiased_finding(view: View) -> list[str]:
    """Returns for how many records the release may tell more than a guess, and the lowest floor beside a guess."""
    known = [c for c in view.columns if c["lowest"] is not None]  # the most exposed one, if possible not constant
    order = sorted(known, key=lambda c: (c["constant"], c["lowest"] / max(c["guess"], sys.float_info.min)))
    return paragraphs("finding.txt", view=view, column=next(iter(order), None), more=BEYOND)


def public_headline(run: Run) -> list[str]:
    """Returns the first sentences of the public report: the largest chance to rebuild a record.

    Where ranges were read off the data, the first sentence names this condition.

    Args:
        run: the public facts.
    """
    noun, protection = terms(run)[0], read_protection(run.guarantee)
    if not protection.meaningful:
        return [protection.warning(noun)]
    holds = (
        f"This holds whatever the data, and for every attacker: even one who knows every other {noun} and sees every "
        "step of the training."
    )
    known = protection.success is not None
    sentences = conditional(run, [protection.sentence(noun), holds] if known else any_attacker_sentences(run))
    return sentences or ["These settings give no floor worth naming that binds every attacker."]


def conditional(run: Run, sentences: list[str]) -> list[str]:
    """Returns the sentences; where ranges were read off the data, the first one names this condition.

    Args:
        run: the public facts.
        sentences: statements that hold if all ranges are known without the data.
    """
    if not sentences or not run.data.get("inferred_ranges"):
        return sentences
    first, *rest = sentences
    if run.data.get("kind") == "tokens":
        return [f"If the vocabulary were known without the data: {first[0].lower()}{first[1:]}", *rest]
    ranges, private = run.data.get("ranges") or {}, [str(name) for name in run.data.get("private") or ()]
    numbers = [name for name in private if name not in (run.data.get("categories") or ())]
    names = [clean(name, 40) for name in numbers if name not in ranges]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    were = "was" if len(names) == 1 else "were"
    which = f"here {listed} {were} read off it" if names else "here some were read off it"
    return [f"If every range were known without the data ({which}): {first[0].lower()}{first[1:]}", *rest]


def comparison_headline(audits: Sequence[Mapping[str, Any]], caution: str) -> list[str]:
    """Returns the first sentences of a comparison: in which audit the most exposed record is best protected.

    Args:
        audits: facts of each audit (`comparison.audit_facts`).
        caution: why the audits are hard to compare; "" where they are not.
    """
    known = [(audit["floors"]["lowest_estimate"], audit["name"]) for audit in audits]
    floors = sorted((floor, name) for floor, name in known if floor is not None)
    return paragraphs("comparison.txt", floors=floors, caution=caution)


def any_attacker_sentences(run: Run) -> list[str]:
    """Returns what the floors for any attacker mean: for each attacker some conceivable record is hard.

    Args:
        run: the public facts.
    """
    noun, part, unit, of_range = terms(run)
    floors = (line(run, name, unit) for name in ("lecam", "rate_distortion"))  # of each number, and on average
    each, mean = (floor if floor is not None and floor >= NEGLIGIBLE * unit else None for floor in floors)
    single = int(run.data.get("features", 0)) == 1
    return paragraphs("any-attacker.txt", noun=noun, part=part, of_range=of_range, each=each, mean=mean, single=single)


def accuracy_sentence(view: View) -> str:
    """Returns the test accuracy (R² for a number) beside that of a model which learnt nothing."""
    return paragraphs("accuracy.txt", view=view)[0]

"""A floor below and real attacks above, for the paper's MNIST network on a GPU.

    python experiments/sandwich_mnist.py --train --device cuda        24 records, 1,500 trainings, on a GPU
    python experiments/sandwich_mnist.py --train --small --out FOLDER to try the script on a CPU: 8 × 8 digits, a minute
    python experiments/sandwich_mnist.py --again                      the same records by another ledger, on a CPU
    python experiments/sandwich_mnist.py                              the table from the rows

6,000 digits: then a record takes part in most trainings of 100 Poisson batches of about 60. Smooth clip 4, torch's SGD,
fresh parameters for every training. PrivateSGD's ledger of 20 runs says which records are exposed, and states floors
and divergences (estimates: limits need more runs).

The records are attacked together (attacks/sandwich.py): every training draws for each of them whether it is there, left
out, or mid-grey, a third each. So each record has about 500 trainings in each of its worlds. The attacker of a record
knows all others, also in which worlds they are, and who of them took part. It sees every step, and does not know
whether the record took part. What is stated is about the data as they are; in the trainings 24 of the 6,000 records are
in random worlds. "removed_here" and "replaced_here" are D in the trainings themselves.

Records are rebuilt from 6 trainings of each kind. All trainings are held in memory at once (47 GB). Each row is written
when it is known. A run that was cut off goes on with the records that have no row yet, in trainings of their own."""

from __future__ import annotations

import argparse
import csv
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reconbound import PrivateSGD, Settings
from reconbound.attacks import Training, knowledge, trainings
from reconbound.attacks.sandwich import Plan, Sandwich, Stated, Target, attack_records, with_family_confidence
from reconbound.auditing.models import make_loss, make_model, start_afresh
from reconbound.data import Dataset, load_dataset
from reconbound.fisher.worlds import Replacement

ROWS = Path(__file__).parent / "results"
NAME, AGAIN = "sandwich_mnist.csv", "sandwich_mnist_again.csv"
GROUPS = ("most-exposed", "least-exposed", "random")
LIMIT, NOISE, CLIP, RATE, LR, STEPS, REBUILD = 6000, 0.35, 4.0, 0.01, 0.5, 100, 6
#: Of the ledger: records measured over records trained on, and runs.
BUDGET, RUNS = 1.0, 20
#: Of the small form: 500 digits of 8 × 8 pixels, three records, few steps.
SMALL = {"records": 3, "trials": 12, "steps": 6, "rate": 0.1, "limit": 500}


def problem(small: bool, device: torch.device, steps: int, noise: float) -> tuple[Dataset, str, Training]:
    """Returns the data, the kind of the model, and the training in float32."""
    dataset = load_dataset("digits", limit=SMALL["limit"]) if small else load_dataset("mnist", limit=LIMIT)
    kind = "mlp" if small else "cnn"
    model = make_model(dataset, kind, seed=0).to(device)
    rate = SMALL["rate"] if small else RATE
    settings = Settings(noise, CLIP, rate, lr=LR, seed=2**100 + 7, rules=("exact",), budget=BUDGET)
    inputs, targets = torch.from_numpy(dataset.inputs).to(device), torch.from_numpy(dataset.targets).to(device)
    fresh = partial(start_afresh, dataset, kind)
    return dataset, kind, Training(model, make_loss(dataset), inputs, targets, settings, steps, fresh)


def stated_of(training: Training, runs: int = RUNS) -> tuple[Tensor, Tensor, Tensor]:
    """1/dFIL, and D without the record and with mid-grey in its place, of every record by PrivateSGD's ledger."""
    learner = PrivateSGD(
        training.model, training.loss_fn, training.inputs, training.targets, training.settings,
        worlds={"grey": Replacement(0.5)}, initialise=training.initialise, progress=False, check=False,
    ).repeat(runs, training.steps)  # fmt: skip
    ledger = learner.accountant
    assert ledger is not None
    return 1 / ledger.dfil().cpu(), ledger.divergence("removed").cpu(), ledger.divergence("grey").cpu()


def chosen(floor: Tensor, count: int) -> list[tuple[int, str]]:
    """A third each: the most exposed, the least exposed, and random ones; one of each in turn."""
    order = [int(i) for i in torch.nan_to_num(floor, posinf=float("inf")).argsort()]
    third = max(1, count // 3)
    middle = order[third:-third]
    drawn = torch.randperm(len(middle), generator=torch.Generator().manual_seed(0))[:third]
    turns = zip(order[:third], order[: -third - 1 : -1], (middle[int(i)] for i in drawn), strict=True)
    return [found for turn in turns for found in zip(turn, GROUPS, strict=True)]


def row(one: Sandwich, training: Training) -> dict[str, object]:
    stated, tried, close, probable = one.target.stated, one.membership, one.close_chances, one.probable
    assert tried is not None
    found: dict[str, object] = {"record": one.target.record, "group": one.target.group, "trials": tried.trials}
    found |= {"noise": training.settings.noise_multiplier, "steps": training.steps}
    found |= {"floor": stated.floor, "removed": stated.removed, "replaced": stated.replaced, "guess": one.guess}
    found |= {"removed_here": one.nats[0][0], "removed_error": one.nats[0][1], "replaced_here": one.nats[1][0]}
    found |= {"two_point": one.two_point}
    found |= dict(zip(("both", "both_low", "both_high"), one.both or (None,) * 3, strict=True))
    for name in ("mse", "standard_error", "bias", "variance"):
        found[name] = None if probable is None else getattr(probable, name)
    for name in ("hits", "false_hits", "nats", "epsilon", "mu", "learned", "learned_error"):
        found[name] = getattr(tried, name)
    found |= {"close_low": close and close[0][0], "close_high": close and close[0][1], "p_max": close and close[2]}
    return {**found, "faults": "; ".join(one.faults)}


def train(asked: argparse.Namespace) -> None:
    """Makes the ledger, and attacks the records that have no row; each row is written when it is known."""
    device, begun = torch.device(asked.device), time.perf_counter()
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        trainings.FLOATS = 12_000_000_000  # of 4 bytes: the trajectories of 1,500 trainings at once
        knowledge.GPU_FLOATS = 500_000_000
    _, _, training = problem(asked.small, device, asked.steps, asked.noise)
    asked.out.mkdir(parents=True, exist_ok=True)
    ledger = asked.out / f"sandwich_mnist_ledger_{asked.noise:g}_{asked.steps}.safetensors"
    if not ledger.exists():
        save_file(dict(zip(("floor", "removed", "grey"), stated_of(training), strict=True)), ledger)
    print(f"{time.perf_counter() - begun:.0f} s: the ledger; now the trainings", flush=True)
    known = load_file(ledger)
    stated = [Stated(*each) for each in zip(*(known[n].tolist() for n in ("floor", "removed", "grey")), strict=True)]
    whole = [Target(i, stated[i], group) for i, group in chosen(known["floor"], asked.records)]
    there = {str(target.record): target for target in whole}
    path, kind = asked.out / NAME, (f"{asked.noise:.6g}", str(asked.steps))
    before = csv.DictReader(path.read_text().splitlines()) if path.exists() else ()
    rows: list[dict[str, object]] = [r for r in before if r["record"] in there and (r["noise"], r["steps"]) == kind]
    done = {r["record"] for r in rows}
    targets = [target for name, target in there.items() if name not in done]
    grey = torch.full_like(training.inputs[0], 0.5).flatten()
    plan = Plan(asked.trials, 12 + len(rows), grey, rebuild=asked.rebuild, together=True)
    for one in attack_records(training, targets, with_family_confidence(plan, len(whole))) if targets else ():
        rows.append(row(one, training))
        write(path, sorted(rows, key=lambda r: (GROUPS.index(str(r["group"])), float(str(r["floor"])))))
        print(f"{time.perf_counter() - begun:.0f} s: {len(rows)} of {len(whole)} records", flush=True)


def measure_again(asked: argparse.Namespace) -> None:
    """Writes what another ledger, of other batches and noise, says of the records that have a row."""
    torch.set_num_threads(1)
    _, _, training = problem(asked.small, torch.device("cpu"), asked.steps, asked.noise)
    settings = training.settings
    other = replace(training, settings=replace(settings, seed=int(settings.seed or 0) + 1))
    measured = dict(zip(("floor", "removed", "replaced"), stated_of(other), strict=True))
    chosen_rows = csv.DictReader((asked.out / NAME).read_text().splitlines())
    rows: list[dict[str, object]] = [
        {"record": r["record"], **{name: float(values[int(r["record"])]) for name, values in measured.items()}}
        for r in chosen_rows
    ]
    write(asked.out / AGAIN, rows)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for found in rows:
            writer.writerow({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in found.items()})


def floor_here(r: dict[str, str]) -> float:
    """The two-point floor of a row, (‖Δ‖²/4d) e^{−D}, with D as it is in the trainings in place of the ledger's."""
    return float(r["two_point"]) * math.exp(float(r["replaced"]) - float(r["replaced_here"]))


def table(path: Path) -> None:
    found = list(csv.DictReader(path.read_text().splitlines()))
    heads = ["record", "group", "ledger's 1/dFIL", "MAP's error", "guess", "ledger's floor", "floor here",
             "attack on both", "ledger's D", "D here", "learned", "D at least", "ε at least", "μ at least",
             "faults"]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for r in found:
        n = {
            k: f"{float(v):.{digits_of(k)}g}" if v and k not in ("record", "group", "faults") else v
            for k, v in r.items()
        }
        cells = [n["record"], n["group"], n["floor"], f"{n['mse']} ± {n['standard_error']}", n["guess"]]
        cells += [n["two_point"], f"{floor_here(r):.3g}", f"{n['both']} ({n['both_low']}–{n['both_high']})"]
        cells += [n["removed"], n["removed_here"], f"{n['learned']} ± {n['learned_error']}"]
        print(f"| {' | '.join([*cells, n['nats'], n['epsilon'], n['mu'], n['faults'] or 'none'])} |")
    for group in GROUPS:
        own = [r for r in found if r["group"] == group]
        ledgers = [float(r["both"]) / float(r["two_point"]) for r in own]
        here = [float(r["both"]) / floor_here(r) for r in own]
        print(
            f"\n{group}: the attack's error is {apart(here)} times the floor here, {apart(ledgers)} times the ledger's"
        )
    second = path.with_name(AGAIN)
    if second.exists():
        compare_ledgers(found, list(csv.DictReader(second.read_text().splitlines())))
    away = [standard_errors_away(r) for r in found]
    print(f"\nlearned less D here, in standard errors: mean {mean(away):.2f}, root mean square {rms(away):.2f}")


def compare_ledgers(found: list[dict[str, str]], second: list[dict[str, str]]) -> None:
    """Prints what the ledger that chose the records says of them, and what another says."""
    for group in GROUPS:
        own = [(r, other) for r, other in zip(found, second, strict=True) if r["group"] == group]
        for which, rows in (("ledger", [r for r, _ in own]), ("another ledger", [other for _, other in own])):
            floors = [float(r["floor"]) for r in rows]
            ratios = [
                float(r["removed"]) / float(first["removed_here"]) for r, (first, _) in zip(rows, own, strict=True)
            ]
            print(f"\n{group}, {which}: D is {mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times D here,")
            print(f"    1/dFIL {min(floors):.3g} to {max(floors):.3g}")


def standard_errors_away(r: dict[str, str]) -> float:
    error = math.hypot(float(r["learned_error"]), float(r["removed_error"]))
    return (float(r["learned"]) - float(r["removed_here"])) / error


def digits_of(column: str) -> int:
    return 2 if column.endswith("_error") else 3


def apart(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def rms(values: list[float]) -> float:
    return math.sqrt(mean(value**2 for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--again", action="store_true", help="measure the records by another ledger")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--small", action="store_true", help="8 × 8 digits, few trainings: to try the script")
    parser.add_argument("--records", type=int, help="in three groups (24)")
    parser.add_argument("--trials", type=int, help="trainings of each kind, on average (500)")
    parser.add_argument("--rebuild", type=int, default=REBUILD, help=f"of them, to rebuild a record from ({REBUILD})")
    parser.add_argument("--steps", type=int, help=f"of a training ({STEPS})")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"noise multiplier ({NOISE})")
    parser.add_argument("--out", type=Path, default=ROWS, help="folder of the rows")
    asked = parser.parse_args()
    for name, full in (("records", 24), ("trials", 500), ("steps", STEPS)):
        if getattr(asked, name) is None:
            setattr(asked, name, SMALL[name] if asked.small else full)
    if (asked.train or asked.again) and asked.small and asked.out.resolve() == ROWS.resolve():
        parser.error("--small would replace the full-size results: give another folder by --out")
    if asked.train:
        train(asked)
    if asked.again:
        measure_again(asked)
    table(asked.out / NAME)


if __name__ == "__main__":
    main()

"""A floor below and real attacks above, for the paper's MNIST network on a GPU.

    python experiments/sandwich_mnist.py --train --device cuda        for a GPU: 24 records, 500 trainings of each kind
    python experiments/sandwich_mnist.py --train --small --out FOLDER to try the script on a CPU: 8 × 8 digits, a minute
    python experiments/sandwich_mnist.py                              the table from the rows

Every training begins with fresh parameters; Poisson batches, smooth clip 1, torch's SGD. PrivateSGD's ledger of two
runs says which records are exposed, and states floors and divergences (estimates: limits need more runs). Then each
record is attacked in trainings with it, without it, and with mid-grey in its place. The attacker knows all other
records and who of them took part, sees every step, and does not know whether the record took part.

The trainings with each record are shared by all; the others are 2 × 500 for each record. Records are rebuilt from 8
trainings of each kind, which takes most of the time. --records, --trials and --rebuild make it shorter. Trainings run
side by side, as many as the memory of gradients allows (attacks/trainings.py, FLOATS), and so do --parts processes. A
run that was cut off goes on with the records that have no row yet."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reconbound import PrivateSGD, Settings
from reconbound.attacks import Training, trainings
from reconbound.attacks.sandwich import Plan, Sandwich, Stated, Target, attack_records, with_family_confidence
from reconbound.auditing.models import make_loss, make_model, start_afresh
from reconbound.data import Dataset, load_dataset
from reconbound.fisher.worlds import Replacement

ROWS = Path(__file__).parent / "results"
NAME, LEDGER = "sandwich_mnist.csv", "sandwich_mnist_ledger.safetensors"
NOISE, RATE, LR, STEPS, REBUILD = 0.4, 0.002, 2.0, 150, 8
#: Of the small form: 500 digits of 8 × 8 pixels, two records, few steps.
SMALL = {"records": 3, "trials": 4, "steps": 6, "rate": 0.1, "limit": 500}


def problem(small: bool, device: torch.device, steps: int, noise: float) -> tuple[Dataset, str, Training]:
    """Returns the data, the kind of the model, and the training in float32."""
    dataset = load_dataset("digits", limit=SMALL["limit"]) if small else load_dataset("mnist")
    kind = "mlp" if small else "cnn"
    model = make_model(dataset, kind, seed=0).to(device)
    settings = Settings(noise, 1.0, SMALL["rate"] if small else RATE, lr=LR, seed=2**100 + 7, rules=("exact",))
    inputs, targets = torch.from_numpy(dataset.inputs).to(device), torch.from_numpy(dataset.targets).to(device)
    fresh = partial(start_afresh, dataset, kind)
    return dataset, kind, Training(model, make_loss(dataset), inputs, targets, settings, steps, fresh)


def stated_of(training: Training, runs: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """1/dFIL, and D without the record and with mid-grey in its place, of every record by PrivateSGD's ledger."""
    learner = PrivateSGD(
        training.model, training.loss_fn, training.inputs, training.targets, training.settings,
        worlds={"grey": Replacement(0.5)}, initialise=training.initialise, progress=False, check=False,
    ).repeat(runs, training.steps)  # fmt: skip
    ledger = learner.accountant
    assert ledger is not None
    return 1 / ledger.dfil().cpu(), ledger.divergence("removed").cpu(), ledger.divergence("grey").cpu()


def chosen(floor: Tensor, count: int) -> list[tuple[int, str]]:
    """A third each: the most exposed, the least exposed, and random ones."""
    order = [int(i) for i in torch.nan_to_num(floor, posinf=float("inf")).argsort()]
    third = max(1, count // 3)
    middle = order[third:-third]
    drawn = torch.randperm(len(middle), generator=torch.Generator().manual_seed(0))[:third]
    groups = {"most-exposed": order[:third], "least-exposed": order[-third:], "random": [middle[int(i)] for i in drawn]}
    return [(i, name) for name, group in groups.items() for i in group]


def row(one: Sandwich) -> dict[str, object]:
    stated, tried, close, probable = one.target.stated, one.membership, one.close_chances, one.probable
    assert tried is not None
    found: dict[str, object] = {"record": one.target.record, "group": one.target.group, "trials": tried.trials}
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
    """Makes the ledger, attacks the records in some processes side by side, and joins their rows."""
    device = torch.device(asked.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    _, _, training = problem(asked.small, device, asked.steps, asked.noise)
    begun = time.perf_counter()
    stated = asked.out / LEDGER
    if not stated.exists():
        asked.out.mkdir(parents=True, exist_ok=True)
        save_file(dict(zip(("floor", "removed", "grey"), stated_of(training), strict=True)), stated)
    print(f"{time.perf_counter() - begun:.0f} s: the ledger", flush=True)
    if asked.parts == 1:
        attack_part(training, asked, 0)
    else:
        words = [sys.executable, __file__, *sys.argv[1:], "--part"]
        children = [subprocess.Popen([*words, str(part)]) for part in range(asked.parts)]
        if any(child.wait() for child in children):
            sys.exit("a part failed: the rows of the others are kept; give the same command again for the rest")
    rows = [line for part in range(asked.parts) for line in csv.DictReader(part_file(asked.out, part).open())]
    groups = {"most-exposed": 0, "least-exposed": 1, "random": 2}
    write(asked.out / NAME, sorted(rows, key=lambda r: (groups[r["group"]], float(r["floor"]), int(r["record"]))))


def attack_part(training: Training, asked: argparse.Namespace, part: int) -> None:
    """Attacks every so-manieth record; each row is written when it is known, and rows that are there are kept."""
    if training.inputs.device.type == "cuda":
        trainings.FLOATS = 4_000_000_000 // asked.parts  # of 4 bytes; the trajectories take as much again
    known = load_file(asked.out / LEDGER)
    stated = zip(*(known[name].tolist() for name in ("floor", "removed", "grey")), strict=True)
    each = [Stated(*numbers) for numbers in stated]
    whole = [Target(i, each[i], group) for i, group in chosen(known["floor"], asked.records)]
    file = part_file(asked.out, part)
    rows: list[dict[str, object]] = [*csv.DictReader(file.open())] if file.exists() else []
    there = {int(str(r["record"])) for r in rows}
    targets = [target for target in whole[part :: asked.parts] if target.record not in there]
    begun = time.perf_counter()
    plan = Plan(asked.trials, 12, torch.full_like(training.inputs[0], 0.5).flatten(), rebuild=asked.rebuild)
    for one in attack_records(training, targets, with_family_confidence(plan, len(whole))) if targets else ():
        rows.append(row(one))
        write(file, rows)
        print(f"{time.perf_counter() - begun:.0f} s: {len(rows)} records in part {part}", flush=True)


def part_file(folder: Path, part: int) -> Path:
    return folder / f"{Path(NAME).stem}_part_{part}.csv"


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for found in rows:
            writer.writerow({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in found.items()})


def table(path: Path) -> None:
    found = list(csv.DictReader(path.read_text().splitlines()))
    heads = ["record", "group", "1/dFIL", "MAP's error", "guess", "two-point floor", "attack on both", "D", "learned",
             "D at least", "ε at least", "μ at least", "faults"]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for r in found:
        n = {name: f"{float(v):.3g}" if v and name not in ("record", "group", "faults") else v for name, v in r.items()}
        cells = [n["record"], n["group"], n["floor"], n["mse"], n["guess"], n["two_point"], n["both"], n["removed"]]
        cells += [f"{n['learned']} ± {n['learned_error']}", n["nats"], n["epsilon"], n["mu"], n["faults"] or "none"]
        print(f"| {' | '.join(cells)} |")
    for group in ("most-exposed", "least-exposed"):
        ratios = [float(r["both"]) / float(r["two_point"]) for r in found if r["group"] == group and r["two_point"]]
        if ratios:
            middle = sorted(ratios)[len(ratios) // 2]
            print(f"\n{group}: the attack's error over the two-point floor is {middle:.3g} (median of {len(ratios)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--small", action="store_true", help="8 × 8 digits, few trainings: to try the script")
    parser.add_argument("--records", type=int, help="in three groups (24)")
    parser.add_argument("--trials", type=int, help="trainings of each kind (500)")
    parser.add_argument("--rebuild", type=int, default=REBUILD, help=f"of them, to rebuild a record from ({REBUILD})")
    parser.add_argument("--steps", type=int, help=f"of a training ({STEPS})")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"noise multiplier ({NOISE})")
    parser.add_argument("--parts", type=int, default=1, help="processes side by side (1)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of a process that another one started
    parser.add_argument("--out", type=Path, default=ROWS, help="folder of the rows")
    asked = parser.parse_args()
    for name, full in (("records", 24), ("trials", 500), ("steps", STEPS)):
        if getattr(asked, name) is None:
            setattr(asked, name, SMALL[name] if asked.small else full)
    if asked.train and asked.small and asked.out.resolve() == ROWS.resolve():
        parser.error("--small would replace the full-size results: give another folder by --out")
    if asked.part is not None:
        attack_part(problem(asked.small, torch.device(asked.device), asked.steps, asked.noise)[2], asked, asked.part)
        return
    if asked.train:
        train(asked)
    table(asked.out / NAME)


if __name__ == "__main__":
    main()

"""Does an attack on private SGD respect the floors? The likeliest record, on digits and on a few points of the plane.

    python experiments/sgd_attack.py --train     half an hour on one core; adds rows to results/sgd_attack.csv
    python experiments/sgd_attack.py             the table from the rows

Attacker: sees the parameters after every step; knows all other records, which of them took part and the label; not
whether the record took part. What is measured is its error over trainings with fresh noise and batches.

digits: a linear softmax model (650 parameters, 64 pixels in [0, 1]) on 60 of scikit-learn's digits, 30 steps, clip norm
1, step 0.5, every record with chance 1/2 in a batch; three records, the most, the middle and the least exposed by the
information along one training. points: the same model on 20 random points of the unit square, two classes, step 0.02,
chance 1/5; the record's gradient is 1.3 to 3.8 times the noise, so that the attacker is often unsure whether it took
part: that is what the exact factor is about."""

from __future__ import annotations

import argparse
import copy
import csv
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from reconbound import PrivateSGD, Settings
from reconbound.attacks import SGDTrials, simulate_sgd

ROWS = Path(__file__).parent / "results" / "sgd_attack.csv"
#: data, σ, T, trainings, which of the records in order of exposure (None: record 3)
RUNS = (
    ("digits", 0.03, 30, 40, (0, 30, 59)),
    ("digits", 0.3, 30, 40, (0, 30, 59)),
    ("points", 0.2, 100, 300, None),
    ("points", 0.35, 400, 150, None),
)
NAMES = ("data", "steps", "record", "noise_multiplier", "trials", "mse", "standard_error", "median", "trimmed", "bias",
         "variance", "floor", "cramer_rao")  # fmt: skip


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def problem(data: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, dict[str, float]]:
    torch.manual_seed(0)
    if data == "digits":
        images, labels = load_digits(return_X_y=True)
        x, y = torch.from_numpy(images[:60] / 16), torch.from_numpy(labels[:60])
        return nn.Sequential(nn.Linear(64, 10)).double(), x, y, {"sample_rate": 0.5, "lr": 0.5}
    x, y = torch.rand(20, 2, dtype=torch.float64), torch.randint(0, 2, (20,))
    return nn.Sequential(nn.Linear(2, 2)).double(), x, y, {"sample_rate": 0.2, "lr": 0.02}


def train(out: Path, share: float) -> None:
    torch.set_num_threads(1)
    there = csv.DictReader(out.read_text().splitlines()) if out.exists() else ()
    done = {(r["data"], r["steps"], r["record"], r["noise_multiplier"]) for r in there}  # it goes on from the rows
    for data, noise, steps, trials, places in RUNS:
        model, x, y, options = problem(data)
        settings = Settings(noise, 1.0, seed=1, budget="every", **options)
        ledger = PrivateSGD(copy.deepcopy(model), losses, x, y, settings, progress=False).fit(steps).accountant
        order = ledger.dfil().argsort(descending=True)
        for record in [3] if places is None else [int(order[k]) for k in places]:
            if (data, str(steps), str(record), str(noise)) in done:
                continue
            begun, count = time.perf_counter(), max(2, round(share * trials))
            found = simulate_sgd(model, losses, x, y, settings, record, SGDTrials(steps, count))
            print(f"{data}, noise {noise}, {time.perf_counter() - begun:.0f} s", found, flush=True)
            values = {"data": data, "steps": steps, "noise_multiplier": noise}
            values |= {name: f"{getattr(found, name):.6g}" for name in NAMES if name not in values}
            new = not out.exists()
            with open(out, "a", newline="") as file:
                writer = csv.DictWriter(file, NAMES, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(values)


def table(rows: list[dict[str, str]]) -> None:
    heads = ["data", "σ", "T", "record", "trainings", "floor 1/dFIL", "Cramér–Rao"]
    heads += ["attack's error", "over it", "its median", "bias²"]
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    for r in rows:
        n = {name: float(r[name]) for name in NAMES[2:]}
        error = f"{n['mse']:.3g} ± {n['standard_error']:.2g} | {n['mse'] / n['cramer_rao']:.3g}"
        cells = [r[name] for name in ("data", "noise_multiplier", "steps", "record", "trials")]
        cells += [f"{n['floor']:.3g}", f"{n['cramer_rao']:.3g}", error, f"{n['median']:.3g}", f"{n['bias']:.2g}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--share", type=float, default=1.0, help="of the trainings, to try the script")
    asked = parser.parse_args()
    if asked.train and asked.share != 1 and asked.rows.resolve() == ROWS.resolve():
        parser.error("--share would add to the full-size results: give another file by --rows FILE")
    if asked.train:
        train(asked.rows, asked.share)
    table(list(csv.DictReader(asked.rows.read_text().splitlines())))


if __name__ == "__main__":
    main()

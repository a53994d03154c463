"""How often is a floor from one run too high? Small private trainings, each with a ledger of its own.

After one run there is no confidence limit: what is shown first is 1/estimate, called an estimate, with the shares that
this script counts: of records whose floor was too high by more than a factor of 2, and of 10, in squared error. The
truth, each record's expected information, is the mean over all trainings with every record measured at every step.

python experiments/one_run.py [--problems iris wine] [--trainings 150] [--seed 0]     some seconds for each problem
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from coverage import TRIALS, Trial, simulate, write

#: The default, one measurement for each record trained on, and four.
BUDGETS: dict[str, Any] = {"0.15": 0.15, "1": 1.0, "4": 4.0}
RESULTS = Path(__file__).parent / "results" / "one_run.csv"


def shares(trial: Trial, trainings: int, seed: int, budgets: dict[str, Any] = BUDGETS) -> list[dict[str, Any]]:
    """Counts floors that are too high, for each budget, over records and trainings.

    Args:
        trial: the problem.
        trainings: how many, of one run each.
        seed: of all that is random.
        budgets: names and values.

    Returns:
        For each budget: measurements of a record, the shares of floors too high at all, by more than 2 and by more than
        10, each in squared error. "truth_error": the largest relative standard error of the truth.
    """
    truth, error, ledgers = simulate(trial, trainings, seed, budgets=budgets, runs=1)
    found = []
    for name in budgets:
        ledger = ledgers[name]
        ratio = truth / ledger.dfil().reshape(trainings, -1)  # a floor is 1/dFIL
        ratio = ratio[ledger.measured().reshape(trainings, -1) > 0]
        above = {f"above_{k}": float((ratio > k).double().mean()) for k in (1, 2, 10)}
        measured = float(ledger.measured().double().median())
        found.append({"budget": name, "measurements": measured, **above, "truth_error": float((error / truth).max())})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--trainings", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for problem in asked.problems:
        for line in shares(TRIALS[problem], asked.trainings, asked.seed):
            lines.append({"problem": problem, "trainings": asked.trainings, "seed": asked.seed, **line})
            print(problem, {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
    write(asked.out, lines)


if __name__ == "__main__":
    main()

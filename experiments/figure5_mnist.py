"""Figure 5 (left) of the paper: MNIST, accuracy against every floor over the paper's grid of 432 settings.

Trained on a GPU by `python experiments/figure5_mnist.py --train`, which goes on from the rows it finds; without
--train the table and the picture are made anew from experiments/results/mnist_grid.csv, in seconds."""

from dataclasses import replace
from pathlib import Path

from _grid import Grid, combinations, given, options, train

from reconbound.auditing.models import mnist_cnn
from reconbound.data import mnist

ROWS = Path(__file__).parent / "results" / "mnist_grid.csv"
NOISE, CLIP, LR = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), (0.01, 0.03, 0.1)
AT, RUNS = (1000, 2000, 3000, 5000), 2
BUDGETS = (0.4, 0.2, 0.2, 0.1)  # 4, 2, 2, 2 measurements of each record in the four stretches
GRID = Grid(
    mnist_cnn, lambda part: mnist(train=part), 0.01, 0.5, AT, BUDGETS, combinations("poisson", NOISE, CLIP, LR), 36
)


def chosen(grid: Grid, only: str, until: int, short: int) -> Grid:
    """The grid, or the trainings that were named, or a short version of it."""
    if only:
        named = (line.split(",") for line in only.split(";"))
        grid = replace(grid, trainings=tuple((name, float(s), float(c), float(lr)) for name, s, c, lr in named))
    if until:
        kept = tuple(t for t in grid.at if t <= until)
        grid = replace(grid, at=kept, budgets=grid.budgets[: len(kept)])
    if short:
        grid = replace(grid, at=tuple(t // short for t in grid.at))
    return grid


def main() -> None:
    asked = given(options(__doc__, runs=RUNS, rows=ROWS))
    if asked.train:
        train(chosen(GRID, asked.only, asked.until, asked.short), asked)
        return
    from _frontier import report

    report(
        [[ROWS]],
        "figure5_mnist",
        title="MNIST, 26,010 parameters, batches of 600; 432 settings, two runs each",
        rate=GRID.rate,
        dim=784,
        paper={("theorem1_paper", 1.0): "about 95 %", ("dfil_paper_max", 1.0): "about 97 %"},
        low=0.8,
    )


if __name__ == "__main__":
    main()

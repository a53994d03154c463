"""Figure 2 of the paper: floors of every record of a logistic regression on MNIST 0 against 1, released with noise."""

import math
from collections.abc import Sequence

import numpy as np
from _common import BLUE, GREEN, GREY, RED, digits, options, parse, plt, run, save, table, write

from reconbound import OutputPerturbation
from reconbound.bounds import corners, theorem1
from reconbound.linear import Logistic, leakage, minimise

L2, NOISE, RUNS, SEED = 1e-2, 1e-2, 10, 0
DIM = 784


def accuracy(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    rng = np.random.default_rng(SEED)
    released = weights + NOISE * rng.standard_normal((RUNS, DIM))
    return float(np.mean((x @ released.T > 0) == (y[:, None] > 0)))


def main(words: Sequence[str] | None = None) -> None:
    given = parse(options(__doc__), words)
    (x, y), (x_test, y_test) = digits(records=given.records), digits(train=False)
    n, norms = len(x), np.linalg.norm(x, axis=1)
    o = minimise(x, y, Logistic(), l2=L2, intercept=False)
    found = leakage(o, NOISE)
    floor = np.asarray(found.floor.value)
    short = x / np.maximum(norms, 1.0)[:, None]
    clipped = minimise(short, y, Logistic(), l2=L2, intercept=False)
    floor_clipped = np.asarray(leakage(clipped, NOISE, spectral=False, diagonal=False).floor.value)
    paper = OutputPerturbation(n, L2, NOISE).order2()
    sound = OutputPerturbation(n, L2, NOISE, data_norm=math.sqrt(DIM)).order2()
    seen = OutputPerturbation(n, L2, NOISE, data_norm=float(norms.max())).order2()
    rdp, all_corners = theorem1(paper, dim=DIM).value, corners(paper, dim=DIM).value

    clipped_accuracy, noise = accuracy(clipped.weights, x_test, y_test), n * L2 * NOISE * math.sqrt(DIM)
    rows = [
        ("records", "12,665", f"{n:,}"),
        ("order-2 ε, gradients of norm 1 as the paper computes it", "2.49", f"{paper:.2f}"),
        ("order-2 ε, sound for pixels in [0,1] (rows up to √784 = 28)", "", f"{sound:.0f}"),
        (f"the same for the longest row seen, {norms.max():.2f} (read off the data)", "", f"{seen:.0f}"),
        ("test accuracy, noisy weights", "99.95 %", f"{100 * accuracy(o.weights, x_test, y_test):.2f} %"),
        (f"Theorem 1 at ε = {paper:.2f}", "≈ 0.02", f"{rdp:.4f}"),
        (f"all corners at ε = {paper:.2f}", "", f"{all_corners:.1f}"),
        ("Theorem 1 at the sound ε", "", f"{theorem1(sound, dim=DIM).value:.1g}"),
        ("per-record floors, smallest", "> 1", f"{floor.min():.3f}"),
        ("per-record floors, median", "", f"{np.median(floor):.3g}"),
        ("per-record floors, largest", "", f"{floor.max():.3g}"),
        ("records with floor ≤ 1", "0", f"{int(np.sum(floor <= 1))}"),
        ("exact Cramér–Rao floor Tr(I⁻¹)/d, smallest", "", f"{np.min(found.cramer_rao.value):.3f}"),
        ("weakest direction 1/‖I‖, smallest", "", f"{np.min(found.spectral_floor.value):.3f}"),
        ("one pixel 1/Iⱼⱼ, smallest", "", f"{np.min(found.feature_floors.value):.3f}"),
        (f"rows clipped to norm 1, where ε = {paper:.2f} is sound: accuracy", "", f"{100 * clipped_accuracy:.2f} %"),
        ("rows clipped to norm 1: smallest floor", "", f"{floor_clipped.min():.3f}"),
        ("gradient norm left by the solver", "", f"{o.gradient_norm:.1e}"),
        ("noise in gradient units, nλσ√d", "", f"{noise:.1f}"),
    ]
    table("figure2_linear", "Figure 2: MNIST 0 against 1, λ = 1e-2, σ = 1e-2", rows, given.out)
    columns = {"record": range(n), "label": y.astype(int), "floor": floor, "floor_clipped": floor_clipped}
    write("figure2_linear", columns, given.out)

    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    bins = np.logspace(-2.2, math.log10(floor.max()) + 0.2, 90)
    axis.hist(floor, bins=bins, color=BLUE, alpha=0.85, label="per-record floors d/Tr(I)")
    top = axis.get_ylim()[1] * 1.55
    axis.set_ylim(0, top)
    for value, colour, style, name in (
        (rdp, RED, "-", f"Theorem 1 at ε = {paper:.2f}: {rdp:.3f}"),
        (1.0, GREY, "--", "MSE = 1"),
        (all_corners, GREEN, "-.", f"all corners at ε = {paper:.2f}: {all_corners:.1f}"),
    ):
        axis.axvline(value, color=colour, linestyle=style, label=name)
    axis.set(xscale="log", xlabel="floor under an unbiased attacker's MSE per pixel", ylabel="training records")
    axis.legend(loc="upper right", fontsize=9)
    axis.set_title(
        f"Red and green rest on gradients of norm 1: for raw pixels ε is {sound:.0f}", fontsize=10, loc="left"
    )
    save(figure, "figure2_linear", given.out)


if __name__ == "__main__":
    run(main)

"""Figure 3 of the paper: each record's floor against the GLM attack's real error over 10,000 releases."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _common import BLUE, GREY, RED, at_least, digits, options, parse, plt, run, save, table, write
from scipy.stats import spearmanr

from reconbound._internal.checks import DataMissing
from reconbound.attacks import AttackReport, simulate
from reconbound.linear import Logistic, leakage, minimise

L2, NOISE, TRIALS, SEED = 1e-2, 1e-5, 10_000, 0
SIZE, GUESS = "records, trials", "MSE of guessing the mean of the others with that label"  # rows that --draw reads


def rank(floor: np.ndarray, error: np.ndarray) -> float:
    low = floor <= 1
    return float(spearmanr(floor[low], error[low]).statistic)


def rows_for(name: str, floor: np.ndarray, exact: np.ndarray, found: AttackReport, drowned: np.ndarray) -> list:
    low, below = floor <= 1, found.mse < floor
    assert found.bias is not None
    assert found.variance is not None
    share = found.bias[below] / found.mse[below]
    usual = "close correlation" if name == "ratio" else ""
    steady = low & (found.mse < 2 * found.median)
    return [
        (f"{name}: rank correlation with the mean error, floors ≤ 1", usual, f"{rank(floor, found.mse):.3f}"),
        (f"{name}: rank correlation with the trimmed mean", "", f"{rank(floor, found.trimmed):.3f}"),
        (f"{name}: rank correlation with the median error", "", f"{rank(floor, found.median):.3f}"),
        (f"{name}: records below their floor", "some", f"{below.sum():,}"),
        (f"{name}: of these with floor ≤ 1", "0", f"{np.sum(below & low):,}"),
        (f"{name}: of these with squared bias over a tenth of the MSE", "", f"{np.sum(share > 0.1):,}"),
        (f"{name}: of these with signal below twice its noise", "", f"{np.sum(below & drowned):,}"),
        (f"{name}: median over records of mean error / median error", "", f"{np.median(found.mse / found.median):.3g}"),
        (f"{name}: variance / exact Cramér–Rao floor, median where the mean settles ({steady.sum():,} records)", "",
         f"{np.median((found.variance / exact)[steady]):.3f}" if steady.any() else "none"),
    ]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--trials", type=at_least(2), default=TRIALS, metavar="T", help=f"releases (default: {TRIALS:,})"
    )
    parser.add_argument("--draw", action="store_true", help="only draw again, from the files in the folder of --out")
    given = parse(parser, words, ("records", "trials"))
    if given.draw:
        return draw(*kept(given.out), given.out)
    trials, (x, y) = given.trials, digits(records=given.records)
    guess = sum(np.mean(y == label) * np.mean(x[y == label].var(axis=0)) for label in (0, 1))
    with_constant = minimise(x, y, Logistic(), l2=L2, intercept=True)
    without = minimise(x, y, Logistic(), l2=L2, intercept=False)
    rows = [(SIZE, "12,665, 10,000", f"{len(x):,}, {trials:,}")]
    rows.append((GUESS, "", f"{guess:.4f}"))
    columns: dict = {"record": np.arange(len(x)), "label": y.astype(int)}
    for name, o, method, branch in (
        ("ratio", with_constant, "ratio", "nearest"),
        ("label", without, "label", "nearest"),
        ("label, told the root", without, "label", "given"),
    ):
        found = leakage(o, NOISE, spectral=False, diagonal=False)
        floor, exact = np.asarray(found.floor.value), np.asarray(found.cramer_rao.value)
        attack = simulate(o, NOISE, trials, method=method, branch=branch, random_state=SEED)
        # signal and noise of what the attack starts from: v₀ = ℓ' + noise σ‖He₀‖, or θ·v = ℓ's + noise σ‖Hθ‖
        noise = NOISE * np.linalg.norm(o.hessian[-1] if o.intercept else o.hessian @ o.weights[0])
        size = np.abs(o.slopes[:, 0]) if o.intercept else np.abs(o.slopes[:, 0] * o.scores[:, 0])
        rows += rows_for(name, floor, exact, attack, size < 2 * noise)
        key = name.split(",")[0] if branch == "nearest" else "told"
        if branch == "nearest":
            columns |= {f"{key}_floor": floor, f"{key}_cramer_rao": exact}
        columns |= {f"{key}_mse": attack.mse, f"{key}_median": attack.median, f"{key}_trimmed": attack.trimmed}
        columns |= {f"{key}_bias": attack.bias}  # the variance is the mean error less this
    table("figure3_glm", "Figure 3: floor against the GLM attack's error, λ = 1e-2, σ = 1e-5", rows, given.out)
    write("figure3_glm", columns, given.out, digits=4, compress=True)
    draw(columns, trials, guess, given.out)


def kept(out: Path) -> tuple[dict, int, float]:
    """What an earlier run left in the folder: columns, trials, the error of a guess."""
    data, told = out / "figure3_glm.csv.gz", out / "figure3_glm_table.csv"
    for path in (data, told):
        if not path.exists():
            raise DataMissing(f"{path} does not exist: run without --draw first")
    drawn = np.genfromtxt(data, delimiter=",", names=True)
    with told.open(encoding="utf-8", newline="") as file:
        said = {row["what"]: row["ours"] for row in csv.DictReader(file)}
    trials = int(said[SIZE].split(", ")[1].replace(",", ""))
    return {name: drawn[name] for name in drawn.dtype.names}, trials, float(said[GUESS])


def draw(columns: dict, trials: int, guess: float, out: Path) -> None:
    """The scatter plots; red dots lie below their floor."""
    figure, axes = plt.subplots(1, 4, figsize=(14.5, 3.9), sharex=True, sharey=True)
    shown = (
        ("constant feature, x = v/v₀: mean", columns["ratio_floor"], columns["ratio_mse"]),
        ("the same: median (no floor binds a median)", columns["ratio_floor"], columns["ratio_median"]),
        ("no constant, label and nearest root: mean", columns["label_floor"], columns["label_mse"]),
        ("no constant, told which root: mean", columns["label_floor"], columns["told_mse"]),
    )
    every = np.concatenate([panel[1] for panel in shown])
    span = (every.min() / 2, every.max() * 2)
    errors = np.concatenate([panel[2] for panel in shown])
    for axis, (title, floor, error) in zip(axes, shown, strict=True):
        below = (error < floor) & (not title.startswith("the same"))
        axis.scatter(floor[~below], error[~below], s=2, color=BLUE, alpha=0.35, linewidths=0, rasterized=True)
        axis.scatter(floor[below], error[below], s=2, color=RED, alpha=0.5, linewidths=0, rasterized=True)
        axis.plot(span, span, color="black", linewidth=1)
        axis.axvline(1, color=GREY, linestyle="--", linewidth=0.8)
        axis.axhline(guess, color=GREY, linestyle=":", linewidth=1.0)
        axis.set(xscale="log", yscale="log", xlim=span, ylim=(errors.min() / 2, np.quantile(errors, 0.9995) * 2))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("floor d/Tr(I)")
        if below.any():
            told_so = f"{below.sum():,} below the floor"
            axis.text(0.97, 0.03, told_so, color=RED, transform=axis.transAxes, ha="right", fontsize=9)
    low, high = axes[0].get_ylim()
    if low < guess < high:
        across, say = axes[0].get_yaxis_transform(), {"color": GREY, "fontsize": 8, "ha": "right", "va": "top"}
        axes[0].text(0.97, guess / 1.6, "guess: mean of that label", transform=across, **say)
    axes[0].set_ylabel(f"squared error per pixel, {trials:,} trials")
    figure.tight_layout()
    save(figure, "figure3_glm", out)


if __name__ == "__main__":
    run(main)

"""Figure 4 of the paper: the 8 most and the 8 least exposed digits, and what the GLM attack makes of one release."""

from collections.abc import Sequence

import numpy as np
from _common import at_least, digits, options, parse, plt, run, save, table, write

from reconbound.attacks import simulate
from reconbound.linear import Logistic, leakage, minimise

L2, NOISE, TRIALS, SEED, SHOWN = 1e-2, 1e-5, 1000, 0, 8


def main(words: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--trials",
        type=at_least(2),
        default=TRIALS,
        metavar="T",
        help=f"releases behind each median (default: {TRIALS:,})",
    )
    given = parse(parser, words, ("records", "trials"))
    x, y = digits(records=given.records)
    o = minimise(x, y, Logistic(), l2=L2, intercept=True)
    found = leakage(o, NOISE, spectral=False, diagonal=False)
    floor = np.asarray(found.floor.value)
    order = np.argsort(floor)
    chosen = np.concatenate([order[:SHOWN], order[-SHOWN:]])
    kind = {"records": chosen, "keep": 1, "random_state": SEED}
    ratio = simulate(o, NOISE, given.trials, method="ratio", **kind)
    label = simulate(o, NOISE, given.trials, method="label", branch="given", **kind)
    assert ratio.reconstructions is not None
    assert label.reconstructions is not None

    images = (x[chosen], ratio.reconstructions[:, 0], label.reconstructions[:, 0])
    widths = [1.0] * SHOWN + [0.25] + [1.0] * SHOWN  # a gap between the two groups
    figure, grid = plt.subplots(3, 2 * SHOWN + 1, figsize=(13.8, 3.1), width_ratios=widths)
    for axis in grid[:, SHOWN]:
        axis.axis("off")
    axes = np.delete(grid, SHOWN, axis=1)
    for row, (name, pictures) in enumerate(zip(("record", "x = v/v₀", "label solve"), images, strict=True)):
        for column, axis in enumerate(axes[row]):
            axis.imshow(pictures[column].reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(f"{floor[chosen[column]]:.1g}", fontsize=9)
        axes[row, 0].set_ylabel(name, fontsize=9)
    figure.suptitle("Floor d/Tr(I) above each digit: the 8 most exposed (left), the 8 least (right)", fontsize=11)
    figure.tight_layout(w_pad=0.2, h_pad=0.3)
    save(figure, "figure4_reconstructions", given.out)
    write(
        "figure4_reconstructions",
        {
            "record": chosen,
            "label": y[chosen].astype(int),
            "floor": floor[chosen],
            "ratio_median_error": ratio.median,
            "label_median_error": label.median,
        },
        given.out,
    )
    rows = [
        (
            "8 most exposed: largest median error per pixel",
            "reconstructed perfectly",
            f"{ratio.median[:SHOWN].max():.2g}",
        ),
        ("8 most exposed: largest floor", "", f"{floor[chosen[:SHOWN]].max():.2g}"),
        ("8 least exposed: smallest median error per pixel", "attack fails", f"{ratio.median[SHOWN:].min():.2g}"),
        ("8 least exposed: smallest floor", "", f"{floor[chosen[SHOWN:]].min():.2g}"),
        ("8 most exposed, label solve told its root: largest median error", "", f"{label.median[:SHOWN].max():.2g}"),
    ]
    table("figure4_reconstructions", "Figure 4: most and least exposed digits, λ = 1e-2, σ = 1e-5", rows, given.out)


if __name__ == "__main__":
    run(main)

"""Which attributes of which people does a private income model expose? Adult (1994 census), in years, hours, dollars.

Logistic regression on five numbers about each person, once with strong noise and once with little. Scales and ranges
are public constants, so that nothing about the preparation depends on the people."""

from collections.abc import Sequence

import adult_csv
import numpy as np
from _common import BLUE, GREY, RED, first, folder, options, parse, plt, run, save, table, write

from reconbound.linear import PrivateLogisticRegression

# column in the file, name, unit, centre and scale (public constants), largest value kept
FEATURES = (
    (0, "age", "years", 40.0, 15.0, 90.0),
    (4, "education", "years", 10.0, 3.0, 16.0),
    (10, "capital gain", "dollars", 0.0, 10_000.0, 20_000.0),
    (11, "capital loss", "dollars", 0.0, 1_000.0, 2_500.0),
    (12, "hours per week", "hours", 40.0, 12.0, 99.0),
)
L2, DATA_NORM, SEED, KEPT = 1e-2, 5.0, 0, 1000  # the most exposed go to the CSV file
SETTINGS = {"ε = 1, δ = 1e-6": {"target_epsilon": 1.0, "target_delta": 1e-6}, "noise 1e-5": {"noise_std": 1e-5}}


def people(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers in their own units, (N, 5), and whether income is above 50,000 dollars."""
    rows = adult_csv.rows(folder() / "adult", name)
    values = np.array([[float(row[k]) for k, *_ in FEATURES] for row in rows])
    largest = np.array([top for *_, top in FEATURES])
    return np.minimum(values, largest), np.array([row[14].startswith(">50K") for row in rows]).astype(int)


def main(words: Sequence[str] | None = None) -> None:
    given = parse(options(__doc__), words)
    centre, scale = (np.array([feature[i] for feature in FEATURES]) for i in (3, 4))
    (own, y), (own_test, y_test) = people("adult.data"), people("adult.test")
    own, y = first(own, given.records), first(y, given.records)
    x, x_test = (own - centre) / scale, (own_test - centre) / scale
    guess = own.std(axis=0)
    figure, axes = plt.subplots(1, len(FEATURES), figsize=(14.5, 3.2))
    rows, columns = (
        [
            ("people", "", f"{len(x):,}"),
            ("always guessing “below”: accuracy", "", f"{100 * np.mean(y_test == 0):.1f} %"),
        ],
        {},
    )
    for colour, (setting, kind) in zip((BLUE, RED), SETTINGS.items(), strict=True):
        model = PrivateLogisticRegression(L2, data_norm=DATA_NORM, random_state=SEED, **kind).fit(x, y)
        found = model.leakage(x, y, scale=scale)
        error = np.asarray(found.feature_floors.rmse)
        if colour == BLUE:
            rows.append(
                (
                    f"people whose row was clipped to norm {DATA_NORM:g}",
                    "",
                    f"{found.clipped.sum()}",
                )
            )
        rows.append((f"{setting}: noise on each weight", "", f"{model.noise_std_:.3g}"))
        rows.append((f"{setting}: test accuracy", "", f"{100 * model.score(x_test, y_test):.1f} %"))
        for j, (_, name, unit, *_rest) in enumerate(FEATURES):
            who = int(np.argmin(error[:, j]))
            said = f"±{error[who, j]:.3g} {unit} (person {who}, {own[who, j]:.0f})"
            exposed = int(np.sum(error[:, j] < guess[j]))
            rows.append(
                (
                    f"{setting}: {name}, most exposed; people closer than a guess (±{guess[j]:.3g})",
                    "",
                    f"{said}; {exposed:,}",
                )
            )
            columns[f"{name} ± {unit}, {setting}"] = error[:, j]
            bins = np.logspace(np.log10(error[:, j].min()), np.log10(np.quantile(error[:, j], 0.999)), 60)
            axes[j].hist(error[:, j], bins=bins, color=colour, alpha=0.75, label=setting)
    for j, (_, name, unit, *_rest) in enumerate(FEATURES):
        axes[j].axvline(guess[j], color=GREY, linestyle="--", label="a plain guess")
        axes[j].set(xscale="log", xlabel=f"floor, ± {unit}", yticks=[])
        axes[j].set_title(name, fontsize=10)
    axes[0].set_ylabel("people")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.06))
    figure.tight_layout()
    save(figure, "adult_linear", given.out)
    order = np.argsort(np.min([column / np.median(column) for column in columns.values()], axis=0))[:KEPT]
    write("adult_linear", {"person": order, **{name: column[order] for name, column in columns.items()}}, given.out)
    table(
        "adult_linear",
        "Adult: the least error of an unbiased attacker on one attribute, all others known",
        rows,
        given.out,
    )


if __name__ == "__main__":
    run(main)

"""A floor below and a real attack above, for ten digits and a network with one hidden layer; and one of k candidates.

    python experiments/sandwich_digits.py --train            all parts; half an hour on one core
    python experiments/sandwich_digits.py --train --only one-of-k
    python experiments/sandwich_digits.py                    the tables from the rows

Attacker: sees the parameters after every step; knows all other records, who of them took part, the label and the
settings. "known": also in which steps the record took part. 200 trainings each, 100 of scikit-learn's digits, smooth
clip 1, every training from the same start. The ten records are evenly spread in the order of PrivateSGD's own ledger.

full: 8 × 8 pixels, four hidden tanh, 24 steps, chance 1/2, σ = 0.02. Participation known, and hidden.
    Participation known; of the most and the least exposed also hidden.
coarse: 4 × 4 pixels (means of four), three hidden tanh, 200 steps, chance 1/5, σ = 0.3: the record's gradient is up to
    3.3 times the noise, so that the attacker is often unsure whether it took part. There the factor of sampling counts.
    Participation hidden; of the most and the least exposed also known.
map: 4 × 4 pixels, 100 steps, chance 1/5, σ = 0.4 and 1.5. The attacker expects a digit like the others of its class
    (Gaussian), and answers with the most probable one, in 60 of the trainings. Trainings with each record, without it,
    and with mid-grey in its place. "both": an attacker who knows that it is the record or mid-grey.
one-of-k: 8 × 8 pixels, 24 steps, chance 1/2: the record is one of k digits that were not trained on, each as likely."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from reconbound import PrivateSGD, Settings
from reconbound.attacks import Changed, LikeliestRecord, OneOf, SGDKnowledge, Training, train_many, transcript_of
from reconbound.attacks.limits import chance_limits, reconstruction_of
from reconbound.attacks.sandwich import Plan, Stated, Target, attack_records, floors_of_information
from reconbound.bounds import success_from_kl

RESULTS = Path(__file__).parent / "results"
RECORDS, CHOSEN, TRIALS = 100, 10, 200
PARTS = ("full", "coarse", "map", "one-of-k")
#: Noise multipliers, and trainings from which records are rebuilt.
MAP_LEVELS, REBUILD = (0.4, 1.5), 60
#: Trainings for each number of candidates; noise multipliers; the record that is secret.
SECRETS, LEVELS, SECRET = {2: 2000, 10: 500, 100: 500}, (1.0, 2.0, 4.0), 0


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def problem(part: str, noise: float | None = None) -> Training:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8), torch.from_numpy(labels)
    coarse = part in ("coarse", "map")
    if coarse:
        x = nn.functional.avg_pool2d(x, 2)
    torch.manual_seed(0)
    hidden = 3 if coarse else 4
    size = x[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()
    rate, sigma, steps = {"full": (0.5, 0.02, 24), "coarse": (0.2, 0.3, 200), "map": (0.2, noise or 1.5, 100)}.get(
        part, (0.5, 1.0, 24)
    )
    settings = Settings(noise or sigma, 1.0, rate, lr=0.5, seed=2**100, budget="every", rules=("exact",))
    return Training(model, losses, x[:RECORDS], y[:RECORDS], settings, steps)


def ledger_of(training: Training, runs: int = 4) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """1/dFIL and D of every record by PrivateSGD's own ledger, the mean of some trainings."""
    start = {name: value.clone() for name, value in training.model.state_dict().items()}
    from reconbound.fisher.worlds import Replacement

    learner = PrivateSGD(
        training.model, losses, training.inputs, training.targets, training.settings,
        worlds={"grey": Replacement(0.5)}, initialise=lambda m: m.load_state_dict(start), progress=False, check=False,
    ).repeat(runs, training.steps)  # fmt: skip
    training.model.load_state_dict(start)
    ledger = learner.accountant
    assert ledger is not None
    nats = {world: ledger.divergence(world).numpy() for world in ("removed", "grey")}
    return 1 / ledger.dfil().numpy(), nats


def spread(floor: np.ndarray) -> list[int]:
    order = np.argsort(floor)
    return [int(order[k]) for k in np.linspace(0, len(order) - 1, CHOSEN).round().astype(int)]


def likelihood_rows(part: str, trials: int) -> Iterator[dict[str, object]]:
    training = problem(part)
    floor, _ = ledger_of(training)
    x, y = training.inputs, training.targets
    parts = list(train_many(training, trials, 5))
    for place, i in enumerate(spread(floor)):
        others = torch.arange(RECORDS) != i
        known = SGDKnowledge(
            training.model, losses, training.settings, y[i : i + 1], x[i : i + 1], mean=x[others].mean(0).flatten()
        )
        z = x[i].flatten()
        first = part == "full"  # participation known there, hidden on the coarse digits; both at both ends
        for participation in (True, False) if place in (0, CHOSEN - 1) else (first,):
            begun = time.perf_counter()
            seen = [transcript_of(p, known, i, z, participation=participation) for p in parts]
            answers = np.concatenate([np.asarray(LikeliestRecord()(s, known).answers) for s in seen])
            information = sum(len(s) * known.information(s, z) for s in seen) / trials
            dfil, cramer_rao = floors_of_information(np.asarray(information))
            hidden = {"participation": "known" if participation else "hidden", "ledger": floor[i]}
            yield row(part, i, place, answers, z.numpy(), hidden | {"floor": dfil, "cramer_rao": cramer_rao})
            print(part, i, hidden["participation"], f"{time.perf_counter() - begun:.0f} s", flush=True)


def row(part: str, record: int, place: int, answers: np.ndarray, z: np.ndarray, more: dict) -> dict[str, object]:
    found = reconstruction_of(answers, z)
    names = ("trials", "mse", "standard_error", "median", "bias", "variance", "variance_error")
    return {"part": part, "record": record, "place": place, **more, **{name: getattr(found, name) for name in names}}


def map_rows(noise: float, trials: int) -> Iterator[dict[str, object]]:
    training = problem("map", noise)
    floor, nats = ledger_of(training)
    chosen = spread(floor)
    targets = [Target(i, Stated(floor[i], nats["removed"][i], nats["grey"][i])) for i in chosen]
    plan = Plan(trials, 6, torch.full((16,), 0.5, dtype=torch.float64), rebuild=REBUILD)
    for place, one in enumerate(attack_records(training, targets, plan)):
        i, close = one.target.record, one.close_chances
        assert one.probable is not None
        assert one.both is not None
        assert close is not None
        assert one.close is not None
        assert one.membership is not None
        names = ("trials", "mse", "standard_error", "median", "bias", "variance", "variance_error")
        yield {
            "noise": noise, "record": i, "place": place, "participation": "hidden", "ledger": floor[i],
            "floor": one.floor, "cramer_rao": one.cramer_rao, **{n: getattr(one.probable, n) for n in names},
            "guess": one.guess, "two_point": one.two_point, "both": one.both[0], "both_high": one.both[2],
            "close": one.close[0] / one.probable.trials, "close_low": close[0][0], "close_other_high": close[1][1],
            "tested": one.membership.trials,
            "p_max": close[2], "nats": nats["removed"][i], "learned": one.membership.learned,
            "learned_error": one.membership.learned_error, "nats_low": one.membership.nats,
            "epsilon_low": one.membership.epsilon, "mu_low": one.membership.mu, "faults": "; ".join(one.faults),
        }  # fmt: skip


def secret_rows(share: float) -> Iterator[dict[str, object]]:
    images, _ = load_digits(return_X_y=True)
    digits = torch.from_numpy(images / 16).reshape(-1, 1, 8, 8)
    for noise in LEVELS:
        training = problem("one-of-k", noise)
        y = training.targets[SECRET : SECRET + 1]
        for k, count in SECRETS.items():
            trials = max(2, round(share * count))
            candidates = digits[RECORDS : RECORDS + k]
            secret = torch.randint(0, k, (trials,), generator=torch.Generator().manual_seed(k))
            known = SGDKnowledge(training.model, losses, training.settings, y, candidates[:1])
            flat, at, right = candidates.flatten(1), 0, 0
            nats: dict[str, list[Tensor]] = {"removed": [], "average": []}
            for part in train_many(training, trials, 8, records=[SECRET], world=Changed(SECRET, candidates[secret])):
                own = secret[at : at + len(part.sums)]
                at += len(own)
                seen = transcript_of(part, known, SECRET, flat[own])
                right += int((OneOf(flat)(seen, known).choice == own.numpy()).sum())
                nats["removed"].append(known.nats(seen, flat[own]))
                nats["average"].append(known.nats(seen, flat[own], flat.mean(0)))
            mean = {name: torch.cat(parts).mean().item() for name, parts in nats.items()}
            error = {name: torch.cat(parts).std().item() / trials**0.5 for name, parts in nats.items()}
            low, high = chance_limits(right, trials)
            best = min(mean, key=lambda name: mean[name])
            yield {
                "noise": noise, "k": k, "trials": trials, "success": right / trials, "low": low, "high": high,
                "removed": mean["removed"], "average": mean["average"], "error": error[best],
                "p_max": float(success_from_kl(1 / k, mean[best])),
            }  # fmt: skip
            print(f"one of {k}, noise {noise}: {right / trials:.3f}", flush=True)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for found in rows:
            writer.writerow({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in found.items()})


def path_of(part: str, folder: Path) -> Path:
    return folder / f"sandwich_{part.replace('-', '_')}.csv"


def train(parts: list[str], folder: Path, share: float) -> None:
    torch.set_num_threads(1)
    trials = max(2, round(share * TRIALS))
    for part in parts:
        if part == "map":
            rows = [found for noise in MAP_LEVELS for found in map_rows(noise, trials)]
        elif part == "one-of-k":
            rows = list(secret_rows(share))
        else:
            rows = list(likelihood_rows(part, trials))
        write(path_of(part, folder), rows)


def shown(value: str, digits: int = 3) -> str:
    return f"{float(value):.{digits}g}" if value else ""


def table(heads: list[str], rows: list[list[str]]) -> None:
    print(f"\n| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


def tables(folder: Path) -> None:
    for part in ("full", "coarse"):
        if not path_of(part, folder).exists():
            continue
        found = list(csv.DictReader(path_of(part, folder).read_text().splitlines()))
        heads = [
            part,
            "record",
            "participation",
            "ledger's 1/dFIL",
            "1/dFIL",
            "Tr I⁻¹/d",
            "attack's variance",
            "over it",
        ]
        rows = [
            ["", r["record"], r["participation"], shown(r["ledger"]), shown(r["floor"]), shown(r["cramer_rao"]),
             f"{shown(r['variance'])} ± {shown(r['variance_error'], 2)}",
             f"{float(r['variance']) / float(r['cramer_rao']):.3f} ± "
             f"{float(r['variance_error']) / float(r['cramer_rao']):.3f}"]
            for r in found
        ]  # fmt: skip
        table([*heads, "bias²"], [[*cells, shown(r["bias"], 2)] for cells, r in zip(rows, found, strict=True)])
    if path_of("map", folder).exists():
        found = list(csv.DictReader(path_of("map", folder).read_text().splitlines()))
        heads = ["σ", "record", "ledger's 1/dFIL", "MAP's error", "guess", "bias²", "two-point floor", "attack on both",
                 "close", "p_max", "D", "learned", "D at least", "ε at least", "μ at least", "faults"]  # fmt: skip
        rows = [
            [r["noise"], r["record"], shown(r["ledger"]), f"{shown(r['mse'])} ± {shown(r['standard_error'], 2)}",
             shown(r["guess"]),
             shown(r["bias"]), shown(r["two_point"]), f"{shown(r['both'])} (≤ {shown(r['both_high'])})",
             f"{shown(r['close'])} (≥ {shown(r['close_low'])})", shown(r["p_max"]), shown(r["nats"]),
             f"{shown(r['learned'])} ± {shown(r['learned_error'], 2)}", shown(r["nats_low"]),
             shown(r["epsilon_low"]), shown(r["mu_low"]), r["faults"] or "none"]
            for r in found
        ]  # fmt: skip
        table(heads, rows)
    if path_of("one-of-k", folder).exists():
        found = list(csv.DictReader(path_of("one-of-k", folder).read_text().splitlines()))
        heads = ["σ", "k", "trainings", "success (95 %)", "mean D", "p_max", "p_max over success"]
        rows = [
            [r["noise"], r["k"], r["trials"],
             f"{float(r['success']):.3f} ({float(r['low']):.3f}–{float(r['high']):.3f})",
             f"{min(float(r['removed']), float(r['average'])):.3g} ± {shown(r['error'], 2)}",
             f"{float(r['p_max']):.3f}",
             f"{float(r['p_max']) / max(float(r['success']), 1e-9):.2f}"]
            for r in found
        ]  # fmt: skip
        table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to train; all by default")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--share", type=float, default=1.0, help="of the trainings, to try the script")
    asked = parser.parse_args()
    if asked.train and asked.share != 1 and asked.rows.resolve() == RESULTS.resolve():
        parser.error("--share would replace the full-size results: give another folder by --rows")
    if asked.train:
        asked.rows.mkdir(parents=True, exist_ok=True)
        train(asked.only or list(PARTS), asked.rows, asked.share)
    tables(asked.rows)


if __name__ == "__main__":
    main()

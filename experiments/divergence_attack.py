"""Does an attack that knows everything respect the divergence ledger? Likelihood ratios between two worlds.

    python experiments/divergence_attack.py --train     ten minutes on one core; writes results/divergence_attack.csv
    python experiments/divergence_attack.py             the tables from the rows

A network with one hidden layer of three ReLUs (13 parameters) is trained by PrivateSGD on six points of the plane: 20
adaptive steps, hard clip, each record with chance 1/2 in a batch. It is trained again and again in the real world, in
that where record 0 is left out, and in that where its two features have public values.

Both attackers know the start, all other records, both values of record 0 and the settings, see every noisy sum, and use
the exact likelihood ratio of the two worlds, which no other test beats (Neyman and Pearson):
knows: is also told which of the others took part in each step. No other attacker on a release knows as much.
sees: is not told; its likelihood sums over the 64 sets of records that may have taken part.

Thresholds are set by trainings of a simulation, 100,000 in each world, so that κ of those in the other world lie above.
The chance of success and κ are then counted anew in PrivateSGD's trainings. κ is counted too: that the simulation draws
what PrivateSGD draws is not taken for granted."""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import beta
from torch import Tensor, nn

from reconbound import FisherAccountant, PrivateSGD, Settings
from reconbound.bounds import success_estimate, success_from_kl
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.fisher.worlds import REMOVED, Replacement
from reconbound.training.settings import Callback

ROWS = Path(__file__).parent / "results" / "divergence_attack.csv"
KAPPAS = (0.001, 0.01, 0.1, 0.5)
HIDDEN, CLIP, RATE, NOISE, LR, STEPS = 3, 1.0, 0.5, 1.1, 1.0, 20
TRAININGS, SIMULATED, CHUNK = 2_500, 100_000, 5_000
REPLACED = "replaced"
WORLDS = {REPLACED: Replacement([0.0, 0.5], [0, 1])}
ATTACKERS = ("knows", "sees")
NAMES = ("trained", "world", "attacker", "trainings", "kappa", "other", "chance", "stated", "nats", "nats_error",
         "mean_ratio", "ratio_error")  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Records and start; the attack is on record 0."""

    x: Tensor
    y: Tensor
    start: Tensor

    @property
    def step(self) -> float:
        """What a noisy sum is multiplied by: the learning rate over the fixed divisor qN."""
        return LR / (RATE * len(self.x))


def problem(records: int = 6) -> Problem:
    """The first records of the problem; record 0 lies apart from the others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    y = torch.tensor([0.0, 1, 0, 1, 0, 1], dtype=torch.float64)
    x[:, 0] += 2 * y - 1
    x[0] = torch.tensor([2.0, -1.0])
    start = 0.7 * torch.randn(13, generator=generator, dtype=torch.float64)
    return Problem(x[:records], y[:records], start)


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")


def network(start: Tensor) -> nn.Module:
    """The network at these parameters."""
    model = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).double()
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    return model


def clipped_gradients(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of every record at every w (M, 13), clipped, (M, N, 13): by hand; a test compares with the library."""
    first, shift, second, last = w.split([2 * HIDDEN, HIDDEN, HIDDEN, 1], dim=1)
    into = torch.einsum("mhd,nd->mnh", first.reshape(-1, HIDDEN, 2), x) + shift[:, None]
    out = into.relu()
    error = ((out * second[:, None]).sum(2) + last).sigmoid() - y
    back = error[..., None] * second[:, None] * (into > 0)
    parts = ((back[..., None] * x[:, None]).flatten(2), back, error[..., None] * out, error[..., None])
    gradient = torch.cat(parts, dim=2)
    return gradient / (gradient.norm(dim=2, keepdim=True) / CLIP).clamp(min=1)


def in_world(world: str | None, w: Tensor, given: Problem) -> Tensor:
    """Clipped gradients in a world, (M, N, 13); None: the real one."""
    found = clipped_gradients(w, given.x, given.y)
    if world == REMOVED:
        found[:, 0] = 0
    elif world is not None:
        found[:, :1] = clipped_gradients(w, *WORLDS[world](given.x[:1], given.y[:1]))
    return found


# --- releases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Releases:
    """Of M trainings: parameters before each step (M, T, 13), noisy sums (M, T, 13), who took part (M, T, N)."""

    weights: Tensor
    sums: Tensor
    took: Tensor


def simulate(given: Problem, world: str | None, trainings: int, generator: torch.Generator) -> Iterator[Releases]:
    """Releases of many trainings at once, in chunks."""
    options = {"generator": generator, "dtype": torch.float64}
    for begin in range(0, trainings, CHUNK):
        count = min(CHUNK, trainings - begin)
        w, kept = given.start.expand(count, -1), []
        for _ in range(STEPS):
            took = (torch.rand(count, len(given.x), **options) < RATE).double()
            clean = torch.einsum("mn,mnp->mp", took, in_world(world, w, given))
            noisy = clean + NOISE * CLIP * torch.randn(clean.shape, **options)
            kept.append((w, noisy, took))
            w = w - given.step * noisy
        yield Releases(*(torch.stack(parts, dim=1) for parts in zip(*kept, strict=True)))


class Recorder(Callback):
    """Keeps the parameters at the start and after each step, and who took part."""

    def __init__(self, records: int) -> None:
        self.records = records
        self.weights: list[Tensor] = []
        self.took: list[Tensor] = []

    def on_step(self, learner: PrivateSGD) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
        if learner.step:
            took = torch.zeros(self.records, dtype=torch.float64)
            took[learner.sampler.batch(learner.run_seed, learner.step - 1)] = 1
            self.took.append(took)


def train(given: Problem, world: str | None, trainings: int, seed: int) -> tuple[Releases, FisherAccountant | None]:
    """Releases of PrivateSGD's trainings, and the ledger, which is kept in the real world only.

    Without record 0 there is one record less, so that PrivateSGD divides its sums by less: the learning rate makes up
    for it, and the same sums lead to the same parameters in both worlds.
    """
    x, y = given.x, given.y
    if world == REMOVED:
        x, y = x[1:], y[1:]
    elif world is not None:
        other = WORLDS[world](x[:1], y[:1])[0]
        x = torch.cat([other, x[1:]])
    options = {"rules": None, "seed": 2**200 + seed, "clip": "hard"}
    settings = Settings(NOISE, CLIP, RATE, lr=given.step * RATE * len(x), **options)
    recorder = Recorder(len(x))
    model = network(given.start)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    learner = PrivateSGD(model, losses, x, y, settings, worlds=WORLDS if world is None else None, check=False,
                         callbacks=[recorder], initialise=lambda m: m.load_state_dict(start),
                         progress=False)  # fmt: skip
    learner.repeat(trainings, STEPS)
    weights = torch.stack(recorder.weights).reshape(trainings, STEPS + 1, -1)
    took = torch.stack(recorder.took).reshape(trainings, STEPS, -1)
    if world == REMOVED:
        took = torch.cat([torch.zeros_like(took[..., :1]), took], dim=2)
    sums = (weights[:, :-1] - weights[:, 1:]) / given.step
    return Releases(weights[:, :-1], sums, took), learner.accountant


# --- attacks ---------------------------------------------------------------------------------------------------------


def log_ratios(releases: Releases, world: str, given: Problem) -> dict[str, Tensor]:
    """ln dP/dQ of each training for both attackers, (M,), P the real world: exact, a sum over the steps."""
    found = {name: torch.zeros(len(releases.sums), dtype=torch.float64) for name in ATTACKERS}
    for t in range(releases.sums.shape[1]):
        w, noisy, took = (part[:, t] for part in (releases.weights, releases.sums, releases.took))
        real, other = (in_world(which, w, given) for which in (None, world))
        others = took.clone()
        others[:, 0] = 0
        rest = noisy - torch.einsum("mn,mnp->mp", others, real)
        for sign, gradients in ((1, real), (-1, other)):
            found["knows"] += sign * log_density(rest, gradients[:, :1])
            found["sees"] += sign * log_density(noisy, gradients)
    return found


def log_density(noisy: Tensor, gradients: Tensor) -> Tensor:
    """ln of the density of sums (M, p), up to a constant, where each of K records took part with chance q; (M,)."""
    count = gradients.shape[1]
    sets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * count).reshape(-1, count)
    size = sets.sum(1)
    chance = size * math.log(RATE) + (count - size) * math.log1p(-RATE)
    inner = torch.einsum("mnp,mp->mn", gradients, noisy) @ sets.T
    square = torch.einsum("sn,mnk,sk->ms", sets, gradients @ gradients.mT, sets)
    distance = noisy.square().sum(1, keepdim=True) - 2 * inner + square
    return torch.logsumexp(chance - distance / (2 * (NOISE * CLIP) ** 2), dim=1)


def path_nats(releases: Releases, world: str, given: Problem) -> Tensor:
    """Σ_t k_q at the parameters of each training, (M,): its mean over real trainings is D."""
    w = releases.weights.flatten(0, 1)
    a, b = (in_world(which, w, given)[:, 0] / (NOISE * CLIP) for which in (None, world))
    if world == REMOVED:
        nats = poisson_kl(a.norm(dim=1), RATE)
    else:
        norms, inner = (a.norm(dim=1), b.norm(dim=1)), (a * b).sum(1)
        nats = poisson_pair_kl(*norms, inner, RATE, squared_distance=(a - b).square().sum(1))
    return nats.reshape(releases.weights.shape[:2]).sum(1)


def interval(count: float, trainings: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a chance of which so many successes were counted."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(beta.ppf(tail, count, trainings - count + 1))
    high = 1.0 if count == trainings else float(beta.ppf(1 - tail, count + 1, trainings - count))
    return low, high


# --- rows and tables -------------------------------------------------------------------------------------------------


def mean(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


def simulated_ratios(given: Problem, trainings: int) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]:
    """By world: ln dP/dQ of real trainings and of those in the other world, by attacker, and the path sums."""
    generator = torch.Generator().manual_seed(2)
    worlds = (REMOVED, REPLACED)
    real: dict[str, list[dict[str, Tensor]]] = {world: [] for world in worlds}
    nats: dict[str, list[Tensor]] = {world: [] for world in worlds}
    for chunk in simulate(given, None, trainings, generator):
        for world in worlds:
            real[world].append(log_ratios(chunk, world, given))
            nats[world].append(path_nats(chunk, world, given))
    other = {w: [log_ratios(c, w, given) for c in simulate(given, w, trainings, generator)] for w in worlds}
    joined: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]] = lambda parts: {  # noqa: E731
        name: torch.cat([part[name] for part in parts]) for name in ATTACKERS
    }
    return {world: (joined(real[world]), joined(other[world]), torch.cat(nats[world])) for world in worlds}


def rows_of(
    trained: str, world: str, ratios: tuple[dict[str, Tensor], dict[str, Tensor]], nats: tuple[float, float],
    thresholds: dict[str, list[float]], stated: dict[float, float] | None = None,
) -> list[dict[str, object]]:  # fmt: skip
    """One row for each attacker and κ."""
    found: list[dict[str, object]] = []
    for name in ATTACKERS:
        real, other = ratios[0][name], ratios[1][name]
        average, error = mean(real)
        for kappa, threshold in zip(KAPPAS, thresholds[name], strict=True):
            counted = (kappa, float((other > threshold).double().mean()), float((real > threshold).double().mean()))
            best = "" if stated is None else stated[kappa]
            values = (trained, world, name, len(real), *counted, best, *nats, average, error)
            found.append({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in zip(NAMES, values, strict=True)})
    return found


def measure(trainings: int, simulated: int) -> list[dict[str, object]]:
    """All rows: the simulation, PrivateSGD's trainings, and PrivateSGD's with record 0 by itself."""
    torch.set_num_threads(1)
    begun, found = time.perf_counter(), []
    say = lambda what: print(f"{time.perf_counter() - begun:.0f} s: {what}", flush=True)  # noqa: E731
    given, alone = problem(), problem(1)
    thresholds = {}
    for world, (real, other, nats) in simulated_ratios(given, simulated).items():
        thresholds[world] = {name: [float(other[name].quantile(1 - k)) for k in KAPPAS] for name in ATTACKERS}
        found += rows_of("simulated", world, (real, other), mean(nats), thresholds[world])
    say("simulated")
    releases, ledger = train(given, None, trainings, 0)
    by_itself, own = train(alone, None, trainings, 1)
    assert ledger is not None
    assert own is not None
    say("the real world")
    for k, world in enumerate((REMOVED, REPLACED)):
        there, _ = train(given, world, trainings, 2 + k)
        both = (log_ratios(releases, world, given), log_ratios(there, world, given))
        stated = {kappa: float(ledger.max_success(kappa, world).value[0]) for kappa in KAPPAS}
        found += rows_of("PrivateSGD", world, both, ledger_nats(ledger, world), thresholds[world], stated)
        ratio = mean(log_ratios(by_itself, world, alone)["knows"])
        values = ("PrivateSGD, alone", world, "knows", trainings, "", "", "", "", *ledger_nats(own, world), *ratio)
        found.append({n: f"{v:.6g}" if isinstance(v, float) else v for n, v in zip(NAMES, values, strict=True)})
        say(f"the world {world}")
    return found


def ledger_nats(ledger: FisherAccountant, world: str) -> tuple[float, float]:
    """D of record 0 by the ledger, and its standard error over the runs."""
    return float(ledger.divergence(world)[0]), float(ledger.divergences.estimates(world).error[0])


def limits(row: dict[str, str]) -> dict[str, float]:
    """What a row is compared with: the interval of the chance, and the largest chance by the ledger and by its half.

    The half counts as beaten where the chance's lower limit lies above what D/2 allows at the upper limit of κ.
    """
    count, kappa, nats = int(row["trainings"]), float(row["kappa"]), float(row["nats"])
    low, high = interval(round(float(row["chance"]) * count), count)
    most = interval(round(float(row["other"]) * count), count)[1]
    return {
        "low": low,
        "high": high,
        "largest": success_from_kl(kappa, nats),
        "estimate": success_estimate(kappa, nats),
        "half": success_from_kl(kappa, nats / 2),
        "beaten": float(low > success_from_kl(most, nats / 2)),
    }


def tables(rows: list[dict[str, str]]) -> None:
    heads = ["trainings", "other world", "κ", "κ counted", "chance (95 %)", "p_max(κ, D)", "over chance"]
    heads += ["`max_success`", "estimate", "p_max(κ, D/2)", "half beaten"]
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for r in (r for r in rows if r["kappa"] and r["attacker"] == "knows"):
        n, chance = limits(r), float(r["chance"])
        cells = [f"{r['trained']}, {int(r['trainings']):,}", r["world"], r["kappa"]]
        cells += [f"{float(r['other']):.2g}", f"{chance:.3f} ({n['low']:.3f}–{n['high']:.3f})", f"{n['largest']:.3f}"]
        cells += [f"{n['largest'] / max(chance, 1e-9):.2f}", f"{float(r['stated']):.3f}" if r["stated"] else ""]
        cells += [f"{n['estimate']:.3f}", f"{n['half']:.3f}"]
        print(f"| {' | '.join([*cells, 'yes' if n['beaten'] else 'no'])} |")
    print("\n| trainings | other world | attacker | D | mean of ln dP/dQ | difference, in standard errors |")
    print("| --- " * 6 + "|")
    for r in (r for r in rows if r["kappa"] in ("", str(KAPPAS[0]))):
        nats, error, ratio, spread = (float(r[n]) for n in NAMES[-4:])
        score = (ratio - nats) / math.hypot(error, spread)
        cells = [f"{r['trained']}, {int(r['trainings']):,}", r["world"], r["attacker"]]
        cells += [f"{nats:.4f} ± {error:.2g}", f"{ratio:.4f} ± {spread:.2g}", f"{score:+.1f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--trainings", type=int, default=TRAININGS, help="in each world, by PrivateSGD")
    parser.add_argument("--simulated", type=int, default=SIMULATED, help="in each world, by the simulation")
    asked = parser.parse_args()
    full = (asked.trainings, asked.simulated) == (TRAININGS, SIMULATED)
    if asked.train and not full and asked.rows.resolve() == ROWS.resolve():
        parser.error("other numbers would replace the full-size results: give another file by --rows FILE")
    if asked.train:
        with open(asked.rows, "w", newline="") as file:
            writer = csv.DictWriter(file, NAMES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(measure(asked.trainings, asked.simulated))
    tables(list(csv.DictReader(asked.rows.read_text().splitlines())))


if __name__ == "__main__":
    main()

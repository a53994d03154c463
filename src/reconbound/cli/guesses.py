"""What to say of an option that does not exist: the names that people try, by command, and what they mean there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_RATE = "give --sample-rate, the batch size over the number of records (256/50000 will do; Opacus: 1/len(loader))"
_GRID = "give its values to try, as --grid {}"
_PRINTED = "the answer is printed; keep it by --json > FILE"
_NO_LR = "is not needed: what is released does not depend on the learning rate"
_CLIP_NORM = "is not needed: --noise-multiplier is already in units of the clip norm"


def _each(names: str, said: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), said)


_CALCULATOR = {
    **_each("--noise --sigma", "give --noise-multiplier (or --noise-std, with --output-perturbation)"),
    **_each("--batch-size --batch -b", _RATE),
    **_each("--max-grad-norm --clip-norm --clipping-norm --max-norm", _CLIP_NORM),
    **_each("--lr --learning-rate --momentum", _NO_LR),
    "--seed": "is not needed: nothing here is random",
    **_each("--out --output -o --output-file", _PRINTED),
    **_each("--features --dimension --dimensions -d", "give --dim"),
    "--range": "give the ends as --low and --high",
    **_each("--data --private", "no data are read here: give --dim, --low and --high"),
    "--runs": "is not needed: one training is released",
}
_FOLDER = _each("--output --output-dir --out-dir --output-folder --folder", "give --out, the folder")
_TABLE = {
    **_each("--label --labels --target-column --y", "give --target, the column to predict"),
    **_each("--columns --features --sensitive", "give --private, the private columns"),
    **_each("--ranges --low --high --bounds", "give --range COLUMN=LOW:HIGH, once for each column"),
    **_each("--records --rows --subset --max-records", "give --limit to train on at most so many records"),
}
_TRIED: dict[str, Mapping[str, str]] = {
    "bound": {
        **_CALCULATOR,
        **_each("--eps", "give --epsilon"),
        **_each("--target-epsilon --target-mse --target-error", "reconbound calibrate has it: it looks for the noise"),
    },
    "calibrate": {
        **_CALCULATOR,
        **_each("--target-rmse --error --target", "give --target-error, or its square as --target-mse"),
        **_each("--mse --floor", "give --target-mse"),
        **_each("--eps", "give --target-epsilon"),
        "--baseline": "reconbound bound has it",
    },
    "audit": {
        **_FOLDER,
        **_TABLE,
        **_each("--noise --sigma --noise-std", "give --noise-multiplier"),
        **_each(
            "--epsilon --eps --target-epsilon",
            "an audit takes the noise: give --noise-multiplier, which reconbound calibrate --target-epsilon finds for "
            "an epsilon; the plan that is printed first tells the epsilon of it",
        ),
        **_each("--delta --target-delta", "the plan tells epsilon at delta 1e-5; reconbound bound --delta at another"),
        **_each("--batch-size --batch -b", _RATE),
        **_each("--learning-rate --eta", "give --lr"),
        **_each("--clip-norm --clipping-norm --max-norm --grad-norm -C", "give --max-grad-norm, the clip norm"),
        **_each("--test --test-size --holdout", "give --test-share"),
        **_each("--repeats --trials", "give --runs"),
    },
    "sweep": {
        **_FOLDER,
        **_TABLE,
        **_each("--noise --noise-multiplier --sigma", _GRID.format("noise_multiplier=0.5,1,2")),
        **_each("--lr --learning-rate --eta", _GRID.format("lr=0.1,0.5")),
        **_each("--max-grad-norm --clip-norm --max-norm", _GRID.format("max_grad_norm=1,4")),
        **_each("--sample-rate", _GRID.format("sample_rate=0.01,0.05")),
        **_each("--batch-size --batch -b", _GRID.format("sample_rate=256/50000,512/50000, batch size over records")),
        **_each("--momentum", _GRID.format("momentum=0,0.5")),
        **_each("--clip", _GRID.format("clip=smooth,hard")),
        **_each("--sampler", _GRID.format("sampler=poisson,fixed")),
        **_each("--epsilon --eps --target-epsilon", _GRID.format("noise_multiplier=0.5,1,2; its epsilon is told")),
        "--epochs": "give --steps: epochs over the sample rate",
        **_each("--jobs -j --processes", "give --workers"),
    },
    "report": _each("--output --output-file", "give --out, the file of the comparison"),
    "show": _each("--records --index --id --row -n", "give --record, its number"),
    "frontier": {
        **_each("--target-mse --min-floor --mse --target", "give --at-least, the floor as MSE"),
        **_each("--out --output -o", "the pages are written into the sweep's folder"),
    },
}


def said_of(option: str, command: str, known: Iterable[str]) -> str:
    """One line about an option that a command does not have.

    >>> said_of("--noise", "audit", ["--seed", "--noise-multiplier"])
    '--noise is not known to reconbound audit: give --noise-multiplier'
    >>> said_of("--step", "bound", ["--steps", "--seed"])
    '--step is not known to reconbound bound: did you mean --steps?'
    """
    said = _TRIED.get(command, {}).get(option)
    if said is not None and said.startswith("is not needed"):
        return f"{option} {said}"
    within = f" to reconbound {command}" if command else ""
    if said is None:
        near = _near(option, known)
        help_of = " ".join(word for word in ("reconbound", command, "--help") if word)
        said = f"did you mean {' or '.join(near)}?" if near else f"see {help_of}"
    return f"{option} is not known{within}: {said}"


def _near(option: str, known: Iterable[str]) -> list[str]:
    """Options that begin with what was typed, or are spelt nearly so; most of what is alike by chance is left out."""
    long = sorted({name for name in known if name.startswith("--")})
    begins = [name for name in long if len(option) > 4 and name.startswith(option)]
    return begins or get_close_matches(option, long, n=2, cutoff=0.8)


__all__ = ["said_of"]

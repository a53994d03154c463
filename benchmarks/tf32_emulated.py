"""What TF32 does to a record's information on the CIFAR-10 network: its rounding, emulated on a CPU in every product.

TF32 keeps 10 bits of the mantissa of both factors of a product and adds in float32. Here the factors of every matrix
product and convolution are rounded so, to nearest; the rest stays float32. Reference: float64, same records and probes.

RECONBOUND_DATA=FOLDER python benchmarks/tf32_emulated.py"""

import copy
import json
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from reconbound.auditing.models import cifar10_cnn
from reconbound.data import cifar10
from reconbound.fisher import ProbeOptions, StepOptions, step_information

PRODUCTS = {"convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"}
RECORDS, STEPS, BATCH = 40, 120, 100


def rounded(x):
    """float32 to the nearest TF32 number."""
    if not (isinstance(x, torch.Tensor) and x.dtype == torch.float32):
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Tf32(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            args = tuple(rounded(a) for a in args)
        return func(*args, **(kwargs or {}))


def losses(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")


def main() -> None:
    beside = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    if not (os.environ.get("RECONBOUND_DATA") or beside.exists()):
        print("no data folder: nothing measured")
        return
    images, labels = cifar10(os.environ.get("RECONBOUND_DATA") or beside, batches=1)
    x, y = torch.from_numpy(images.copy()).float() / 255, torch.from_numpy(labels)
    torch.manual_seed(0)
    model = cifar10_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    worst = {}
    for after in (0, STEPS):
        for step in range(after):
            rows = slice(step * BATCH % len(x), step * BATCH % len(x) + BATCH)
            optimizer.zero_grad()
            losses(model(x[rows]), y[rows]).mean().backward()
            optimizer.step()
        omega = torch.randn(3, 32, 32)
        setting = {"max_grad_norm": 1.0, "noise_multiplier": 0.5}
        given = {"space": "inputs", "error": "bound"}
        part = x[-RECORDS:], y[-RECORDS:]
        double = copy.deepcopy(model).double(), losses, part[0].double(), part[1]
        truth = step_information(
            *double, **setting, options=StepOptions(probes=ProbeOptions(directions=[omega.double()], **given))
        )
        plain = step_information(
            model, losses, *part, **setting, options=StepOptions(probes=ProbeOptions(directions=[omega], **given))
        )
        with Tf32():
            coarse = step_information(
                model, losses, *part, **setting, options=StepOptions(probes=ProbeOptions(directions=[omega], **given))
            )
        for field in ("norm", "along", "across", "trace"):
            a = getattr(truth, field)
            gaps = [((getattr(b, field) - a) / a).abs() for b in (plain, coarse)]
            worst[f"{field} after {after} steps"] = {"float32": float(gaps[0].max()), "tf32": float(gaps[1].max())}
        total = torch.cat([v.flatten() for v in truth.gradient_sum.values()])
        rough = torch.cat([v.flatten() for v in coarse.gradient_sum.values()])
        worst[f"gradient sum after {after} steps"] = {"tf32": float((rough - total).norm() / total.norm())}
    print(json.dumps({"records": RECORDS, "largest relative error": worst}, indent=1))


if __name__ == "__main__":
    main()

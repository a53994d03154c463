"""Sealed files by the writer of safetensors: a reference for `write_sealed`, and files for tests to tamper with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from reconbound._internal.files import BLANK, SEAL


def sealed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Returns a safetensors file of the tensors, with the facts as JSON and a digest of everything in its header."""
    said = json.dumps(facts, sort_keys=True)
    metadata = {"reconbound": said, "confidential": "per-record leakage: keep it secret", "sha256": BLANK}
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    content = save(own, metadata)
    header_end = 8 + int.from_bytes(content[:8], "little")
    (place,) = (m for m in SEAL.finditer(content[:header_end]) if m.group(1).decode() == BLANK)
    start, end = place.span(1)
    return content[:start] + hashlib.sha256(content).hexdigest().encode() + content[end:]

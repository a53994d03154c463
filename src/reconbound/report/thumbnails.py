"""Small pictures as data URIs: a record's pixels, and the information that leaks about each."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

#: Viridis, ten stops (Smith and van der Walt, public domain): dark to bright, also for the colour-blind.
VIRIDIS = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
)  # fmt: skip


def png(pixels: np.ndarray) -> bytes:
    """Encodes 8-bit pixels as a PNG file: (H, W) grey, (H, W, 3) colour or (H, W, 4) with opacity."""
    kind = {1: 0, 3: 2, 4: 6}[1 if pixels.ndim == 2 else pixels.shape[2]]
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(pixels.shape[0], -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def data_uri(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def picture(image: np.ndarray) -> np.ndarray:
    """Returns 8-bit pixels of an image (C, H, W) in [0, 1]: colour for three channels, otherwise their mean."""
    values = np.clip(np.nan_to_num(image.astype(np.float64)), 0, 1)
    shown = values.transpose(1, 2, 0) if len(values) == 3 else values.mean(0)
    return np.asarray(np.round(255 * shown), dtype=np.uint8)


def viridis(share: np.ndarray) -> np.ndarray:
    """Returns colours (…, 3), 8 bit, of numbers in [0, 1]."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in VIRIDIS], dtype=np.float64)
    place = np.clip(share, 0, 1) * (len(stops) - 1)
    low = np.minimum(place.astype(int), len(stops) - 2)
    part = (place - low)[..., None]
    return np.asarray(np.round(stops[low] * (1 - part) + stops[low + 1] * part), dtype=np.uint8)


def pixel_information(diagonal: np.ndarray, shape: Sequence[int], private: np.ndarray | None) -> np.ndarray:
    """Returns the information about each pixel, (k, H, W): the mean over its private channels; NaN where it has none.

    Args:
        diagonal: information about each private feature, (k, d).
        shape: the shape of an image.
        private: flat indices of the private features; None for all.
    """
    flat = np.full((len(diagonal), int(np.prod(shape))), np.nan)
    flat[:, slice(None) if private is None else private] = np.nan_to_num(diagonal, nan=0.0, posinf=np.finfo(float).max)
    image = flat.reshape(len(diagonal), *shape)
    known = ~np.isnan(image)
    total = np.where(known, image, 0.0).sum(1)
    return np.where(known.any(1), total / np.maximum(known.sum(1), 1), np.nan)


def heat_range(information: np.ndarray) -> tuple[float, float] | None:
    """Returns the ends of the colour scale, log10 of information: largest and 2 % quantile, at most 6 decades."""
    positive = information[np.isfinite(information) & (information > 0)]
    if positive.size == 0:
        return None
    high = float(np.log10(positive.max()))
    low = float(np.log10(np.quantile(positive, 0.02)))
    return min(max(low, high - 6), high - 0.05), high


def heat(information: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """Returns colours (H, W, 4) of the information per pixel: bright leaks most; clear where nothing is private.

    Args:
        information: about each pixel, (H, W).
        ends: of the colour scale, from `heat_range`.
    """
    low, high = ends
    logs = np.log10(np.where(information > 0, information, 10.0**low))
    colours = viridis((logs - low) / (high - low))
    opacity = np.where(np.isnan(information), 0, 255).astype(np.uint8)
    return np.concatenate([colours, opacity[..., None]], axis=-1)

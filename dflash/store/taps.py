"""Figures per tap over the documents of a shard: size, spread, and the faults that nobody sees in a loss curve.

An all-zero tap, one that repeats another, or values that are not finite train to a poor drafter without an error.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.store.calib import read_calib

if TYPE_CHECKING:
    from dflash.store.store import Store

SLICE_TOKENS = 512


class TapFigures:
    """Add rows one by one; `result` gives [{layer, rms, rms_min, rms_max, nonfinite, zero_rows, repeats}]."""

    def __init__(self, store: "Store") -> None:
        self.layers, self.width = store.meta.taps, store.meta.hidden_size
        self.channel_rms = (
            read_calib(store.root, len(self.layers) * self.width) if store.meta.storage == "int8" else None
        )
        taps = len(self.layers)
        self._squares, self._finite, self._nonfinite = np.zeros(taps), np.zeros(taps), np.zeros(taps, dtype=np.int64)
        self._row_rms: list[np.ndarray] = []
        self._zero_rows = np.zeros(taps, dtype=np.int64)
        self._equal = np.ones((taps, taps), dtype=bool)

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        taps, hidden = len(self.layers), arrays["hidden"]
        if not len(hidden):
            return
        squares, finite = np.zeros(taps), np.zeros(taps)
        for start in range(0, len(hidden), SLICE_TOKENS):
            values = self._values(arrays, slice(start, start + SLICE_TOKENS))
            ok = np.isfinite(values)
            squares += np.square(np.where(ok, values, 0), dtype=np.float64).sum(axis=(0, 2))
            finite += ok.sum(axis=(0, 2))
            self._nonfinite += (~ok).sum(axis=(0, 2))
            for t in range(1, taps):
                for before in range(t):
                    if self._equal[t, before]:
                        self._equal[t, before] = np.array_equal(values[:, t], values[:, before], equal_nan=True)
        self._zero_rows += (squares == 0) & (finite > 0)
        self._squares += squares
        self._finite += finite
        self._row_rms.append(np.sqrt(squares / np.maximum(finite, 1)))

    def _values(self, arrays: dict[str, np.ndarray], part: slice) -> np.ndarray:
        """float32 [tokens, K, H] of a slice of tokens, whatever the storage."""
        hidden = arrays["hidden"][part]
        shape = (len(hidden), len(self.layers), self.width)
        if hidden.dtype == np.uint16:
            return (hidden.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        assert self.channel_rms is not None
        scale = arrays["scale"][part][:, :, None]
        return (hidden * self.channel_rms).reshape(shape).astype(np.float32) * scale

    def result(self) -> list[dict[str, Any]]:
        found = []
        for t, layer in enumerate(self.layers):
            spread = [float(rms[t]) for rms in self._row_rms]
            same = np.flatnonzero(self._equal[t, :t]).tolist() if self._row_rms else []
            found.append({
                "layer": layer,
                "rms": float(np.sqrt(self._squares[t] / max(self._finite[t], 1))),
                "rms_min": min(spread, default=0.0),
                "rms_max": max(spread, default=0.0),
                "nonfinite": int(self._nonfinite[t]),
                "zero_rows": int(self._zero_rows[t]),
                "repeats": self.layers[same[0]] if same else None,
            })  # fmt: skip
        return found

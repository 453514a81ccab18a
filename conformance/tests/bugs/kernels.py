"""Kernels with mistakes: `python3 kernels.py BUG DIRECTORY`; a case in, `y.f32` out."""

import array
import json
import math
import sys
from pathlib import Path

BUG, DIRECTORY = sys.argv[1], Path(sys.argv[2])
CASE = json.loads((DIRECTORY / "case.json").read_text())


def inputs():
    data = (DIRECTORY / "inputs.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:end]).items():
        start, stop = entry["data_offsets"]
        yield name, array.array("f", data[end + start : end + stop])


def rms_norm(x, weight):
    width = CASE["inputs"]["x"][1]
    y = []
    for r in range(0, len(x), width):
        row = list(x[r : r + width])
        if BUG == "centred":
            mean = sum(row) / width
            row = [v - mean for v in row]
        scale = 1.0 / math.sqrt(sum(v * v for v in row) / width + CASE["numbers"]["eps"])
        y += [v * scale * w for v, w in zip(row, weight)]
    return y


def rope(x, cos, sin):
    tokens, heads, width = CASE["inputs"]["x"]
    half = CASE["inputs"]["cos"][1] // 2
    y = array.array("f", x)
    for t in range(tokens):
        for h in range(heads):
            at = (t * heads + h) * width
            for i in range(half):
                c, s = cos[t * 2 * half + i], sin[t * 2 * half + i]
                if BUG == "pairs":
                    a, b = x[at + 2 * i], x[at + 2 * i + 1]
                    y[at + 2 * i], y[at + 2 * i + 1] = a * c - b * s, b * c + a * s
                else:
                    if BUG == "backwards":
                        s = -s
                    a, b = x[at + i], x[at + half + i]
                    y[at + i], y[at + half + i] = a * c - b * s, b * c + a * s
    return y


KERNELS = {"rms_norm": rms_norm, "rope": rope}
if CASE["op"] not in KERNELS:
    sys.exit(3)
(DIRECTORY / "y.f32").write_bytes(array.array("f", KERNELS[CASE["op"]](**dict(inputs()))).tobytes())

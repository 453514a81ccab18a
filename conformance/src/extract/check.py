#!/usr/bin/env python3
"""Judges one op as Karat did, with nothing but Python's own library.

    python3 check.py          judges what the subject gave
    python3 check.py y.f32    judges a result of yours: raw little-endian f32, row after row

The exit code is 0 where the result is within its limits, 1 where it is not, 2 where there is none. A kernel in
Python imports this file, reads `inputs()` and calls `judge(y)`.
"""

import array
import json
import math
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASE = json.loads((HERE / "case.json").read_text())
LIMITS = CASE["limits"]


def tensors(path):
    """The tensors of a safetensors file by name, flat."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = array.array({"F32": "f", "F64": "d"}[entry["dtype"]], data[start:end])
        if sys.byteorder == "big":
            found[name].byteswap()
    return found


def inputs():
    """The subject's own inputs of the op, by name, flat; their shapes are in CASE["inputs"]."""
    return tensors(HERE / "inputs.safetensors")


def f32(x):
    """x rounded to f32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def score(y, r, variance):
    """(y - r) / sqrt(variance); infinite where it must be equal and is not."""
    if y == r or (variance == 0.0 and y == f32(r)) or (math.isnan(y) and math.isnan(r)):
        return 0.0
    if variance == 0.0 or not math.isfinite(y) or not math.isfinite(r):
        return math.inf
    return (y - r) / math.sqrt(variance)


def spread(group):
    """What is too wide about a group (count, sum of z, sum of z squared), or nothing."""
    n, total, squares = group
    if n == 0:
        return None
    k, z = 2.0 / (9.0 * n), LIMITS["z_group"]
    rms, mean = math.sqrt(squares / n), total / n
    if rms > 1.1 * max(1.0 - k + z * math.sqrt(k), 1.0) ** 1.5:
        return f"rms z {rms:.3f}"
    if LIMITS["calibrated"] and abs(mean) > 0.05 + z / math.sqrt(n):
        return f"mean z {mean:.3f}"
    return None


def judge(y):
    """A list of what is wrong with y; empty where it is within its limits."""
    expected, columns = tensors(HERE / "expected.safetensors"), LIMITS["columns"]
    high, wide = LIMITS["tile"]
    if len(y) != len(expected["r"]):
        return [f"{len(y)} values, expected {len(expected['r'])}"]
    wrong, groups = [], {}
    for n, (value, r, v, bound) in enumerate(
        zip(y, expected["r"], expected["variance"], expected["bound"])
    ):
        row, col = divmod(n, columns)
        z = score(value, r, v)
        off = 0.0 if z == 0.0 else abs(value - r)
        if not (abs(z) <= LIMITS["z_max"] and off <= bound * 1.000001):
            wrong.append(f"[{row}, {col}]: expected {r:.9g}, found {value:.9g}")
        if v > 0.0 or z != 0.0:
            for key in ("all", ("row", row), ("column", col), ("tile", row // high, col // wide)):
                count, total, squares = groups.get(key, (0, 0.0, 0.0))
                groups[key] = (count + 1, total + z, squares + z * z)
    if wrong:
        return wrong
    return [f"{key}: {why}" for key, group in groups.items() if (why := spread(group))]


def main():
    if len(sys.argv) > 1:
        try:
            data = Path(sys.argv[1]).read_bytes()
        except OSError as error:
            print(f"{sys.argv[1]}: {error.strerror}")
            return 2
        if len(data) % 4:
            print(f"{sys.argv[1]}: {len(data)} bytes are no whole number of f32")
            return 2
        y = array.array("f", data)
        if sys.byteorder == "big":
            y.byteswap()
    else:
        y = tensors(HERE / "expected.safetensors")["subject"]
    wrong = judge(y)
    if not wrong:
        print(f"PASSED: {CASE['op']} at {CASE['tap']}, {len(y)} values")
        return 0
    print(f"FAILED: {CASE['op']} at {CASE['tap']}, {len(wrong)} of {len(y)}, first {wrong[0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A kernel under test as a program, with nothing but Python's own library.

    karat verify llama --subject "cmd:python3 device/examples/python/kernel.py" --sites "prefill.layers.0.*"

Karat runs it once an op, with a directory as its last argument. `case.json` says the op, its numbers and the
shape of its result; `inputs.safetensors` holds its inputs. This writes the result as raw f32 to `y.f32` and
ends with 0, or with 3 for an op that it does not compute.
"""

import array
import json
import math
import struct
import sys
from pathlib import Path

NOT_SUPPORTED = 3


def f32(x):
    """x rounded to f32: a kernel that adds in f32 rounds after every step."""
    return struct.unpack("f", struct.pack("f", x))[0]


def read_inputs(path):
    """The tensors of a safetensors file, by name: flat arrays of f32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = array.array("f", data[start:end])
    return tensors


def linear(case, x, w, b=None):
    """y[t, o] = sum_i x[t, i] * w[o, i] + b[o], added left to right in f32."""
    (tokens, inner), (out, _) = case["inputs"]["x"], case["inputs"]["w"]
    y = []
    for t in range(tokens):
        row = x[t * inner : (t + 1) * inner]
        for o in range(out):
            acc = 0.0
            for a, v in zip(row, w[o * inner : (o + 1) * inner]):
                acc = f32(acc + f32(a * v))
            y.append(acc if b is None else f32(acc + b[o]))
    return y


def rms_norm(case, x, weight=None):
    """y = x / sqrt(mean(x^2) + eps) * weight over rows of `width`."""
    rows, width = case["inputs"]["x"]
    y = []
    for r in range(rows):
        row = x[r * width : (r + 1) * width]
        scale = 1.0 / math.sqrt(sum(v * v for v in row) / width + case["numbers"]["eps"])
        y.extend(v * scale * (1.0 if weight is None else weight[i]) for i, v in enumerate(row))
    return y


def residual(case, x, branch):
    """y = x + multiplier * branch."""
    multiplier = case["numbers"]["multiplier"]
    return [a + multiplier * b for a, b in zip(x, branch)]


KERNELS = {"linear": linear, "rms_norm": rms_norm, "residual": residual}


def main():
    directory = Path(sys.argv[-1])
    case = json.loads((directory / "case.json").read_text())
    kernel = KERNELS.get(case["op"])
    if kernel is None:
        return NOT_SUPPORTED
    y = kernel(case, **read_inputs(directory / "inputs.safetensors"))
    (directory / "y.f32").write_bytes(array.array("f", y).tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())

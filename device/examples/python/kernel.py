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


def attention(case, q, k, v, sinks=None):
    """y[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g]) * v[j, g] over the keys that token t sees, where g is the key
    head of h's group: those up to its own position `first + t`, the last `window` of them where that is not 0."""
    shapes, numbers = case["inputs"], case["numbers"]
    (tokens, heads, dim), (keys, kv_heads, width) = shapes["q"], shapes["v"]
    y = []
    for t in range(tokens):
        position = int(numbers["first"]) + t
        window = int(numbers["window"]) or position + 1
        seen = range(max(0, position + 1 - window), min(keys, position + 1))
        for h in range(heads):
            g = h // (heads // kv_heads)
            query = q[(t * heads + h) * dim :][:dim]
            scores = []
            for j in seen:
                at = (j * kv_heads + g) * dim
                score = numbers["scale"] * sum(a * b for a, b in zip(query, k[at : at + dim]))
                if numbers["softcap"]:
                    score = numbers["softcap"] * math.tanh(score / numbers["softcap"])
                scores.append(score)
            # A sink takes its share of the sum and gives nothing.
            sink = [] if sinks is None else [sinks[h]]
            largest = max(scores + sink)
            weights = [math.exp(score - largest) for score in scores]
            total = sum(weights) + sum(math.exp(s - largest) for s in sink)
            rows = [(j * kv_heads + g) * width for j in seen]
            y.extend(sum(w * v[at + d] for w, at in zip(weights, rows)) / total for d in range(width))
    return y


KERNELS = {"linear": linear, "rms_norm": rms_norm, "residual": residual, "attention": attention}


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

"""The statistics of karat's comparer with numpy, over two arrays of `values` f32; times one pass per line read.

Chunks of 128 Ki values stay in a second-level cache; that is faster than whole arrays.
"""

import sys
import time

try:
    import numpy as np
except ImportError:
    print("missing numpy", flush=True)
    sys.exit()

values = int(sys.argv[1])
CHUNK = 1 << 17
random = np.random.default_rng(1)
a = random.standard_normal(values, dtype=np.float32)
b = a * np.float32(1 + 2**-20)


def key(x):
    """Integers in the order of the values: neighbours differ by 1."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def compare():
    largest = max_abs = max_rel = squares = aa = bb = ab = 0.0
    first = worst = -1
    non_finite = [0, 0]
    histogram = np.zeros(34, np.int64)
    for start in range(0, values, CHUNK):
        x, y = a[start : start + CHUNK], b[start : start + CHUNK]
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        non_finite[0] += int((~finite_x).sum())
        non_finite[1] += int((~finite_y).sum())
        both = finite_x & finite_y
        if not both.all():
            x, y = x[both], y[both]
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        difference = np.abs(wide_x - wide_y)
        differ = x.view(np.int32) != y.view(np.int32)
        if first < 0 and differ.any():
            first = start + int(differ.argmax())
        at = int(difference.argmax())
        if difference[at] > max_abs:
            max_abs, worst = float(difference[at]), start + at
        size = np.maximum(np.abs(wide_x), np.abs(wide_y))
        max_rel = max(max_rel, float((difference / np.maximum(size, 2.0**-126)).max()))
        largest = max(largest, float(np.abs(wide_x).max()))
        squares += float(np.dot(difference, difference))
        aa += float(np.dot(wide_x, wide_x))
        bb += float(np.dot(wide_y, wide_y))
        ab += float(np.dot(wide_x, wide_y))
        apart = np.abs(key(x) - key(y))
        lengths = np.ceil(np.log2(apart + 1.0)).astype(np.int64)
        histogram += np.bincount(lengths, minlength=34)
    return largest, max_abs, max_rel, squares, ab / np.sqrt(aa * bb), first, worst, non_finite, histogram


print("ready", flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    compare()
    print(time.perf_counter() - start, flush=True)

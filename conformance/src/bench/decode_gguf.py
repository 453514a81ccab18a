"""Decodes blocks with the gguf package; times one pass per line `run`, hashes the values for a line `hash`."""

import hashlib
import sys
import time

try:
    import numpy as np
except ImportError:
    print("missing numpy", flush=True)
    sys.exit()
try:
    import gguf
except ImportError:
    print("missing gguf", flush=True)
    sys.exit()

kind = gguf.GGMLQuantizationType[sys.argv[1]]
rows = int(sys.argv[3])
blocks = np.fromfile(sys.argv[2], dtype=np.uint8).reshape(rows, -1)

print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "hash":
        values = gguf.quants.dequantize(blocks, kind).astype("<f4")
        print(hashlib.sha256(values.tobytes()).hexdigest(), flush=True)
        continue
    start = time.perf_counter()
    gguf.quants.dequantize(blocks, kind)
    print(time.perf_counter() - start, flush=True)

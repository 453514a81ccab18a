"""Judges kernels written in Python with the `karat` program.

    import karat

    def my_rms_norm(x, weight=None, eps=0.0):
        ...

    def test_rms_norm():
        karat.check(my_rms_norm, "rms_norm")

A kernel gets the inputs of an op by name, as numpy arrays where numpy is installed (or torch tensors with
`arrays="torch"`), else as memoryviews with axes, and its numbers as floats. It returns the result as anything
that has `tolist`, or as nested lists. The program is found through $KARAT, else on the path.

The ops, their inputs and numbers: `linear` x, w, b?; `rms_norm` x, weight?, eps; `rope` x, cos, sin,
interleaved; `attention` q, k, v, sinks?, scale, softcap, first, window; `gated_act` gate, up, gelu_tanh;
`residual` x, branch, multiplier; `embed` ids, table, scale; `softcap` x, cap; `scale` x, factor;
`sigmoid_gate` x, gate; `gated_delta_rule` q, k, v, g, beta, state?.
"""

import array
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback

__all__ = ["NotConformant", "Report", "check", "verify"]

NOT_SUPPORTED = 3


class NotConformant(AssertionError):
    """A kernel did not pass; `report` says where and what it computes instead."""

    def __init__(self, report):
        super().__init__(report.text())
        self.report = report


class Report:
    """What `karat verify` found, as its JSON says it."""

    def __init__(self, result):
        self.result = result
        self.verdict = result["verdict"]
        self.sites = result["sites"]
        self.first_failure = result.get("first_failure")
        self.explanation = (result.get("explanation") or {}).get("mutant")

    @property
    def passed(self):
        """Whether a conforming kernel gives this verdict (DRIFT: where it is more precise than declared)."""
        drift = all(site["z_rms"] <= 1.0 for site in self.sites if site["verdict"] == "DRIFT")
        return self.verdict in ("PASSED", "NEAR_TIE") or (self.verdict == "DRIFT" and drift)

    def text(self):
        """The verdict in a few lines."""
        lines = [f"{self.result['package']}: {self.verdict}"]
        if reason := self.result.get("reason"):
            lines.append(reason)
        if first := self.first_failure:
            place = f" [row {first['row']}, col {first['col']}]" if "row" in first else ""
            lines.append(f"first {first['site']}{place}: expected {first.get('expected')}, found {first.get('found')}")
            if "pattern" in first:
                lines.append(f"where {first['pattern']}")
        if self.explanation:
            lines.append(f"computes {self.result['explanation']['formula']} ({self.explanation})")
        return "\n".join(lines)


def check(kernel, op, **options):
    """Judges a kernel for one op at every place where a model uses it; raises where it does not conform."""
    report = verify({op: kernel}, **options)
    if not report.passed:
        raise NotConformant(report)
    return report


def verify(kernels, package="qwen3", sites="prefill.*", contract="f32", arrays=None, timeout=60.0):
    """Judges kernels, by op, in the place of a model's ops; the report, whatever it says.

    `sites` is a glob over taps, `contract` the number formats that the kernels declare, `arrays` "numpy",
    "torch" or "memory".
    """
    make = maker(arrays)
    failure = []
    with tempfile.TemporaryDirectory(prefix="karat-") as folder, socket.socket(socket.AF_UNIX) as server:
        address = os.path.join(folder, "s")
        server.bind(address)
        server.listen()
        thread = threading.Thread(target=serve, args=(server, kernels, make, failure), daemon=True)
        thread.start()
        relay = pathlib.Path(__file__).with_name("relay.py")
        command = f'cmd:"{sys.executable}" -S -E "{relay}" "{address}"'
        run = subprocess.run(
            [program(), "verify", package, "--subject", command, "--sites", sites, "--contract", contract]
            + ["--timeout", str(timeout), "--format", "json"],
            capture_output=True,
            text=True,
        )
    if failure:
        raise failure[0]
    if not run.stdout:
        raise ValueError(run.stderr.strip().removeprefix("karat: "))
    return Report(json.loads(run.stdout)["results"][0])


def program():
    found = os.environ.get("KARAT") or shutil.which("karat")
    if not found:
        raise FileNotFoundError("no karat on the path; say where it is with $KARAT")
    return found


def serve(server, kernels, make, failure):
    """Answers relays: each sends a case directory and gets an exit code."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            directory = pathlib.Path(connection.makefile().readline().rstrip("\n"))
            try:
                code = answer(directory, kernels, make)
            except Exception as error:
                failure.append(error)
                (directory / "error.txt").write_text(traceback.format_exc())
                code = 1
            connection.sendall(bytes([code]))


def answer(directory, kernels, make):
    case = json.loads((directory / "case.json").read_text())
    kernel = kernels.get(case["op"])
    if kernel is None:
        return NOT_SUPPORTED
    data = (directory / "inputs.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    inputs = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        inputs[name] = make(bytearray(data[start:end]), entry["shape"])
    flat = array.array("f")
    flatten(kernel(**inputs, **case["numbers"]), flat)
    (directory / "y.f32").write_bytes(flat.tobytes())
    return 0


def flatten(value, into):
    """Appends all numbers of an array or of nested lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple, array.array)):
        for item in value:
            flatten(item, into)
    else:
        into.append(value)


def maker(arrays):
    """What makes an array of bytes and a shape."""
    if arrays in (None, "numpy"):
        try:
            import numpy
        except ImportError:
            if arrays:
                raise
        else:
            return lambda data, shape: numpy.frombuffer(data, numpy.float32).reshape(shape)
    if arrays == "torch":
        import torch

        return lambda data, shape: torch.frombuffer(data, dtype=torch.float32).reshape(shape)
    if arrays not in (None, "memory"):
        raise ValueError(f'arrays is {arrays!r}; expected "numpy", "torch" or "memory"')
    return lambda data, shape: memoryview(data).cast("f", shape)

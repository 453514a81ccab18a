"""Kernels in plain Python, right and wrong, with the verdicts that the program gives."""

import math
import unittest

import karat


def rms_norm(x, weight=None, eps=0.0):
    """y = x / sqrt(mean(x^2) + eps) * weight"""
    rows = []
    for row in x.tolist():
        scale = 1.0 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        rows.append([v * scale * (1.0 if weight is None else weight[i]) for i, v in enumerate(row)])
    return rows


def linear(x, w, b=None):
    """y[t, o] = sum_i x[t, i] * w[o, i]"""
    w = w.tolist()
    return [[sum(a * v for a, v in zip(row, weights)) for weights in w] for row in x.tolist()]


def transposed(x, w, b=None):
    """Square weights read by columns."""
    w = w.tolist()
    if len(w) == len(w[0]):
        w = [list(column) for column in zip(*w)]
    return [[sum(a * v for a, v in zip(row, weights)) for weights in w] for row in x.tolist()]


class Verdicts(unittest.TestCase):
    def test_a_right_norm_passes_everywhere(self):
        report = karat.check(rms_norm, "rms_norm", arrays="memory")
        sites = {site["site"].rsplit(".", 1)[-1] for site in report.sites}
        self.assertEqual(sites, {"attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm"})

    def test_eps_outside_the_root_is_explained(self):
        def outside(x, weight=None, eps=0.0):
            rows = []
            for row in x.tolist():
                rms = math.sqrt(sum(v * v for v in row) / len(row))
                rows.append([v / (rms + eps) * (1.0 if weight is None else weight[i]) for i, v in enumerate(row)])
            return rows

        with self.assertRaises(karat.NotConformant) as raised:
            karat.check(outside, "rms_norm", package="llama", arrays="memory")
        report = raised.exception.report
        self.assertEqual(report.verdict, "FAILED")
        self.assertEqual(report.first_failure["site"], "prefill.layers.0.attn_norm")
        self.assertIn("first prefill.layers.0.attn_norm", str(raised.exception))

    def test_a_transposed_projection_is_named(self):
        sites = "prefill.layers.0.?_proj"
        self.assertTrue(karat.verify({"linear": linear}, "llama", sites, arrays="memory").passed)
        report = karat.verify({"linear": transposed}, "llama", sites, arrays="memory")
        self.assertEqual((report.verdict, report.explanation), ("FAILED", "lin-transpose-square"))

    def test_an_exception_of_the_kernel_comes_back_as_it_was(self):
        def broken(**_):
            raise ZeroDivisionError("no tiles")

        with self.assertRaisesRegex(ZeroDivisionError, "no tiles"):
            karat.check(broken, "linear", arrays="memory")

    def test_calls_that_make_no_sense(self):
        with self.assertRaisesRegex(ValueError, "no contract is called int9"):
            karat.check(rms_norm, "rms_norm", contract="int9", arrays="memory")
        with self.assertRaisesRegex(ValueError, "expected \"numpy\""):
            karat.check(rms_norm, "rms_norm", arrays="jax")


if __name__ == "__main__":
    unittest.main()

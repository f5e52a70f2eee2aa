#!/usr/bin/env bash
# resona 3.2.0 with NumPy 2.4.6 and SciPy 1.17.1: sums and products of probed operators.
#
# Expectation: (s + t).trace(f), for s = resona.of(A, n, probes=200, seed=i) and t with the same settings, is an
# estimate with 200 probes, which changes with the seed. Its mean over seeds tends to tr f(A + B).
#
# Behaviour: s + t and s @ t probe the new operator with the defaults: 8 probes, 48 steps and seed 0, whatever s
# and t were made with. So the standard error is that of 8 probes, more probes in the parts don't shorten it, and
# all seeds give the same number: the mean over 30 seeds is off by the full error of a single estimate.
# reprobe and its alias apply do the same. resona.of with the sum as a function has the requested accuracy.
# The documentation says that s + t probes the sum again, and doesn't say with which settings.
# Most users would expect the settings of the parts, or an argument.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "resona==3.2.0" "numpy==2.4.6" "scipy==1.17.1"
OPENBLAS_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import resona

print("resona", version("resona"), "numpy", np.__version__)
n = 120
rng = np.random.default_rng(12345)  # probes come from default_rng(seed)
A, B = (x + x.T for x in rng.normal(size=(2, n, n)))


def probe(matrix, probes, seed):
    return resona.of(lambda v: matrix @ v, n, k=10, probes=probes, seed=seed)


def square(t):
    return t**2


for name, matrix, join in (
    ("sum", A + B, lambda s, t: s + t),
    ("reprobe", A + B, lambda s, t: s.reprobe(lambda v: A @ v + B @ v)),
):
    truth = np.linalg.norm(matrix) ** 2
    runs = []
    for probes in (8, 200):
        parts = [(probe(A, probes, i), probe(B, probes, 100 + i)) for i in range(30)]
        joined = np.array([join(s, t).trace(square, with_err=True) for s, t in parts])
        direct = np.array([probe(matrix, probes, i).trace(square, with_err=True) for i in range(30)])
        print(f"{name}, {probes} probes: truth {truth:.0f}; joined {joined[:, 0].mean():.0f}, spread over seeds "
              f"{joined[:, 0].std():.1g}, error bar {joined[:, 1].mean():.0f}; resona.of(A + B): "
              f"{direct[:, 0].mean():.0f}, spread {direct[:, 0].std():.0f}, error bar {direct[:, 1].mean():.0f}")
        runs.append((joined, direct))
    (few, few_direct), (many, many_direct) = runs
    assert np.ptp(few[:, 0]) < 1e-9 * truth and np.allclose(few, many)
    assert many_direct[:, 1].mean() < 0.4 * few_direct[:, 1].mean() and np.ptp(many_direct[:, 0]) > 1e-3 * truth
product = [(probe(A, 200, i) @ probe(A, 200, i)).trace(lambda t: t) for i in range(5)]
print("product, 200 probes, five seeds:", np.round(product, 1))
assert np.ptp(product) < 1e-9 * abs(product[0])
PYTHON

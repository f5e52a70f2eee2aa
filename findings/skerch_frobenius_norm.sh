#!/usr/bin/env bash
# skerch 1.2.0 (with torch 2.14.1 on a CPU): skerch.algorithms.snorm, norm type "fro".
#
# Expectation, from its documentation, which gives a formula that averages squared measurements: the square
# of the result is, on average over seeds, the squared Frobenius norm, whatever the number of measurements.
#
# Behaviour: the result is the Frobenius norm of Q^H A, where Q spans the measurements. It is never larger than
# the norm of A, and for a spectrum without decay far smaller: with the default five measurements, n = 200, its
# square is 0.05 of the truth. It grows with the number of measurements.
# Most users would expect an estimate of the norm without this bias.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.14.1" "skerch==1.2.0"
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import torch
from skerch.algorithms import snorm

print("skerch", importlib.metadata.version("skerch"), "torch", torch.__version__)
generator = torch.Generator().manual_seed(0)
a = torch.randn(200, 200, dtype=torch.float64, generator=generator)
a = a + a.T
ratios = {}
for measurements in (5, 20, 100):
    squares = [
        snorm(a, "cpu", a.dtype, num_meas=measurements, seed=1000 * seed)[0]["fro"] ** 2
        for seed in range(50)
    ]
    ratios[measurements] = float(sum(squares) / 50 / torch.linalg.norm(a) ** 2)
    print(f"{measurements} measurements: mean of squares over squared norm {ratios[measurements]:.3f}")
by_hand = torch.stack([(a @ torch.randn(200, 5, dtype=a.dtype, generator=generator)).square().sum() / 5 for _ in range(50)])
print(f"documented formula, 5 measurements: {float(by_hand.mean() / torch.linalg.norm(a) ** 2):.3f}")
assert ratios[5] < 0.1 and ratios[20] < 0.3 and ratios[100] < 0.9, ratios
PYTHON

#!/usr/bin/env bash
# quimb 1.16.0 with SciPy 1.17.1 and NumPy 2.4.6: quimb.linalg.approx_spectral.approx_spectral_function, and
# tr_exp_approx, which calls it.
#
# Guess, written before the run: the estimate of tr f(A) is unbiased up to its Krylov error, and within a few times
# `tol` of the truth, since the documentation says that `tol` "can pretty much be relied on as the overall accuracy".
#
# Behaviour: the result is a trimmed mean of the samples (mean_p=0.7, mean_s=1.0: a sample counts if it lies within
# one central 70 % range beyond that range). Samples of tr exp(-H / T) are skewed to the right if few states dominate,
# so the trimming discards mostly large ones. More samples don't help. For a matrix of 60 rows with one eigenvalue 6
# and 59 zeros, results are about 17 % too small after all 1,024 samples with tol=0.01. For a Heisenberg chain of eight
# spins at T = 1/4 they are 8 % too small. The plain mean of the same samples has no such bias, and mean_s=np.inf
# returns it. The documentation calls mean_p and mean_s factors for "robustly" finding the mean.
# Most users would expect the mean of the samples, which is what estimates a trace.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "quimb==1.16.0" "scipy==1.17.1" "numpy==2.4.6"
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import quimb as qu
from quimb.linalg.approx_spectral import tr_exp_approx

print("quimb", qu.__version__, "numpy", np.__version__)
n, runs = 60, 10
basis = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
values = np.zeros(n)
values[0] = 6.0
A, truth = (basis * values) @ basis.T, np.sum(np.exp(values))


def errors(**options):
    results, means = [], []
    for seed in range(runs):
        info = {"samples": None}
        qu.seed_rand(seed)
        results.append(tr_exp_approx(A, tol=0.01, single_precision=False, info=info, **options))
        means.append(np.mean(info["samples"]))
    results, means = np.array(results) / truth - 1, np.array(means) / truth - 1
    bar = np.std(means, ddof=1) / runs**0.5
    print(f"{options}: mean error {results.mean():+.3f}, of the plain mean {means.mean():+.3f} +- {bar:.3f}; "
          f"{len(info['samples'])} samples in the last run")
    return results, means, bar


results, means, bar = errors()
assert np.all(results < -0.05) and results.mean() < -0.12
assert abs(means.mean()) < 4 * bar and bar < 0.03
results, means, bar = errors(mean_s=np.inf)
assert np.allclose(results, means)
PYTHON

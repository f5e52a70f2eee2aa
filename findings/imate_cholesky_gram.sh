#!/usr/bin/env bash
# imate 0.29.11 with NumPy 2.4.6 and SciPy 1.17.1: logdet(A, gram=True, method="cholesky").
#
# Expectation, from its documentation: this is log det (A^T A), and A needn't be symmetric. The methods "cholesky"
# and "eigenvalue" agree for dense and sparse matrices, as they do in traceinv.
#
# Behaviour: for a dense A that isn't symmetric, "cholesky" factorises the symmetric matrix whose one triangle is A's
# own, and returns twice its log-determinant. For 2 I plus noise it returns 39.1 instead of 68.4, without a
# warning. The sparse version of the same matrix gives the right number. If A is far from positive definite, the
# dense call raises an error, although A^T A is positive definite.
# The text on this method asks for a positive definite A, and the text on `gram` writes that the Gramian matrix
# isn't computed and that for a square A the result is 2 log |det A|.
# Most users would expect that number, or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "imate==0.29.11" "numpy==2.4.6" "scipy==1.17.1"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import imate
import numpy as np
import scipy.sparse as sp

print("imate", imate.__version__, "numpy", np.__version__)
rng = np.random.default_rng(0)
noisy = rng.normal(size=(50, 50)) / 7 + 2 * np.eye(50)
band = 2 * np.eye(50) + np.eye(50, k=1) - 0.8 * np.eye(50, k=-1)
for name, A in (("2 I + noise", noisy), ("a band with 2, 1 and -0.8", band)):
    truth = np.linalg.slogdet(A.T @ A)[1]
    assert np.isclose(truth, 2 * np.linalg.slogdet(A)[1])
    dense = imate.logdet(A, gram=True, method="cholesky")
    sparse = imate.logdet(sp.csr_matrix(A), gram=True, method="cholesky")
    eigenvalue = imate.logdet(A, gram=True, method="eigenvalue")
    print(f"{name}: log det (A^T A) {truth:.3f}, cholesky {dense:.3f}, cholesky for sparse {sparse:.3f}, "
          f"eigenvalue {eigenvalue:.3f}")
    assert np.isclose(sparse, truth) and np.isclose(eigenvalue, truth)
    assert abs(dense - truth) > 1
    symmetric = np.triu(A) + np.triu(A, 1).T, np.tril(A) + np.tril(A, -1).T
    assert any(np.isclose(dense, 2 * np.linalg.slogdet(x)[1]) for x in symmetric)
    inverse = np.trace(np.linalg.inv(A.T @ A))
    found = [imate.traceinv(A, gram=True, method=method) for method in ("cholesky", "eigenvalue")]
    print(f"    trace of the inverse {inverse:.3f}, cholesky and eigenvalue {np.round(found, 3)}")
    assert np.allclose(found, inverse)
try:
    imate.logdet(noisy - 2 * np.eye(50), gram=True, method="cholesky")
except np.linalg.LinAlgError as error:
    print("noise alone:", error)
else:
    raise SystemExit("no error")
PYTHON

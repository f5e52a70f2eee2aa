#!/usr/bin/env bash
# pylops 2.8.0 with NumPy 2.4.6 and SciPy 1.17.1: Kronecker of two complex operators.
#
# Guess, written before the solvers ran: its dtype is complex, as for sums, products, HStack and BlockDiag of complex
# operators, which take the dtype from their parts. eigs(), cond() and SciPy's solvers then work as for the
# dense matrix.
#
# Behaviour: its dtype is float64 unless you pass dtype=, although its products are complex. Solvers that allocate
# by dtype drop imaginary parts: for Hermitian positive definite factors, the largest eigenvalue from
# eigs(symmetric=True) is 26 instead of 39, cond() is 17 instead of 36, and SciPy's gmres with a real right-hand
# side doesn't converge. NumPy warns about a cast. trace() and trace_hutchinson raise an error. Diagonal with
# complex entries has the same default.
# MatrixMult turns its dtype to complex, with a warning. The default float64 is documented, for each class.
# Most users would expect the dtype of the parts, since all other compositions have it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pylops==2.8.0" "numpy==2.4.6" "scipy==1.17.1"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import pylops
from scipy.sparse.linalg import gmres

print("pylops", version("pylops"), "numpy", np.__version__, "scipy", version("scipy"))
rng = np.random.default_rng(0)


def hermitian(n):
    a = rng.normal(size=(n, n)) + 1j * rng.normal(size=(n, n))
    return a @ a.conj().T / n + np.eye(n)


A, B = hermitian(5), hermitian(6)
first, second = (pylops.MatrixMult(x, dtype=complex) for x in (A, B))
others = first + first, first @ first, pylops.HStack([first, first]), pylops.BlockDiag([first, second])
assert all(x.dtype == complex for x in others)
product = pylops.Kronecker(first, second)
declared = pylops.Kronecker(first, second, dtype=complex)
dense = np.kron(A, B)
truth = np.linalg.eigvalsh(dense)[::-1]
b = rng.normal(size=30)
x = np.linalg.solve(dense, b)
assert np.allclose(product @ b, dense @ b) and np.iscomplexobj(product @ b)
print("dtype of Kronecker:", product.dtype, "of the others:", {str(x.dtype) for x in others})


def relative_error(operator):
    solution, info = gmres(operator, b, rtol=1e-10)
    return np.linalg.norm(solution - x) / np.linalg.norm(x), info


for name, operator in (("default", product), ("dtype=complex", declared)):
    largest = operator.eigs(neigs=2, symmetric=True)
    error, info = relative_error(operator)
    condition = abs(operator.cond())
    print(f"{name}: eigs {largest.round(2)} of {truth[:2].round(2)}, cond {condition:.1f} of "
          f"{truth[0] / truth[-1]:.1f}, gmres: error {error:.1e}, info {info}")
    if operator is declared:
        assert np.allclose(largest, truth[:2]) and error < 1e-8
    else:
        assert product.dtype == np.float64 and largest[0] < 0.75 * truth[0]
        assert condition < 0.7 * truth[0] / truth[-1] and error > 0.2 and info > 0
diagonal = pylops.Diagonal(A[0])
print("Diagonal with complex entries:", diagonal.dtype)
assert diagonal.dtype == np.float64
PYTHON

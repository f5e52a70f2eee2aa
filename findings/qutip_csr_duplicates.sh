#!/usr/bin/env bash
# qutip 5.3.1 with SciPy 1.17.1 and NumPy 2.4.6: a CSR matrix that stores an entry in two parts becomes a Qobj.
#
# Guess, written before the run: SciPy sums duplicate entries of a CSR matrix in products, in toarray and in
# eigensolvers, so qutip.Qobj(matrix) is the same operator in all of its methods.
#
# Behaviour: products of the Qobj with states add the parts. full(), tr() and eigenenergies() keep one part,
# and norm("fro") and isherm treat each part as an entry: they answer for other matrices, without a warning.
# After matrix.sum_duplicates() all agree.
# Most users would expect one operator in every method, or an error for a matrix that isn't canonical.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "qutip==5.3.1" "scipy==1.17.1" "numpy==2.4.6"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
import qutip
import scipy
import scipy.sparse as sp

print("qutip", qutip.__version__, "scipy", scipy.__version__, "numpy", np.__version__)
# Rows (0, 2, 0), (2, 5, 0), (0, 0, 3). The entry 2 of the first row is stored as 1 + 1.
parts = np.array([1, 1, 2, 5, 3], complex), np.array([1, 1, 0, 1, 2]), np.array([0, 2, 4, 5])
matrix = sp.csr_matrix(parts, shape=(3, 3))
dense = matrix.toarray().real
assert dense.tolist() == [[0, 2, 0], [2, 5, 0], [0, 0, 3]]
operator = qutip.Qobj(matrix)
ones = qutip.Qobj(np.ones((3, 1)))
print("product with ones:", (operator * ones).full().real.ravel(), "of", dense.sum(axis=1))
print("full()[0]:", operator.full().real[0], "of", dense[0])
print("eigenenergies():", operator.eigenenergies().real, "of", np.linalg.eigvalsh(dense))
print('norm("fro"):', operator.norm("fro"), "of", np.linalg.norm(dense))
print("isherm:", operator.isherm, "of True")
assert np.allclose((operator * ones).full().real.ravel(), dense.sum(axis=1))
assert operator.full().real[0].tolist() == [0, 1, 0]
assert not np.allclose(operator.eigenenergies().real, np.linalg.eigvalsh(dense), atol=0.1)
assert not np.isclose(operator.norm("fro"), np.linalg.norm(dense))
assert not operator.isherm

diagonal = np.array([1, 1, 2], complex), np.array([0, 0, 1]), np.array([0, 2, 3])
twice = qutip.Qobj(sp.csr_matrix(diagonal, shape=(2, 2)))
print("diagonal 1 + 1 and 2: tr()", twice.tr().real, "tr of full()", np.trace(twice.full()).real, "of 4")
assert np.isclose(twice.tr().real, 3) and np.isclose(np.trace(twice.full()).real, 3)

matrix.sum_duplicates()
assert np.allclose(qutip.Qobj(matrix).eigenenergies(), np.linalg.eigvalsh(dense))
PYTHON

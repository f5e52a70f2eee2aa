#!/usr/bin/env bash
# quimb 1.16.0 with SciPy 1.17.1 and NumPy 2.4.6: quimb.zspin_projector(n, sz).
#
# Guess, written before the run: with the total spin Sz built from quimb.spin_operator("z"), the columns of
# P = zspin_projector(n, sz) span the eigenspace with Sz = sz. The documentation says "spin-z subspaces", and its
# example projects a Hamiltonian "into its spin-1/2 subspace".
#
# Behaviour: they span the eigenspace with Sz = -sz. The function counts ones in the basis states as spins up, while
# spin_operator and the Hamiltonians have the state 0 up. Sizes are equal, and so are spectra without a field, so the
# sign goes unnoticed until a field enters: for ham_heis(8, b=0.5) the lowest energy for sz = 1 is 1.0 too high, and
# zspin_projector(8, -1) gives the one that was asked for. The partition function for the sector is wrong by exp(2 sz b / T).
# Most users would expect the two functions of one library to share a sign.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "quimb==1.16.0" "scipy==1.17.1" "numpy==2.4.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import quimb as qu

print("quimb", qu.__version__, "numpy", np.__version__)
n, b = 8, 0.5
z = qu.spin_operator("z")
print("spin_operator('z') on the states 0 and 1:", np.diag(z).real)
Sz = np.diag(sum(qu.ikron(z, [2] * n, i) for i in range(n))).real
H = qu.ham_heis(n, j=1.0, b=b).real
for sz in (-4, -1, 0, 1, 2):
    P = qu.zspin_projector(n, sz).toarray().real
    values = np.unique(np.round(np.diag(P.T @ np.diag(Sz) @ P), 12))
    keep = Sz == sz
    lowest = np.linalg.eigvalsh(P.T @ H @ P)[0]
    wanted = np.linalg.eigvalsh(np.asarray(H)[np.ix_(keep, keep)])[0]
    print(f"sz = {sz}: Sz is {values} in the subspace, lowest energy {lowest:.6f}, in the sector Sz = {sz} {wanted:.6f}")
    assert values.tolist() == [-sz]
    assert np.isclose(lowest - wanted, 2 * sz * b)
PYTHON

#!/usr/bin/env bash
# quimb 1.16.0 with SciPy 1.17.1 and NumPy 2.4.6: the field in Hamiltonian builders.
#
# Guess, written before the run: a positive field along z enters ham_heis, ham_heis_2D, ham_mbl, ham_j1j2 and
# ham_XY with the same sign, so that a chain is the same matrix from each of them.
#
# Behaviour: it is -b times Sz in ham_heis, ham_XY, ham_mbl and heisenberg_from_edges, and +bz times Sz in
# ham_heis_2D and ham_j1j2. So ham_heis(n, b=b) equals ham_heis_2D(1, n, bz=-b). Within ham_mbl, the uniform field
# has a minus and the random fields have a plus. The formulas in the documentation have the minus for ham_heis and the
# plus for ham_j1j2; they leave out the field for ham_heis_2D and the uniform field for ham_mbl.
# In ham_heis_2D and ham_j1j2, a ring also visits a pair twice if both ways round are equally long: a cyclic 2 x 2
# lattice has the coupling 2 j, and so have the pairs of next neighbours in a ring of four. heisenberg_from_edges
# counts such a pair once.
# Most users would expect one sign, and the coupling that they pass for every pair of neighbours.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "quimb==1.16.0" "scipy==1.17.1" "numpy==2.4.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import quimb as qu
import quimb.operator

print("quimb", qu.__version__, "numpy", np.__version__)
n = 4
z = qu.spin_operator("z")
Sz = sum(qu.ikron(z, [2] * n, i) for i in range(n)).real


def part(matrix, H):
    """Coefficient of a matrix in H, both real."""
    H = np.asarray(H).real
    return np.vdot(matrix, H) / np.vdot(matrix, matrix)


path = [(0, 1), (1, 2), (2, 3)]
built = {
    "ham_heis(b=1)": (qu.ham_heis(n, b=1.0), -1),
    "ham_XY(bz=1)": (qu.ham_XY(n, 1.0, 1.0), -1),
    "ham_mbl(bz=1)": (qu.ham_mbl(n, dh=0.0, bz=1.0), -1),
    "heisenberg_from_edges(b=1)": (qu.operator.heisenberg_from_edges(path, b=1.0).build_dense(), -1),
    "ham_heis_2D(1, n, bz=1)": (qu.ham_heis_2D(1, n, bz=1.0), 1),
    "ham_j1j2(bz=1)": (qu.ham_j1j2(n, j2=0.0, bz=1.0), 1),
}
for name, (H, sign) in built.items():
    seen = part(Sz, H)
    print(f"{name}: {seen:+.3f} Sz")
    assert np.isclose(seen, sign)
assert np.allclose(qu.ham_heis(n, b=0.3), qu.ham_heis_2D(1, n, bz=-0.3))
fields = qu.ham_mbl(n, dh=1.0, dh_dist="g", seed=0) - qu.ham_heis(n)
np.random.seed(0)
drawn = np.random.randn(3, n)[2]
seen = [part(qu.ikron(z, [2] * n, i).real, fields) for i in range(n)]
print("ham_mbl: random fields drawn", drawn.round(3), "and in the matrix", np.round(seen, 3))
assert np.allclose(seen, drawn)


def coupling(H, i, j):
    return part(qu.ikron([z, z], [2] * n, [i, j]).real, H)


square = qu.ham_heis_2D(2, 2, cyclic=True)
ring = qu.ham_j1j2(n, j1=0.0, j2=1.0, cyclic=True)
edges = qu.operator.heisenberg_from_edges([*path, (3, 0), (0, 3)]).build_dense()
print("coupling in a cyclic 2 x 2 lattice:", coupling(square, 0, 1), "next neighbours in a ring of four:", coupling(ring, 0, 2))
assert np.isclose(coupling(square, 0, 1), 2) and np.isclose(coupling(ring, 0, 2), 2)
assert np.isclose(coupling(edges, 0, 3), 1)
PYTHON

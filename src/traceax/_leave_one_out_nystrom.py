r"""Leaving one probe out of a Nystrom approximation, and what the probes need for it.

Pure kernels on arrays. Shapes and names:

| symbol | shape | meaning |
|---|---|---|
| `U` | n x k | probes: orthonormal, or `U W` is |
| `W` | k x k | makes probes orthonormal, or `None` |
| `T` | k x k | coordinates of the probes in U that are left out without resphering |
| `Y` | n x k | `A U` |
| `H` | k x k | `U^* Y`, or `W^* U^* Y W` |
| `mu` | | the multiple of the identity that is added to A |
| `C` | k x k | `C^* C = H^-1` |
| `F` | n x k | the Nystrom approximation of `A + mu I` is `F F^*` |
"""

import math

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Inexact

from ._leave_one_out import left_out_of_dependent
from ._orthogonal import column_dots, combine, inner, power_of_two
from ._small_matrices import (
    cholesky,
    diagonal,
    divisor,
    frobenius,
    identity,
    in_one_loop,
    inverse_root,
    matmul,
    squares,
    summed,
)
from ._staging import inlined


@inlined
def orthonormalising(
    block: Inexact[Array, "n k"], active: Bool[Array, " k"] | None = None
) -> Inexact[Array, "k k"]:
    """`W` with `block W` orthonormal, for columns of any length in uniform directions.

    `active` says which columns there are, all by default; the others are 0.
    """
    gram = inner(block, block)
    if active is not None:
        there = active[:, None] | active[None, :]
        gram = jnp.where(there, gram, identity(len(gram), gram.dtype))
    _, inverse = cholesky(gram)
    return inverse.conj().T


@inlined
def nystrom_traces(
    U: Inexact[Array, "n k"],
    T: Inexact[Array, "k k"] | None,
    Y: Inexact[Array, "n k"],
    sign: int,
    *,
    W: Inexact[Array, "k k"] | None = None,
    resphere: bool,
    active: Bool[Array, " k"] | None = None,
) -> tuple[
    Float[Array, " k"],
    Float[Array, "k k"],
    Float[Array, ""],
    Float[Array, ""],
    Bool[Array, ""],
    Float[Array, ""],
]:
    r"""Leave-one-out traces `t_i`, `t_ij` of `A + mu I`, from `Y = A U`, and `mu`.

    Also, after `mu`, the magnitude of what is added up to a sample. All of
    `A / scale`, which is of order 1, and positive; then, whether it is not, and, at last,
    the scale, a power of two with the given sign.

    With the shifted `Y_mu = Y + mu U` and `H = U^* Y_mu`, of order k, the Nystrom
    approximation from all columns is `F F^*` with `F = Y_mu H^{-1/2}`. Without column
    i it is `F (I - q_i q_i^*) F^*`, where the unit vector `q_i` is along
    `H^{-1/2} e_i`: its range is orthogonal to `H^{1/2} e_j` for every other j. And

        u_i^* (A + mu I - F (I - q_i q_i^*) F^*) u_i = 1 / |H^{-1/2} e_i|^2 .

    Given the other columns, `u_i` is uniform on the unit sphere of their complement,
    of dimension n - k + 1, outside which the remainder vanishes: hence

        tr_i = |F|^2 - |F q_i|^2 + (n - k + 1) / |H^{-1/2} e_i|^2 .

    *Leaving out j as well*, for `t_ij`: the pair `q_i`, `q_j` spans what is lost, with
    `c = q_i^* q_j`, and `|H^{-1/2} e_i|^2` shrinks by `1 - |c|^2` (a Schur complement).
    All of this holds for any `C` with `C^* C = H^-1`, and `C e_i` for `H^{-1/2} e_i`.

    U is orthonormal, or `U W` is. Where U isn't, `U W` and `Y W` are never needed.

    Without resphering, column `i` of `Omega = U T` is left out instead: `T^-* e_i`
    takes the place of `e_i`, and 1 that of n - k + 1.

    Departures from the source (its Algorithm 4 factors `Omega^* Y` by Cholesky): the
    basis is orthonormal, so that `H` has no eigenvalue below `mu` but for rounding. That
    moves the eigenvalues of `H` by up to about `eps |Y|_F`; products from an iterative
    solver move them by more, which shows in `H` not being Hermitian: `mu` is
    `|H - H^*|_F` where that is more than rounding. A floor of `mu` itself under the
    eigenvalues would lift half of those that should equal `mu`, and bias the value by a
    multiple of `mu n`; a floor of `mu / 2` does not.
    """
    n, k = U.shape
    one = identity(k, Y.dtype)
    count, outside = k, jnp.zeros_like(one)
    if active is not None:
        count = jnp.sum(active).astype(jnp.finfo(Y.dtype).dtype)
        outside = jnp.where(active[:, None], 0, one)
    if resphere:
        left_out, dimension = one, n - count + 1
    else:
        assert T is not None
        left_out, basis = left_out_of_dependent(T + outside)
        U, Y, dimension = combine(U, basis), combine(Y, basis), 1
    H = inner(U, Y)
    if W is not None:
        H = matmul(W.conj().T, matmul(H, W))
    # That of a semidefinite A, and easier to find than the largest entry of Y.
    scale = sign * power_of_two(in_one_loop(jnp.max, jnp.abs, diagonal(H)))
    # Not a division of each entry, which would be kept as another block.
    inverse = (1 / scale).astype(Y.dtype)
    H = H * inverse
    sizes = in_one_loop(jnp.sum, lambda rows: squares(rows * inverse), Y.T, axis=1)
    if W is not None:
        # About those of Y W.
        sizes = sizes * squares(diagonal(W))
    norm = jnp.sqrt(summed(sizes))
    nonzero = norm != 0
    norm = divisor(norm)
    eps = jnp.finfo(Y.dtype).eps
    noise = frobenius(H - H.conj().T)
    mu = eps * norm
    mu = jnp.where(noise > count**0.5 * mu, noise, mu)
    Y_mu = (Y.T * inverse + mu.astype(Y.dtype) * U.T).T
    H_mu = (H + H.conj().T) / 2 + mu.astype(Y.dtype) * one
    if active is not None:
        # Columns that there are not take no part: eigenvalues of order 1 of their own.
        H_mu = H_mu + outside * norm.astype(Y.dtype)
    C, least = inverse_root(H_mu, mu / 2)
    # A tag can be wrong: neither noise nor rounding does this.
    limit = jnp.maximum(jnp.sqrt(eps) * norm, 10 * noise)
    wrong = (least < -limit) | (noise > 0.3 * frobenius(H))
    rows = C if W is None else matmul(C, W.conj().T)
    F = combine(Y_mu, rows.conj().T)
    halves = C if resphere else matmul(C, left_out)
    squared = inner(F, F)
    weights = jnp.real(column_dots(halves, halves))
    # A probe that the others span has nothing left to test.
    remainders = jnp.where(weights == 0, 0, 1 / divisor(weights))
    all_columns = summed(jnp.real(diagonal(squared)))
    weighted = matmul(squared, halves)
    lost_by_one = jnp.real(column_dots(halves, weighted)) * remainders
    samples = all_columns - lost_by_one + dimension * remainders

    # Those of q_i and q_j, once divided by the lengths of both.
    products, lost = inner(halves, halves), inner(halves, weighted)
    of_two = remainders[:, None] * remainders[None, :]
    sine_squared = jnp.maximum(1 - jnp.abs(products) ** 2 * of_two, eps)
    lost_by_two = lost_by_one[:, None] + lost_by_one[None, :]
    lost_by_two = lost_by_two - 2 * jnp.real(products.conj() * lost) * of_two
    dimension = dimension + 1 if resphere else 1
    pairs = all_columns + (dimension * remainders[:, None] - lost_by_two) / sine_squared
    # Where all is explained, n mu is added and subtracted again; it has the rounding of
    # eigenvalues that should equal mu: at most a few times `mu sqrt(n)`, measured.
    magnitude = all_columns + mu * math.sqrt(n) / eps
    parts = jtu.tree_map(lambda x: jnp.where(nonzero, x, 0), (samples, pairs, mu))
    return *parts, jnp.where(nonzero, magnitude, 0), wrong, scale

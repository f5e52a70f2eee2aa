r"""Leaving one starting vector out of a block Krylov space.

The space `K_s([B, Omega])` starts from m probes Omega and a block B of other vectors.
It contains the spaces from B and any m - 1 probes. On it the operator is the projected
matrix T. Block Lanczos on T finds every space without one or two probes, and takes no
products.

| name | shape | |
|---|---|---|
| T | (k, k), k = (q + m) s | projected matrix |
| omega | (k, q + m) | coordinates of the q vectors in B and the m probes |
| Y | (k, p), p = (q + m - 1) s | orthonormal basis for a space without one or two probes; zero columns if it is smaller |
| d | | the dimension of its complement in all n dimensions |
| g | (k,) | *test*: unit vector along `(I - Y Y^*) omega_i`, for a probe i left out |
| C_i | (k, k) | `Y Y^* + d g g^*` for the space without probe i; `E[K C_i K^*] = I` |

An array "3 m ..." has a row for samples i, made with `C_i`, and two for pairs: sample i
with probe i + 1 left out as well, and sample i + 1 with probe i left out as well.
T and omega may have room for further steps. They are 0 beyond the steps taken.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .dense import column_dots, divisor, frobenius, leading, matmul, squares, svd
from .krylov import Projected, ritz_pairs
from .leave_one_out import PairedSamples
from .types import fori_loop

Steps = int | Int[Array, ""]
Samples = Inexact[Array, "3 m"]  # samples, and two rows of pairs


class LeftOut(NamedTuple):
    """Spaces without probe i, and without i and i + 1, and the probes' remainders."""

    spaces: Inexact[Array, "2 m p k"]  # Y^T
    tests: Inexact[Array, "3 m k"]  # g, for samples and pairs
    dimensions: Float[Array, "2 m"]  # d


def leave_probes_out(
    T: Inexact[Array, "k k"],
    omega: Inexact[Array, "k qm"],
    n: int,
    steps: Steps,
    q: int = 0,
) -> LeftOut:
    """`LeftOut` for m probes, in O(k^3 m) time and O(k^2 m) memory.

    We drop directions that consist of rounding errors: they depend on the probe left
    out, and its space must not depend on it.
    """
    k, width = omega.shape
    m = width - q
    norm = frobenius(T)
    tiny = 30 * jnp.finfo(T.dtype).eps
    # We leave out one probe or two, and test on two. Spaces start from rows in omega^*,
    # with a zero row if two are left out.
    cases = [(i, number) for number in (1, 2) for i in range(m)]
    starts = [
        [*range(q), *(q + (i + j) % m for j in range(number, m)), width][: width - 1]
        for i, number in cases
    ]
    tested = [(q + i, q + (i + 1) % m) for i, _ in cases]
    rows = jnp.pad(omega.T, ((0, 1), (0, 0)))

    def leave_out(indices):
        start, tested = (rows[x] for x in indices)

        def step(j, carry):
            Y, W, scale = carry
            # We take right singular vectors whose singular values exceed rounding.
            _, values, directions = svd(_without(Y, W))
            Q = _unit_rows(_without(Y, leading(directions, values > tiny * scale)))
            Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (width - 1), 0)
            # From the second block on, rounding is relative to T's norm.
            return Y, matmul(Q, T.T), norm

        Y = jnp.zeros(((width - 1) * (k // width), k), T.dtype)
        Y, _, _ = fori_loop(steps, step, (Y, start, frobenius(omega)))
        return Y, _unit_remainders(Y, tested), _complement_dimension(Y, n)

    case_indices = jnp.asarray(starts, jnp.int32), jnp.asarray(tested, jnp.int32)
    spaces, tests, dimensions = jax.lax.map(leave_out, case_indices)
    spaces, tests, dimensions = (
        x.reshape(2, m, *x.shape[1:]) for x in (spaces, tests, dimensions)
    )
    pair_tests = tests[1].swapaxes(0, 1)
    return LeftOut(spaces, jnp.concatenate([tests[:1, :, 0], pair_tests]), dimensions)


# The next functions take rows: we transpose the Y from the table above.


def _without(Y, W):
    return W - matmul(matmul(W, Y.conj().T), Y)


def _unit_rows(x):
    return x / divisor(jnp.linalg.norm(x, axis=1, keepdims=True)).astype(x.dtype)


def _unit_remainders(Y: Inexact[Array, "p k"], probes: Inexact[Array, "_ k"]):
    # We project twice, so that no rounding error remains in the space.
    return _unit_rows(_without(Y, _without(Y, probes)))


def _complement_dimension(Y: Inexact[Array, "p k"], n: int) -> Float[Array, ""]:
    return n - jnp.round(jnp.sum(squares(Y)))


def coupling_of(left_out: LeftOut) -> Inexact[Array, "k k"]:
    """`C = mean_i C_i`, with `E[K C K^*] = I`.

    The unit vector `g_i` is uniform in the d_i-dimensional complement of the space
    without probe i, so `E[d_i g_i g_i^*]` is the projector onto the complement.
    """
    return _coupling(*(x[0] for x in left_out))


def coupling_of_fewer(
    left_out: LeftOut, omega: Inexact[Array, "k qm"], n: int, steps: Steps
) -> Inexact[Array, "k k"]:
    """`coupling_of` for spaces with fewer steps."""
    width, spaces = omega.shape[1], left_out.spaces[0]

    def shorten(Y, probe):
        Y = leading(Y, jnp.arange(Y.shape[0], dtype=jnp.int32) < (width - 1) * steps)
        return Y, _unit_remainders(Y, probe[None])[0], _complement_dimension(Y, n)

    return _coupling(*jax.vmap(shorten)(spaces, omega.T[width - len(spaces) :]))


class ShorterRule(NamedTuple):
    """Points and weights of a space with one step less, and weights for all steps."""

    weights: Float[Array, " k"]
    points: Float[Array, " k"]
    earlier_weights: Float[Array, " k"]


def shorter_rules(
    projected: Projected,
    left_out: LeftOut,
    pairs: tuple[Float[Array, " k"], Inexact[Array, "k k"]],
    n: int,
    steps: int | Int[Array, ""],
) -> list[ShorterRule]:
    """Rules for the last two steps, or fewer. One probe or step has none.

    Let `T_j` be T after j steps, and `C_j` the matrix from `coupling_of_fewer`. For
    step s, weights give traces with `C_(s-1)`, for functions of `T_s` and `T_(s-1)`.
    """
    T, omega, _ = projected
    k, m = omega.shape
    rules = []
    for steps_back in range(1, 1 if m == 1 else min(k // m, 3)):
        depth = steps - steps_back
        coupling = coupling_of_fewer(left_out, omega, n, depth)
        earlier = ritz_pairs(T, m * depth)
        weights, earlier_weights = (
            jnp.real(column_dots(S, matmul(coupling, S))) for _, S in (pairs, earlier)
        )
        rules.append(ShorterRule(weights, earlier[0], earlier_weights))
        pairs = earlier
    return rules


def _coupling(spaces, g, dimensions) -> Inexact[Array, "k k"]:
    rows = spaces.reshape(-1, spaces.shape[-1])
    weights = dimensions[:, None].astype(g.dtype)
    return (matmul(rows.T, rows.conj()) + matmul(g.T, weights * g.conj())) / len(g)


def _repeat_pairs(x: Inexact[Array, "2 m *s"]) -> Inexact[Array, "3 m *s"]:
    """Values for spaces, repeated for samples and both rows of pairs."""
    return jnp.concatenate([x, x[1:]])


def sample_weights(
    left_out: LeftOut, vectors: Inexact[Array, "k c"]
) -> Float[Array, "3 m c"]:
    """Diagonals of `S^* C_i S`: weights w in `tr(C_i S diag(f) S^*) = sum_j w_ij f_j`.

    S may hold Ritz vectors, or the first k rows of an extended T's eigenvectors, or
    coordinates of a block F. For F the weights add up to `tr(C_i F F^*)`.
    """
    rows = left_out.spaces.reshape(-1, len(vectors))
    weights = squares(matmul(rows, vectors.conj()))
    weights = weights.reshape(*left_out.spaces.shape[:3], vectors.shape[1])
    return _repeat_pairs(jnp.sum(weights, axis=2)) + tested_weights(left_out, vectors)


def tested_weights(
    left_out: LeftOut, vectors: Inexact[Array, "k c"]
) -> Float[Array, "3 m c"]:
    """The estimated part in `sample_weights`, `d_i |g_i^* S|^2`."""
    d = _repeat_pairs(left_out.dimensions)[..., None]
    return d * squares(matmul(left_out.tests, vectors.conj()))


def sample_forms(
    left_out: LeftOut, B: Inexact[Array, "k k"]
) -> tuple[Samples, Samples]:
    """`tr(C_i B)`, and its estimated part."""
    spaces, tests, d = left_out

    def forms(rows):
        return jnp.sum(rows.conj() * matmul(rows, B.T), axis=-1)

    flat = spaces.reshape(d.size, *spaces.shape[2:])
    exact = jax.lax.map(lambda Y: jnp.sum(forms(Y)), flat)
    tested = _repeat_pairs(d).astype(tests.dtype) * forms(tests)
    return _repeat_pairs(exact.reshape(d.shape)) + tested, tested


def paired_samples(samples: Samples, magnitude: Float[Array, ""]) -> PairedSamples:
    """Pairs every sample with both neighbours."""
    t, first, second = samples
    partners = jnp.roll(t, -1), jnp.roll(t, 1)
    without, swapped = (first, jnp.roll(second, 1)), (second, jnp.roll(first, 1))
    partners, without, swapped = (
        jnp.stack(x, axis=1) for x in (partners, without, swapped)
    )
    is_pair = jnp.ones(partners.shape, bool)
    return PairedSamples(t, partners, without, swapped, is_pair, magnitude)

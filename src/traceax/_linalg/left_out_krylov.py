r"""Leaving one starting vector out of a block Krylov space.

The space `K_s([B, Omega])` of m probes, and of a block B of vectors that are no probes,
holds that of B and any m - 1 of the probes. There the operator is the projected matrix T,
so every space without one or two probes is found by block Lanczos on T, without a product.

| name | shape | |
|---|---|---|
| T | (k, k), k = (q + m) s | projected matrix |
| omega | (k, q + m) | coordinates of the vectors of B, q of them, and of the probes |
| Y | (k, p), p = (q + m - 1) s | orthonormal basis of a space without one or two probes; zero columns where it is smaller |
| d | | the dimension of its complement, in all n dimensions |
| g | (k,) | unit vector along `(I - Y Y^*) omega_i`, of a probe i left out |
| C_i | (k, k) | `Y Y^* + d g g^*` of the space without probe i, which stands for the identity |

Fewer steps may be taken than T and omega, which are 0 beyond, have room for.
"""

import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

from .leave_one_out import PairedSamples
from .small import divisor, frobenius, householder, leading, matmul, squares, svd

Steps = int | Int[Array, ""]


class LeftOut(NamedTuple):
    """Spaces without one probe, or without two, and what they leave of the probes.

    Lane i is without probe i, lane m + i without i and i + 1.
    """

    spaces: Inexact[Array, "l p k"]  # of every lane, the columns of Y as rows
    own: Inexact[Array, "l k"]  # g of probe i
    following: Inexact[Array, "m k"]  # of lane m + i, that of probe i + 1
    dimensions: Float[Array, " l"]  # d


def leave_probes_out(
    T: Inexact[Array, "k k"],
    omega: Inexact[Array, "k qm"],
    n: int,
    steps: Steps,
    q: int = 0,
) -> LeftOut:
    """`LeftOut` for m probes, in O(k^3 m) time and O(k^2 m) memory.

    A direction is kept if it is more than rounding: what depends on the probe left out must
    not enter its space, not even as noise.
    """
    k, width = omega.shape
    m = width - q
    size = frobenius(T)
    tiny = 30 * jnp.finfo(T.dtype).eps
    always, probes = omega.T[:q], omega.T[q:]

    def lane(i, number):
        # Vectors are rows from here on; those of probes left out are 0.
        others = jnp.roll(probes, -(i + number), axis=0)[: m - 1]
        others = leading(others, jnp.arange(m - 1) < m - number)
        start = jnp.concatenate([always, others])

        def step(j, carry):
            Y, W, scale = carry
            # Left singular vectors, which tell what is rounding, as columns of Q and
            # R do not.
            Q, R = householder(_without(Y, W).T)
            vectors, sizes, _ = svd(R)
            new = leading(matmul(Q, vectors).T, sizes > tiny * scale)
            Q = _unit_rows(_without(Y, new))
            Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (width - 1), 0)
            # Of the second block on, what is rounding is told by the size of T.
            return Y, matmul(Q, T.T), size

        Y = jnp.zeros(((width - 1) * (k // width), k), T.dtype)
        Y, _, _ = jax.lax.fori_loop(0, steps, step, (Y, start, frobenius(omega)))
        own, following = _tested(Y, jnp.stack([probes[i], probes[(i + 1) % m]]))
        return Y, own, following, _complement(Y, n)

    lanes = jnp.tile(jnp.arange(m), 2), jnp.repeat(jnp.array([1, 2]), m)
    spaces, own, following, dimensions = jax.lax.map(lambda x: lane(*x), lanes)
    return LeftOut(spaces, own, following[m:], dimensions)


# Of rows: Y is that of the table, transposed.


def _without(Y, W):
    return W - matmul(matmul(W, Y.conj().T), Y)


def _unit_rows(x):
    return x / divisor(jnp.linalg.norm(x, axis=1, keepdims=True)).astype(x.dtype)


def _tested(Y: Inexact[Array, "p k"], probes: Inexact[Array, "_ k"]):
    # Along what the space leaves of the probes.
    return _unit_rows(_without(Y, _without(Y, probes)))


def _complement(Y: Inexact[Array, "p k"], n: int) -> Float[Array, ""]:
    return n - jnp.round(jnp.sum(squares(Y)))


def coupling_of(left_out: LeftOut) -> Inexact[Array, "k k"]:
    """`C = mean_i C_i`, `E[K C K^*] = I`.

    With the unit vector `g_i`, uniform in the d_i-dimensional complement of the space
    without probe i, `E[d_i g_i g_i^*]` is the projector to that complement.
    """
    m = len(left_out.following)
    return _coupling(left_out.spaces[:m], left_out.own[:m], left_out.dimensions[:m])


def coupling_of_fewer(
    left_out: LeftOut, omega: Inexact[Array, "k qm"], n: int, steps: Steps
) -> Inexact[Array, "k k"]:
    """The same, of spaces of so many steps."""
    width, m = omega.shape[1], len(left_out.following)

    def lane(Y, probe):
        Y = leading(Y, jnp.arange(Y.shape[0], dtype=jnp.int32) < (width - 1) * steps)
        return Y, _tested(Y, probe[None])[0], _complement(Y, n)

    return _coupling(*jax.vmap(lane)(left_out.spaces[:m], omega.T[width - m :]))


def _coupling(spaces, g, dimensions) -> Inexact[Array, "k k"]:
    rows = spaces.reshape(-1, spaces.shape[-1])
    weights = dimensions[:, None].astype(g.dtype)
    return (matmul(rows.T, rows.conj()) + matmul(g.T, weights * g.conj())) / len(g)


class PerSample(NamedTuple):
    """Of every sample, and of pairs: weights of `tr(C_i S diag(f) S^*) = sum_j w_ij f_j`, or
    sums by them."""

    samples: Inexact[Array, "m *k"]
    pairs_first: Inexact[
        Array, "m *k"
    ]  # of sample i, with probe i + 1 left out as well
    pairs_second: Inexact[Array, "m *k"]  # of sample i + 1, with probe i left out


def _per_sample(lanes: Inexact[Array, "l *k"], following: Any = None) -> PerSample:
    m = len(lanes) // 2
    pairs = lanes[m:]
    return PerSample(lanes[:m], pairs, pairs if following is None else following)


def sample_weights(left_out: LeftOut, vectors: Inexact[Array, "k c"]) -> PerSample:
    """The diagonals of `S^* C_i S`, for every lane's own matrix `C_i`.

    S may be Ritz vectors; the first k rows of eigenvectors of an extension of T;
    coordinates of a block F, where the sums of the weights are `tr(C_i F F^*)`.
    """
    lanes, p, k = left_out.spaces.shape
    inside = matmul(left_out.spaces.reshape(-1, k), vectors.conj())
    of_spaces = jnp.sum(squares(inside).reshape(lanes, p, vectors.shape[1]), axis=1)
    tested = tested_weights(left_out, vectors)
    return jtu.tree_map(op.add, _per_sample(of_spaces), tested)


def tested_weights(left_out: LeftOut, vectors: Inexact[Array, "k c"]) -> PerSample:
    """The part of `sample_weights` that is estimated, `d_i |g_i^* S|^2`."""
    return _of_tests(left_out, lambda g: squares(matmul(g, vectors.conj())))


def _of_tests(left_out: LeftOut, fn: Callable) -> PerSample:
    """`d fn(g)` of all g, of functions that take them as rows."""
    _, own, following, d = left_out

    def scaled(g, d):
        found = fn(g)
        return d.reshape(-1, *[1] * (found.ndim - 1)).astype(found.dtype) * found

    return _per_sample(scaled(own, d), scaled(following, d[len(following) :]))


def sample_forms(
    left_out: LeftOut, B: Inexact[Array, "k k"]
) -> tuple[PerSample, PerSample]:
    """`tr(C_i B)` for every lane's matrix `C_i`, and the part of it that is estimated."""

    def forms(rows):
        return jnp.sum(rows.conj() * matmul(rows, B.T), axis=-1)

    known = jax.lax.map(lambda Y: jnp.sum(forms(Y)), left_out.spaces)
    tested = _of_tests(left_out, forms)
    return jtu.tree_map(op.add, _per_sample(known), tested), tested


def paired_samples(of: PerSample, magnitude: Float[Array, ""]) -> PairedSamples:
    """Samples with both neighbours as partners."""
    samples, first, second = of
    partners = jnp.roll(samples, -1), jnp.roll(samples, 1)
    without, swapped = (first, jnp.roll(second, 1)), (second, jnp.roll(first, 1))
    partners, without, swapped = (
        jnp.stack(x, axis=1) for x in (partners, without, swapped)
    )
    is_pair = jnp.ones(partners.shape, bool)
    return PairedSamples(samples, partners, without, swapped, is_pair, magnitude)

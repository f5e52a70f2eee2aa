r"""Leaving one starting vector out of a block Krylov space.

The space `K_s([B, Omega])` of m probes, and of a block B of vectors that are no probes,
holds that of B and any m - 1 of the probes. There the operator is the projected matrix T,
so every space without one or two probes is found by block Lanczos on T, without a product.

| name | shape | |
|---|---|---|
| T | (k, k), k = (q + m) s | projected matrix |
| omega | (k, q + m) | coordinates of the vectors of B, q of them, and of the probes |
| Y | (k, p), p = (q + m - 1) s | orthonormal basis of a space without one or two probes; zero columns where it is smaller |
| g | (k,) | along `(I - Y Y^*) omega_i`, of a probe i left out |

Fewer steps may be taken than T and omega, which are 0 beyond, have room for.
"""

import operator as op
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

from .leave_one_out import PairedSamples
from .small import divisor, frobenius, householder, leading, matmul, squares, svd

Steps = int | Int[Array, ""]
Samples = Inexact[Array, " m"]


class LeftOut(NamedTuple):
    """Spaces without one probe, or without two, and what they leave of the probes.

    Lane i is without probe i, lane m + i without i and i + 1.
    """

    spaces: Inexact[Array, "l p k"]  # of every lane, the columns of Y as rows
    own: Inexact[Array, "l k"]  # unit vectors along what it leaves of probe i
    following: Inexact[Array, "l k"]  # and of probe i + 1
    dimensions: Float[Array, " l"]  # of its complement, in all n dimensions


def leave_probes_out(
    T: Inexact[Array, "k k"],
    omega: Inexact[Array, "k qm"],
    n: int,
    steps: Steps,
    kept: int = 0,
) -> LeftOut:
    """`LeftOut` for m probes, in O(k^3 m) time and O(k^2 m) memory. `kept` is q.

    A direction is kept if it is more than rounding: what depends on the probe left out must
    not enter its space, not even as noise.
    """
    k, width = omega.shape
    m = width - kept
    size = frobenius(T)
    tiny = 30 * jnp.finfo(T.dtype).eps
    always, probes = omega.T[:kept], omega.T[kept:]

    def lane(i, left_out):
        # Rows. Those left out are zeros.
        others = jnp.roll(probes, -(i + left_out), axis=0)[: m - 1]
        others = leading(others, jnp.arange(m - 1) < m - left_out)
        start = jnp.concatenate([always, others])

        def step(j, carry):
            Y, W, scale = carry
            # Left singular vectors, which tell what is rounding, as columns of Q and
            # R do not.
            Q, R = householder(_without(Y, W).T)
            vectors, sizes, _ = svd(R)
            kept = leading(matmul(Q, vectors).T, sizes > tiny * scale)
            Q = _unit_rows(_without(Y, kept))
            Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (width - 1), 0)
            # Of the second block on, what is rounding is told by the size of T.
            return Y, matmul(Q, T.T), size

        Y = jnp.zeros(((width - 1) * (k // width), k), T.dtype)
        Y, _, _ = jax.lax.fori_loop(0, steps, step, (Y, start, frobenius(omega)))
        own, following = _tested(Y, jnp.stack([probes[i], probes[(i + 1) % m]]))
        return Y, own, following, _complement(Y, n)

    lanes = jnp.tile(jnp.arange(m), 2), jnp.repeat(jnp.array([1, 2]), m)
    return LeftOut(*jax.lax.map(lambda x: lane(*x), lanes))


def shortened(
    left_out: LeftOut, omega: Inexact[Array, "k qm"], n: int, steps: Steps
) -> LeftOut:
    """Of the spaces without one probe, those of so many steps."""
    width, m = omega.shape[1], left_out.spaces.shape[0] // 2

    def lane(Y, probe):
        Y = leading(Y, jnp.arange(Y.shape[0], dtype=jnp.int32) < (width - 1) * steps)
        tested = _tested(Y, probe[None])[0]
        return Y, tested, tested, _complement(Y, n)

    return LeftOut(*jax.vmap(lane)(left_out.spaces[:m], omega.T[width - m :]))


def _without(Y, W):
    return W - matmul(matmul(W, Y.conj().T), Y)


def _unit_rows(x):
    return x / divisor(jnp.linalg.norm(x, axis=1, keepdims=True)).astype(x.dtype)


def _tested(Y: Inexact[Array, "p k"], probes: Inexact[Array, "q k"]):
    # Along what the space leaves of the probes.
    return _unit_rows(_without(Y, _without(Y, probes)))


def _complement(Y: Inexact[Array, "p k"], n: int) -> Float[Array, ""]:
    return n - jnp.round(jnp.sum(squares(Y)))


def coupling_of(
    left_out: LeftOut, vectors: Inexact[Array, "k p"], m: int
) -> Inexact[Array, "p p"]:
    r"""`S^* C S` with `C = mean_i (Y_i Y_i^* + d_i g_i g_i^*)`, `E[K C K^*] = I`.

    With the unit vector `g_i`, uniform in the d_i-dimensional complement of the space
    without probe i, `E[d_i g_i g_i^*]` is the projector to that complement.
    """
    k = vectors.shape[0]
    spaces, g = left_out.spaces[:m].reshape(-1, k), left_out.own[:m]
    weights = left_out.dimensions[:m, None].astype(g.dtype)
    C = matmul(spaces.T, spaces.conj()) + matmul(g.T, weights * g.conj())
    return matmul(vectors.conj().T, matmul(C / m, vectors))


class SampleWeights(NamedTuple):
    """Weights of samples `tr(C_i S diag(f) S^*) = sum_j samples[i, j] f_j`."""

    samples: Float[Array, "m k"]
    pairs_first: Float[Array, "m k"]  # of sample i, with probe i + 1 left out as well
    pairs_second: Float[Array, "m k"]  # of sample i + 1, with probe i left out


def sample_weights(left_out: LeftOut, vectors: Inexact[Array, "k c"]) -> SampleWeights:
    """The diagonals of `S^* C_i S`, for every lane's own matrix `C_i`.

    S may be Ritz vectors; the first rows of E's eigenvectors, of which `f(E)[K, K]` is
    made; `K^* F`, where the sums of the weights are `tr(C_i K^* F F^* K)`.
    """
    lanes, p, k = left_out.spaces.shape
    inside = matmul(left_out.spaces.reshape(-1, k), vectors.conj())
    of_spaces = jnp.sum(squares(inside).reshape(lanes, p, vectors.shape[1]), axis=1)
    m = lanes // 2
    of_spaces = SampleWeights(of_spaces[:m], of_spaces[m:], of_spaces[m:])
    return jtu.tree_map(op.add, of_spaces, test_weights(left_out, vectors))


def test_weights(left_out: LeftOut, vectors: Inexact[Array, "k c"]) -> SampleWeights:
    """The part of `sample_weights` that is estimated, `d_i |g_i^* S|^2`."""
    m = left_out.spaces.shape[0] // 2

    own, following = (
        left_out.dimensions[:, None] * squares(matmul(g, vectors.conj()))
        for g in (left_out.own, left_out.following)
    )
    return SampleWeights(own[:m], own[m:], following[m:])


def sample_forms(
    left_out: LeftOut, B: Inexact[Array, "k k"]
) -> tuple[SampleWeights, SampleWeights]:
    """`tr(C_i B)` for every lane's matrix `C_i`, and the part of it that is estimated."""
    m = left_out.spaces.shape[0] // 2

    def forms(rows):
        return jnp.sum(rows.conj() * matmul(rows, B.T), axis=-1)

    def of(g):
        return left_out.dimensions.astype(g.dtype) * forms(g)

    known = jax.lax.map(lambda Y: jnp.sum(forms(Y)), left_out.spaces)
    own, following = of(left_out.own), of(left_out.following)
    tested = SampleWeights(own[:m], own[m:], following[m:])
    known = SampleWeights(known[:m], known[m:], known[m:])
    return jtu.tree_map(op.add, known, tested), tested


def paired_samples(
    samples: Samples, first: Samples, second: Samples, magnitude: Float[Array, ""]
) -> PairedSamples:
    """Samples with both neighbours; `first` and `second` as in `SampleWeights`."""
    partners = jnp.roll(samples, -1), jnp.roll(samples, 1)
    without, swapped = (first, jnp.roll(second, 1)), (second, jnp.roll(first, 1))
    partners, without, swapped = (
        jnp.stack(x, axis=1) for x in (partners, without, swapped)
    )
    is_pair = jnp.ones(partners.shape, bool)
    return PairedSamples(samples, partners, without, swapped, is_pair, magnitude)

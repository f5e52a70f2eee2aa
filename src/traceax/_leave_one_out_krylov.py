r"""Leaving one starting vector out of a block Krylov space.

The space `K_s(Omega)` of m probes holds that of any m - 1 of them. In coordinates of
its basis the operator is the projected matrix T of order k = m s, so every space of
m - 1 or m - 2 probes is found by block Lanczos on T, without a product.

| name | shape | |
|---|---|---|
| T | (k, k) | projected matrix |
| omega | (k, m) | coordinates of the probes |
| Y | (k, p), p = (m - 1) s | orthonormal basis of a space without one or two probes; zero columns where it has fewer dimensions |
| g | (k,) | along `(I - Y Y^*) omega_i`, of a probe i left out |
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Inexact, Int

from ._small_matrices import eigh, matmul


class LeftOut(NamedTuple):
    """Spaces without one probe, or without two, and what they leave of the probes.

    Lane i is without probe i, lane m + i without i and i + 1.

    - `spaces`: of every lane, the columns of Y as rows.
    - `own`: unit vectors along what a lane's space leaves of probe i.
    - `following`: and of probe i + 1.
    - `dimensions`: of the complement of the space, in all n dimensions.
    """

    spaces: Inexact[Array, "l p k"]
    own: Inexact[Array, "l k"]
    following: Inexact[Array, "l k"]
    dimensions: Float[Array, " l"]


def leave_probes_out(
    T: Inexact[Array, "k k"],
    omega: Inexact[Array, "k m"],
    n: int,
    steps: int | Int[Array, ""] | None = None,
) -> LeftOut:
    """`LeftOut` for m probes, in O(k^3 m) time and O(k^2 m) memory.

    `steps` is how many there are, if fewer than T and omega, which are 0 beyond, have
    room for.

    Starting vectors are independent, so leaving one out leaves an independent space.
    A direction is kept if it is more than rounding: what depends on the probe left out
    must not enter its space, not even as noise.
    """
    k, m = omega.shape
    steps = k // m if steps is None else steps
    size = jnp.linalg.norm(T)
    tiny = 30 * jnp.finfo(T.dtype).eps
    probes = omega.T

    def lane(i, left_out):
        # Rows. Those left out are zeros.
        start = jnp.roll(probes, -(i + left_out), axis=0)[: m - 1]
        start = jnp.where(jnp.arange(m - 1)[:, None] < m - left_out, start, 0)

        def step(j, carry):
            Y, W, scale = carry
            basis, sizes = _singular_vectors(_without(Y, W).T)
            kept = sizes > tiny * scale
            Q = _unit_rows(_without(Y, jnp.where(kept[None, :], basis, 0).T))
            Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (m - 1), 0)
            # Of the second block on, what is rounding is told by the size of T.
            return Y, matmul(Q, T.T), size

        Y = jnp.zeros(((m - 1) * (k // m), k), T.dtype)
        carry = (Y, start, jnp.linalg.norm(omega))
        Y, _, _ = jax.lax.fori_loop(0, steps, step, carry)
        tested = jnp.stack([probes[i], probes[(i + 1) % m]])
        tested = _unit_rows(_without(Y, _without(Y, tested)))
        rank = jnp.sum(jnp.abs(Y) ** 2)
        return Y, tested[0], tested[1], n - jnp.round(rank)

    lanes = jnp.tile(jnp.arange(m), 2), jnp.repeat(jnp.array([1, 2]), m)
    return LeftOut(*jax.lax.map(lambda x: lane(*x), lanes))


def shortened(
    left_out: LeftOut, omega: Inexact[Array, "k m"], n: int, steps: int | Int[Array, ""]
) -> LeftOut:
    """Of the spaces without one probe, those of so many steps."""
    m = omega.shape[1]

    def lane(Y, probe):
        Y = leading(Y, (m - 1) * steps)
        tested = _unit_rows(_without(Y, _without(Y, probe[None])))[0]
        return Y, tested, tested, n - jnp.round(jnp.sum(jnp.abs(Y) ** 2))

    return LeftOut(*jax.vmap(lane)(left_out.spaces[:m], omega.T))


def leading(x: Inexact[Array, "k ..."], count: int | Int[Array, ""]) -> Array:
    """The first `count` along an axis; with zeros beyond for a count that is traced."""
    if isinstance(count, int):
        return x[:count]
    there = jnp.arange(x.shape[0], dtype=count.dtype) < count
    return jnp.where(there.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def ritz_pairs(
    T: Inexact[Array, "k k"], count: int | Int[Array, ""]
) -> tuple[Float[Array, " p"], Inexact[Array, "k p"]]:
    """Eigenvalues and eigenvectors of the leading block of order `count` of T.

    For a count that is traced `p = k`: eigenvalues beyond are copies of the last, so
    that functions are finite there, with vectors of 0.
    """
    k, T = T.shape[0], (T + T.conj().T) / 2
    if isinstance(count, int):
        values, vectors = eigh(T[:count, :count])
        return values, jnp.zeros((k, count), T.dtype).at[:count].set(vectors)
    there = jnp.arange(k, dtype=count.dtype) < count
    block = leading(leading(T, count).T, count).T
    # Decoupled, and above all that there is: the ones beyond come last.
    above = 2 * jnp.max(jnp.sum(jnp.abs(block), axis=1))
    above = jnp.where(above == 0, 1, above)
    filled = block + jnp.diag(jnp.where(there, 0, above).astype(T.dtype))
    values, vectors = eigh(filled)
    vectors = leading(leading(vectors, count).T, count).T
    return jnp.where(there, values, values[count - 1]), vectors


def _without(Y: Inexact[Array, "p k"], W: Inexact[Array, "q k"]):
    return W - matmul(matmul(W, Y.conj().T), Y)


def _unit_rows(x: Inexact[Array, "q k"]) -> Inexact[Array, "q k"]:
    lengths = jnp.linalg.norm(x, axis=1, keepdims=True)
    return x / jnp.where(lengths == 0, 1, lengths).astype(x.dtype)


@sequential_vmap
def _singular_vectors(block: Inexact[Array, "k p"]) -> tuple[Array, Array]:
    # Left ones, which tell what is rounding, as columns of Q and R do not.
    q, r = jnp.linalg.qr(block)
    u, sizes, _ = jnp.linalg.svd(r)
    return matmul(q, u), sizes


def coupling_of(
    left_out: LeftOut, vectors: Inexact[Array, "k k"], m: int
) -> Inexact[Array, "k k"]:
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
    """Weights on Ritz values of every leave-one-out sample.

    Sample i of a function is `sum_j samples[i, j] f(theta_j)`; `pairs_first[i]` is
    sample i with probe i + 1 left out as well, `pairs_second[i]` sample i + 1 with
    probe i left out.
    """

    samples: Float[Array, "m k"]
    pairs_first: Float[Array, "m k"]
    pairs_second: Float[Array, "m k"]


def sample_weights(left_out: LeftOut, vectors: Inexact[Array, "k k"]) -> SampleWeights:
    """The diagonals of `S^* C_i S`, for every lane's own matrix."""
    lanes, p, k = left_out.spaces.shape
    m = lanes // 2
    inside = matmul(left_out.spaces.reshape(-1, k), vectors.conj())
    of_spaces = jnp.sum(jnp.abs(inside.reshape(lanes, p, k)) ** 2, axis=1)

    def of(g):
        tested = jnp.abs(matmul(g, vectors.conj())) ** 2
        return of_spaces + left_out.dimensions[:, None] * tested

    own, following = of(left_out.own), of(left_out.following)
    return SampleWeights(own[:m], own[m:], following[m:])

r"""Leaving one starting vector out of a block Krylov space.

The space `K_s(Omega)` of m probes holds that of any m - 1 of them. In coordinates of
its basis the operator is the projected matrix T of order k = m s, so every space of
m - 1 or m - 2 probes is found by block Lanczos on T, without a product.

| name | shape | |
|---|---|---|
| T | (k, k) | projected matrix |
| omega | (k, m) | coordinates of the probes |
| Y | (k, (m - 1) s) | orthonormal basis of a space without one or two probes; zero columns where it has fewer dimensions |
| g | (k,) | `(I - Y Y^*) omega_i`, of the probe i left out |
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Inexact

from ._orthogonal import matmul


class LeftOut(NamedTuple):
    """Spaces without one probe, or without two, and what they leave of the probes.

    - `spaces`: `Y` of every lane: without probe i, and then without i and i + 1.
    - `alone[i]`: the unit vector along what space i leaves of probe i.
    - `first[i]`, `second[i]`: what the space without i and i + 1 leaves of each.
    - `dimensions`: of the complement, in all n dimensions, a number for each lane.
    """

    spaces: Inexact[Array, "l k p"]
    alone: Inexact[Array, "m k"]
    first: Inexact[Array, "m k"]
    second: Inexact[Array, "m k"]
    dimensions: Float[Array, " l"]


def leave_probes_out(
    T: Inexact[Array, "k k"], omega: Inexact[Array, "k m"], n: int
) -> LeftOut:
    """`LeftOut` for m >= 2 probes, in O(k^3 m) time and O(k^2 m) memory.

    Starting vectors are independent, so leaving one out leaves an independent space.
    A direction is kept if it is more than rounding: what depends on the probe left out
    must not enter its space, not even as noise.
    """
    k, m = omega.shape
    steps = k // m
    # The probes that are left out come last, as zeros: the factorisation below takes
    # columns in turn.
    rolled = jnp.stack([jnp.roll(omega, -(i + 1), axis=1) for i in range(m)])
    one_out = rolled[:, :, : m - 1]
    rolled = jnp.stack([jnp.roll(omega, -(i + 2), axis=1) for i in range(m)])
    two_out = rolled[:, :, : m - 1] * (jnp.arange(m - 1) < m - 2)
    starts = jnp.concatenate([one_out, two_out])
    lanes = 2 * m
    eps = jnp.finfo(T.dtype).eps
    tiny = 100 * eps

    def step(j, carry):
        Y, W, scale = carry
        W = _without(Y, _without(Y, W))
        Q, R = _qr(W)
        kept = jnp.abs(jnp.diagonal(R, axis1=1, axis2=2)) > tiny * scale
        Q = _without(Y, jnp.where(kept[:, None, :], Q, 0))
        lengths = jnp.linalg.norm(Q, axis=1, keepdims=True)
        Q = Q / jnp.where(lengths == 0, 1, lengths).astype(Q.dtype)
        Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (m - 1), 2)
        W = jnp.einsum("kj,ljp->lkp", T, Q, precision=jax.lax.Precision.HIGHEST)
        # Of the second block on, what is rounding is told by the size of T.
        return Y, W, jnp.linalg.norm(T)

    Y = jnp.zeros((lanes, k, (m - 1) * steps), T.dtype)
    carry = (Y, starts, jnp.linalg.norm(omega))
    Y, _, _ = jax.lax.fori_loop(0, steps, step, carry)
    ranks = jnp.sum(jnp.abs(Y) ** 2, axis=(1, 2))

    def left(spaces, probes):
        g = _without(spaces, _without(spaces, probes.T[:, :, None]))[:, :, 0]
        lengths = jnp.linalg.norm(g, axis=1, keepdims=True)
        return g / jnp.where(lengths == 0, 1, lengths).astype(g.dtype)

    following = jnp.roll(omega, -1, axis=1)
    return LeftOut(
        Y,
        left(Y[:m], omega),
        left(Y[m:], omega),
        left(Y[m:], following),
        n - jnp.round(jnp.real(ranks)),
    )


def _without(
    Y: Inexact[Array, "l k p"], W: Inexact[Array, "l k q"]
) -> Inexact[Array, "l k q"]:
    precision = jax.lax.Precision.HIGHEST
    inside = jnp.einsum("lkp,lkq->lpq", Y.conj(), W, precision=precision)
    return W - jnp.einsum("lkp,lpq->lkq", Y, inside, precision=precision)


@sequential_vmap
def _qr(blocks: Inexact[Array, "l k p"]) -> tuple[Array, Array]:
    # Of all lanes in one call.
    q, r = jnp.linalg.qr(blocks)
    return q, r


def coupling_of(
    left_out: LeftOut, vectors: Inexact[Array, "k k"]
) -> Inexact[Array, "k k"]:
    r"""`S^* C S` with `C = mean_i (Y_i Y_i^* + d_i g_i g_i^*)`, `E[K C K^*] = I`.

    With the unit vector `g_i`, uniform in the d_i-dimensional complement of the space
    without probe i, `E[d_i g_i g_i^*]` is the projector to that complement.
    """
    m = left_out.alone.shape[0]
    spaces, g = left_out.spaces[:m], left_out.alone
    weights = left_out.dimensions[:m].astype(g.dtype)
    k = vectors.shape[0]
    flat = jnp.moveaxis(spaces, 0, 1).reshape(k, -1)
    C = matmul(flat, flat.conj().T) + matmul(g.T * weights, g.conj())
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
    m = left_out.alone.shape[0]
    precision = jax.lax.Precision.HIGHEST
    inside = jnp.einsum(
        "kj,lkp->ljp", vectors.conj(), left_out.spaces, precision=precision
    )
    of_spaces = jnp.sum(jnp.abs(inside) ** 2, axis=2)

    def of(g, lanes):
        tested = jnp.abs(matmul(g, vectors.conj())) ** 2
        return of_spaces[lanes] + left_out.dimensions[lanes][:, None] * tested

    one, two = slice(None, m), slice(m, None)
    return SampleWeights(
        of(left_out.alone, one), of(left_out.first, two), of(left_out.second, two)
    )

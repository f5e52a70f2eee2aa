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

An array "3 m ..." is of samples and of pairs: of sample i, made with `C_i`; of sample i with
probe i + 1 left out as well; of sample i + 1 with probe i left out as well.

Fewer steps may be taken than T and omega, which are 0 beyond, have room for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from .dense import divisor, frobenius, leading, matmul, squares, svd
from .leave_one_out import PairedSamples
from .types import fori_loop

Steps = int | Int[Array, ""]
Samples = Inexact[Array, "3 m"]  # and those of pairs


class LeftOut(NamedTuple):
    """Spaces without probe i, and without i and i + 1; what they leave of the probes."""

    spaces: Inexact[Array, "2 m p k"]  # the columns of Y as rows
    tests: Inexact[Array, "3 m k"]  # g, of samples and of pairs
    dimensions: Float[Array, "2 m"]  # d


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
    # A lane leaves out one probe, or two. Its space starts from rows of omega^*, of which the
    # last is a row of zeros if two are left out, and is tested on two probes.
    lanes = [(i, number) for number in (1, 2) for i in range(m)]
    starts = [
        [*range(q), *(q + (i + j) % m for j in range(number, m)), width][: width - 1]
        for i, number in lanes
    ]
    tested = [(q + i, q + (i + 1) % m) for i, _ in lanes]
    rows = jnp.pad(omega.T, ((0, 1), (0, 0)))

    def lane(of_lane):
        start, tested = (rows[x] for x in of_lane)

        def step(j, carry):
            Y, W, scale = carry
            # Right singular vectors; the sizes tell what is rounding.
            _, sizes, new = svd(_without(Y, W))
            Q = _unit_rows(_without(Y, leading(new, sizes > tiny * scale)))
            Y = jax.lax.dynamic_update_slice_in_dim(Y, Q, j * (width - 1), 0)
            # Of the second block on, what is rounding is told by the size of T.
            return Y, matmul(Q, T.T), size

        Y = jnp.zeros(((width - 1) * (k // width), k), T.dtype)
        Y, _, _ = fori_loop(steps, step, (Y, start, frobenius(omega)))
        return Y, _tested(Y, tested), _complement(Y, n)

    indices = jnp.asarray(starts, jnp.int32), jnp.asarray(tested, jnp.int32)
    spaces, tests, dimensions = jax.lax.map(lane, indices)
    spaces, tests, dimensions = (
        x.reshape(2, m, *x.shape[1:]) for x in (spaces, tests, dimensions)
    )
    of_pairs = tests[1].swapaxes(0, 1)
    return LeftOut(spaces, jnp.concatenate([tests[:1, :, 0], of_pairs]), dimensions)


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
    return _coupling(*(x[0] for x in left_out))


def coupling_of_fewer(
    left_out: LeftOut, omega: Inexact[Array, "k qm"], n: int, steps: Steps
) -> Inexact[Array, "k k"]:
    """The same, of spaces of so many steps."""
    width, spaces = omega.shape[1], left_out.spaces[0]

    def lane(Y, probe):
        Y = leading(Y, jnp.arange(Y.shape[0], dtype=jnp.int32) < (width - 1) * steps)
        return Y, _tested(Y, probe[None])[0], _complement(Y, n)

    return _coupling(*jax.vmap(lane)(spaces, omega.T[width - len(spaces) :]))


def _coupling(spaces, g, dimensions) -> Inexact[Array, "k k"]:
    rows = spaces.reshape(-1, spaces.shape[-1])
    weights = dimensions[:, None].astype(g.dtype)
    return (matmul(rows.T, rows.conj()) + matmul(g.T, weights * g.conj())) / len(g)


def _of_pairs(x: Inexact[Array, "2 m *s"]) -> Inexact[Array, "3 m *s"]:
    """What spaces tell, of samples and of pairs."""
    return jnp.concatenate([x, x[1:]])


def sample_weights(
    left_out: LeftOut, vectors: Inexact[Array, "k c"]
) -> Float[Array, "3 m c"]:
    """The diagonals of `S^* C_i S`: weights of `tr(C_i S diag(f) S^*) = sum_j w_ij f_j`.

    S may be Ritz vectors; the first k rows of eigenvectors of an extension of T;
    coordinates of a block F, where the sums of the weights are `tr(C_i F F^*)`.
    """
    rows = left_out.spaces.reshape(-1, len(vectors))
    inside = squares(matmul(rows, vectors.conj()))
    inside = inside.reshape(*left_out.spaces.shape[:3], vectors.shape[1])
    return _of_pairs(jnp.sum(inside, axis=2)) + tested_weights(left_out, vectors)


def tested_weights(
    left_out: LeftOut, vectors: Inexact[Array, "k c"]
) -> Float[Array, "3 m c"]:
    """The part of `sample_weights` that is estimated, `d_i |g_i^* S|^2`."""
    d = _of_pairs(left_out.dimensions)[..., None]
    return d * squares(matmul(left_out.tests, vectors.conj()))


def sample_forms(
    left_out: LeftOut, B: Inexact[Array, "k k"]
) -> tuple[Samples, Samples]:
    """`tr(C_i B)`, and the part of it that is estimated."""
    spaces, tests, d = left_out

    def forms(rows):
        return jnp.sum(rows.conj() * matmul(rows, B.T), axis=-1)

    lanes = spaces.reshape(d.size, *spaces.shape[2:])
    known = jax.lax.map(lambda Y: jnp.sum(forms(Y)), lanes)
    tested = _of_pairs(d).astype(tests.dtype) * forms(tests)
    return _of_pairs(known.reshape(d.shape)) + tested, tested


def paired_samples(samples: Samples, magnitude: Float[Array, ""]) -> PairedSamples:
    """Samples with both neighbours as partners."""
    t, first, second = samples
    partners = jnp.roll(t, -1), jnp.roll(t, 1)
    without, swapped = (first, jnp.roll(second, 1)), (second, jnp.roll(first, 1))
    partners, without, swapped = (
        jnp.stack(x, axis=1) for x in (partners, without, swapped)
    )
    is_pair = jnp.ones(partners.shape, bool)
    return PairedSamples(t, partners, without, swapped, is_pair, magnitude)

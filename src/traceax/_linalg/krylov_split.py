r"""A Krylov basis that grows until tests that it knows nothing of advise against it.

For Hermitian operators a product with a basis vector serves twice: for the trace on the
basis, and for the next block of a Krylov space. The probes that it begins with are no
tests, so that all tests are independent of the basis, and of the decision below.

| symbol | shape | meaning |
|---|---|---|
| `W`, `Y` | n x p | tests, and their products |
| `Q` | n x l | an orthonormal basis of a block Krylov space, then zeros |
| `AQ` | n x l | its products |
| `rest` | n x p | `(I - Q Q^*) A (I - Q Q^*) W` |

*Multiplicity.* A Krylov space of b vectors finds b eigenvectors of an eigenvalue, however
many there are. `misses_multiples` sees that from Ritz values alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from .adaptive import Tests
from .krylov import Arnoldi, arnoldi_start, arnoldi_step
from .small import eigh, matmul, squares
from .tall import column_dots, combine, inner, put

Product = Callable[[Inexact[Array, "n b"]], Inexact[Array, "n b"]]
# A Ritz pair has converged to a cluster of eigenvalues if its residual, and the distance to
# other Ritz values of the cluster, are at most this part of it.
_CLOSE = 0.1


class Space(NamedTuple):
    """A Krylov space of `steps` blocks, and the products with it."""

    run: Arnoldi
    AQ: Inexact[Array, "n l"]
    steps: Int[Array, ""]

    @property
    def Q(self) -> Inexact[Array, "n l"]:
        return self.run.basis

    def scaled(self, factor: Inexact[Array, ""]) -> "Space":
        """That of a multiple of the operator."""
        pending = self.run.pending * factor
        return Space(self.run._replace(pending=pending), self.AQ * factor, self.steps)


def begin(product: Product, start: Inexact[Array, "n b"], most: int, steps: int):
    """So many of at most `most` steps."""
    run = arnoldi_start(start, most)
    space = Space(run, jnp.zeros_like(run.basis), jnp.zeros((), int))
    return jax.lax.fori_loop(0, steps, lambda _, x: another(product, x), space)


def another(product: Product, space: Space) -> Space:
    """One more step."""
    run, AQ, steps = space
    width = run.pending.shape[1]
    run = arnoldi_step(product, run, steps)
    return Space(run, put(AQ, run.pending, steps * width), steps + 1)


def misses_multiples(
    space: Space, start: Inexact[Array, "n b"], size: int
) -> Bool[Array, ""]:
    r"""Whether most of what a Krylov space leaves will stay out of its reach.

    From the first `size` columns of its basis. A Ritz pair `(theta, u)` stands for
    `omega = sum_j |w_j^* u|^2 / b` eigenvalues, by Gauss quadrature. Where b or more Ritz
    values cluster, and their residuals are small, they are eigenvectors of eigenvalues
    that are equal as far as the space can tell, and all but b of the cluster will be
    missed. Their energy `sum (omega - 1) (theta - mean)^2` is compared with that of Ritz
    values that haven't converged, which a larger space will find.
    """
    n, b = start.shape
    Q, AQ = space.Q[:, :size], space.AQ[:, :size]
    T = inner(Q, AQ)
    theta, U = eigh((T + T.conj().T) / 2)
    beyond = space.run.pending - combine(Q, inner(Q, space.run.pending))
    residual = jnp.sqrt(jnp.sum(squares(combine(beyond, U[-b:])), axis=0))
    omega = jnp.sum(squares(matmul(inner(start, Q), U)), axis=0) / b
    theta = theta - jnp.sum(omega * theta) / n
    width = _CLOSE * jnp.abs(theta)
    converged = residual < width
    near = jnp.abs(theta[:, None] - theta[None, :]) < width[:, None]
    near = near & converged[:, None] & converged[None, :]
    cluster = jnp.sum(near, axis=1) >= b
    cluster = cluster & (jnp.sum(jnp.where(near, omega[None, :], 0), axis=1) > 2 * b)
    left = jnp.maximum(omega - 1, 0) * theta**2
    missed = jnp.sum(jnp.where(cluster, left, 0))
    return missed > jnp.sum(jnp.where(converged, 0, left))


def grow(
    product: Product,
    space: Space,
    W: Inexact[Array, "n p"],
    Y: Inexact[Array, "n p"],
    k: int,
) -> tuple[Space, Int[Array, " p"], Float[Array, " p"]]:
    r"""The space when all tests have stopped it; when each of the others did, for each.

    And the energy that is left then. With `r_j` the rest of test j after s steps, and
    means over all tests but i,

        E = |r_j|^2 - |w_j^* r_j|^2 / (n - b s)

    is the energy less that of a multiple of the identity, and `E / (k - b s)` the
    variance that is predicted. Test i stops the space when that hasn't fallen for a while.
    So steps are added one after the other, and no more is known when one is added than
    without test i.
    """
    n, p = W.shape
    b = space.run.pending.shape[1]
    most = space.Q.shape[1] // b - 1  # some probes are fresh
    patience, real = max(2, round(k / (8 * b))), jnp.finfo(W.dtype).dtype

    def others(x):
        return (jnp.sum(x) - x) / (p - 1)

    def predict(rest, steps):
        rank = (b * steps).astype(real)
        energy = others(column_dots(rest, rest).real)
        known = squares(others(column_dots(W, rest))) / (n - rank)
        energy = jnp.maximum(energy - known, energy / 1000)
        return energy / (k - rank), energy

    def going(carry):
        space, *_, stop = carry
        return jnp.any(stop < 0) & (space.steps < most)

    def step(carry):
        space, rest, best, left, at, stop = carry
        space = another(product, space)
        Q, AX, steps = space.Q, space.run.pending, space.steps
        X = jax.lax.dynamic_slice_in_dim(Q.T, (steps - 1) * b, b).T
        rest = rest - combine(X, inner(X, rest))
        rest = rest - combine(AX - combine(Q, inner(Q, AX)), inner(X, W))
        predicted, energy = predict(rest, steps)
        better = predicted < best
        best, at = jnp.where(better, predicted, best), jnp.where(better, steps, at)
        stopping = (stop < 0) & ((steps - at >= patience) | (steps == most))
        return (
            space,
            rest,
            best,
            jnp.where(stopping, energy, left),
            at,
            jnp.where(stopping, steps, stop),
        )

    Q, steps = space.Q, space.steps
    rest = Y - combine(space.AQ, inner(Q, W))
    rest = rest - combine(Q, inner(Q, rest))
    best, energy = predict(rest, steps)
    at = jnp.broadcast_to(steps, (p,))
    carry = space, rest, best, energy, at, jnp.full_like(at, -1)
    space, _, _, energy, _, stop = jax.lax.while_loop(going, step, carry)
    return space, stop, energy


def multiply_fresh(
    product: Product, X: Inexact[Array, "n l"], space: Space
) -> Inexact[Array, "n l"]:
    """`A X`, of which the products with the basis are known."""
    b, width = space.run.pending.shape[1], X.shape[1]

    def more(done):
        AX, at = done
        some = jax.lax.dynamic_slice_in_dim(X.T, at, b).T
        return put(AX, product(some), at), at + b

    done = space.AQ, b * space.steps
    return jax.lax.while_loop(lambda done: done[1] < width, more, done)[0]


def krylov_tests(stop: Int[Array, " p"], b: int, width: int, dtype) -> list[Tests]:
    """The first tests, each with the basis of its own stop, and the fresh ones."""
    (p,) = stop.shape
    column, real = jnp.arange(width), jnp.finfo(dtype).dtype
    rank, largest = b * stop, b * jnp.max(stop)
    share = ((width - rank) / (p + width - rank)).astype(real)
    fresh, number = column >= largest, (width - largest).astype(real)
    itself = jnp.eye(p, dtype=bool)
    first = Tests(
        column[None, :] < rank[:, None],
        jnp.zeros((p, width, 1), dtype),
        ~itself[:, None, :],
        jnp.where(itself, ((1 - share) / p)[:, None], 0)[:, None, :],
    )
    last = jnp.where(fresh, jnp.mean(share) / number, 0)
    second = Tests(
        ~fresh[None, :],
        jnp.zeros((1, width, 1), dtype),
        (jnp.arange(p + width) < p)[None, None, :],
        jnp.pad(last, (p, 0))[None, None, :],
    )
    return [first, second]

r"""A Krylov basis that grows until tests that it knows nothing of advise against it.

For Hermitian operators a product with a basis vector serves twice: for the trace on the
basis, and for the next block of a Krylov space. The probes that it begins with are no
tests, so that all tests are independent of the basis.

| symbol | shape | meaning |
|---|---|---|
| `W`, `Y` | n x p | tests, and their products |
| `X`, `AX` | n x l | what is multiplied, b columns at a time, and its products |
| `Q` | n x b s | the first s blocks of X, an orthonormal basis; the others are fresh tests |
| `rest` | n x p | `(I - Q Q^*) A (I - Q Q^*) W` |

*Multiplicity.* A Krylov space of b vectors finds b eigenvectors of an eigenvalue, however
many there are. So images of random vectors are kept beside those of the last block, less
what the basis knows. Where they have much more energy they are followed, and others kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from .adaptive import Tests
from .krylov import Product
from .small import squares
from .tall import column_dots, combine, extend, inner, put

# How much more energy images of random vectors have when they are followed. What Krylov
# spaces find next costs half as many products.
_MUCH = 4.0
# Steps at which vectors are random in any case: images of older ones have been followed in
# part, by what the basis knows.
_LOOKS = (2, 8, 26, 80)
# A basis is stopped where the variance is that much larger than it was so many steps ago.
_WORSE, _STEPS = 1.2, 3


class Growth(NamedTuple):
    """How a basis grows.

    - `deep`: what the basis leaves of the products with the last block that was followed.
    - `random`: the same of random vectors; `holding`: whether there are such.
    - `best`, `at`: the least variance predicted without each test, and after which step.
    - `stop`, `energy`: when each was stopped by the others, -1 before, and what is left.
    """

    rest: Inexact[Array, "n p"]
    deep: Inexact[Array, "n b"]
    random: Inexact[Array, "n b"]
    holding: Bool[Array, ""]
    best: Float[Array, " p"]
    at: Int[Array, " p"]
    stop: Int[Array, " p"]
    energy: Float[Array, " p"]


class Split(NamedTuple):
    """How a budget was spent: on `b max(stop)` vectors of a basis, and on fresh tests."""

    X: Inexact[Array, "n l"]
    AX: Inexact[Array, "n l"]
    stop: Int[Array, " p"]
    energy: Float[Array, " p"]


def split_budget(
    product: Product,
    W: Inexact[Array, "n p"],
    Y: Inexact[Array, "n p"],
    probes: Inexact[Array, "n l"],
    b: int,
) -> Split:
    r"""Spends as many products as there are probes on a basis, and then on fresh tests.

    With `r_j` the rest of test j after s steps, and means over all tests but i,

        E = |r_j|^2 - |w_j^* r_j|^2 / (n - b s)

    is the energy less that of a multiple of the identity, and `E / (p + l - b s)` the
    variance that is predicted. Test i stops the basis when that has risen for a while.
    So steps are added one after the other, and no more is known when one is added than
    without test i.
    """
    (n, most), p = probes.shape, W.shape[1]
    steps, real = most // b, jnp.finfo(W.dtype).dtype

    def others(x):
        return (jnp.sum(x) - x) / (p - 1)

    def predict(rest, spent):
        rank = jnp.asarray(b * spent, real)
        energy = others(column_dots(rest, rest).real)
        known = squares(others(column_dots(W, rest))) / (n - rank)
        energy = jnp.maximum(energy - known, energy / 1000)
        return energy / (p + most - rank), energy

    def step(j, carry):
        X, AX, now = carry
        going = jnp.any(now.stop < 0)
        fresh = jax.lax.dynamic_slice_in_dim(probes.T, j * b, b).T
        look = ~now.holding | jnp.any(j == jnp.asarray(_LOOKS))
        deeper = _MUCH * jnp.sum(squares(now.deep)) >= jnp.sum(squares(now.random))
        source = jnp.where(deeper, now.deep, now.random)
        source = jnp.where(look, fresh, source)
        # Before that the basis is all that X holds.
        new = jax.lax.cond(going, lambda: extend(X, source, j * b)[0], lambda: fresh)
        image = product(new)
        X, AX = put(X, new, j * b), put(AX, image, j * b)

        def grown():
            return grow(now, X, new, image, look, deeper, j)

        return X, AX, jax.lax.cond(going, grown, lambda: now)

    def grow(now: Growth, Q, X, AX, look, deeper, j) -> Growth:
        spent, image = j + 1, AX - combine(Q, inner(Q, AX))

        def left(block):
            return block - combine(X, inner(X, block))

        rest = left(now.rest) - combine(image, inner(X, W))
        predicted, energy = predict(rest, spent)
        better = predicted < now.best
        at = jnp.where(better, spent, now.at)
        worse = (predicted > _WORSE * now.best) & (spent - at >= _STEPS)
        # Some probes are fresh.
        stopping = (now.stop < 0) & (worse | (spent == steps - 1))
        return Growth(
            rest,
            jnp.where(look, left(now.deep), image),
            jnp.where(look, image, left(now.random)),
            look | deeper,
            jnp.where(better, predicted, now.best),
            at,
            jnp.where(stopping, spent, now.stop),
            jnp.where(stopping, energy, now.energy),
        )

    best, energy = predict(Y, 0)
    nothing, start = jnp.zeros_like(probes), jnp.zeros(p, int)
    none, holding = jnp.zeros_like(probes.T[:b].T), jnp.array(False)
    begun = Growth(Y, none, none, holding, best, start, start - 1, energy)
    X, AX, end = jax.lax.fori_loop(0, steps, step, (nothing, nothing, begun))
    return Split(X, AX, end.stop, end.energy)


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

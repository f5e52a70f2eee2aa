r"""Control variates of leave-one-out samples: what is known exactly of their weights.

Sample i of `tr f(A)` is `tr(C_i f)`, and for any matrix M of known trace `tr(C_i M)` has
the mean `tr M`. So `sample_i - c_i (tr(C_i M) - tr M)` has the same mean, for a slope
`c_i` that doesn't depend on probe i, and the noise of `f - c M` on what the spaces
without a probe leave. Slopes are taken from tests of the two neighbours of probe i, in the
spaces without both. M is the operator, of which the projected matrix is in hand; or, with
a preconditioner of columns, the projector Pi to their range, where `log(B)` is about 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact

from .._linalg.left_out_krylov import (
    LeftOut,
    PerSample,
    sample_weights,
    tested_weights,
)
from .._linalg.small import divisor, matmul, squares
from .._linalg.tall import power_of_two_scale
from .function import SpectralFunction, derivative, weighted_sums

# Standard errors that the mean of a control is away from 0 by chance: of three samples in 1 %.
_CHANCE = 10


class ColumnControl(NamedTuple):
    """What is known of every sample's weight on the range of columns.

    - `excess`: of `tr(C_i Pi)`, over `tr Pi`.
    - `outside`: the dimensions outside of Pi that a space without two probes leaves.
    """

    excess: PerSample
    outside: Float[Array, " m"]

    def of(self, tested: PerSample) -> PerSample:
        """What is to be added to samples whose estimated parts these are."""
        outside = self.outside.astype(tested.samples.dtype)
        first, second = tested.pairs_first / outside, tested.pairs_second / outside
        slopes = _of_neighbours(first, second)
        return _times(self.excess, slopes, jnp.mean(first + second) / 2)


def of_columns(
    inside: Inexact[Array, "r k"],
    trace_inside: Float[Array, ""],
    left_out: LeftOut,
    S: Inexact[Array, "k p"],
    leaves: list[Inexact[Array, " p"]],
) -> tuple[list[PerSample], Inexact[Array, "p p"], ColumnControl]:
    r"""What is to be added to the samples of every leaf, by the range of columns; and to
    the coupling, so that derivatives are of what is estimated.

    A test g of a complement of d dimensions, which holds `r_i = r - tr(P_i Pi)` of Pi,
    estimates the total there by `d g^* f g`, and `r_i` by `d g^* Pi g`. The total spreads
    over the `d - r_i` dimensions outside of Pi, so that a sample is too small by

        d g^* f g / (d - r_i) (d g^* Pi g - r_i) .
    """
    inside = inside.conj().T
    tested, excess = (
        jtu.tree_map(lambda x: jnp.sum(x, axis=1), of(left_out, inside))
        for of in (tested_weights, sample_weights)
    )
    excess = jtu.tree_map(lambda x: x - trace_inside, excess)
    # `d - r_i` of the spaces without two probes.
    m = len(tested.samples)
    d = left_out.dimensions[m:]
    outside = jnp.maximum(d - (tested.pairs_first - excess.pairs_first), 1)
    unfound, control = tested_weights(left_out, S), ColumnControl(excess, outside)

    def of_leaf(f):
        return control.of(jtu.tree_map(lambda x: weighted_sums(x, f), unfound))

    def coupling(g, excess):
        g = matmul(g, S.conj())
        weights = d / outside * excess / (2 * m)
        return matmul(g.T, weights[:, None].astype(g.dtype) * g.conj())

    # Every test is of a neighbour.
    of_pairs = coupling(left_out.own[m:], jnp.roll(excess.samples, -1)) + coupling(
        left_out.following, excess.samples
    )
    return [of_leaf(f) for f in leaves], of_pairs, control


def of_trace(
    trace: Float[Array, ""],
    left_out: LeftOut,
    weights: PerSample,
    theta: Float[Array, " p"],
    S: Inexact[Array, "k p"],
    function: SpectralFunction,
) -> tuple[list[PerSample], list[Float[Array, ""]]]:
    r"""What is to be added to the samples of every leaf, by the trace of the operator; and
    the size of what cancels in it: nothing where its rounding is more than samples differ by.

    With a test g of the complement of a space Y, `P = I - Y Y^*`, the slope is

        c = (E[g^* T P f g] - E[g^* T g] E[g^* f g]) / (E|P T g|^2 - E[g^* T g]^2) ,

    in the spaces without two probes; in those without one it is as much smaller or larger
    as f' is at the mean `(tr A - tr Y^* T Y) / d` of the spectrum there, which is known.
    """
    m, leaves = len(weights.samples), function(theta)
    # Squares neither overflow nor underflow.
    scale = power_of_two_scale(theta)
    theta, trace = theta / scale, trace / scale
    excess = jtu.tree_map(lambda x: weighted_sums(x, theta) - trace, weights)
    tested = jtu.tree_map(
        lambda x: weighted_sums(x, theta), tested_weights(left_out, S)
    )
    d = left_out.dimensions

    def slopes_at_mean(tested, excess, d):
        mean = (tested - excess) / jnp.maximum(d, 1)
        # Rounding must not take it out of the function's domain.
        mean = jnp.clip(mean, jnp.min(theta), jnp.max(theta))
        return derivative(function, mean * scale)

    slopes = slopes_at_mean(tested.samples, excess.samples, d[:m])
    slopes_of_pairs = slopes_at_mean(tested.pairs_first, excess.pairs_first, d[m:])
    # Coordinates of tests in Ritz vectors.
    tests = [matmul(g, S.conj()) for g in (left_out.own[m:], left_out.following)]
    spaces = left_out.spaces[m:].conj()

    def inside(f, u):
        """What Y holds of products of tests with `S diag(f) S^*`."""
        products = matmul(f.astype(u.dtype)[None, :] * u, S.T)
        return jnp.einsum("lpk,lk->lp", spaces, products, precision="highest")

    def mean(f):
        return _of_neighbours(*(weighted_sums(squares(u), f) for u in tests))

    def product(f):
        held = [jnp.real(inside(theta, u).conj() * inside(f, u)) for u in tests]
        return mean(theta * f) - _of_neighbours(*(jnp.sum(x, axis=1) for x in held))

    eps = jnp.finfo(theta.dtype).eps
    beta, b_b = mean(theta), product(theta)
    variance = b_b - beta**2
    # That of rounding gives no slope.
    varies = variance > 1e3 * eps * jnp.maximum(b_b, beta**2)

    def slope_of(f):
        if jnp.iscomplexobj(f):
            return jax.lax.complex(slope_of(f.real), slope_of(f.imag))
        f = f.astype(theta.dtype)
        c = (product(f) - mean(f) * beta) / jnp.where(varies, variance, 1)
        return jnp.where(varies & jnp.isfinite(c), c, 0)

    def of_leaf(f, slope, slope_of_pairs):
        c = slope_of(f)
        of_pairs = _of_neighbours(slope_of_pairs, slope_of_pairs)
        ratio = jnp.real(slope / divisor(of_pairs))
        ratio = jnp.where(jnp.isfinite(ratio), jnp.clip(ratio, 0.25, 4), 1)
        size = jnp.mean(jnp.abs(c)) * magnitude
        samples = weighted_sums(weights.samples, f)
        spread = _deviation(samples) / m**0.5
        seen = 4 * eps * size < spread.astype(size.dtype)
        c = jnp.where(seen, -c, 0).astype(samples.dtype)
        control = _times(excess, c * ratio.astype(c.dtype), jnp.mean(c))
        return control, jnp.where(seen, size, 0).astype(spread.dtype)

    magnitude = weighted_sums(weights.samples, jnp.abs(theta)).mean()
    per_leaf = zip(leaves, slopes, slopes_of_pairs, strict=True)
    controls, sizes = zip(*(of_leaf(*of) for of in per_leaf), strict=True)
    return list(controls), list(sizes)


def bias_of(control: PerSample) -> Float[Array, ""]:
    """How much samples are off by together, as the mean of a control shows; else 0.

    It is far from 0 where rounding carried a probe into the spaces that leave it out, as
    along many equal eigenvalues, far from all others, that were found long before.
    """
    samples = control.samples
    mean, error = jnp.mean(samples), _deviation(samples) / (len(samples) - 1) ** 0.5
    return jnp.where(jnp.abs(mean) > _CHANCE * error, jnp.abs(mean), 0)


def _deviation(x: Inexact[Array, " m"]) -> Float[Array, ""]:
    """The root mean square distance from the mean."""
    scale = power_of_two_scale(x)
    unit = x / scale.astype(x.dtype)
    return scale * jnp.sqrt(jnp.mean(squares(unit - jnp.mean(unit))))


def _of_neighbours(first: Array, second: Array) -> Array:
    """The means over tests of probes i - 1 and i + 1 in spaces without probe i.

    `first[i]` is of probe i, and `second[i]` of probe i + 1, in the space without both.
    """
    return (second + jnp.roll(first, 1)) / 2


def _times(excess: PerSample, c: Array, mean: Array) -> PerSample:
    samples, first, second = (x.astype(c.dtype) for x in excess)
    return PerSample(c * samples, mean * first, mean * second)

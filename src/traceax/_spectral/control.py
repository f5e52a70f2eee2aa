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
from jaxtyping import Array, Float, Inexact

from .._linalg.left_out_krylov import (
    LeftOut,
    Samples,
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

    excess: Float[Array, "3 m"]
    outside: Float[Array, " m"]

    def of(self, tested: Samples) -> Samples:
        """What is to be added to samples whose estimated parts these are."""
        slopes = tested[1:] / self.outside.astype(tested.dtype)[None]
        return _times(self.excess, _of_neighbours(slopes), jnp.mean(slopes))


def of_columns(
    inside: Inexact[Array, "r k"],
    trace_inside: Float[Array, ""],
    left_out: LeftOut,
    S: Inexact[Array, "k p"],
    leaves: list[Inexact[Array, " p"]],
) -> tuple[list[Samples], Inexact[Array, "p p"], ColumnControl]:
    r"""What is to be added to the samples of every leaf, by the range of columns; and to
    the coupling, so that derivatives are of what is estimated.

    A test g of a complement of d dimensions, which holds `r_i = r - tr(P_i Pi)` of Pi,
    estimates the total there by `d g^* f g`, and `r_i` by `d g^* Pi g`. The total spreads
    over the `d - r_i` dimensions outside of Pi, so that a sample is too small by

        d g^* f g / (d - r_i) (d g^* Pi g - r_i) .
    """
    inside = inside.conj().T
    tested, excess = (
        jnp.sum(of(left_out, inside), axis=2) for of in (tested_weights, sample_weights)
    )
    excess = excess - trace_inside
    # `d - r_i` of the spaces without two probes.
    d = left_out.dimensions[1]
    outside = jnp.maximum(d - (tested[1] - excess[1]), 1)
    unfound, control = tested_weights(left_out, S), ColumnControl(excess, outside)
    # Every test is of a neighbour.
    of_tested = jnp.stack([jnp.roll(excess[0], -1), excess[0]])
    weights = ((d / outside)[None] * of_tested / of_tested.size).reshape(-1, 1)
    g = matmul(left_out.tests[1:].reshape(-1, len(S)), S.conj())
    of_pairs = matmul(g.T, weights.astype(g.dtype) * g.conj())
    controls = [control.of(weighted_sums(unfound, f)) for f in leaves]
    return controls, of_pairs, control


def of_trace(
    trace: Float[Array, ""],
    left_out: LeftOut,
    weights: Float[Array, "3 m p"],
    theta: Float[Array, " p"],
    S: Inexact[Array, "k p"],
    function: SpectralFunction,
) -> tuple[list[Samples], list[Float[Array, ""]]]:
    r"""What is to be added to the samples of every leaf, by the trace of the operator; and
    the size of what cancels in it: nothing where its rounding is more than samples differ by.

    With a test g of the complement of a space Y, `P = I - Y Y^*`, the slope is

        c = (E[g^* T P f g] - E[g^* T g] E[g^* f g]) / (E|P T g|^2 - E[g^* T g]^2) ,

    in the spaces without two probes; in those without one it is as much smaller or larger
    as f' is at the mean `(tr A - tr Y^* T Y) / d` of the spectrum there, which is known.
    """
    leaves = function(theta)
    # Squares neither overflow nor underflow.
    scale = power_of_two_scale(theta)
    theta, trace = theta / scale, trace / scale
    excess = weighted_sums(weights, theta) - trace
    tested = weighted_sums(tested_weights(left_out, S), theta)
    means = (tested - excess)[:2] / jnp.maximum(left_out.dimensions, 1)
    # Rounding must not take them out of the function's domain.
    means = jnp.clip(means, jnp.min(theta), jnp.max(theta))
    # Tests of pairs, in Ritz vectors.
    u, spaces = matmul(left_out.tests[1:], S.conj()), left_out.spaces[1].conj()

    def inside(f):
        """What Y holds of products of tests with `S diag(f) S^*`."""
        products = matmul(u, f.astype(u.dtype)[:, None] * S.T)
        return jnp.einsum("mpk,tmk->tmp", spaces, products, precision="highest")

    def mean(f):
        return _of_neighbours(weighted_sums(squares(u), f))

    def product(f):
        held = jnp.sum(jnp.real(of_theta.conj() * inside(f)), axis=2)
        return mean(theta * f) - _of_neighbours(held)

    of_theta = inside(theta)
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

    def of_leaf(f, at_mean):
        c = slope_of(f)
        of_pairs = _of_neighbours(jnp.stack([at_mean[1], at_mean[1]]))
        ratio = jnp.real(at_mean[0] / divisor(of_pairs))
        ratio = jnp.where(jnp.isfinite(ratio), jnp.clip(ratio, 0.25, 4), 1)
        size = jnp.mean(jnp.abs(c)) * magnitude
        samples = weighted_sums(weights[0], f)
        spread = _deviation(samples) / len(samples) ** 0.5
        seen = 4 * eps * size < spread.astype(size.dtype)
        c = jnp.where(seen, -c, 0).astype(samples.dtype)
        control = _times(excess, c * ratio.astype(c.dtype), jnp.mean(c))
        return control, jnp.where(seen, size, 0).astype(spread.dtype)

    magnitude = weighted_sums(weights[0], jnp.abs(theta)).mean()
    per_leaf = zip(leaves, derivative(function, means * scale), strict=True)
    controls, sizes = zip(*(of_leaf(*of) for of in per_leaf), strict=True)
    return list(controls), list(sizes)


def bias_of(control: Samples) -> Float[Array, ""]:
    """How much samples are off by together, as the mean of a control shows; else 0.

    It is far from 0 where rounding carried a probe into the spaces that leave it out, as
    along many equal eigenvalues, far from all others, that were found long before.
    """
    samples = control[0]
    mean, error = jnp.mean(samples), _deviation(samples) / (len(samples) - 1) ** 0.5
    return jnp.where(jnp.abs(mean) > _CHANCE * error, jnp.abs(mean), 0)


def _deviation(x: Inexact[Array, " m"]) -> Float[Array, ""]:
    """The root mean square distance from the mean."""
    scale = power_of_two_scale(x)
    unit = x / scale.astype(x.dtype)
    return scale * jnp.sqrt(jnp.mean(squares(unit - jnp.mean(unit))))


def _of_neighbours(pairs: Inexact[Array, "2 m"]) -> Inexact[Array, " m"]:
    """The means over tests of probes i - 1 and i + 1 in spaces without probe i.

    Of the space without probes i and i + 1, the first are of i, the second of i + 1.
    """
    return (pairs[1] + jnp.roll(pairs[0], 1)) / 2


def _times(excess: Float[Array, "3 m"], c: Array, mean: Array) -> Samples:
    of_pairs = jnp.full_like(c, mean)
    return jnp.stack([c, of_pairs, of_pairs]) * excess.astype(c.dtype)

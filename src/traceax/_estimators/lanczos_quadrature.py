"""Stochastic Lanczos quadrature."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .._frechet import lanczos_blocks
from .._krylov import lanczos
from .._operator import apply_block, space_of
from .._orthogonal import inner, largest_entry
from .._samplers import RademacherSampler, Sampler, check_sampler, draw_probes
from .._small_matrices import eigh
from .._spectral_base import (
    SpectralEstimator,
    SpectralOutcome,
    check_probes,
    probes_and_steps,
    ritz_values,
    rounding_errors,
    weighted_sums,
)
from .._standard_error import independent_samples
from .._stream import without_numpy


class LanczosQuadratureEstimator(SpectralEstimator):
    r"""Stochastic Lanczos quadrature: the mean of `w_j^* f(A) w_j` over m probes.

    Each form is a Gauss quadrature, whose nodes and weights come from s steps of
    Lanczos from the probe.

    *Use when* the spectrum is flat, so that there is nothing to find in it, or when
    O(n k^2) work beyond the products is too much: that of a probe is O(n s^2), on its
    own. Everywhere else [`traceax.KrylovAwareEstimator`][] is more accurate.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, k less at most 2 |
    | beyond the products | O(n k s) time, three n x k blocks; derivatives hold five |
    | bias | of the quadrature; none where f is a polynomial of degree 2 s - 1 |
    | standard error | of probes, from their spread; and of the quadrature, from its last steps or a bracket (below) |
    | derivative | `tr((F o C) V^* dA V)` with the Ritz vectors V of all probes, k products with dA; second ones take 4 k more |

    *The error of the quadrature* is extrapolated from its last steps. Where a number is
    known that no eigenvalue is below (a shift of a semidefinite operator, in
    [`traceax.logdet`][]) it is the distance between Gauss and Gauss-Radau rules instead,
    which bracket the truth if derivatives of the function alternate in sign.

    **Arguments:**

    - `num_probes`: m. By default about `0.9 sqrt(k)`.
    - `sampler`: of the probes; [`traceax.RademacherSampler`][] by default.

    **Reference:** Golub and Meurant, "Matrices, Moments and Quadrature with
    Applications" (2010), doi:10.1515/9781400833889; Ubaru, Chen and Saad, "Fast
    Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", SIAM J. Matrix Anal.
    Appl. 38 (2017), doi:10.1137/16M1104974.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = RademacherSampler()

    def __check_init__(self):
        name = type(self).__name__
        check_probes(self.num_probes, name)
        check_sampler(self.sampler, name, independent=True)

    def compute(self, state, k):
        operator, function = state.operator, state.function
        space = space_of(operator)
        n = space.size
        m, steps = probes_and_steps(self.num_probes, k)
        Omega = draw_probes(self.sampler, state.key, m, space)
        krylov = lanczos(lambda X: apply_block(operator, X), Omega, steps)
        blocks = lanczos_blocks(krylov)
        flat, result = ritz_values(blocks.values, krylov.asymmetry, operator)
        V = blocks.basis
        squares = m * jnp.real(jnp.diagonal(blocks.coupling)).reshape(m, steps)
        # What the forms are made of, between probes: for the skewness of samples.
        across = inner(Omega, V).reshape(m, m, steps)
        own = jnp.einsum("iir->ir", across)
        gram_weights = across * own.conj()[None]
        rounding = rounding_errors(function, flat, squares.reshape(-1) / m)
        if state.lower is None or steps == 1:
            quadrature = _quadrature_errors(function, krylov, flat)
        else:
            quadrature = _bracket(function, krylov, flat, squares, state.lower)
        leaves, errors, freedoms = [], [], []
        others = zip(quadrature, rounding, strict=True)
        for leaf, (change, rounded) in zip(function(flat), others, strict=True):
            f = leaf.reshape(m, steps)
            samples = weighted_sums(squares, f)
            # A multiple of the identity has no part in the spread. In a unit in which
            # squares neither over- nor underflow.
            varying = f - jnp.mean(samples) / n
            unit = largest_entry(varying)
            unit = jnp.where(unit == 0, 1, unit)
            varying = varying / unit.astype(f.dtype)
            norms = unit * jnp.sqrt(weighted_sums(squares, jnp.abs(varying) ** 2))
            grams = weighted_sums(gram_weights[:16, :16], varying[None, :16])
            bar = independent_samples(samples, norms, grams[None])
            leaves.append(bar.mean)
            error = jnp.hypot(bar.standard_error, change)
            errors.append(jnp.hypot(error, rounded))
            freedoms.append(bar.degrees_of_freedom)
        stats = {
            "num_matvecs": m * steps,
            "result": result,
            "largest_product": krylov.largest_product,
        }
        blocks = eqx.tree_at(lambda b: b.values, blocks, flat)
        return SpectralOutcome(leaves, errors, freedoms, stats, blocks)


def _rule(krylov, projected):
    """Nodes and weights of the quadrature of each starting vector."""
    nodes, vectors = jax.vmap(eigh)(projected)
    return nodes, krylov.norms[:, None] ** 2 * vectors[:, 0, :] ** 2


def _bracket(function, krylov, values, gauss_weights, lower):
    """How far Gauss rules are from Gauss-Radau rules with a node at `lower`.

    For a function whose derivatives alternate in sign, such as a logarithm or an
    inverse, the truth lies between the two.
    """
    projected = krylov.projected
    theta, vectors = jax.vmap(eigh)(projected[:, :-1, :-1])
    beta = projected[:, -1, -2]
    distance = theta - lower
    # A Ritz value at the end of the spectrum is that end: there is nothing to add.
    tiny = jnp.finfo(theta.dtype).eps * jnp.max(jnp.abs(theta))
    safe = jnp.where(distance > tiny, distance, 1)
    terms = jnp.where(distance > tiny, vectors[:, -1, :] ** 2 / safe, 0)
    last = lower + beta**2 * jnp.sum(terms, axis=1)
    nodes, weights = _rule(krylov, projected.at[:, -1, -1].set(last))
    radau = function(jnp.maximum(nodes, lower))
    gauss = function(values.reshape(nodes.shape))
    return [
        jnp.abs(jnp.mean(weighted_sums(gauss_weights, f) - weighted_sums(weights, g)))
        for f, g in zip(gauss, radau, strict=True)
    ]


def _quadrature_errors(function, krylov, values):
    """How far the mean is from its limit in the number of steps, of each leaf.

    With h a third of the steps, the last h of them changed the mean by b and the h
    before by a. If every h steps leave the fraction `r = b / a` of the error, what is
    left is `b r / (1 - r)`. NaN for a single step, which tells nothing.
    """
    steps = krylov.projected.shape[1]
    if steps == 1:
        return [jnp.full((), jnp.nan) for _ in function(values)]
    h = max(steps // 3, 1)
    low, high = jnp.min(values), jnp.max(values)

    def means(s):
        nodes, weights = _rule(krylov, krylov.projected[:, :s, :s])
        # Rounding must not take a node out of the function's domain.
        leaves = function(jnp.clip(nodes, low, high))
        return [jnp.mean(weighted_sums(weights, f)) for f in leaves]

    depths = [steps, steps - h, steps - 2 * h]
    known = [means(s) for s in depths if s >= 1]
    errors = []
    for means_of_leaf in zip(*known, strict=True):
        b = jnp.abs(means_of_leaf[0] - means_of_leaf[1])
        if len(means_of_leaf) < 3:
            errors.append(b)
            continue
        a = jnp.abs(means_of_leaf[1] - means_of_leaf[2])
        ratio = jnp.clip(b / jnp.where(a == 0, 1, a), 0, 0.9)
        errors.append(b * ratio / (1 - ratio))
    return errors

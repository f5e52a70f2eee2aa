"""Leave-one-out estimates of spectral functions from one block Krylov space."""

import math

import equinox as eqx
import jax.numpy as jnp

from .._frechet import SpectralBlocks
from .._krylov import block_lanczos
from .._leave_one_out_krylov import (
    coupling_of,
    leave_probes_out,
    sample_weights,
    shortened,
)
from .._operator import apply_block, space_of
from .._orthogonal import combine, eigh
from .._samplers import NormalSampler, Sampler, check_sampler, laid_out
from .._spectral_base import (
    SpectralEstimator,
    SpectralOutcome,
    check_probes,
    probes_and_steps,
    ritz_values,
    rounding_errors,
    weighted_sums,
)
from .._standard_error import cyclic_pairs, leave_one_out_samples
from .._stream import without_numpy


class KrylovAwareEstimator(SpectralEstimator):
    r"""Leave-one-out estimates of `tr f(A)` from one block Krylov space.

    Applies the operator to the m probes, to what comes out, and so on, s times; `T`
    is the operator projected to the space `K_s(Omega)` of all of this. The space of
    all probes but one is exact for its part of the trace, and the probe left out
    estimates the rest:

        tr_i = tr(P_i f(A)) + (n - rank P_i) g_i^* f(A) g_i / |g_i|^2,
        P_i the projector to K_s(Omega without w_i),   g_i = (I - P_i) w_i,

    all within `K_s(Omega)`, where f(A) is f(T). The value is the mean of the `tr_i`.

    *Use when* f(A) is wanted of a symmetric or Hermitian operator. An eigenvalue that
    the Krylov space has found takes no part in the error, whether it is large or not;
    shifts `A + c I` change neither the space nor the accuracy, so that a small noise
    variance added to a kernel matrix needs no preconditioner.

    | | |
    |---|---|
    | operator | symmetric or Hermitian, PyTrees, complex |
    | products | m s, k less at most 2 |
    | beyond the products | O(n k^2 + k^3 m) time, three n x k blocks; derivatives hold five |
    | bias | of the Krylov space: f(T) for f(A). None where f is a polynomial of degree 1 |
    | standard error | of probes, from leaving out pairs; and of the Krylov space, from the last block of it |
    | derivative | `tr((F o C) V^* dA V)` with Ritz vectors V, k products with dA; second ones take 4 k more |

    **Arguments:**

    - `num_probes`: m. By default about `0.9 sqrt(k)`. Few probes reach deeper into the
        spectrum, many average more; with at least 5 the error bar is reliable.
    - `sampler`: of the probes; rotation invariant, as resphering needs.

    **Raises:**

    - `ValueError` for a sampler that isn't rotation invariant and independent.

    **Reference:** Chen and Hallman, "Krylov-Aware Stochastic Trace Estimation", SIAM J.
    Matrix Anal. Appl. 44 (2023), doi:10.1137/22M1494257, arXiv:2205.01736, for the
    block Krylov space in place of products with f(A); Epperly, Tropp and Webber,
    doi:10.1137/23M1548323, for leaving probes out. Leaving a probe out of the *whole*
    Krylov space is of this library: see the page on spectral functions.
    """

    num_probes: int | None = eqx.field(
        default=None, static=True, converter=without_numpy
    )
    sampler: Sampler = NormalSampler()

    def __check_init__(self):
        name = type(self).__name__
        check_probes(self.num_probes, name)
        check_sampler(self.sampler, name, resphere=True, independent=True)

    def compute(self, state, k):
        operator, function = state.operator, state.function
        space = space_of(operator)
        n = space.size
        m, steps = probes_and_steps(self.num_probes, k)
        Omega = laid_out(self.sampler, space).sample(
            state.key, n, m, space.compute_dtype
        )
        krylov = block_lanczos(lambda X: apply_block(operator, X), Omega, steps)
        T, omega = krylov.projected, krylov.start
        values, vectors = eigh(T)
        values, result = ritz_values(values, krylov.asymmetry, operator)
        left_out = leave_probes_out(T, omega, n)
        coupling = coupling_of(left_out, vectors, m)
        weights = sample_weights(left_out, vectors)
        weights_of_all = jnp.real(jnp.diagonal(coupling))
        rounding = rounding_errors(function, values, weights_of_all)
        earlier = _quadrature_errors(function, krylov, left_out, values, vectors, n, m)
        leaves, errors, freedoms = [], [], []
        others = zip(earlier, rounding, strict=True)
        for f, (quadrature, rounded) in zip(function(values), others, strict=True):
            samples, first, second = (weighted_sums(w, f) for w in weights)
            pairs, known = cyclic_pairs(first, second)
            magnitude = weighted_sums(weights.samples, jnp.abs(f)).mean()
            bar = leave_one_out_samples(samples, pairs, magnitude, known=known)
            leaves.append(bar.mean)
            error = jnp.hypot(bar.standard_error, quadrature)
            errors.append(jnp.hypot(error, rounded))
            freedoms.append(bar.degrees_of_freedom)
        stats = {
            "num_matvecs": m * steps,
            "result": result,
            "largest_product": krylov.largest_product,
        }
        blocks = SpectralBlocks(
            combine(krylov.basis, vectors),
            values,
            coupling,
            _unit_probes(omega, vectors, n),
            vectors,
            m,
        )
        return SpectralOutcome(leaves, errors, freedoms, stats, blocks)


def _unit_probes(omega, vectors, n):
    """Ritz coordinates of the probes, `n / m` the square of their length."""
    m = omega.shape[1]
    lengths = jnp.linalg.norm(omega, axis=0, keepdims=True)
    return vectors.conj().T @ (omega * (math.sqrt(n / m) / lengths).astype(omega.dtype))


def _quadrature_errors(function, krylov, left_out, values, vectors, n, m):
    """How far each leaf is from its limit in the number of steps.

    With spaces without a probe of one step less, and f(A) taken in the space of one step
    less, one step more of the latter changes the sum by b. The step before it changed
    it by a, measured likewise. If a step leaves the fraction `r = b / a` of the error,
    what is left is `b r / (1 - r)`. No less than b is taken, and no more than 2 b: the
    spaces without a probe change by a little forever. NaN for a single step, which tells
    nothing.
    """
    k = krylov.projected.shape[0]
    steps = k // m
    if m == 1 or steps == 1:
        return [jnp.full((), jnp.nan) for _ in function(values)]
    # Rounding must not take a node out of the function's domain.
    low, high = jnp.min(values), jnp.max(values)

    def ritz_pairs(depth):
        theta, S = eigh(krylov.projected[: m * depth, : m * depth])
        padded = jnp.zeros((k, m * depth), S.dtype).at[: m * depth].set(S)
        return jnp.clip(theta, low, high), padded

    spaces = [(values, vectors)]
    changes = []
    for fewer in range(1, min(steps, 3)):
        shorter = shortened(left_out, krylov.start, n, fewer)
        spaces.append(ritz_pairs(steps - fewer))
        sums = []
        for theta, S in spaces[-2:]:
            weights = jnp.real(jnp.diagonal(coupling_of(shorter, S, m)))
            sums.append([weighted_sums(weights, f) for f in function(theta)])
        changes.append([jnp.abs(x - y) for x, y in zip(*sums, strict=True)])
    if len(changes) == 1:
        return changes[0]
    errors = []
    for b, a in zip(*changes, strict=True):
        ratio = jnp.clip(b / jnp.where(a == 0, 1, a), 0, 2 / 3)
        errors.append(b * jnp.maximum(1, ratio / (1 - ratio)))
    return errors

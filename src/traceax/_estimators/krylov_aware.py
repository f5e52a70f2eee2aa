"""Leave-one-out estimates of spectral functions from one block Krylov space."""

import math
from typing import NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Inexact, Int

from .._estimate import RESULTS
from .._frechet import SpectralBlocks
from .._krylov import (
    arnoldi_columns,
    arnoldi_start,
    arnoldi_step,
    block_lanczos,
    krylov_space,
)
from .._leave_one_out_krylov import (
    coupling_of,
    leave_probes_out,
    ritz_pairs,
    sample_weights,
    shortened,
)
from .._operator import apply_block, space_of
from .._orthogonal import combine, inner
from .._samplers import NormalSampler, Sampler, check_sampler, draw_probes
from .._spectral_base import (
    SpectralEstimator,
    SpectralOutcome,
    check_probes,
    probes_and_steps,
    probes_until,
    ritz_values,
    rounding_errors,
    weighted_sums,
)
from .._standard_error import ErrorBar, cyclic_pairs, leave_one_out_samples
from .._stream import without_numpy
from .._tolerance import Phase, unknown_error, until


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

    *To a tolerance* m is fixed, and s grows until the tolerance is met. The estimate, and
    its derivatives, are those of a fixed budget of m s products.

    **Arguments:**

    - `num_probes`: m. By default about `0.9 sqrt(k)`, and `0.9 sqrt(k / 2)` for an
        estimate to a tolerance. Few probes reach deeper into the spectrum, many average
        more; with at least 5 the error bar is reliable.
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
        operator = state.operator
        space = space_of(operator)
        n = space.size
        m, steps = probes_and_steps(self.num_probes, k)
        Omega = draw_probes(self.sampler, state.key, m, space)
        krylov = block_lanczos(lambda X: apply_block(operator, X), Omega, steps)
        found = _found(state, krylov, n, m, steps)
        stats = {
            "num_matvecs": m * steps,
            "result": found.result,
            "largest_product": krylov.largest_product,
        }
        blocks = SpectralBlocks(
            combine(krylov.basis, found.vectors),
            found.values,
            found.coupling,
            _unit_probes(krylov.start, found.vectors, n),
            found.vectors,
            m,
        )
        errors, freedoms = found.errors, found.freedoms
        return SpectralOutcome(found.means, errors, freedoms, stats, blocks)

    def compute_until(self, state, k, tolerance, meter):
        operator = state.operator
        space = space_of(operator)
        n, dtype = space.size, space.compute_dtype
        m, most = probes_until(self.num_probes, k)
        Omega = draw_probes(self.sampler, state.key, m, space)
        sizes, looks = _looks(most)

        def step(carry, count, phase):
            del phase
            return arnoldi_step(
                lambda X: apply_block(operator, X), carry, count, hermitian=True
            )

        def found_in(run, steps, size):
            """With all shapes those of `size` steps."""
            run = run._replace(
                rows=run.rows[: m * size], columns=run.columns[: m * size, : m * size]
            )
            columns = arnoldi_columns(run, steps)
            krylov = krylov_space(run.rows.T, columns, run.largest, Omega)
            found = _found(state, krylov, n, m, steps)
            missing = 0, m * (most - size)
            return found._replace(
                values=jnp.pad(found.values, missing, mode="edge"),
                vectors=jnp.pad(found.vectors, (missing, missing)),
                coupling=jnp.pad(found.coupling, (missing, missing)),
            )

        run = arnoldi_start(Omega, most)
        shapes = jax.eval_shape(lambda: found_in(run, jnp.asarray(1), most))
        nothing = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        unknown = [unknown_error(space, real=True)] * len(nothing.means)
        unknown = jtu.tree_map(lambda *x: jnp.stack(x), *unknown)

        def look(run, found, count, phase):
            del phase

            def at(size):
                found = found_in(run, count, size)
                # Of complex numbers and real ones.
                sizes_of_means = [jnp.abs(x) for x in found.means]
                parts = sizes_of_means, found.errors, found.freedoms
                return ErrorBar(*map(jnp.stack, parts)), found

            # Lanes of a `vmap` that have not stopped are all at the same step.
            where = looks[eqxi.unvmap_max(count)]
            branches = [lambda size=size: at(size) for size in sizes]
            return jax.lax.switch(where, [lambda: (unknown, found), *branches])

        reached = until(
            tolerance,
            meter,
            [Phase(1, most)],
            run,
            nothing,
            step,
            look,
            unknown,
            fewest=1,
            samples=m,
        )
        run, found = reached.carry, reached.found
        used = m * reached.taken
        vectors = found.vectors
        omega = jnp.zeros((m * most, m), dtype).at[:m].set(inner(run.rows[:m].T, Omega))
        stats = {
            "num_matvecs": used,
            "result": found.result,
            "largest_product": run.largest,
        }
        blocks = SpectralBlocks(
            _leading_combination(run.rows.T, vectors, reached.taken, m),
            found.values,
            found.coupling,
            _unit_probes(omega, vectors, n),
            vectors,
            m,
            used,
            tuple(m * size for size in sizes),
        )
        errors, freedoms = (list(x) for x in reached.bar[1:])
        return SpectralOutcome(found.means, errors, freedoms, stats, blocks)


class _Found(NamedTuple):
    """What is known after some steps; of functions a list entry for each leaf."""

    means: list[Inexact[Array, ""]]
    errors: list[Float[Array, ""]]
    freedoms: list[Float[Array, ""]]
    values: Float[Array, " k"]
    vectors: Inexact[Array, "k k"]
    coupling: Inexact[Array, "k k"]
    result: RESULTS


def _found(state, krylov, n, m, steps) -> _Found:
    """`steps` may be traced, and fewer than the space has room for."""
    function, T, omega = state.function, krylov.projected, krylov.start
    values, vectors = ritz_pairs(T, m * steps)
    values, result = ritz_values(values, krylov.asymmetry, state.operator)
    left_out = leave_probes_out(T, omega, n, steps)
    coupling = coupling_of(left_out, vectors, m)
    weights = sample_weights(left_out, vectors)
    weights_of_all = jnp.real(jnp.diagonal(coupling))
    rounding = rounding_errors(function, values, weights_of_all)
    pairs_of_all = values, vectors
    earlier = _quadrature_errors(function, krylov, left_out, pairs_of_all, n, m, steps)
    means, errors, freedoms = [], [], []
    others = zip(earlier, rounding, strict=True)
    for f, (quadrature, rounded) in zip(function(values), others, strict=True):
        samples, first, second = (weighted_sums(w, f) for w in weights)
        pairs, known = cyclic_pairs(first, second)
        magnitude = weighted_sums(weights.samples, jnp.abs(f)).mean()
        bar = leave_one_out_samples(samples, pairs, magnitude, known=known)
        means.append(bar.mean)
        error = jnp.hypot(bar.standard_error, quadrature)
        errors.append(jnp.hypot(error, rounded))
        freedoms.append(bar.degrees_of_freedom)
    return _Found(means, errors, freedoms, values, vectors, coupling, result)


def _looks(most: int) -> tuple[list[int], Int[Array, " most+1"]]:
    """Numbers of steps that small matrices have room for, and which one a look takes.

    No look (0), or the number in the list, counted from 1, after so many steps. Looks
    are a third of the steps apart, and not more than the next room is twice as large.
    """
    sizes = [most]
    while sizes[0] > 12:
        sizes.insert(0, -(-sizes[0] // 2))
    looks = [0] * (most + 1)
    steps = min(2, most)
    while steps < most:
        looks[steps] = 1 + sum(steps > size for size in sizes)
        steps += max(1, steps // 3)
    looks[most] = len(sizes)
    return sizes, jnp.asarray(looks)


def _leading_combination(basis, vectors, blocks, m):
    """`combine`, of so many blocks of m columns alone."""

    def column_block(j, rows):
        block = jax.lax.dynamic_slice_in_dim(vectors, j * m, m, 1)
        found = combine(basis, block)
        return jax.lax.dynamic_update_slice_in_dim(rows, found.T, j * m, 0)

    rows = jnp.zeros_like(basis.T)
    return jax.lax.fori_loop(0, blocks, column_block, rows).T


def _unit_probes(omega, vectors, n):
    """Ritz coordinates of the probes, `n / m` the square of their length."""
    m = omega.shape[1]
    lengths = jnp.linalg.norm(omega, axis=0, keepdims=True)
    return vectors.conj().T @ (omega * (math.sqrt(n / m) / lengths).astype(omega.dtype))


def _quadrature_errors(function, krylov, left_out, pairs, n, m, steps):
    """How far each leaf is from its limit in the number of steps.

    With spaces without a probe of one step less, and f(A) taken in the space of one step
    less, one step more of the latter changes the sum by b. The step before it changed
    it by a, measured likewise. If a step leaves the fraction `r = b / a` of the error,
    what is left is `b r / (1 - r)`. No less than b is taken, and no more than 2 b: the
    spaces without a probe change by a little forever. NaN for a single step, which tells
    nothing.
    """
    values, _ = pairs
    most = krylov.projected.shape[0] // m
    if m == 1 or most == 1:
        return [jnp.full((), jnp.nan, values.dtype) for _ in function(values)]
    # Rounding must not take a node out of the function's domain.
    low, high = jnp.min(values), jnp.max(values)
    spaces = [pairs]
    changes = []
    for fewer in range(1, min(most, 3)):
        depth = steps - fewer
        shorter = shortened(left_out, krylov.start, n, depth)
        theta, S = ritz_pairs(krylov.projected, m * depth)
        spaces.append((jnp.clip(theta, low, high), S))
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
        extrapolated = b * jnp.maximum(1, ratio / (1 - ratio))
        errors.append(jnp.where(steps == 2, b, extrapolated))
    return errors

"""Stochastic Lanczos quadrature."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .._frechet import lanczos_blocks
from .._krylov import lanczos
from .._operator import apply_block, space_of
from .._orthogonal import eigh, inner
from .._samplers import RademacherSampler, Sampler, check_sampler, laid_out
from .._spectral_base import (
    SpectralEstimator,
    SpectralOutcome,
    check_probes,
    probes_and_steps,
    ritz_values,
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
    | standard error | of probes, from their spread; and of the quadrature, from its last step |
    | derivative | `tr((F o C) V^* dA V)` with the Ritz vectors V of all probes, k products with dA; second ones take 4 k more |

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
        n, dtype = space.size, space.compute_dtype
        m, steps = probes_and_steps(self.num_probes, k)
        Omega = laid_out(self.sampler, space).sample(state.key, n, m, dtype)
        krylov = lanczos(lambda X: apply_block(operator, X), Omega, steps)
        blocks = lanczos_blocks(krylov)
        flat, result = ritz_values(blocks.values, None, operator)
        V = blocks.basis
        squares = m * jnp.real(jnp.diagonal(blocks.coupling)).reshape(m, steps)
        # What the forms are made of, between probes: for the skewness of samples.
        across = inner(Omega, V).reshape(m, m, steps)
        own = jnp.einsum("iir->ir", across)
        gram_weights = across * own.conj()[None]
        fewer_values, fewer_vectors = jax.vmap(eigh)(
            krylov.projected[:, : steps - 1, : steps - 1]
        )
        fewer = krylov.norms[:, None] ** 2 * fewer_vectors[:, :1, :].sum(axis=1) ** 2
        fewer_values = jnp.clip(fewer_values, jnp.min(flat), jnp.max(flat))
        leaves, errors, freedoms = [], [], []
        for leaf, f_fewer in zip(function(flat), function(fewer_values), strict=True):
            f = leaf.reshape(m, steps)
            samples = weighted_sums(squares, f)
            norms = jnp.sqrt(weighted_sums(squares, jnp.abs(f) ** 2))
            grams = weighted_sums(gram_weights[:16, :16], f[None, :16])
            bar = independent_samples(samples, norms, grams[None])
            change = jnp.mean(samples - weighted_sums(fewer, f_fewer))
            # Of a single step nothing is known.
            quadrature = jnp.abs(change) if steps > 1 else jnp.nan
            leaves.append(bar.mean)
            errors.append(jnp.hypot(bar.standard_error, quadrature))
            freedoms.append(bar.degrees_of_freedom)
        stats = {
            "num_matvecs": m * steps,
            "result": result,
            "largest_product": krylov.largest_product,
        }
        blocks = eqx.tree_at(lambda b: b.values, blocks, flat)
        return SpectralOutcome(leaves, errors, freedoms, stats, blocks)

r"""Standard errors: of independent samples, and of leave-one-out samples.

Pure kernels on arrays.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


def independent_samples(
    samples: Inexact[Array, " m"], norms: Float[Array, " m"]
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    r"""The mean of independent samples `w_j^* A w_j`, and its standard error.

    The error is NaN for a single sample. `norms` are `|A w_j|`, of mean square
    `|A|_F^2`. For m samples it is

        error^2 = s^2 / m + 2^(1 - m) * 2 |A|_F^2 / m

    with `s^2` the sample variance. The second term is for ties: m signs can agree by
    chance, with probability `2^(1 - m)`, and then `s^2 = 0` though the samples vary.
    It weighs the largest variance that samples of signs can have by that probability.
    Without it few probes would report an error of 0 for a wrong answer; from ten
    probes on it is lost in the noise of `s^2`.
    """
    (m,) = samples.shape
    mean = jnp.mean(samples)
    if m == 1:
        return mean, jnp.full((), jnp.nan, norms.dtype)
    unit = _unit(jnp.maximum(jnp.max(jnp.abs(samples)), jnp.max(norms)))
    deviations = (samples - mean) / unit.astype(samples.dtype)
    variance = jnp.sum(jnp.abs(deviations) ** 2) / (m - 1)
    largest_variance = 2 * jnp.mean((norms / unit) ** 2)
    return mean, unit * jnp.sqrt((variance + 2.0 ** (1 - m) * largest_variance) / m)


def leave_one_out_samples(
    samples: Inexact[Array, " m"],
    pairs: Inexact[Array, "m m"],
    orthogonal_dimension: int | None = None,
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    r"""The mean of leave-one-out samples, and its standard error.

    Sample i, `t_i`, tests on probe i what the other probes built. The samples share
    probes, are correlated, and their sample variance understates the error of their
    mean up to tenfold. `pairs[i, j]`, `t_ij`, is sample i with probe j left out of
    everything. The diagonal of `pairs` is not used.

    *Derivation.* Let t be the truth. `E[t_i | all but i] = t`, and `t_ij` does not
    depend on probe j. So `t_j - t` has mean 0 against `t_ij - t`, `t_i - t` against
    `t_ji - t`, and

        E[(t_i - t_ij)(t_j - t_ji)] = cov(t_i, t_j) + E[(t_ij - t)(t_ji - t)] .

    For independent probes the last term is 0: given all but i and j, `t_ij` depends on
    probe i alone, `t_ji` on probe j alone, and both have mean t. So the products on
    the left estimate the covariances without bias. With `s^2` the sample variance,

        V = s^2 / m + 1 / (m (m-1)) sum_{i != j} (t_i - t_ij)(t_j - t_ji)

    is then an unbiased estimate of the variance of the mean: `E s^2` is the variance
    of a sample less the mean covariance c of two, and that of the mean is
    `(variance - c) / m + c`.

    *Orthogonal probes.* Given all but i and j, orthonormal `u_i`, `u_j` are a uniform
    pair in the complement, of dimension `N = orthogonal_dimension`. The quadratic
    forms of a full orthonormal basis add up to a constant, so those of a pair have
    correlation `-1 / (N - 1)`. The last term is `-var(t_ij) / (N - 1)` instead of 0,
    and the mean square of `t_ij` about the estimate, over N - 1, is added to V.

    The second term is noisy where it is small: V is kept at `s^2 / m` or above.
    """
    (m,) = samples.shape
    mean = jnp.mean(samples)
    if m == 1:
        return mean, jnp.full((), jnp.nan, jnp.finfo(samples.dtype).dtype)
    deviations = samples - mean
    differences = jnp.where(jnp.eye(m, dtype=bool), 0, samples[:, None] - pairs)
    largest = jnp.maximum(jnp.max(jnp.abs(deviations)), jnp.max(jnp.abs(differences)))
    unit = _unit(largest)
    deviations = deviations / unit.astype(samples.dtype)
    differences = differences / unit.astype(samples.dtype)
    variance = jnp.sum(jnp.abs(deviations) ** 2) / (m - 1)
    covariance = jnp.sum(jnp.real(differences * differences.conj().T)) / (m * (m - 1))
    if orthogonal_dimension is not None:
        off = jnp.where(
            jnp.eye(m, dtype=bool), 0, (pairs - mean) / unit.astype(pairs.dtype)
        )
        of_a_pair = jnp.sum(jnp.abs(off) ** 2) / (m * (m - 1))
        covariance = covariance + of_a_pair / (orthogonal_dimension - 1)
    rounding = jnp.finfo(samples.dtype).eps * jnp.max(jnp.abs(samples))
    error = unit * jnp.sqrt(variance / m + jnp.maximum(covariance, 0))
    return mean, jnp.maximum(error, rounding)


def _unit(largest: Float[Array, ""]) -> Float[Array, ""]:
    # Divided by it, squares neither over- nor underflow.
    return jnp.where(largest == 0, jnp.ones_like(largest), largest)

"""The mixture of a new estimate, a change and the past that has the least variance."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

Scalar = Float[Array, ""]
Gram = Inexact[Array, "g g"]


class Mix(NamedTuple):
    """The weights a, b, c, the variance of the rest, and `kappa` and `rho` to expect."""

    weights: tuple[Scalar, Scalar, Scalar]
    rest_variance: Scalar
    ratios: Float[Array, "2"]


class Counts(NamedTuple):
    """Of the probes of the past, of fresh ones, and of estimates before this one."""

    past: int
    fresh: int
    number: Int[Array, ""]


def mix_with_past(
    now: Gram,
    before: Gram,
    expected: Float[Array, "2"],
    last: tuple[Scalar, Scalar],
    counts: Counts,
    begins: Bool[Array, ""],
) -> Mix:
    r"""The weights a, b, c of least variance, from Gram matrices now and before.

    `expected` are `kappa` and `rho` as found before, `last` is `(h, nu)`, and `begins`
    whether the basis was found with the probes of the past. In units of the variance of a
    sample of the operator as it is, let `kappa` be that of the operator as it was, `rho`
    the covariance of the two samples of a probe, and `nu` the variance of the rest. With
    `h = 1 - g` the variance of the value is

        a^2 / f + (b^2 - 2 b c h rho + c^2 h^2 kappa) / p + c^2 nu,    a = 1 - b .

    It is least for

        c = b h rho / (p D),    D = h^2 kappa / p + nu,
        b = (1 / f) / (1 / f + 1 / p - (h rho / p)^2 / D) .

    The covariance of `w^* A w` and `w^* B w` is proportional to `tr A B`, of which
    `w_i^* A w_j` and `w_i^* B w_j` are an estimate from p (p - 1) pairs of probes.

    *Bias.* Weights that follow the samples they weigh bias an estimate, and here the bias
    would add up over steps. So `kappa` and `rho` are averages over the changes before this
    one, from other probes, but for the first change. Twice what the probes themselves ask
    for bounds c: an operator that jumps isn't estimated from its past. And c is at most 1.
    Where the path begins with a basis b is 0, as the basis was found with these probes.
    """
    unit = jnp.maximum(jnp.max(jnp.abs(now)), jnp.max(jnp.abs(before)))
    now, before = (
        x / jnp.where(unit == 0, 1, unit).astype(x.dtype) for x in (now, before)
    )
    products = [mean_product(*x) for x in ((before, before), (now, before))]
    size = mean_product(now, now)
    found = jnp.stack(products) / jnp.where(size == 0, jnp.inf, size)
    (p, f, number), (h, nu) = counts, last
    expected = jnp.where(number == 1, found, expected)

    def best(ratios):
        kappa, rho = ratios
        D = (h**2 / p + nu) * kappa
        shared = jnp.where(D == 0, 0, h * rho / (p * jnp.where(D == 0, 1, D)))
        return (1 / f) / (1 / f + 1 / p - h * rho / p * shared) * shared

    c = jnp.clip(jnp.minimum(best(expected), 2 * best(found)), 0, 1)
    kappa, rho = expected
    b = jnp.clip((1 / f + c * h * rho / p) / (1 / f + 1 / p), 0, 1)
    b = jnp.where(begins, 0, b)
    ratios = (expected + found) / 2
    kappa, rho = ratios
    change = (b**2 - 2 * b * c * h * rho + (c * h) ** 2 * kappa) / p
    return Mix((1 - b, b, c), change + c**2 * nu * kappa, ratios)


def mean_product(x: Gram, y: Gram) -> Scalar:
    """The mean of `x_ij^* y_ij`, i and j different, of the parts that forms see."""
    g = len(x)
    if not jnp.iscomplexobj(x):
        x, y = (x + x.T) / 2, (y + y.T) / 2
    products = jnp.where(jnp.eye(g, dtype=bool), 0, jnp.real(x.conj() * y))
    return jnp.sum(products) / (g * (g - 1))

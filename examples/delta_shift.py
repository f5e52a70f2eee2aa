"""Follow a Hessian's trace through training with a custom estimator, DeltaShift.

A network with one hidden layer learns to read scikit-learn's digits. After each of 50 steps we
estimate its Hessian's trace with 20 products. Hutchinson's estimator and XTrace start from
scratch. `DeltaShiftEstimator` starts from the last estimate and adds the change.

    python examples/delta_shift.py [figure.png]
"""

import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import traceax as tx


# --8<-- [start:estimator]
class Past(NamedTuple):
    """An operator B, an estimate t of its trace, and t's worth in probes (0 if unknown)."""

    operator: lx.AbstractLinearOperator
    value: jax.Array
    standard_error: jax.Array
    worth: jax.Array


def past_of(estimate):
    worth = estimate.stats.get("worth", jnp.zeros(()))  # Exact answers report none.
    value, error = estimate.value, estimate.standard_error
    return Past(estimate.state.operator, value, error, worth)


class DeltaShiftState(eqx.Module):
    key: jax.Array
    operator: lx.AbstractLinearOperator
    past: Past | None


class DeltaShiftEstimator(tx.TraceEstimator):
    r"""Trace of a real operator A, from an estimate t for an earlier operator B.

    Each of l = k/2 probes w_i takes a product with A and one with B. The value is the mean of

        x_i + c_i (t - y_i),    x_i = w_i^T A w_i,    y_i = w_i^T B w_i.

    Suppose that t is worth m probes: it is as accurate as m probes with B. Then the weight `c =
    <A, B> / <B, B> m / (m + l)` minimises the value's variance. It is near 1 after a small
    change, and near 0 after a jump. We compute c_i from all products but the i-th, and not from
    the samples, because a weight that depends on samples would bias the value. Without a past,
    or with fewer than 8 products, this is Hutchinson's estimator.

    **Reference:** Dharangutte and Musco, "Dynamic Trace Estimation", NeurIPS (2021),
    arXiv:2110.13752. Two additions are
    ours: c_i leaves out the i-th product, and we count variances in probes.
    """

    sampler: tx.Sampler = tx.RademacherSampler()

    def init(self, key, operator, past=None):
        state = tx.init_state(key, operator, "DeltaShiftEstimator.init")
        return DeltaShiftState(state.key, state.operator, past)

    def compute(self, state, k):
        past, l = state.past, k // 2  # noqa: E741
        if past is None or k < 8:
            plain = tx.TraceState(state.key, state.operator)
            estimator = tx.HutchinsonEstimator(self.sampler)
            value, error, stats, blocks = estimator.compute(plain, k)
            worth = jnp.asarray(k if k > 1 else 0, error.dtype)
            return value, error, {**stats, "worth": worth}, blocks
        structure = state.operator.in_structure()
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structure)
        zero, unravel = ravel_pytree(zeros)
        W = self.sampler.sample(state.key, zero.size, l, zero.dtype)

        def product(operator, w):
            return ravel_pytree(operator.mv(unravel(w)))[0]

        products = jax.vmap(product, in_axes=(None, 1), out_axes=1)
        AW, BW = products(state.operator, W), products(past.operator, W)
        x, y = jnp.sum(W * AW, axis=0), jnp.sum(W * BW, axis=0)
        dots, squares = jnp.sum(AW * BW, axis=0), jnp.sum(BW**2, axis=0)
        # We leave out the i-th product.
        dots, squares = jnp.sum(dots) - dots, jnp.sum(squares) - squares
        c = dots / squares * past.worth / (past.worth + l)
        c = jnp.clip(jnp.where(squares > 0, c, 0), 0, 1)
        samples = x + c * (past.value - y)
        weight = jnp.mean(c)
        # An unknown standard error is NaN.
        past_error = jnp.where(weight > 0, weight * past.standard_error, 0)
        error = jnp.hypot(jnp.std(samples, ddof=1) / l**0.5, past_error)
        # The variance, divided by the variance of a single probe with A.
        changed, before, now = (jnp.sum(x**2) for x in (AW - weight * BW, BW, AW))
        fraction = changed / l + weight**2 * before / jnp.maximum(past.worth, 1)
        worth = jnp.where(fraction > 0, now / fraction, l)
        stats = {"num_matvecs": 2 * l, "weight_of_past": weight, "worth": worth}
        stats["degrees_of_freedom"] = l - 1  # a lower bound
        return jnp.mean(samples), error, stats, (W, W / l)


# --8<-- [end:estimator]

PRODUCTS, STEPS, REPEATS, HIDDEN = 20, 50, 20, 8
images, labels = load_digits(return_X_y=True)
images, labels = jnp.asarray(images[:500] / 16, jnp.float32), jnp.asarray(labels[:500])


def hessian(parameters):
    return tx.HessianLinearOperator(loss, parameters)


def loss(parameters):
    w, v = parameters
    scores = jax.nn.log_softmax(jnp.tanh(images @ w) @ v)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


def descend(parameters, _):
    gradient = jax.grad(loss)(parameters)
    parameters = jax.tree.map(lambda x, g: x - g / 2, parameters, gradient)
    return parameters, (parameters, jnp.trace(hessian(parameters).as_matrix()))


@eqx.filter_jit
def from_scratch(keys, path, estimator):
    def one(pair):
        operator = hessian(pair[1])
        return tx.trace(pair[0], operator, PRODUCTS, estimator, throw=False).value

    return jax.lax.map(lambda keys: jax.lax.map(one, (keys, path)), keys)


@jax.jit
def tracked(keys, path):
    """Values and interval ends. Each step starts from the previous step's estimate."""
    estimator = DeltaShiftEstimator()

    def step(carry, inputs):
        (before, last), (key, parameters) = carry, inputs
        state = estimator.init(key, hessian(parameters), Past(hessian(before), *last))
        estimate = estimator.estimate(state, PRODUCTS, throw=False)
        results = jnp.stack([estimate.value, *estimate.confidence_interval()])
        return (parameters, past_of(estimate)[1:]), results

    start = jax.tree.map(lambda x: x[0], path), (jnp.zeros(()),) * 3  # worth nothing
    results = jax.lax.map(lambda keys: jax.lax.scan(step, start, (keys, path))[1], keys)
    return jnp.moveaxis(results, -1, 0)


def main(figure_path):
    w_key, v_key, key = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(w_key, (64, HIDDEN)) / 8
    v = jax.random.normal(v_key, (HIDDEN, 10)) / HIDDEN**0.5
    _, (path, truth) = jax.lax.scan(descend, (w, v), length=STEPS)
    keys = jax.random.split(key, (REPEATS, STEPS))
    plain = from_scratch(keys, path, tx.HutchinsonEstimator())
    xtrace = from_scratch(keys, path, tx.XTraceEstimator())
    values, low, high = tracked(keys, path)

    errors = [jnp.sqrt(jnp.mean((x / truth - 1) ** 2)) for x in (plain, xtrace, values)]
    for name, error in zip(("Hutchinson", "XTrace", "DeltaShift"), errors, strict=True):
        print(f"{name:10s} has a relative error of {100 * error:.2f} %")
    inside = jnp.mean((low <= truth) & (truth <= high))
    print(f"its 95 % intervals have a coverage of {100 * inside:.0f} %")
    assert errors[2] < errors[1] < errors[0]
    assert inside > 0.9

    figure, steps = Figure(figsize=(7, 4), layout="constrained"), np.arange(STEPS) + 1
    axes = figure.subplots()
    axes.plot(steps, plain[0], ".", color="0.6", label="Hutchinson")
    axes.fill_between(steps, low[0], high[0], alpha=0.3, label="DeltaShift, 95 %")
    axes.plot(steps, values[0], color="C0", label="DeltaShift")
    axes.plot(steps, truth, "k--", linewidth=1, label="exact")
    axes.set(xlabel="step of training", ylabel="Hessian trace")
    axes.legend()
    figure.savefig(figure_path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "delta_shift.png")

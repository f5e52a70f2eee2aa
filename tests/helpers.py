"""Shared helpers: operators of every class, and statistics over many estimates."""

import functools as ft
import importlib.util
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import scipy.sparse
from jax.experimental import sparse
from problems import (
    PSD,
    float_dtype,
    is_x64,
)

import traceax as tx

ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "hutch++": tx.HutchPlusPlusEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
    "hutchinson-sphere": tx.HutchinsonEstimator(tx.SphereSampler()),
    "hutch++-normal": tx.HutchPlusPlusEstimator(tx.NormalSampler()),
    "xtrace-plain": tx.XTraceEstimator(tx.RademacherSampler(), resphere=False),
    "xnystrace-plain": tx.XNysTraceEstimator(tx.RademacherSampler(), resphere=False),
}
FAMILIES = ("hutchinson", "hutch++", "xtrace", "xnystrace")


@ft.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def draw(sampler, key, n, k, dtype):
    """Draw probes in one compiled program, not one per operation of `sampler.sample`."""
    return sampler.sample(key, n, k, dtype)


def load_example(name):
    """Import an example from its file."""
    path = pathlib.Path(__file__).parents[1] / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def products_only(operator):
    """The same products as a function, which hides entries and trace."""
    return lx.FunctionLinearOperator(
        operator.mv, operator.in_structure(), operator.tags
    )


def counting_operator(a):
    """A semidefinite operator, and a function that counts an estimate's products.

    Call the function right after the estimate: it waits for the value and resets the
    count.
    """
    a, calls = jnp.asarray(a), []

    def product(vector):
        jax.debug.callback(lambda _: calls.append(1), vector[0])
        return a @ vector

    def count_products(estimate):
        jax.block_until_ready(estimate.value)
        jax.effects_barrier()
        count = len(calls)
        calls.clear()
        return count

    structure = jax.eval_shape(lambda: a[0])
    return lx.FunctionLinearOperator(product, structure, PSD), count_products


def z_score(samples, truth, rounding=1e-9):
    """Standard errors between the samples' mean and the truth; the worse of re and im.

    The floor `rounding`, relative to the largest sample, keeps rounding errors from
    failing exact estimators.
    """
    samples, truth = np.asarray(samples), np.asarray(truth)
    floor = rounding * np.max(np.abs(samples), initial=0.0)

    def z(samples, truth):
        samples = samples.astype(np.float64)
        error = samples.std(axis=0, ddof=1) / np.sqrt(samples.shape[0])
        deviation = np.abs(samples.mean(axis=0) - truth)
        return float(np.max(deviation / (error + floor + 1e-300)))

    if np.iscomplexobj(samples):
        return max(z(samples.real, truth.real), z(samples.imag, truth.imag))
    return z(samples, truth)


def rounding():
    return 1e-9 if is_x64() else 1e-5


@eqx.filter_jit
def _run(keys, operator, k, estimator):
    def run_once(key):
        estimate = tx.trace(key, operator, k, estimator, throw=False)
        return estimate.value, estimate.standard_error

    return jax.vmap(run_once)(keys)


def many(estimator, operator, k, num_keys, seed=0):
    """Values and standard errors over a fixed number of keys."""
    values, errors = _run(jr.split(jr.key(seed), num_keys), operator, k, estimator)
    return np.asarray(values), np.asarray(errors)


def banded(n, offsets, seed=0):
    """A SciPy matrix with random entries on some diagonals."""
    rng = np.random.default_rng(seed)
    diagonals = [rng.normal(size=n - abs(i)) for i in offsets]
    return scipy.sparse.diags_array(diagonals, offsets=offsets).tocoo()


def as_bcoo(coo):
    indices = np.stack([coo.row, coo.col], axis=1)
    data = jnp.asarray(coo.data, float_dtype())
    return sparse.BCOO((data, indices), shape=coo.shape)


def coverage(estimate_for, truth, num_keys=2000):
    """Share of keys whose interval contains the truth, for unbiased values."""

    def run_once(key):
        estimate = estimate_for(key)
        low, high = estimate.confidence_interval()
        return (low <= truth) & (truth <= high), estimate.value

    keys = jr.split(jr.key(0), num_keys)
    contained, values = jax.jit(
        lambda keys: jax.lax.map(run_once, keys, batch_size=100)
    )(keys)
    assert z_score(values, truth) < 5
    return float(jnp.mean(contained))


def printed_by(code):
    """Output of a program, compiled as users' programs are."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def is_rounding(estimate):
    """Whether an error bar is only rounding, as for an exact answer."""
    sizes = zip(
        *map(jax.tree.leaves, (estimate.value, estimate.standard_error)), strict=True
    )
    eps = jnp.finfo(jax.tree.leaves(estimate.standard_error)[0].dtype).eps
    return all(np.all(error <= 1e3 * eps * np.max(np.abs(x))) for x, error in sizes)


def assert_close(x, y, rtol=None, atol=0.0):
    if rtol is None:
        rtol = 1e-9 if is_x64() else 1e-4
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)


#
# One operator of every kind as a function of parameters, semidefinite for Nystrom
#


def _psd_matrix(parameters):
    a = parameters["a"]
    return a @ a.T / len(a) + jnp.eye(len(a), dtype=a.dtype)


def _composed_sum(parameters):
    a = lx.MatrixLinearOperator(parameters["a"])
    diagonal = lx.DiagonalLinearOperator(parameters["d"] ** 2)
    return lx.TaggedLinearOperator((a @ a.T) * parameters["d"][0] ** 2 + diagonal, PSD)


def _function(parameters):
    a = _psd_matrix(parameters)
    return lx.FunctionLinearOperator(lambda v: a @ v, jax.eval_shape(lambda: a[0]), PSD)


def _jacobian(parameters):
    # We differentiate a convex loss, so that the Hessian is semidefinite.
    a, d = parameters["a"], parameters["d"]

    def loss(x):
        v = jnp.concatenate([x["u"], x["w"].reshape(-1)])
        return jnp.sum(jax.nn.softplus(a @ v)) + jnp.sum(d**2 * v**2)

    x = {"u": d[:3], "w": d[3:].reshape(1, -1)}
    return lx.JacobianLinearOperator(lambda x, _: jax.grad(loss)(x), x, tags=PSD)


def _pytree(parameters):
    a = _psd_matrix(parameters)
    tree = [[a[:2, :2], a[:2, 2:]], [a[2:, :2], a[2:, 2:]]]
    structure = jax.eval_shape(lambda: [a[0, :2], a[0, 2:]])
    return lx.PyTreeLinearOperator(tree, structure, PSD)


OPERATORS = {
    "matrix": lambda parameters: lx.MatrixLinearOperator(_psd_matrix(parameters), PSD),
    "composed sum": _composed_sum,
    "function": _function,
    "jacobian over a PyTree": _jacobian,
    "pytree": _pytree,
}


def parameters(n=10, seed=3):
    rng = np.random.default_rng(seed)
    return {
        "a": jnp.asarray(rng.normal(size=(n, n)), float_dtype()),
        "d": jnp.asarray(rng.uniform(0.5, 1.5, size=n), float_dtype()),
    }


def exact_trace(operator):
    return jnp.trace(operator.as_matrix())

"""Random operators: no NaN, no wrong answer, no internal traceback.

`TRACEAX_PROPERTY_CASES=5000` runs 5,000 cases; the default is 140.
The static part of a case (structure, dtype, sizes, estimator, budget) comes from a
fixed pool, so that the cases share compiled programs; values are drawn freely.
"""

import functools
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from helpers import (
    ESTIMATORS,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import NSD, PSD, is_x64

import traceax as tx

CASES = int(os.environ.get("TRACEAX_PROPERTY_CASES", "140"))
DTYPES = ["float32", "complex64", *(["float64", "complex128"] if is_x64() else [])]
STRUCTURES = ["matrix", "function", "pytree", "sum", "composed", "negative"]
SHAPES = ["flat", "decaying", "clustered", "ones", "identity", "signed", "nilpotent"]
SEMIDEFINITE = SHAPES[:5]


def _pool(size):
    """Static combinations: every estimator with every structure, dtypes in turn."""
    rng = np.random.default_rng(7)
    names = [*ESTIMATORS, "default"]
    for i in range(size):
        name, structure = names[i % len(names)], STRUCTURES[i % len(STRUCTURES)]
        n = int(rng.choice([1, 2, 3, 5, 8, 13, 21]))
        k = int(rng.integers(1, n + 4))
        yield name, structure, DTYPES[(i // 2) % len(DTYPES)], n, k


POOL = list(_pool(9))


@functools.cache
def _compiled(name, structure, n, k, psd):
    def run(a, key):
        # We estimate and differentiate `a` in the given structure.
        estimator = ESTIMATORS.get(name)
        operator = _operator(a, structure, psd)
        return tx.trace(key, operator, k, estimator, throw=False)

    def gradient(a, key):
        return jax.grad(lambda a: run(a, key).value.real)(a)

    return eqx.filter_jit(run), eqx.filter_jit(gradient)


def _operator(a, structure, psd):
    """The matrix `a`, or `-a` for `"negative"`."""
    n = a.shape[0]
    tags = PSD if psd else ()
    struct = jax.ShapeDtypeStruct((n,), a.dtype)
    match structure:
        case "matrix":
            return lx.MatrixLinearOperator(a, tags)
        case "function":
            return lx.FunctionLinearOperator(lambda v: a @ v, struct, tags)
        case "pytree":
            cut = n // 2
            tree = [[a[:cut, :cut], a[:cut, cut:]], [a[cut:, :cut], a[cut:, cut:]]]
            structs = [
                jax.ShapeDtypeStruct((cut,), a.dtype),
                jax.ShapeDtypeStruct((n - cut,), a.dtype),
            ]
            return lx.PyTreeLinearOperator(tree, structs, tags)
        case "sum":
            half = lx.MatrixLinearOperator(a / 2, tags)
            whole = half + lx.FunctionLinearOperator(lambda v: a @ v / 2, struct, tags)
            return lx.TaggedLinearOperator(whole, tags) if psd else whole
        case "composed":
            identity = lx.IdentityLinearOperator(struct)
            product = lx.MatrixLinearOperator(a) @ identity
            return lx.TaggedLinearOperator(product, tags) if psd else product
        case "negative":
            return lx.MatrixLinearOperator(-a, NSD if psd else ())


def _values(n, shape, rank, exponent, seed, dtype):
    """A matrix, its numerical trace and the sum of its singular values."""
    rng = np.random.default_rng(seed)
    complex = np.issubdtype(dtype, np.complexfloating)
    i = np.arange(1, n + 1.0)
    spectrum = {
        "flat": np.linspace(1, 3, n),
        "decaying": 0.4**i,
        "clustered": np.where(i <= 2, 1.0, 1e-3),
        "ones": np.where(i == 1, n, 0.0),
        "identity": np.ones(n),
        "signed": (-1.0) ** i / i,
        "nilpotent": np.zeros(n),
    }[shape]
    if shape not in ("ones", "identity", "nilpotent"):
        spectrum = np.where(i <= rank, spectrum, 0)
    gaussian = rng.normal(size=(n, n))
    if complex:
        gaussian = gaussian + 1j * rng.normal(size=(n, n))
    basis = np.linalg.qr(gaussian)[0]
    if shape == "ones":
        a = np.ones((n, n))
    elif shape == "nilpotent":
        a = np.diag(np.ones(n - 1), 1)
    else:
        a = (basis * spectrum) @ basis.conj().T
    if shape != "nilpotent":
        a = (a + a.conj().T) / 2
    a = (a * 10.0**exponent).astype(dtype)
    wide = a.astype(np.complex128 if complex else np.float64)
    return a, np.trace(wide), np.linalg.svd(wide, compute_uv=False).sum()


cases = st.fixed_dictionaries(
    {
        "static": st.integers(0, len(POOL) - 1),
        "shape": st.sampled_from(SHAPES),
        "rank": st.integers(0, 21),
        "exponent": st.integers(-28, 28),
        "seed": st.integers(0, 2**31 - 1),
    }
)


def _check(static, shape, rank, exponent, seed):
    name, structure, dtype, n, k = POOL[static]
    needs_psd = name.startswith("xnystrace")
    if needs_psd and shape not in SEMIDEFINITE:
        shape = SEMIDEFINITE[seed % len(SEMIDEFINITE)]
    psd = needs_psd or (shape in SEMIDEFINITE and static % 2 == 0)
    a, trace, nuclear = _values(n, shape, rank, exponent, seed, np.dtype(dtype))
    if structure == "negative":
        trace = -trace
    run, gradient = _compiled(name, structure, n, k, psd)
    key = jr.key(seed)
    estimate = run(jnp.asarray(a), key)

    real = np.finfo(dtype).dtype
    assert estimate.value.shape == ()
    assert estimate.value.dtype == (real if psd else np.dtype(dtype))
    assert estimate.standard_error.dtype == real
    assert estimate.result == tx.RESULTS.successful
    used = int(estimate.stats["num_matvecs"])
    assert used <= k
    assert used >= min(k, n) - 2

    value, error = complex(estimate.value), float(estimate.standard_error)
    assert np.isfinite(value)
    assert error >= 0 or (np.isnan(error) and k < min(n, 2))
    deviation, eps = abs(value - trace), float(np.finfo(dtype).eps)
    # We bound rounding in sums with n terms. XNysTrace also adds and subtracts a shift
    # of n eps |A|_F.
    rounding = 200 * n * eps * nuclear + 1e-300
    if k >= n:
        assert error <= rounding
        assert deviation <= rounding
    if error == 0:
        assert deviation <= rounding
    low, high = estimate.confidence_interval()
    if k >= 2 or k >= n:
        assert np.all(np.isfinite([low, high]))
        assert complex(low).real <= value.real <= complex(high).real
    # On average, no estimator multiplies vectors longer than sqrt(n). A normal probe is
    # at most a few times as long.
    assert deviation <= 60 * n * nuclear + rounding
    if k >= 8:
        assert deviation <= 40 * error + rounding
    effective = min(rank, n) if shape in ("flat", "decaying", "signed") else n
    if shape == "ones":
        effective = 1
    if name == "xnystrace" and effective < k - 1:
        assert deviation <= 1e3 * rounding
    if name == "xtrace" and effective < k // 2 - 1 and shape != "nilpotent":
        assert deviation <= 1e3 * rounding

    if static % 3 == 0:
        derivative = np.asarray(gradient(jnp.asarray(a), key))
        assert np.all(np.isfinite(derivative))
        sign = -1 if structure == "negative" else 1
        if k >= n:
            np.testing.assert_allclose(derivative, sign * np.eye(n), atol=1e-5)


@settings(max_examples=CASES, derandomize=True, deadline=None, database=None)
@given(case=cases)
# We keep sizes, ranks and scales that failed before.
@example(case={"static": 3, "shape": "flat", "rank": 0, "exponent": 0, "seed": 1})
@example(case={"static": 2, "shape": "ones", "rank": 1, "exponent": -28, "seed": 0})
def test_random_operators(case):
    _check(**case)

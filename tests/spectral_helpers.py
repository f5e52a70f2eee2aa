"""Shared helpers for the tests of spectral functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import float_dtype

import traceax as tx

SPECTRAL = {
    "krylov-aware": tx.KrylovAwareEstimator(),
    "quadrature": tx.LanczosQuadratureEstimator(),
}

# These tests mix real and complex numbers, or precisions, which the suite's strict mode
# refuses. We test separately that the library itself doesn't mix them.


@pytest.fixture(autouse=True)
def relaxed():
    with jax.numpy_dtype_promotion("standard"):
        yield


def eps(dtype=None):
    return float(jnp.finfo(float_dtype() if dtype is None else dtype).eps)


def first_failure(result):
    """First failure among a function's results, or success."""
    kind = type(tx.RESULTS.successful)
    items = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, kind))
    failures = [x for x in items if x != tx.RESULTS.successful]
    return (failures or items)[0]


def to_double(x):
    """A NumPy array in double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def normal(shape, complex=False, seed=7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape)) / np.sqrt(2) if complex else x


#
# Brackets for truncation errors, by loops over dense matrices
#

OPERATOR_MONOTONE = {"log": np.log, "root": np.sqrt, "inverse": lambda x: -1 / x}


def dense_function(a, f):
    values, vectors = np.linalg.eigh(a)
    return (vectors * f(values)) @ vectors.conj().T


def new_directions(Q, W):
    """Orthonormal directions of W outside Q, except for rounding errors."""
    for _ in range(2):
        W = W - Q @ (Q.conj().T @ W)
    u, sizes, _ = np.linalg.svd(W, full_matrices=False)
    return u[:, sizes > 1e-9]


def krylov_bases(A, start, steps):
    """Bases for a Krylov space and for its next block, by a loop."""
    Q, block = np.zeros((len(A), 0)), start
    for _ in range(steps):
        new = new_directions(Q, block)
        Q, block = np.hstack([Q, new]), A @ new
    return Q, new_directions(Q, block)


def extension(A, Q, Z, lower):
    T, C = Q.conj().T @ A @ Q, Z.conj().T @ A @ Q
    inverse = np.linalg.pinv(T - lower * np.eye(len(T)), rcond=1e-13, hermitian=True)
    corner = lower * np.eye(Z.shape[1]) + C @ inverse @ C.conj().T
    return T, np.block([[T, C.conj().T], [C, corner]])

"""Problems with known answers: prescribed spectra, and Gaussian processes.

`SPECTRA` is the catalogue of spectra, tagged with their difficulties. `Problem` turns a
spectrum into a matrix and an operator, and computes exact traces of functions.
`Process` is a kernel with noise, and computes exact likelihoods by Cholesky
factorisation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from kernels import Matern

import traceax as tx

PSD = lx.positive_semidefinite_tag
NSD = lx.negative_semidefinite_tag


def is_x64():
    return jax.config.jax_enable_x64  # pyright: ignore


def float_dtype():
    return jnp.float64 if is_x64() else jnp.float32


def complex_dtype():
    return jnp.complex128 if is_x64() else jnp.complex64


def as_array(x):
    """An array in the working precision."""
    x = np.asarray(x)
    return jnp.asarray(x, complex_dtype() if np.iscomplexobj(x) else float_dtype())


def as_operator(a, psd=False):
    return lx.MatrixLinearOperator(as_array(a), PSD if psd else ())


#
# Matrices with prescribed eigenvalues
#

# Every spectrum has one of these tags, for the signs of its eigenvalues.
DEFINITE, SEMIDEFINITE, INDEFINITE = "definite", "semidefinite", "indefinite"
# A few Lanczos steps integrate a logarithm or a root to 1e-5.
EASY = "easy"
# The spectrum has few distinct eigenvalues, so that Krylov spaces stop growing.
BREAKING = "breaking"


class Spectrum(NamedTuple):
    eigenvalues: Callable
    tags: set


def _first(number, values):
    return lambda n: np.where(np.arange(n) < number, values(np.arange(float(n))), 0.0)


def _thirds(n):
    return np.repeat([-1.0, 1.0, 2.0], [n // 2, n // 4, n - n // 2 - n // 4])


def _step(n):
    return np.where(np.arange(n) < min(50, n // 3), 1.0, 1e-3)


SPECTRA = {
    "flat": Spectrum(lambda n: np.linspace(1.0, 3.0, n), {DEFINITE, EASY}),
    "poly": Spectrum(lambda n: np.arange(1, n + 1) ** -2.0, {DEFINITE}),
    "exp": Spectrum(lambda n: 0.7 ** np.arange(float(n)), {DEFINITE}),
    "tail": Spectrum(lambda n: 1 + 40 / np.arange(1, n + 1), {DEFINITE}),
    "step": Spectrum(_step, {DEFINITE, BREAKING}),
    "signed": Spectrum(lambda n: np.linspace(-1.0, 2.0, n), {INDEFINITE}),
    "identity": Spectrum(np.ones, {DEFINITE, EASY, BREAKING}),
    "twice the identity": Spectrum(
        lambda n: np.full(n, 2.0), {DEFINITE, EASY, BREAKING}
    ),
    "zero": Spectrum(np.zeros, {SEMIDEFINITE, BREAKING}),
    "projector": Spectrum(
        lambda n: 1.0 * (np.arange(n) < n // 2), {SEMIDEFINITE, BREAKING}
    ),
    "small projector": Spectrum(_first(3, np.ones_like), {SEMIDEFINITE, BREAKING}),
    "repeated": Spectrum(_thirds, {INDEFINITE, BREAKING}),
    "rank 5": Spectrum(_first(5, lambda i: i + 1), {SEMIDEFINITE, BREAKING}),
    "rank 5, indefinite": Spectrum(
        _first(5, lambda i: i - 2.5), {INDEFINITE, BREAKING}
    ),
}


def tagged(tag):
    return [name for name, spectrum in SPECTRA.items() if tag in spectrum.tags]


def spectrum(name, n):
    return SPECTRA[name].eigenvalues(n)


def haar(n, seed=0, complex=False):
    rng = np.random.default_rng(seed)
    gaussian = rng.normal(size=(n, n))
    if complex:
        gaussian = gaussian + 1j * rng.normal(size=(n, n))
    return np.linalg.qr(gaussian)[0]


@dataclasses.dataclass(frozen=True)
class Problem:
    """`scale` times a Hermitian matrix from the catalogue, plus `shift` times identity."""

    name: str
    n: int
    complex: bool = False
    seed: int = 0
    shift: float = 0.0
    scale: float = 1.0

    @property
    def eigenvalues(self):
        return self.scale * spectrum(self.name, self.n) + self.shift

    @functools.cached_property
    def dense(self):
        values, u = self.eigenvalues, haar(self.n, self.seed, self.complex)
        if np.all(values == values[0]):  # without rounding
            return np.diag(values).astype(u.dtype)
        a = (u * values) @ u.conj().T
        return (a + a.conj().T) / 2

    @property
    def array(self):
        return as_array(self.dense)

    def operator(self, psd=False):
        return as_operator(self.dense, psd)

    def total(self, fn):
        """Trace of a function, summed over eigenvalues."""
        return np.sum(fn(self.eigenvalues))

    @property
    def trace(self):
        return np.sum(self.eigenvalues)

    def logdet(self, shift=0.0):
        return self.total(lambda x: np.log(x + shift))

    def trace_inverse(self, shift=0.0):
        return self.total(lambda x: 1 / (x + shift))


def hermitian(name, n, complex=False, seed=0):
    return Problem(name, n, complex, seed).dense.copy()


def matrix(name, n, complex=False, seed=0):
    """A dense matrix from the catalogue, or the `"nonsymmetric"` one."""
    if name != "nonsymmetric":
        return hermitian(name, n, complex, seed)
    rng = np.random.default_rng(seed + 1)
    a = rng.normal(size=(n, n)) / np.sqrt(n)
    if complex:
        a = a + 1j * rng.normal(size=(n, n)) / np.sqrt(n)
    return a + np.diag(np.linspace(0.5, 1.5, n))


#
# Kernels and Gaussian processes in the plane
#


def points(n, d=2, seed=0):
    return np.random.default_rng(seed).random((n, d))


def _squared(x):
    return np.sum((x[:, None] - x[None]) ** 2, axis=2)


def matern(x, length):
    r = np.sqrt(3 * _squared(x)) / length
    return (1 + r) * np.exp(-r)


def gaussian(x, length=0.3):
    return np.exp(-_squared(x) / (2 * length**2))


class Process(eqx.Module):
    """A Gaussian process: the kernel `scale` times Matern 3/2, and noise."""

    length: jax.Array
    scale: jax.Array
    noise: jax.Array

    def kernel(self, x):
        matern = Matern(self.length)
        return tx.KernelLinearOperator(lambda a, b: self.scale * matern(a, b), x)

    def dense(self, x):
        # Call this outside of `jit`: XLA gets its gradient wrong (see
        # test_kernel_operator.py).
        x = x @ jnp.diag(1 / self.length)
        squared = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        r = jnp.sqrt(3 * jnp.where(squared == 0, 1, squared))
        K = self.scale * jnp.where(squared == 0, 1, (1 + r) * jnp.exp(-r))
        return K + jnp.diag(jnp.broadcast_to(self.noise, (len(x),)))

    def exact_terms(self, x, y):
        """The log-determinant, `y^T A^-1 y` and `A^-1 y`."""
        lower = jnp.linalg.cholesky(self.dense(x))
        solution = jax.scipy.linalg.cho_solve((lower, True), y)
        return 2 * jnp.sum(jnp.log(jnp.diag(lower))), jnp.sum(y * solution, 0), solution

    def exact_likelihood(self, x, y):
        """The log-likelihood, summed over columns of y."""
        logdet, inv_quad, _ = self.exact_terms(x, y)
        constant = inv_quad.size * (logdet + len(x) * math.log(2 * math.pi))
        return -(constant + jnp.sum(inv_quad)) / 2


def process(noise=1e-2):
    return Process(*map(as_array, ([0.4, 0.6], 1.5, noise)))


def observations(n=120, columns=()):
    """Points, and noisy observations at them."""
    rng = np.random.default_rng(1)
    x = rng.random((n, 2))
    y = np.sin(5 * x[:, 0]) + 0.1 * rng.normal(size=(*columns, n))
    return as_array(x), as_array(y.T)

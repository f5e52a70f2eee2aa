"""One operator for every class in the library, with its dense matrix.

Both are functions of the same arrays, so that tests can compare derivatives too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree
from problems import PSD, complex_dtype, float_dtype, is_x64

import traceax as tx
from traceax._operators.space import ComplexLinearOperator, ShiftedLinearOperator
from traceax._preconditioner import PreconditionedLinearOperator, make_preconditioner

N, ROWS = 7, 4
SYMMETRIC = frozenset({"symmetric"})
SEMIDEFINITE = frozenset({"symmetric", "psd"})


class Entry(NamedTuple):
    """An operator and its matrix, as functions of `arrays()`.

    - `known`: properties that lineax's checks confirm, by their names in `CHECKS`.
    - `read`: whether traceax reads columns and diagonal without products.
    - `order`: the highest derivative with respect to the arrays.
    - `on_host`: whether products are host callbacks, which have no reverse mode.
    """

    make: Callable[[dict[str, Any]], lx.AbstractLinearOperator]
    dense: Callable[[dict[str, Any]], Any]
    known: frozenset[str] = frozenset()
    read: bool = False
    order: int = 2
    on_host: bool = False


CHECKS = {
    "symmetric": lx.is_symmetric,
    "diagonal": lx.is_diagonal,
    "tridiagonal": lx.is_tridiagonal,
    "lower": lx.is_lower_triangular,
    "upper": lx.is_upper_triangular,
    "unit": lx.has_unit_diagonal,
    "psd": lx.is_positive_semidefinite,
    "nsd": lx.is_negative_semidefinite,
}


def known_properties(operator):
    return {name for name, check in CHECKS.items() if check(operator)}


@functools.cache
def _values():
    rng = np.random.default_rng(5)
    c = rng.normal(size=(N, N)) + 1j * rng.normal(size=(N, N))
    real = {
        "a": rng.normal(size=(N, N)),
        "wide": rng.normal(size=(3, ROWS, N)),
        "batches": rng.normal(size=(3, N, N)),
        "d": rng.uniform(0.5, 1.5, N),
        "x": rng.normal(size=(N, 2)),
        "s": np.asarray(0.7),
    }
    rounded = {name: x.astype(float_dtype()) for name, x in real.items()}
    return rounded | {"c": c.astype(complex_dtype())}


def arrays():
    return jax.tree.map(jnp.asarray, _values())


#
# Building blocks
#


def _psd(p):
    return p["a"] @ p["a"].T / N + jnp.diag(p["d"])


def _hermitian(p):
    return p["c"] @ p["c"].conj().T / N + jnp.diag(p["d"]).astype(p["c"].dtype)


def _regular(a):
    return a + 4 * jnp.eye(N, dtype=a.dtype)


def _matrix(a, tags=()):
    return lx.MatrixLinearOperator(a, tags)


def _leaves(x):
    return {"u": x[:3], "w": x[3:].reshape(2, 2)}


def _on_pytrees(a):
    """A semidefinite matrix that acts on vectors with two leaves."""
    structure = jax.eval_shape(lambda: _leaves(a[0]))
    return lx.FunctionLinearOperator(
        lambda v: _leaves(a @ ravel_pytree(v)[0]), structure, PSD
    )


def _solver():
    tolerance = 1e-12 if is_x64() else 1e-6
    return lx.CG(rtol=tolerance, atol=tolerance)


def _kernel(p):
    return lambda a, b: jnp.exp(-p["s"] * jnp.sum((a - b) ** 2))


def _kernel_matrix(p):
    return jax.vmap(jax.vmap(_kernel(p), (None, 0)), (0, None))(p["x"], p["x"])


def _tiled(p):
    # We cut seven rows into tiles of three, so that the last tile is padded.
    return tx.KernelLinearOperator(_kernel(p), p["x"], tile=3)


def _mean(key, p):
    return tx.MeanLinearOperator(
        lambda m: _matrix(p["s"] * m), p[key], weights=p["d"][:3]
    )


def _mean_matrix(key, p):
    weights = p["d"][:3] / jnp.sum(p["d"][:3])
    return p["s"] * jnp.einsum("b,bij->ij", weights, p[key])


def _as_complex(x):
    return x.astype(complex_dtype())


# We use one model and one convex loss, for parameters with two leaves and for flat
# ones.


def _model(x, args):
    x = ravel_pytree(x)[0]
    return jnp.tanh(args["a"] @ x) * x


def _loss(outputs, args):
    return jnp.sum(jax.nn.softplus(args["d"] * outputs))


def _composed(x, args):
    return _loss(_model(x, args), args)


def _parts(p):
    return {"a": p["a"], "d": p["d"]}


def _hessian_matrix(p):
    return jax.hessian(_composed)(p["d"], _parts(p))


def _gauss_newton_matrix(p, shift=0.0):
    x, args = p["d"] + shift, _parts(p)
    J = jax.jacobian(_model)(x, args)
    return J.T @ jax.hessian(_loss)(_model(x, args), args) @ J


def _gauss_newton(x, p):
    return tx.GaussNewtonLinearOperator(_model, _loss, x, _parts(p))


# Our sparse matrices keep two entries out of three.


def _kept(a):
    return np.arange(a.size).reshape(a.shape) % 3 != 1


def _sparse(a):
    return jnp.where(_kept(a), a, jnp.zeros_like(a))


def _bcoo(a):
    """A BCOO with every entry split into two summands, and three entries out of bounds."""
    places = np.argwhere(_kept(a))
    data = a[places[:, 0], places[:, 1]]
    data = jnp.concatenate([data / 4, 3 * data / 4, data[:3]])
    places = np.concatenate([places, places, np.full((3, 2), a.shape)])
    return jsparse.BCOO((data, places), shape=a.shape)


def _fixed(name):
    """A NumPy matrix, for SciPy."""
    a = _values()[name]
    return np.where(_kept(a), a, 0).astype(a.dtype)


class MatVec(scipy.sparse.linalg.LinearOperator):
    """A SciPy operator without `matmat`: it accepts vectors of shape `(n,)` only."""

    def __init__(self, a):
        super().__init__(a.dtype, a.shape)
        self.a = a

    def _matvec(self, x):
        assert x.ndim == 1
        return self.a @ x

    def _rmatvec(self, x):
        return self.a.conj().T @ x


@functools.cache
def _preconditioned():
    p = arrays()
    operator = _matrix(_psd(p), PSD)
    preconditioner = make_preconditioner(jax.random.key(0), operator, 3, p["d"] / 10)
    M = preconditioner.apply(jnp.eye(N, dtype=p["a"].dtype))
    exact = M @ (_psd(p) + jnp.diag(p["d"] / 10)) @ M.T
    operator = PreconditionedLinearOperator(operator, preconditioner, p["d"] / 10)
    return operator, np.asarray(exact)


def _cubic(p):
    return lambda t: p["s"] * t**3 + t


def _cubic_matrix(a, p):
    return p["s"].astype(a.dtype) * (a @ a @ a) + a


def _eye(a):
    return jnp.eye(N, dtype=a.dtype)


SQUARE = {
    "kernel": Entry(_tiled, _kernel_matrix, SEMIDEFINITE, read=True),
    "mean": Entry(lambda p: _mean("batches", p), lambda p: _mean_matrix("batches", p)),
    "Gauss-Newton": Entry(
        lambda p: _gauss_newton(p["d"], p), _gauss_newton_matrix, SEMIDEFINITE
    ),
    "inverse": Entry(
        lambda p: tx.InverseLinearOperator(_matrix(_regular(p["a"])), lx.LU()),
        lambda p: jnp.linalg.inv(_regular(p["a"])),
    ),
    "shifted": Entry(
        lambda p: ShiftedLinearOperator(_matrix(p["a"]), p["s"]),
        lambda p: p["a"] + p["s"] * _eye(p["a"]),
        read=True,
    ),
    "preconditioned": Entry(
        lambda p: _preconditioned()[0],
        lambda p: _preconditioned()[1],
        SEMIDEFINITE,
        order=0,
    ),
    "BCOO": Entry(
        lambda p: tx.as_operator(_bcoo(p["a"])), lambda p: _sparse(p["a"]), read=True
    ),
    "sparse of SciPy": Entry(
        lambda p: tx.as_operator(scipy.sparse.csc_array(_fixed("a"))),
        lambda p: _fixed("a"),
        read=True,
        order=0,
    ),
    "SciPy": Entry(
        lambda p: tx.as_operator(scipy.sparse.linalg.aslinearoperator(_fixed("a"))),
        lambda p: _fixed("a"),
        order=0,
        on_host=True,
    ),
}
COMPLEX = {
    "complex vectors": Entry(
        lambda p: ComplexLinearOperator(_matrix(p["a"])),
        lambda p: _as_complex(p["a"]),
        read=True,
    ),
    "complex mean": Entry(
        lambda p: tx.MeanLinearOperator(
            lambda s: _matrix(_as_complex(s) * p["c"]), p["d"]
        ),
        lambda p: _as_complex(jnp.mean(p["d"])) * p["c"],
    ),
    "complex inverse": Entry(
        lambda p: tx.InverseLinearOperator(_matrix(_regular(p["c"])), lx.LU()),
        lambda p: jnp.linalg.inv(_regular(p["c"])),
    ),
    "complex function": Entry(
        lambda p: tx.MatrixFunctionLinearOperator(
            _matrix(_hermitian(p), PSD), _cubic(p), N, PSD
        ),
        lambda p: _cubic_matrix(_hermitian(p), p),
        frozenset({"psd"}),
        order=1,
    ),
    "complex shifted": Entry(
        lambda p: ShiftedLinearOperator(_matrix(p["c"]), p["c"][0, 0]),
        lambda p: p["c"] + p["c"][0, 0] * _eye(p["c"]),
        read=True,
    ),
    "complex BCOO": Entry(
        lambda p: tx.as_operator(_bcoo(p["c"])), lambda p: _sparse(p["c"]), read=True
    ),
    "complex SciPy": Entry(
        lambda p: tx.as_operator(MatVec(_fixed("c"))),
        lambda p: _fixed("c"),
        order=0,
        on_host=True,
    ),
}
OVER_PYTREES = {
    "Hessian over a PyTree": Entry(
        lambda p: tx.HessianLinearOperator(_composed, _leaves(p["d"]), _parts(p)),
        _hessian_matrix,
        SYMMETRIC,
    ),
    "mean over PyTrees": Entry(
        lambda p: tx.MeanLinearOperator(
            lambda s: _gauss_newton(_leaves(p["d"] + s), p), p["d"][:2], tags=PSD
        ),
        lambda p: sum(_gauss_newton_matrix(p, p["d"][i]) for i in range(2)) / 2,
        SEMIDEFINITE,
    ),
    "inverse over a PyTree": Entry(
        lambda p: tx.InverseLinearOperator(_on_pytrees(_psd(p)), _solver()),
        lambda p: jnp.linalg.inv(_psd(p)),
        SEMIDEFINITE,
    ),
    "function over a PyTree": Entry(
        lambda p: tx.MatrixFunctionLinearOperator(_on_pytrees(_psd(p)), _cubic(p), N),
        lambda p: _cubic_matrix(_psd(p), p),
        SYMMETRIC,
        order=1,
    ),
    "shifted over a PyTree": Entry(
        lambda p: ShiftedLinearOperator(_on_pytrees(_psd(p)), p["s"]),
        lambda p: _psd(p) + p["s"] * _eye(p["a"]),
        SYMMETRIC,
    ),
}
WIDE = {
    "wide mean": Entry(lambda p: _mean("wide", p), lambda p: _mean_matrix("wide", p)),
    "wide BCSR": Entry(
        lambda p: tx.as_operator(jsparse.BCSR.from_bcoo(_bcoo(p["wide"][0]))),
        lambda p: _sparse(p["wide"][0]),
    ),
    "wide SciPy": Entry(
        lambda p: tx.as_operator(MatVec(_values()["wide"][0])),
        lambda p: _values()["wide"][0],
        order=0,
        on_host=True,
    ),
}
CATALOGUE = SQUARE | COMPLEX | OVER_PYTREES | WIDE


RTOL = 1e-9 if is_x64() else 2e-4


def assert_near(x, y, rtol=RTOL, label=""):
    """Assert equality up to `rtol` times the largest entry."""
    x, y = np.asarray(x), np.asarray(y)
    atol = rtol * np.max(np.abs(y))
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=label)


def flat_product(operator):
    """The operator's product, as a function on flat vectors."""
    structure = operator.in_structure()
    _, unravel = ravel_pytree(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structure)
    )
    return lambda v: ravel_pytree(operator.mv(unravel(v)))[0]

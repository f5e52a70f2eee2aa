"""Operators from matrices, sparse matrices, SciPy's operators and functions."""

import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import PSD, complex_dtype, float_dtype, is_x64

import traceax as tx

scipy_sparse = pytest.importorskip("scipy.sparse")
scipy_linalg = pytest.importorskip("scipy.sparse.linalg")

RTOL = 1e-12 if is_x64() else 1e-5
N = 6


def _matrix(m=N, n=N, complex=False, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(m, n)) * (rng.random((m, n)) < 0.5)
    a = a * (1 + 2j) if complex else a
    return a.astype(complex_dtype() if complex else float_dtype())


def _near(x, y, rtol=RTOL):
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.max(np.abs(y)))


def _bcoo(a):
    return jsparse.BCOO.fromdense(jnp.asarray(a))


def _with_duplicates(a):
    rows, columns = np.nonzero(a)
    indices = np.stack([rows, columns], axis=1)
    quarter = a[rows, columns] / 4
    data = np.concatenate([quarter, 3 * quarter])
    return jsparse.BCOO((data, np.concatenate([indices, indices])), shape=a.shape)


class _MatVec(scipy_linalg.LinearOperator):
    """Without `matmat`."""

    def __init__(self, a):
        super().__init__(a.dtype, a.shape)
        self.a = a

    def _matvec(self, x):
        return self.a @ x.reshape(-1)

    def _rmatvec(self, x):
        return self.a.conj().T @ x.reshape(-1)


class _Counting(tx.TraceEstimator):
    """Hutchinson's estimator, counting how often it is traced."""

    def init(self, key, operator):
        return tx.init_state(key, operator)

    def compute(self, state, k):
        RUNS.append(k)
        return SIGNS.compute(state, k)


RUNS, SIGNS = [], tx.HutchinsonEstimator()
FORMS = {
    "NumPy": np.asarray,
    "JAX": jnp.asarray,
    "BCOO": _bcoo,
    "BCSR": lambda a: jsparse.BCSR.fromdense(jnp.asarray(a)),
    "padded BCOO": lambda a: jsparse.BCOO.fromdense(jnp.asarray(a), nse=a.size + 3),
    "duplicates": _with_duplicates,
    "sparse array": scipy_sparse.csr_array,
    "sparse matrix": scipy_sparse.csc_matrix,
    "SciPy": scipy_linalg.aslinearoperator,
    "SciPy of sparse": lambda a: scipy_linalg.aslinearoperator(
        scipy_sparse.coo_array(a)
    ),
    "matvec": _MatVec,
    "function": lambda a: lambda v: jnp.asarray(a) @ v,
    "lineax": lambda a: lx.MatrixLinearOperator(jnp.asarray(a)),
}


def _convert(form, a, **kwargs):
    return tx.as_operator(FORMS[form](a), jnp.asarray(a[0]), **kwargs)


@pytest.mark.parametrize(
    ("form", "complex"),
    [*((f, True) for f in FORMS), ("JAX", False), ("BCOO", False), ("SciPy", False)],
)
def test_products(form, complex):
    a = _matrix(4, complex=complex)
    operator = _convert(form, a)
    vectors = _matrix(3, complex=complex, seed=1)
    assert operator.in_structure() == jax.ShapeDtypeStruct((N,), a.dtype)
    assert operator.out_structure() == jax.ShapeDtypeStruct((4,), a.dtype)

    @jax.jit
    def products(vectors):
        tangent = jax.jvp(operator.mv, (vectors[0],), (vectors[1],))[1]
        conjugate, transpose = lx.conj(operator), operator.T
        matrices = [x.as_matrix() for x in (operator, conjugate, transpose)]
        return (
            operator.mv(vectors[0]),
            tangent,
            jax.vmap(operator.mv)(vectors),
            matrices,
        )

    expected = a @ vectors[0], a @ vectors[1], vectors @ a.T, [a, a.conj(), a.T]
    jax.tree.map(_near, products(jnp.asarray(vectors)), expected)


@pytest.mark.parametrize("form", ["padded BCOO", "matvec"])
def test_traces(form):
    a = _matrix()
    operator = _convert(form, a)
    _near(jax.jit(lambda: lx.diagonal(operator))(), np.diagonal(a))
    _near(jax.jit(lambda: lx.materialise(operator).as_matrix())(), a)
    vectors = _matrix(2, seed=1)[None]
    _near(jax.jit(jax.vmap(jax.vmap(operator.mv)))(vectors), vectors @ a.T)
    dense = tx.trace(jr.key(0), lx.MatrixLinearOperator(jnp.asarray(a)), 4, SIGNS)
    _near(tx.trace(jr.key(0), operator, 4, SIGNS).value, dense.value, 100 * RTOL)

    def value(scale):
        return tx.trace(jr.key(0), scale * operator, N).value

    # What multiplies an operator has derivatives, whatever the operator is.
    _near(jax.jit(jax.grad(value))(jnp.asarray(2.0, a.dtype)), np.trace(a))


@pytest.mark.x64
@pytest.mark.parametrize("form", ["sparse array", "lineax"])
def test_tags(form):
    a = _matrix()
    a = a @ a.T
    assert not lx.is_symmetric(_convert(form, a))
    operator = _convert(form, a, tags=PSD)
    assert lx.is_positive_semidefinite(operator)
    assert lx.is_positive_semidefinite(operator.T)
    _near(tx.trace(jr.key(0), operator, N).value, np.trace(a))


@pytest.mark.x64
@pytest.mark.parametrize("form", ["BCOO", "BCSR"])
def test_derivatives_with_respect_to_entries(form):
    sparse = FORMS[form](_matrix())

    def with_entries(data):
        children, structure = jax.tree.flatten(sparse)
        assert children[0] is sparse.data
        return jax.tree.unflatten(structure, [data, *children[1:]])

    def cubes(data):
        operator = tx.as_operator(with_entries(data))
        return tx.trace(jr.key(0), operator @ operator @ operator, N).value

    def exact(data):
        a = jnp.zeros((N, N), data.dtype).at[np.nonzero(_matrix())].add(data)
        return jnp.trace(a @ a @ a)

    data = sparse.data
    for derivative in (jax.grad, jax.hessian):
        _near(jax.jit(derivative(cubes))(data), jax.jit(derivative(exact))(data))
    lanes = jnp.stack([data, 2 * data])
    _near(jax.jit(jax.vmap(cubes))(lanes), [exact(data), 8 * exact(data)])


@pytest.mark.x64
@pytest.mark.parametrize("form", ["JAX", "sparse array"])
def test_matrices_compile_once(form):
    before = len(RUNS)
    for scale in (1.0, 2.0, 3.0):
        a = scale * _matrix()
        value = tx.trace(jr.key(0), _convert(form, a), 3, _Counting()).value
        _near(
            value / scale,
            tx.trace(jr.key(0), tx.as_operator(_matrix()), 3, SIGNS).value,
        )
    assert len(RUNS) == before + 1


@pytest.mark.x64
def test_a_host_operator_is_called_once_for_all_vectors():
    calls = []

    class Recording(_MatVec):
        def _matmat(self, x):
            calls.append(x.shape)
            return self.a @ x

    a = _matrix()
    operator = tx.as_operator(Recording(a))
    value = jax.jit(lambda key: tx.trace(key, operator, 4, tx.HutchinsonEstimator()))
    estimate = value(jr.key(0))
    jax.block_until_ready(estimate.value)
    assert calls == [(N, 4)]


def test_other_dtypes():
    whole = np.arange(9).reshape(3, 3)
    forms = (
        whole,
        jnp.asarray(whole),
        _bcoo(whole),
        scipy_sparse.csr_array(whole),
        scipy_linalg.aslinearoperator(whole),
        scipy_linalg.aslinearoperator(whole.astype(np.float64)),
    )
    for x in forms:
        operator = tx.as_operator(x)
        assert operator.in_structure().dtype in (float_dtype(), np.float32)
        product = operator.mv(jnp.ones(3, operator.in_structure().dtype))
        _near(product, whole.sum(axis=1))
    assert tx.as_operator(np.eye(3, dtype=np.float32)).in_structure().dtype == "float32"


def test_functions_of_pytrees():
    like = {"a": np.ones(2), "b": jax.ShapeDtypeStruct((3,), float_dtype())}
    operator = tx.as_operator(lambda x: jax.tree.map(lambda v: 2 * v, x), like)
    assert operator.in_structure()["a"].dtype == float_dtype()
    _near(tx.trace(jr.key(0), operator, 5).value, 10.0)


def test_lineax_operators_are_left_alone():
    operator = lx.DiagonalLinearOperator(jnp.ones(3))
    assert tx.as_operator(operator) is operator


@pytest.mark.x64
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((None,), TypeError, "got None of type NoneType; turn it into an array"),
        (([[1.0]],), TypeError, "got an object of type list; turn it"),
        ((lx.MatrixLinearOperator,), TypeError, "got the class lineax"),
        ((np.ones(3),), ValueError, r"2-dimensional array, got one of shape \(3,\)"),
        ((np.ones((2, 3, 3)),), ValueError, r"shape \(2, 3, 3\); use jax.vmap"),
        ((scipy_sparse.coo_array(np.ones(3)),), ValueError, r"of shape \(3,\)"),
        (
            (jsparse.BCOO.fromdense(np.ones((2, 3)), n_batch=1),),
            ValueError,
            "no batch and no dense dimensions, got 1 and 0",
        ),
        ((jnp.sin,), TypeError, r"example of its input, got None; pass as_operator\("),
        ((jnp.sin, 3), TypeError, "got 3 of type int in it; pass"),
    ],
)
def test_wrong_arguments(args, error, message):
    with pytest.raises(error, match=f"^traceax.as_operator: .*{message}"):
        tx.as_operator(*args)


@pytest.mark.wrong_types
@pytest.mark.x64
@pytest.mark.parametrize("form", ["NumPy", "BCOO", "sparse array", "SciPy", "function"])
def test_what_front_doors_say(form):
    x = FORMS[form](_matrix())
    for call in (tx.trace, tx.trace_inverse, tx.logdet):
        with pytest.raises(
            TypeError, match=r"lineax linear operator.*as_operator\(x\)"
        ):
            call(jr.key(0), x, 3)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_which_library_an_object_is_from():
    operator = scipy_linalg.aslinearoperator(_matrix())
    with pytest.raises(TypeError, match=r"type scipy\.sparse\.linalg\.\S*MatrixLinear"):
        tx.trace(jr.key(0), operator, 3)


@pytest.mark.x64
@pytest.mark.parametrize("form", ["BCOO", "BCSR", "sparse array"])
def test_sparse_matrices_in_operators_of_dense_ones(form):
    inner = lx.MatrixLinearOperator(FORMS[form](_matrix()))
    for operator in (inner, 2 * inner, lx.TaggedLinearOperator(inner, PSD)):
        with pytest.raises(
            TypeError, match=r"must hold a dense array, got an object.*as_operator\(x\)"
        ):
            tx.trace(jr.key(0), operator, 3)


@pytest.mark.x64
def test_host_operators_have_no_reverse_mode():
    operator = tx.as_operator(scipy_linalg.aslinearoperator(_matrix()))
    with pytest.raises(ValueError, match="do not support transpose"):
        jax.grad(lambda v: jnp.sum(operator.mv(v)))(jnp.ones(N))

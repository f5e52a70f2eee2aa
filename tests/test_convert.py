"""Operators from matrices, sparse matrices, SciPy operators and functions."""

import re

import jax
import jax.experimental.sparse as jsparse
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from operator_catalogue import MatVec, assert_near
from problems import PSD, complex_dtype, float_dtype, is_x64

import traceax as tx
from traceax._spectral.base import init_spectral_state

N = 6


def _matrix(m=N, n=N, complex=False, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(m, n)) * (rng.random((m, n)) < 0.5)
    a = a * (1 + 2j) if complex else a
    return a.astype(complex_dtype() if complex else float_dtype())


def _bcoo(a):
    return jsparse.BCOO.fromdense(jnp.asarray(a))


def _with_duplicates(a):
    rows, columns = np.nonzero(a)
    indices = np.stack([rows, columns], axis=1)
    quarter = a[rows, columns] / 4
    data = np.concatenate([quarter, 3 * quarter])
    return jsparse.BCOO((data, np.concatenate([indices, indices])), shape=a.shape)


class _Counting(tx.TraceEstimator):
    """Hutchinson's estimator. It counts how often JAX traces it."""

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
    "sparse array": scipy.sparse.csr_array,
    "sparse matrix": scipy.sparse.csc_matrix,
    "SciPy": scipy.sparse.linalg.aslinearoperator,
    "SciPy of sparse": lambda a: scipy.sparse.linalg.aslinearoperator(
        scipy.sparse.coo_array(a)
    ),
    "matvec": MatVec,
    "function": lambda a: lambda v: jnp.asarray(a) @ v,
    "lineax": lambda a: lx.MatrixLinearOperator(jnp.asarray(a)),
}


def _convert(form, a, **kwargs):
    return tx.as_operator(FORMS[form](a), jnp.asarray(a[0]), **kwargs)


@pytest.mark.parametrize("complex", [False, True])
def test_products(complex):
    # test_operator_catalogue.py tests every class's other operations.
    a = _matrix(4, complex=complex)
    vectors = jnp.asarray(_matrix(2, complex=complex, seed=1)[:, None])
    operators = {form: _convert(form, a) for form in FORMS}
    for operator in operators.values():
        assert operator.in_structure() == jax.ShapeDtypeStruct((N,), a.dtype)
        assert operator.out_structure() == jax.ShapeDtypeStruct((4,), a.dtype)

    @jax.jit
    def products(v):
        # The host receives both batch axes as one block.
        return {x: jax.vmap(jax.vmap(A.mv))(v) for x, A in operators.items()}

    for product in products(vectors).values():
        assert_near(product, vectors @ a.T)


@pytest.mark.parametrize("form", ["padded BCOO", "matvec"])
def test_traces(form):
    a = _matrix()
    operator = _convert(form, a)

    def value(scale):
        return tx.trace(jr.key(0), scale * operator, N).value

    # A factor has derivatives even if its operator has none.
    scale = jnp.asarray(2.0, a.dtype)
    assert_near(
        jax.jit(jax.value_and_grad(value))(scale), (2 * np.trace(a), np.trace(a))
    )


@pytest.mark.x64
@pytest.mark.parametrize("form", ["sparse array", "lineax"])
def test_tags(form):
    a = _matrix()
    a = a @ a.T
    assert not lx.is_symmetric(_convert(form, a))
    operator = _convert(form, a, tags=PSD)
    assert lx.is_positive_semidefinite(operator)
    assert lx.is_positive_semidefinite(operator.T)
    assert tx.as_operator(operator) is operator


@pytest.mark.x64
@pytest.mark.parametrize("form", ["BCOO", "BCSR"])
def test_derivatives_with_respect_to_entries(form):
    sparse = FORMS[form](_matrix())
    children, structure = jax.tree.flatten(sparse)
    assert children[0] is sparse.data

    def cubes(data):
        entries = jax.tree.unflatten(structure, [data, *children[1:]])
        operator = tx.as_operator(entries)
        return tx.trace(jr.key(0), operator @ operator @ operator, N).value

    def exact(data):
        a = jnp.zeros((N, N), data.dtype).at[np.nonzero(_matrix())].add(data)
        return jnp.trace(a @ a @ a)

    @jax.jit
    def derivatives(batch):
        def transform(fn):
            return (
                jax.vmap(fn)(batch),
                jax.grad(fn)(batch[0]),
                jax.hessian(fn)(batch[0]),
            )

        return transform(cubes), transform(exact)

    batch = jnp.stack([sparse.data, 2 * sparse.data])
    jax.tree.map(assert_near, *derivatives(batch))


@pytest.mark.x64
@pytest.mark.parametrize("form", ["JAX", "sparse array"])
def test_matrices_compile_once(form):
    before = len(RUNS)
    for scale in (1.0, 2.0, 3.0):
        a = scale * _matrix()
        value = tx.trace(jr.key(0), _convert(form, a), 3, _Counting()).value
        assert_near(
            value / scale,
            tx.trace(jr.key(0), tx.as_operator(_matrix()), 3, SIGNS).value,
        )
    assert len(RUNS) == before + 1


@pytest.mark.x64
def test_a_host_operator_is_called_once_for_all_vectors():
    calls = []

    class Recording(MatVec):
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
        scipy.sparse.csr_array(whole),
        scipy.sparse.linalg.aslinearoperator(whole),
        scipy.sparse.linalg.aslinearoperator(whole.astype(np.float64)),
    )
    for x in forms:
        operator = tx.as_operator(x)
        assert operator.in_structure().dtype in (float_dtype(), np.float32)
        product = operator.mv(jnp.ones(3, operator.in_structure().dtype))
        assert_near(product, whole.sum(axis=1))
    assert tx.as_operator(np.eye(3, dtype=np.float32)).in_structure().dtype == "float32"


BIG = 3_000_000_000
SPARSE = [f"{name}_array" for name in ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers(dtype):
    # Without 64-bit mode, JAX would convert BIG to -1,294,967,296.
    entries = np.diag(np.asarray([BIG, 1, 2], dtype))
    forms = [getattr(scipy.sparse, name) for name in SPARSE]
    for form in (np.asarray, scipy.sparse.linalg.aslinearoperator, *forms):
        operator = tx.as_operator(form(entries))
        assert_near(operator.as_matrix(), entries)


def test_small_integers_do_not_overflow():
    entries, places = np.asarray([100, 100], np.int8), np.zeros((2, 2), np.int32)
    sparse = jsparse.BCOO((jnp.asarray(entries), places), shape=(2, 2))
    coo = scipy.sparse.coo_array((entries, tuple(places)), shape=(2, 2))
    for x in (sparse, jsparse.BCSR.from_bcoo(sparse), coo, np.diag([200, 0])):
        assert_near(tx.as_operator(x).as_matrix(), np.diag([200.0, 0]))
    boolean = tx.as_operator(np.eye(300, dtype=bool))
    assert_near(boolean.mv(jnp.ones(300)), np.ones(300))


@pytest.mark.skipif(is_x64(), reason="64 bits hold them")
@pytest.mark.wrong_types
def test_large_integers_as_arguments():
    key, d = jr.key(0), np.asarray([1.0, 2.0, 4.0])
    diagonal = lx.DiagonalLinearOperator(jnp.asarray(d))
    for big in (BIG, np.int64(BIG), np.asarray(BIG)):
        assert_near(
            tx.logdet(key, diagonal, 1, shift=big).value, np.sum(np.log(d + BIG))
        )
        state = init_spectral_state("here", key, diagonal, jnp.exp, -big, trace=big)
        assert_near(state.lower, -BIG)
        assert_near(state.trace, BIG)
        assert tx.trace(key, diagonal, 9, atol=big).result == tx.RESULTS.successful
        density = tx.SpectralDensity(jnp.asarray(d), jnp.ones(3))
        whole = tx.spectral_density(key, diagonal, 9)
        assert_near(whole.count(-big, big).value, 3.0)
        assert_near(density.density(0, big), 3 / (BIG * np.sqrt(2 * np.pi)))
    _, slope = tx.jvp(lambda s: tx.trace(key, s * diagonal, 9), (1.0,), (big,))
    assert_near(slope.value, 7 * BIG)
    y, dense = np.asarray([BIG, 1, -2]), lx.MatrixLinearOperator(jnp.diag(d))
    terms = tx.inv_quad_logdet(key, dense, y, 3, shift=big, throw=False)
    assert_near(terms.logdet.value, np.sum(np.log(d + BIG)))
    assert_near(terms.solution, y / (d + BIG))


@pytest.mark.skipif(is_x64(), reason="64 bits hold them")
def test_integers_that_do_not_fit():
    # Points may be categories, and as floating-point numbers these two would be equal.
    points, where = (
        np.asarray([[BIG], [BIG + 1]]),
        "got 3000000000 to 300000000[01]; conv",
    )
    with pytest.raises(ValueError, match=f"Kernel.*: x must hold integers.*{where}"):
        tx.KernelLinearOperator(lambda a, b: jnp.sum(a * b), points)
    with pytest.raises(ValueError, match=f"Mean.*: batches must hold.*{where}"):
        tx.MeanLinearOperator(lx.DiagonalLinearOperator, points)
    for make in (
        lambda: tx.HessianLinearOperator(lambda p, a: p @ a, jnp.ones(2), points[0]),
        lambda: tx.GaussNewtonLinearOperator(
            lambda p, a: p, lambda o, a: jnp.sum(o), jnp.ones(2), {"y": points}
        ),
    ):
        with pytest.raises(ValueError, match="Operator: args must hold integers"):
            make()


def test_functions_of_pytrees():
    like = {"a": np.ones(2), "b": jax.ShapeDtypeStruct((3,), float_dtype())}
    operator = tx.as_operator(lambda x: jax.tree.map(lambda v: 2 * v, x), like)
    assert operator.in_structure()["a"].dtype == float_dtype()
    assert_near(tx.trace(jr.key(0), operator, 5).value, 10.0)


class Like:
    """The part of SciPy's operator interface that PyLops has."""

    shape, dtype = (2, 3), "int32"

    def matvec(self, x):
        return np.asarray([[1, 2, 3], [4, 5, 6]]) @ x


class Callable(Like):
    def __call__(self, x):
        return 10 * jnp.asarray([[1.0, 2, 3], [4, 5, 6]]) @ x


def test_objects_that_resemble_scipy_operators():
    exact = np.asarray([[1, 2, 3], [4, 5, 6.0]])
    assert_near(tx.as_operator(Like()).as_matrix(), exact)
    assert_near(tx.as_operator(Callable()).as_matrix(), exact)
    # With an example input, we treat it as a function.
    assert_near(tx.as_operator(Callable(), jnp.ones(3)).as_matrix(), 10 * exact)


class Sizes:
    """An operator whose sizes are NumPy numbers, as from `numpy.prod`."""

    dtype = float_dtype()

    def __init__(self, size):
        self.shape = size, size

    def matvec(self, x):
        return np.arange(1, 13) * x


def test_numpy_integers_as_sizes():
    n, whole = np.prod((3, 4)), np.arange(1, 13)
    custom = scipy.sparse.linalg.LinearOperator(
        (n, n), matvec=lambda x: whole * x, dtype=float_dtype()
    )
    laplacian = scipy.sparse.linalg.LaplacianNd((3, 4), dtype=float_dtype())
    forms = (
        (custom, None, 78),
        (laplacian, None, -34),
        (Sizes(n), None, 78),
        (Sizes(np.asarray(12)), None, 78),
        (scipy.sparse.coo_array((whole, (whole - 1, whole - 1)), (n, n)), None, 78),
        (lambda x: 2 * x, jax.ShapeDtypeStruct((n,), float_dtype()), 24),
    )
    for x, like, exact in forms:
        operator = tx.as_operator(x, like)
        assert type(operator.in_structure().shape[0]) is int
        assert_near(tx.trace(jr.key(0), operator, 12).value, exact)
    # Few products, too, cause no warning.
    estimate = tx.trace(jr.key(0), tx.as_operator(laplacian), 5)
    assert abs(estimate.value + 34) < 5 * estimate.standard_error


def test_a_real_dtype_with_complex_products_is_an_error():
    diagonal = 1 + 1j * np.arange(1, 6)
    operator = scipy.sparse.linalg.LinearOperator(
        (5, 5), matvec=lambda v: diagonal * v, dtype=float_dtype()
    )
    with pytest.raises(Exception, match="products must be real"):
        jax.block_until_ready(tx.trace(jr.key(0), tx.as_operator(operator), 5))


def test_operators_with_a_batch_are_refused():
    stack = Sizes(12)
    stack.shape = 4, 12, 12
    with pytest.raises(TypeError, match="x must be a dense or sparse matrix"):
        tx.as_operator(stack)
    if tuple(map(int, scipy.__version__.split(".")[:2])) >= (1, 18):
        stack = scipy.sparse.linalg.aslinearoperator(np.ones((4, 5, 5)))
        with pytest.raises(ValueError, match=r"no batch.*shape \(4, 5, 5\)"):
            tx.as_operator(stack)


class Evaluated:
    """A matrix whose call isn't a product, like quspin's `hamiltonian`."""

    shape, dtype = (3, 3), "float64"

    def __call__(self, time):
        return self

    def toarray(self):
        return np.diag([1.0, 2.0, 4.0])


@jax.tree_util.register_pytree_node_class
class Converting:
    """A PyTree that converts its leaves."""

    def __init__(self, convert, x):
        self.convert, self.x = convert, convert(x)

    def tree_flatten(self):
        return (self.x,), self.convert

    @classmethod
    def tree_unflatten(cls, convert, leaves):
        return cls(convert, *leaves)


@pytest.mark.x64
def test_objects_that_are_refused():
    with pytest.raises(
        TypeError, match=r"Evaluated; pass x\.toarray\(\), or write a f"
    ):
        tx.as_operator(Evaluated())
    for convert in (jnp.asarray, np.asarray):
        like = Converting(convert, jnp.ones(3))
        with pytest.raises(TypeError, match=r"like must.*Converting; .*ravel_pytree"):
            tx.as_operator(lambda x: x, like)


class Weights:
    """A graph with a sparse matrix, as in libpysal."""

    sparse = scipy.sparse.csr_array(np.diag([1.0, 2.0]))

    def full(self):
        return np.diag([1.0, 2.0]), [0, 1]


class Builder:
    """A builder of Hamiltonians, as in quimb."""

    def build_sparse_matrix(self):
        return scipy.sparse.csr_array(np.diag([1.0, 2.0]))


class Foreign:
    """A sparse array that NumPy can't convert, as in pydata's `sparse`."""

    shape, dtype = (2, 2), "float64"

    def to_scipy_sparse(self):
        return scipy.sparse.csr_array(np.diag([1.0, 2.0]))

    def todense(self):
        return np.diag([1.0, 2.0])


@pytest.mark.x64
def test_the_conversion_that_an_error_names_works():
    dense = jnp.diag(jnp.asarray([1.0, 2.0]))
    kinds = jsparse.COO, jsparse.CSR, jsparse.CSC
    jax_arrays = [(kind.fromdense(dense), "x.todense()") for kind in kinds]
    for x, advice in (
        (Foreign(), "x.to_scipy_sparse()"),
        (Builder(), "x.build_sparse_matrix()"),
        (Weights(), "x.sparse"),
        *jax_arrays,
    ):
        with pytest.raises(
            TypeError, match=re.escape(f"; pass {advice}, or write a f")
        ):
            tx.as_operator(x)
        path = advice.removeprefix("x.").removesuffix("()")
        converted = getattr(x, path)() if advice.endswith("()") else getattr(x, path)
        assert_near(tx.as_operator(converted).as_matrix(), np.diag([1.0, 2.0]))
    with pytest.raises(TypeError, match=r"the class test_convert\.Foreign; turn it"):
        tx.as_operator(Foreign)


@pytest.mark.x64
def test_wrong_arguments():
    batches = jsparse.BCOO.fromdense(np.ones((2, 3)), n_batch=1)
    for args, error, message in [
        ((None,), TypeError, "got None of type NoneType; turn it into an array"),
        (([[1.0]],), TypeError, "got an object of type list; turn it"),
        ((lx.MatrixLinearOperator,), TypeError, "got the class lineax"),
        ((np.ones(3),), ValueError, r"2-dimensional array, got one of shape \(3,\)"),
        ((np.ones((2, 3, 3)),), ValueError, r"shape \(2, 3, 3\); use jax.vmap"),
        ((scipy.sparse.coo_array(np.ones(3)),), ValueError, r"of shape \(3,\)"),
        ((batches,), ValueError, "no batch and no dense dimensions, got 1 and 0"),
        ((jnp.sin,), TypeError, r"example of its input, got None; pass as_operator\("),
        ((jnp.sin, 3), TypeError, "got 3 of type int in it; pass"),
    ]:
        with pytest.raises(error, match=f"^traceax.as_operator: .*{message}"):
            tx.as_operator(*args)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_messages_of_entry_points():
    match = r"lineax linear operator.*as_operator\(x\)"
    for form in ("NumPy", "BCOO", "sparse array", "SciPy", "function"):
        for call in (tx.trace, tx.trace_inverse, tx.logdet):
            with pytest.raises(TypeError, match=match):
                call(jr.key(0), FORMS[form](_matrix()), 3)
    match = r"type scipy\.sparse\.linalg\.\S*MatrixLinear"
    with pytest.raises(TypeError, match=match):
        tx.trace(jr.key(0), FORMS["SciPy"](_matrix()), 3)
    match = r"must hold a dense array, got an object.*as_operator\(x\)"
    for form in ("BCOO", "BCSR", "sparse array"):
        inner = lx.MatrixLinearOperator(FORMS[form](_matrix()))
        for operator in (inner, 2 * inner, lx.TaggedLinearOperator(inner, PSD)):
            with pytest.raises(TypeError, match=match):
                tx.trace(jr.key(0), operator, 3)


@pytest.mark.x64
def test_host_operators_have_no_reverse_mode():
    operator = tx.as_operator(scipy.sparse.linalg.aslinearoperator(_matrix()))
    with pytest.raises(ValueError, match="do not support transpose"):
        jax.grad(lambda v: jnp.sum(operator.mv(v)))(jnp.ones(N))

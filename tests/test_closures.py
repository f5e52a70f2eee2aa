"""Operators made of new functions each time: right numbers, one compilation."""

import enum
import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, float_dtype, matrix
from jax.extend.core import Jaxpr

import traceax as tx
from traceax._closures import Opaque, PortableFunction, portable
from traceax._programs import interned

N, K = 12, 8


class Counting(tx.TraceEstimator):
    """The exact trace of what `mv` says, counting how often it is traced."""

    def init(self, key, operator):
        return tx.init_state(key, operator)

    def compute(self, state, k):
        runs.append(k)
        n = state.operator.in_size()
        identity = jnp.eye(n, dtype=float_dtype())
        value = jnp.trace(jax.vmap(state.operator.mv)(identity))
        return value, jnp.zeros(()), {"num_matvecs": n}, (identity, identity)


runs = []
STRUCTURE = jax.ShapeDtypeStruct((N,), jnp.float32)


def _estimate(fn, closure_convert):
    structure = jax.ShapeDtypeStruct((N,), float_dtype())
    operator = lx.FunctionLinearOperator(fn, structure, closure_convert=closure_convert)
    return tx.trace(jr.key(0), operator, K, Counting()).value


def _matrices(number=3):
    return [
        jnp.asarray(matrix("flat", N, seed=i) * (i + 1), float_dtype())
        for i in range(number)
    ]


@pytest.mark.parametrize("closure_convert", [True, False])
def test_fresh_closures_compile_once(closure_convert):
    def make(a, scale):
        def product(vector):
            return scale * (a @ vector)

        return lambda vector: product(vector) + vector * a[0, 0]

    before = len(runs)
    for i, a in enumerate(_matrices()):
        scale = jnp.asarray(1.0 + i, a.dtype)
        value = _estimate(make(a, scale), closure_convert)
        assert_close(value, scale * jnp.trace(a) + N * a[0, 0], rtol=1e-4)
    assert len(runs) - before <= 1


def test_other_code_or_constants_are_another_program():
    (a,) = _matrices(1)
    trace = jnp.trace(a)
    for closure_convert in (True, False):
        for factor in (2.0, 3.0, -0.0):
            value = _estimate(lambda v, c=factor: c * (a @ v), closure_convert)
            assert_close(value, factor * trace, rtol=1e-4, atol=1e-6)
        assert_close(_estimate(lambda v: a @ v, closure_convert), trace, rtol=1e-4)
        assert_close(
            _estimate(lambda v: a @ v + v, closure_convert), trace + N, rtol=1e-4
        )


@pytest.mark.parametrize("closure_convert", [True, False])
def test_the_sign_of_zero_counts(closure_convert):
    def make(zero):
        return lambda v: v * jnp.copysign(1, jnp.asarray(zero, v.dtype))

    for zero in (0.0, -0.0, np.float32(0), np.float32(-0.0)):
        value = _estimate(make(zero), closure_convert)
        assert_close(value, np.copysign(N, zero), rtol=1e-5)


GLOBAL = jnp.ones(())


def _helper(vector):
    return GLOBAL.astype(vector.dtype) * vector


def test_changed_globals_count(monkeypatch):
    module = globals()

    def check(factor):
        for closure_convert in (True, False):
            for fn in (
                lambda v: GLOBAL.astype(v.dtype) * v,
                lambda v: _helper(v) + 0 * v,
            ):
                assert_close(_estimate(fn, closure_convert), factor * N)

    check(1.0)
    for factor in (2.0, 5.0):
        monkeypatch.setitem(module, "GLOBAL", jnp.asarray(factor))
        check(factor)


def test_objects_that_can_change_are_read_anew():
    class Holder:
        factor = 2.0

    holder = Holder()
    for factor in (2.0, 3.0):
        holder.factor = factor
        assert_close(_estimate(lambda v: holder.factor * v, False), factor * N)
    simple = types.SimpleNamespace(factor=4.0)
    assert not isinstance(portable(lambda v: simple.factor * v), PortableFunction)
    # Containers of arrays are taken apart.
    table = {"factor": jnp.asarray(2.0, float_dtype())}
    assert isinstance(portable(lambda v: table["factor"] * v), PortableFunction)
    for factor in (2.0, 3.0):
        table["factor"] = jnp.asarray(factor, float_dtype())
        assert_close(_estimate(lambda v: table["factor"] * v, False), factor * N)


class Settings:
    factor = 1.0


MODULE = types.ModuleType("settings")
EYE = np.eye(N, dtype=np.float32)


def _factor():
    return Settings.factor


MODULE.factor_of = _factor  # pyright: ignore


def _holding(x):
    def scaled(v):
        return x.factor * v if isinstance(x, type) else x.astype(v.dtype) @ v

    return scaled


def _read_from(holder):
    return holder.factor


WRITTEN_TO = {
    "class": lambda: lambda v: Settings.factor * v,
    "class in a closure": lambda: _holding(Settings),
    "class as an argument": lambda: lambda v: _read_from(Settings) * v,
    "module": lambda: lambda v: MODULE.factor * v,
    "function of a module": lambda: lambda v: MODULE.factor_of() * v,
    "global function": lambda: lambda v: _factor() * v,
    "global array": lambda: lambda v: EYE.astype(v.dtype) @ v,
    "array in a closure": lambda: _holding(EYE),
    "default": lambda: lambda v, held=EYE: held.astype(v.dtype) @ v,
}


@pytest.mark.parametrize("closure_convert", [True, False])
@pytest.mark.parametrize("name", WRITTEN_TO)
def test_what_is_written_to_counts(monkeypatch, name, closure_convert):
    for factor in (1.0, 2.0, 3.0, 3.0):
        monkeypatch.setattr(Settings, "factor", factor)
        monkeypatch.setattr(MODULE, "factor", factor, raising=False)
        EYE[:] = factor * np.eye(N)
        before = len(runs)
        assert_close(_estimate(WRITTEN_TO[name](), closure_convert), factor * N)
    # The last is as the one before.
    assert len(runs) == before


TABLE, NUMBERS, SIMPLE = {"factor": 1.0}, [1.0], types.SimpleNamespace(factor=1.0)


class Scaling:
    factor = 1.0

    def product(self, v, _=None):
        return self.factor * v

    __call__ = product


SCALING = Scaling()
# The same function each time.
NAMED = {
    "dictionary": (lambda v, _=None: TABLE["factor"] * v, True),
    "list": (lambda v, _=None: NUMBERS[0] * v, True),
    "object": (lambda v, _=None: SCALING.factor * v, False),
    "namespace": (lambda v, _=None: SIMPLE.factor * v, False),
    "by name": (lambda v, _=None: getattr(SIMPLE, "factor") * v, False),  # noqa: B009
    "bound method": (SCALING.product, False),
    "callable object": (SCALING, False),
    "partial": (functools.partial(Scaling.product, SCALING), False),
}


def _set(factor):
    TABLE["factor"] = NUMBERS[0] = SIMPLE.factor = SCALING.factor = factor


@pytest.fixture
def factors():
    def setting():
        for factor in (1.0, 3.0, 3.0, 2.0):
            _set(factor)
            yield factor

    yield setting()
    _set(1.0)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "made anew"])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_function_is_read_anew(name, kept, factors):
    fn, comparable = NAMED[name]
    structure = jax.ShapeDtypeStruct((N,), float_dtype())
    # A kept operator with a converted function holds the program of its time.
    operator = lx.FunctionLinearOperator(fn, structure, closure_convert=False)
    jacobian = lx.JacobianLinearOperator(fn, jnp.ones(N, float_dtype()))
    compiled = []
    for factor in factors:
        before = len(runs)
        if not kept:
            assert_close(_estimate(fn, True), factor * N)
            assert_close(_estimate(fn, False), factor * N)
        value = tx.trace(jr.key(0), operator, K, Counting()).value
        assert_close(value, factor * N)
        if name not in ("bound method", "callable object", "partial"):
            # These are functions that lineax converts when it makes the operator.
            value = tx.trace(jr.key(0), jacobian, K, Counting()).value
            assert_close(value, factor * N)
        compiled.append(len(runs) > before)
    # What is compared compiles once for each value of it.
    assert compiled == ([True, True, False, True] if comparable else [True] * 4)


def test_functions_of_eigenvalues_are_read_anew(factors):
    def fn(x):
        return TABLE["factor"] * x**2

    a = lx.MatrixLinearOperator(jnp.eye(N, dtype=float_dtype()), lx.symmetric_tag)
    for factor in factors:
        value = tx.trace_function(jr.key(0), fn, a, 4).value
        assert_close(value, factor * N, rtol=1e-4)


def test_means_are_read_anew(factors):
    def make(batch):
        structure = jax.ShapeDtypeStruct((N,), float_dtype())
        return lx.FunctionLinearOperator(
            lambda v: NUMBERS[0] * batch * v, structure, lx.symmetric_tag
        )

    batches = jnp.arange(1.0, 4.0, dtype=float_dtype())
    kept = tx.MeanLinearOperator(make, batches)
    for factor in factors:
        for mean in (kept, tx.MeanLinearOperator(make, batches)):
            value = tx.trace(jr.key(0), mean, K, Counting()).value
            assert_close(value, 2 * factor * N, rtol=1e-5)


class Colour(enum.Enum):
    red = 1


def test_what_does_not_change_compiles_once():
    a = jnp.asarray(matrix("flat", N), float_dtype())

    before = len(runs)
    for _ in range(3):
        value = _estimate(lambda v: a @ v if Colour.red is Colour(1) else v, False)
        assert_close(value, jnp.trace(a), rtol=1e-4)
    assert len(runs) - before <= 1


def test_numbers_that_python_must_know_stay_known():
    shape, width = np.array([3, 4]), np.int64(2)
    flag, number = jnp.asarray(True), jnp.asarray(3)

    def product(vector):
        parts = vector.reshape(shape).reshape(-1, width)
        return int(number) * parts.reshape(-1) if flag else vector

    for closure_convert in (True, False):
        assert_close(_estimate(product, closure_convert), 3 * N)


@pytest.mark.parametrize("closure_convert", [True, False])
def test_functions_with_effects_have_them(closure_convert):
    calls, traces = [], 0

    def make():
        def product(vector):
            nonlocal traces
            traces += 1
            jax.debug.callback(lambda _: calls.append(None), vector[0])
            return 2 * vector

        return product

    for number in (1, 2):
        before = traces
        assert_close(_estimate(make(), closure_convert), 2 * N)
        jax.effects_barrier()
        assert len(calls) == number * N
        assert traces > before
    table = {"calls": 0}

    def counting(vector):
        table["calls"] += 1
        return vector

    _estimate(counting, False)
    assert table["calls"] > 0


def _jvp_rule(factor):
    @jax.custom_jvp
    def fn(x):
        return jnp.sum(x**2)

    @fn.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), factor() * jnp.vdot(x, t)

    return jax.grad(fn)


def _rule_of_a_rule(factor):
    slope = _jvp_rule(factor)

    @jax.custom_jvp
    def fn(x):
        return jnp.vdot(x, x)

    @fn.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), jnp.vdot(slope(x), t)

    return jax.grad(fn)


def _vjp_rule(factor):
    @jax.custom_vjp
    def fn(x):
        return jnp.sum(x**2)

    fn.defvjp(lambda x: (fn(x), x), lambda x, t: (factor() * t * x,))
    return jax.grad(fn)


CUSTOM = {
    "jvp": (_jvp_rule, lambda v, slope: jax.jvp(slope, (v,), (v,))[1]),
    "rule of a rule": (_rule_of_a_rule, lambda v, slope: jax.jvp(slope, (v,), (v,))[1]),
    "vjp": (_vjp_rule, lambda v, slope: slope(v)),
}


@pytest.mark.parametrize("kind", ["a number", "a setting"])
@pytest.mark.parametrize("name", CUSTOM)
def test_rules_of_custom_derivatives_count(name, kind, factors):
    rule, apply = CUSTOM[name]
    compiled = []
    for setting in factors:
        factor = setting
        if kind == "a setting":
            # Other numbers than those of the other kind, which is the same program.
            factor, read = 4 * setting, lambda: 4 * TABLE["factor"]
        else:
            read = lambda f=factor: f  # noqa: E731
        slope = rule(read)
        before = len(runs)
        for operator in _converted(slope, apply):
            value = tx.trace(jr.key(0), operator, K, Counting()).value
            assert_close(value, factor * N, rtol=1e-4)
        compiled.append(len(runs) - before)
    # The third is as the second.
    assert compiled == [2, 2, 0, 2]


def _converted(slope, apply):
    x = jnp.ones(N, float_dtype())
    yield lx.FunctionLinearOperator(
        lambda v: apply(v, slope), jax.eval_shape(lambda: x)
    )
    if apply is not CUSTOM["vjp"][1]:
        yield lx.JacobianLinearOperator(lambda y, _: slope(y), x)
    else:
        yield lx.JacobianLinearOperator(lambda y, _: slope(y), x, jac="bwd")


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.softplus, jax.nn.silu])
@pytest.mark.parametrize("closure_convert", [True, False])
def test_rules_of_activations_compile_once(activation, closure_convert):
    def energy(x):
        return jnp.sum(activation(x) ** 3)

    before = len(runs)
    for i in (1, 2, 3):
        x = jnp.full(N, float(i), float_dtype())
        expected = jnp.trace(jax.hessian(energy)(x))
        product = lambda v, x=x: jax.jvp(jax.grad(energy), (x,), (v,))[1]  # noqa: E731
        assert_close(_estimate(product, closure_convert), expected)
        hessian = lx.JacobianLinearOperator(
            lambda y, _: jax.grad(energy)(y), x, closure_convert=closure_convert
        )
        value = tx.trace(jr.key(0), hessian, K, Counting()).value
        assert_close(value, expected)
    assert len(runs) - before <= 2


def test_portable_functions_do_the_same():
    (a,) = _matrices(1)
    flag = True

    def make(b, depth):
        def inner(v, *, power=2):
            return (b @ v) * power if flag else v

        return lambda v, c=b: inner(v, power=depth) + jnp.sin(c @ v) + np.float64(1.0)

    fn = make(a, 3)
    moved = portable(fn)
    assert isinstance(moved, PortableFunction)
    v = a[0]
    assert_close(moved(v), fn(v))
    twin = portable(make(2 * a, 3))
    assert jax.tree.structure(moved) == jax.tree.structure(twin)
    other = portable(make(a, 4))
    assert jax.tree.structure(moved) != jax.tree.structure(other)
    for transform in (jax.jit, jax.checkpoint, eqx.filter_jit):
        assert_close(transform(moved)(v), fn(v))
    gradient = jax.grad(lambda f: jnp.sum(f(v)))(
        eqx.filter(moved, eqx.is_inexact_array)
    )
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(gradient)) > 0

    def recursive(v):
        return recursive(v) if v is None else v

    opaque = portable(recursive)
    assert isinstance(opaque, Opaque)
    assert opaque != portable(recursive)
    assert_close(opaque(v), v)
    partial = functools.partial(fn, c=2 * a)
    assert_close(portable(partial)(v), partial(v))
    assert jax.tree.structure(portable(partial)) != jax.tree.structure(moved)
    assert portable(jnp.sin) is jnp.sin


def test_equal_programs_are_one_object():
    def program(fn):
        return jax.make_jaxpr(fn)(jnp.ones(3)).jaxpr

    def looped(n):
        return lambda x: jax.lax.fori_loop(0, n, lambda i, y: y * 2 + i, x)

    kinds = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x * 0.0,
        lambda x: x * -0.0,
        lambda x: jnp.sum(x) - x,
        lambda x: x - jnp.sum(x),
        looped(3),
        looped(4),
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ]
    first = [interned(program(fn)) for fn in kinds]
    assert len({id(x) for x in first}) == len(kinds)
    for fn, known in zip(kinds, first, strict=True):
        again = program(fn)
        assert isinstance(again, Jaxpr)
        assert interned(again) is known
    assert interned(3) == 3

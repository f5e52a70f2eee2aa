"""The split budget: against loops with a projector a test, for bias, and at its edges."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import as_operator, assert_close, haar, matrix, rounding, z_score

import traceax as tx
from traceax._linalg import adaptive
from traceax.testing._calls import CHECKS, Subject

N = 40
ADAPTIVE = tx.AdaptiveXTraceEstimator()
both = pytest.mark.parametrize("complex", [False, True])


def _probes(key, start, number, a):
    block = ADAPTIVE.sampler.sample(key, len(a), start + number, jnp.asarray(a).dtype)
    return np.asarray(block)[:, start:]


def _projector(y):
    q, _ = np.linalg.qr(y)
    return q @ q.conj().T


def _test(b, p, w, others, rank):
    """A test of matrix b on what the projector p leaves of w, and the shift by others."""

    def quadratic(b, v):
        g = v - p @ v
        return np.vdot(g, b @ g)

    length = sum(quadratic(np.eye(len(b)), v) for v in others)
    c = sum(quadratic(b, v) for v in others) / length
    more = np.vdot(w - p @ w, w - p @ w) - len(b) + rank
    return np.trace(p @ b) + quadratic(b, w) - c * more


def _range(y, r, *left_out):
    kept = [j for j in range(r) if j not in left_out]
    return _projector(y[:, kept]) if kept else np.zeros((len(y), len(y))), len(kept)


def _naive_choice(y, w, k, ranks):
    """The rank for each test, each product left out of the basis it is measured by."""
    n, h = w.shape
    chosen = []
    for i in range(h):
        cost, before = [], np.inf
        for g, r in enumerate(ranks):
            rests = []
            for j in set(range(h)) - {i}:
                p, _ = _range(y, r, i, j)
                rests.append((w[:, j], y[:, j] - p @ y[:, j]))
            energy = np.mean([np.vdot(e, e).real for _, e in rests])
            mean = np.mean([np.vdot(v, e) for v, e in rests])
            v = max(energy - abs(mean) ** 2 / (n - r + (i < r)), energy / 1000)
            if r == 0:
                samples = [np.vdot(w[:, j], y[:, j]) for j in set(range(h)) - {i}]
                v = min(v, (1 + 30 / h) * np.var(samples, ddof=1) / 2)
            common = 0.0
            if g:
                step = max(before / v, 1) ** (1 / (r - ranks[g - 1])) - 1
                common = r * (r - 1) / (k - r) ** 2 * v * step / 4
            cost.append(v / (k - r) + common)
            before = v
        chosen.append(ranks[int(np.argmin(cost))])
    return np.array(chosen)


def _naive(a, w, fresh, b, chosen):
    """Samples of the left-out tests and the value, of matrix b for choices from a."""
    h, y = w.shape[1], a @ w
    largest = max(chosen)
    fresh, width = fresh[:, largest:], fresh.shape[1]
    samples = []
    for i, r in enumerate(chosen):
        others = [w[:, j] for j in range(r, h) if j != i]
        p, rank = _range(y, r, i)
        samples.append(_test(b, p, w[:, i], [*others, fresh[:, -1]], rank))
    p, rank = _range(y, largest)
    shift = list(w[:, largest:].T)
    of_fresh = np.mean([_test(b, p, v, shift, rank) for v in fresh.T])
    share = (width - chosen) / (h + width - chosen)
    return samples, np.mean((1 - share) * samples + share * of_fresh)


@pytest.mark.x64
@pytest.mark.parametrize("k", [10, 17])
@both
def test_formulas_against_loops(complex, k):
    b = matrix("nonsymmetric", N, complex, seed=3)
    h, ranks = k // 2, adaptive.candidates(k // 2)

    @jax.jit
    def run(a, key):
        return ADAPTIVE.compute(tx.init_state(key, lx.MatrixLinearOperator(a)), k)

    @jax.jit
    def kernel(a, w, x):
        q, r = jnp.linalg.qr(a @ w)
        duals = adaptive.duals_of(r)
        which, _ = adaptive.choose_ranks(duals, r, q.conj().T @ w, N, k, ranks)
        tests = adaptive.split_tests(duals, which, ranks, k - h)
        basis = jnp.arange(k - h) < jnp.max(jnp.asarray(ranks)[which])
        q = jnp.pad(q, ((0, 0), (0, k - 2 * h)))
        v = jnp.concatenate([w, jnp.where(basis[None, :], q, x)], axis=1)
        form, gram = v.conj().T @ a @ v, v.conj().T @ v
        return which, tests.weight, adaptive.samples_of(form, gram, N, tests)[0]

    for seed, name in enumerate(["flat", "exp", "nonsymmetric", "poly"]):
        key, a = jr.key(seed), matrix(name, N, complex)
        w, fresh = _probes(key, 0, h, a), _probes(key, h, k - h, a)
        chosen = _naive_choice(a @ w, w, k, ranks)
        samples, value = _naive(a, w, fresh, a, chosen)
        which, weight, found = kernel(jnp.asarray(a), w, fresh)
        np.testing.assert_array_equal(np.asarray(ranks)[which], chosen)
        for i in range(h):
            g = which[i]
            assert weight[g, i, i] > 0
            assert_close(found[g, i, i], samples[i])
        assert_close(jnp.sum(weight), 1.0)
        estimate, _, stats, (V, Z) = run(jnp.asarray(a), key)
        assert stats["basis"] == max(chosen)
        assert_close(estimate, value)
        assert_close(jnp.sum(Z.conj() * (a @ V)), value)
        assert_close(jnp.sum(Z.conj() * (b @ V)), _naive(a, w, fresh, b, chosen)[1])


@pytest.mark.x64
def test_what_tests_have_in_common_against_a_loop():
    a, k, h = matrix("exp", N), 16, 8
    key, ranks = jr.key(2), adaptive.candidates(8)
    w, fresh = _probes(key, 0, h, a), _probes(key, h, h, a)
    y = a @ w
    q, r = (jnp.asarray(x) for x in np.linalg.qr(y))
    which = jnp.asarray([3, 2, 3, 3, 2, 3, 3, 2])
    duals = adaptive.duals_of(r)
    tests = adaptive.split_tests(duals, which, ranks, h)
    v = jnp.where(jnp.arange(k) < h, jnp.pad(w, ((0, 0), (0, h))), 0)
    x = jnp.where(jnp.arange(h)[None, :] < 7, q, fresh)
    v = jnp.concatenate([w, x], axis=1)
    form, gram = v.T @ a @ v, v.T @ v
    samples, shifts = adaptive.samples_of(form, gram, N, tests)
    found = adaptive.covariance(form, gram, N, tests, shifts)
    chosen = np.asarray(ranks)[which]
    weight = np.asarray([tests.weight[which[i], i, i] for i in range(h)])

    def sample(i, *left_out):
        p, rank = _range(y, chosen[i], i, *left_out)
        g = w[:, i] - p @ w[:, i]
        rest = shifts[which[i], i] * (g @ g - N + rank)
        return np.trace(p @ a) + g @ a @ g - rest

    expected = 0.0
    for i in range(h):
        assert_close(sample(i), samples[which[i], i, i])
        for j in set(range(h)) - {i}:
            if max(i, j) < min(chosen[i], chosen[j]):
                change = (sample(i, j) - sample(i)) * (sample(j, i) - sample(j))
                expected += weight[i] * weight[j] * change
    assert_close(found, max(expected, 0), rtol=1e-6)


@pytest.mark.x64
@both
def test_krylov_split_against_loops(complex):
    n, k, b, p = 150, 101, 4, 13
    tag = lx.positive_semidefinite_tag if complex else lx.symmetric_tag
    other = matrix("nonsymmetric", n, complex, seed=3)
    width = k - p

    @jax.jit
    def run(a, key):
        state = tx.init_state(key, lx.MatrixLinearOperator(a, tag))
        return ADAPTIVE.compute(state, k)

    u, key = haar(n, 1, complex), jr.key(4)
    eigenvalues = {
        "flat": np.linspace(1, 3, n),
        "poly": np.arange(1, n + 1.0) ** -1,
        "equal": np.where(np.arange(n) < 16, 1.0, 0.1 / np.arange(1, n + 1.0)),
    }
    for name, values in eigenvalues.items():
        a = (u * values) @ u.conj().T
        a = (a + a.conj().T) / 2
        w, rest = _probes(key, 0, p, a), _probes(key, p, width, a)
        bases, stops, kinds = _naive_krylov(a, w, rest, b)
        assert ("image" in kinds[2:]) == (name == "equal")
        projectors = [_projector(x) for x in bases]
        value, _, stats, (V, Z) = run(jnp.asarray(a), key)
        assert stats["basis"] == b * max(stops)

        def naive(x, w=w, rest=rest, stops=stops, projectors=projectors):
            samples = []
            for i, s in enumerate(stops):
                others = [w[:, j] for j in range(p) if j != i]
                samples.append(_test(x, projectors[s], w[:, i], others, b * s))
            rank, shift, last = b * max(stops), list(w.T), projectors[max(stops)]
            fresh = [_test(x, last, v, shift, rank) for v in rest[:, rank:].T]
            share = np.array([(width - b * s) / (k - b * s) for s in stops])
            return np.mean((1 - share) * samples + share * np.mean(fresh))

        assert_close(value, naive(a), rtol=1e-7)
        assert_close(jnp.sum(Z.conj() * (a @ V)), value)
        assert_close(jnp.sum(Z.conj() * (other @ V)), naive(other), rtol=1e-7)


def _naive_krylov(a, w, probes, b):
    """A basis after each step, when all tests but one stop it, and what was added."""
    (n, p), most = w.shape, probes.shape[1] // b - 1
    k = p + probes.shape[1]
    bases, stops, kinds = [np.zeros((n, 0))], np.full(p, -1), []
    predicted = [_naive_prediction(a, w, bases[0], k)]
    deep = random = None
    for s in range(most):
        left = np.eye(n) - bases[-1] @ bases[-1].conj().T
        if random is None or s in (2, 8):
            kinds.append("random")
            new = left @ probes[:, s * b : (s + 1) * b]
            random = new = np.linalg.qr(new)[0]
        else:
            images = [(0, "random", random)]
            if deep is not None:
                images.append((1, "deep", deep))
            energies = [np.linalg.norm(left @ a @ x) ** 2 for _, _, x in images]
            follow = len(images) == 2 and 4 * energies[1] >= energies[0]
            kinds.append("deep" if follow else "image")
            deep = new = np.linalg.qr(left @ a @ images[int(follow)][2])[0]
            random = random if follow else None
        bases.append(np.hstack([bases[-1], new]))
        predicted.append(_naive_prediction(a, w, bases[-1], k))
        for i in range(p):
            so_far = [x[i] for x in predicted]
            risen = so_far[-1] > 1.2 * min(so_far)
            waited = s + 1 - int(np.argmin(so_far)) >= 3
            if stops[i] < 0 and ((risen and waited) or s + 1 == most):
                stops[i] = s + 1
        if np.all(stops >= 0):
            break
    return bases, stops, kinds


def _naive_prediction(a, w, q, k):
    """The variance of k - r tests on what a basis leaves, by all tests but each."""
    n, r = q.shape
    left, found = np.eye(n) - q @ q.conj().T, []
    rests = left @ a @ left @ w
    for i in range(w.shape[1]):
        others = np.delete(np.arange(w.shape[1]), i)
        energy = np.mean(np.sum(np.abs(rests[:, others]) ** 2, axis=0))
        mean = np.mean(np.sum(w[:, others].conj() * rests[:, others], axis=0))
        energy = max(energy - abs(mean) ** 2 / (n - r), energy / 1000)
        found.append(energy / (k - r))
    return found


def _one_rank_for_all(*args):
    """A choice in which each test has a say: it sees its own probe."""
    which, energies = _choose(*args)
    return jnp.full_like(which, jnp.sort(which)[len(which) // 2]), energies


_choose = adaptive.choose_ranks


@pytest.mark.x64
@pytest.mark.parametrize(
    ("name", "k", "complex"),
    [
        ("step", 16, False),
        ("step", 24, True),
        ("nonsymmetric", 24, False),
        ("parallel", 12, False),
    ],
)
def test_bias(name, k, complex, monkeypatch):
    n, number = 80, 4_000
    a = matrix("nonsymmetric", n, complex)
    if name == "parallel":  # products are, but for their signs, one of three vectors
        a = np.where(np.arange(n * n).reshape(n, n) < 2, 1.0, 1e-10 * a)
    if name == "step":  # for which ranks vary from test to test
        u = haar(n, 1, complex)
        a = (u * np.where(np.arange(n) < 8, 1.0, 0.05)) @ u.conj().T
    b = matrix("nonsymmetric", n, complex, seed=5)

    def run():
        def one(key):
            state = tx.init_state(key, lx.MatrixLinearOperator(jnp.asarray(a)))
            value, _, _, (V, Z) = ADAPTIVE.compute(state, k)
            return value, jnp.sum(Z.conj() * (b @ V))

        keys = jr.split(jr.key(1), number)
        return jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=100))(keys)

    value, derivative = run()
    assert z_score(value, np.trace(a)) < 4
    assert z_score(derivative, np.trace(b)) < 4
    if (name, complex) == ("step", False):
        monkeypatch.setattr(adaptive, "choose_ranks", _one_rank_for_all)
        value, _ = run()
        assert z_score(value, np.trace(a)) > 5


def _edges(n):
    i = np.arange(n)
    return {
        "zero": np.zeros((n, n)),
        # Not of integers, whose products with signs may be 0.
        "rank one": np.outer(np.ones(n), np.sqrt(i + 1.0)),
        "identity": np.eye(n),
        "diagonal": np.diag(1.0 + i),
        "low rank": np.where(i < 3, 1.0, 0.0)[:, None] * matrix("flat", n),
    }


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 8), (20, 9), (20, 19), (40, 16)])
def test_edges(n, k):
    def run(a, key):
        estimate = ADAPTIVE.estimate(
            ADAPTIVE.init(key, lx.MatrixLinearOperator(a)), k, throw=False
        )
        return estimate.value, estimate._standard_error

    keys = jr.split(jr.key(0), 20)
    run = jax.jit(jax.vmap(jax.value_and_grad(run, has_aux=True), (None, 0)))
    for name, a in _edges(n).items():
        (values, errors), gradient = run(as_operator(a).matrix, keys)
        assert jnp.all(jnp.isfinite(values)), name
        assert jnp.all(jnp.isfinite(gradient)), name
        if k > 1:
            assert jnp.all(jnp.isfinite(errors)), name
        exact = {"zero", "identity"} | ({"rank one"} if k > 8 else set())
        if name in exact:
            truth = jnp.full(20, np.trace(a))
            assert_close(values, truth, atol=100 * rounding() * max(np.trace(a), 1.0))


def test_edges_of_krylov_spaces():
    n, k = 120, 102

    def value(a, key):
        operator = lx.MatrixLinearOperator(a, lx.symmetric_tag)
        return ADAPTIVE.estimate(ADAPTIVE.init(key, operator), k, throw=False).value

    run = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))
    for name, edge in {**_edges(n), "step": matrix("step", n)}.items():
        a = (edge + edge.T) / 2
        values, gradient = run(as_operator(a).matrix, jr.split(jr.key(0), 5))
        assert jnp.all(jnp.isfinite(gradient)), name
        rough = {"diagonal": 0.1, "step": 0.1}.get(name, 100 * rounding())
        atol = rough * max(abs(np.trace(a)), 1.0)
        assert_close(values, jnp.full(5, np.trace(a)), atol=atol)


@pytest.mark.x64
@pytest.mark.parametrize("check", ["budget", "scale", "failure", "pytree", "dtype"])
def test_conformance(check):
    (found,) = [x for x in CHECKS if x.__name__ == f"_check_{check}"]
    assert not list(found(Subject(ADAPTIVE, 0)))


def test_an_estimate_is_not_gone_on_from(key):
    operator = as_operator(matrix("exp", N))
    first = tx.trace(key, operator, 12)
    with pytest.raises(TypeError, match="can't go on from an earlier one"):
        ADAPTIVE.estimate(first.state, 12)
    with pytest.raises(TypeError, match="products of another estimator"):
        tx.XTraceEstimator().estimate(first.state, 12)
    anew = ADAPTIVE.refresh(first.state, jr.key(1), operator)
    assert ADAPTIVE.estimate(anew, 12).value != first.value


@pytest.mark.x64
def test_a_diagonal_is_not_seen():
    i = np.arange(1, 101.0)
    a = np.diag(1 / i) + 1e-3 * matrix("nonsymmetric", 100)

    def error(estimator):
        def one(key):
            return tx.trace(key, as_operator(a), 24, estimator).value

        values = jax.jit(jax.vmap(one))(jr.split(jr.key(0), 200))
        return np.sqrt(np.mean((values - np.trace(a)) ** 2))

    assert error(ADAPTIVE) < 1.3 * error(tx.HutchinsonEstimator())


def test_stats_say_how_products_were_split(key):
    def basis(name):
        estimate = tx.trace(key, as_operator(matrix(name, N)), 24, ADAPTIVE)
        return int(estimate.stats["basis"])

    assert basis("exp") == 11
    few = tx.trace(key, as_operator(matrix("exp", N)), 7, ADAPTIVE)
    same = tx.trace(key, as_operator(matrix("exp", N)), 7, tx.HutchinsonEstimator())
    assert_close(few.value, same.value)


@pytest.mark.x64
def test_tests_that_lie_in_the_basis():
    # What the basis leaves of the probes of a shift is rounding: no shift is made of that.
    key = jr.split(jr.key(5), 20_000)[16_459]
    a = as_operator(np.kron(np.eye(3), np.ones((3, 3))))
    estimate = tx.trace(key, a, 8, ADAPTIVE)
    assert abs(estimate.value - 9) < 20

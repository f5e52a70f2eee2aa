"""Our estimators pass the conformance suite, and it finds faults."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import ESTIMATORS

import traceax as tx
from traceax.testing import check_trace_estimator
from traceax.testing._checks import CHECKS, Subject, failures


# The suite is slow, so we run all checks on the plainest estimator, and hard ones on
# others.
@pytest.mark.x64
def test_estimators_conform():
    check_trace_estimator(ESTIMATORS["hutchinson"])


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("xnystrace", "unbiased"),
        *((name, "exact") for name in ("hutch++", "xtrace", "xnystrace")),
        pytest.param("xtrace", "budget", marks=pytest.mark.x64),
    ],
)
def test_checks_pass(name, check):
    assert not failures(Subject(ESTIMATORS[name], 0), check)


class Faulty(tx.TraceEstimator):
    """Hutchinson's estimator, with a fault."""

    fault: str = eqx.field(static=True)
    honest: tx.TraceEstimator = tx.HutchinsonEstimator()

    def init(self, key, operator):
        if self.fault == "early":
            operator.mv(jnp.ones_like(operator.in_structure()))
        return self.honest.init(key, operator)

    def compute(self, state, k):
        value, error, stats, blocks = self.honest.compute(state, k)
        match self.fault:
            case "bias":
                value = 1.02 * value
            case "error":
                error = error / 2
            case "imaginary":
                value = jnp.real(value).astype(value.dtype)
            case "greedy":
                value, error, stats, blocks = self.honest.compute(state, k + 1)
            case "transposed":
                state.operator.transpose().mv(blocks[0][:, 0])
            case "conjugate":
                blocks = (blocks[0], blocks[1].conj())
            case "skew":
                skew = jnp.triu(jnp.ones((len(blocks[0]),) * 2, blocks[0].dtype), 1)
                blocks = (blocks[0], blocks[1] + (skew - skew.T) @ blocks[1])
            case "complex error" if jnp.iscomplexobj(value):
                error = error / 2
            case "vague":
                stats = {**stats, "degrees_of_freedom": jnp.ones(())}
            case "wasteful":
                state.operator.mv(blocks[0][:, 0])  # we use this nowhere
            case "lazy":
                value, error, stats, blocks = self.honest.compute(state, max(1, k - 3))
            case "gradient":
                blocks = (blocks[0], 1.02 * blocks[1])
            case "scale":
                value = value + 1e-3
            case "certain":
                error = jnp.where(jnp.isfinite(error), error, 0)
        return value, error, stats, blocks


# The suite is slow, so we run one check for each fault, up to its first finding.
@pytest.mark.x64
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("bias", "unbiased"),
        ("bias of a semidefinite one", "unbiased"),
        ("greedy", "budget"),
        ("error", "bar"),
        ("imaginary", "unbiased"),
        ("wasteful", "budget"),
        ("early", "budget"),
        ("transposed", "budget"),
        ("lazy", "budget"),
        ("gradient", "derivative"),
        ("conjugate", "derivative"),
        ("skew", "derivative"),
        ("complex error", "bar"),
        ("vague", "bar"),
        ("scale", "exact"),
        ("certain", "bar"),
    ],
)
def test_checks_find_their_faults(fault, check):
    fault, _, semidefinite = fault.partition(" of ")
    kind = tx.XNysTraceEstimator if semidefinite else tx.HutchinsonEstimator
    findings = CHECKS[check](Subject(Faulty(fault, kind()), 0))
    assert any(wrong for wrong, _ in findings)


@pytest.mark.x64
def test_exceptions_are_listed_with_other_failures():
    class Broken(tx.TraceEstimator):
        def init(self, key, operator):
            return tx.init_state(key, operator)

        def compute(self, state, k):
            raise RuntimeError("not written yet")

    with pytest.raises(AssertionError) as info:
        check_trace_estimator(Broken())
    message = str(info.value)
    assert "Broken fails" in message
    assert message.count("RuntimeError: not written yet") == 7


@pytest.mark.wrong_types
def test_only_estimators_are_checked():
    with pytest.raises(TypeError, match="pass an instance"):
        check_trace_estimator(tx.XTraceEstimator)  # pyright: ignore


class Minimal(tx.TraceEstimator):
    """Hutchinson's estimator as a newcomer would write it, without extras."""

    def init(self, key, operator):
        return tx.init_state(key, operator)

    def compute(self, state, k):
        structure = state.operator.in_structure()
        n = sum(x.size for x in jax.tree.leaves(structure))
        dtype = jax.tree.leaves(structure)[0].dtype
        W = jr.normal(state.key, (n, k), dtype)
        AW = jax.vmap(lambda w: self.flat(state.operator, w), -1, -1)(W)
        samples = jnp.sum(W.conj() * AW, axis=0)
        deviation = jnp.std(samples, ddof=1) if k > 1 else jnp.nan
        error = deviation / jnp.sqrt(float(k))
        return jnp.mean(samples), error, {"num_matvecs": k}, (W, W / k)

    def flat(self, operator, w):
        leaves, treedef = jax.tree.flatten(operator.in_structure())
        parts = jnp.split(w, [x.size for x in leaves[:-1]])
        out = operator.mv(jax.tree.unflatten(treedef, parts))
        return jnp.concatenate(jax.tree.leaves(out))


@pytest.mark.x64
@pytest.mark.parametrize("check", ["bar", "derivative"])
def test_a_correct_estimator_without_extras_passes(check):
    assert not failures(Subject(Minimal(), 0), check)

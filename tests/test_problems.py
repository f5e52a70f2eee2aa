"""The problem catalogue's answers match its matrices."""

import numpy as np
import pytest
import scipy.stats
from helpers import (
    assert_close,
)
from problems import (
    BREAKING,
    DEFINITE,
    INDEFINITE,
    SEMIDEFINITE,
    SPECTRA,
    Problem,
    is_x64,
    observations,
    process,
    tagged,
)


@pytest.mark.parametrize("name", SPECTRA)
def test_operators_have_their_spectrum(name):
    for complex in (False, True):
        problem = Problem(name, 24, complex, shift=3.0, scale=0.5)
        a = np.asarray(problem.operator().as_matrix())
        assert np.iscomplexobj(a) is complex
        assert np.array_equal(a, a.conj().T)
        values = np.linalg.eigvalsh(a)
        rtol = 1e-12 if is_x64() else 1e-5
        assert_close(values, np.sort(problem.eigenvalues), rtol)
        assert_close(np.trace(a), problem.trace, rtol)
        assert_close(np.linalg.slogdet(a)[1], problem.logdet(), rtol)
        assert_close(np.trace(np.linalg.inv(a)), problem.trace_inverse(), rtol)


def test_tags_of_spectra_are_true():
    for name, (eigenvalues, tags) in SPECTRA.items():
        values = eigenvalues(24)
        smallest = values.min()
        sign = (
            DEFINITE if smallest > 0 else INDEFINITE if smallest < 0 else SEMIDEFINITE
        )
        assert tags & {DEFINITE, SEMIDEFINITE, INDEFINITE} == {sign}, name
        assert (BREAKING in tags) == (len(np.unique(values)) < 8), name
    assert "flat" in tagged(DEFINITE)


@pytest.mark.x64
def test_process_likelihoods_match_scipy():
    x, y = observations(20, (2,))
    p = process()
    normal = scipy.stats.multivariate_normal(cov=np.asarray(p.dense(x)))
    assert_close(p.exact_likelihood(x, y), np.sum(normal.logpdf(y.T)))
    kernel = p.kernel(x).as_matrix() + p.noise * np.eye(20)
    assert_close(kernel, p.dense(x))

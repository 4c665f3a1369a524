"""k-means, components, ridge and logistic regression against scikit-learn, on 1 and on 8 devices."""

import re

import jax
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.cluster import kmeans_plusplus as sklearn_plus_plus
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.training import classics
from jaxdl.training.classics.components import _scatter
from jaxdl.training.classics.kmeans import _distances_to_rows, _lloyd
from jaxdl.training.classics.logistic import _loss, _sums
from jaxdl.training.classics.ridge import _products
from jaxdl.training.classics.rows import as_rows, on_all

MESHES = {
    1: {"replica": 1, "fsdp": 1},
    8: {"replica": 4, "fsdp": 2},
}


@pytest.fixture(params=list(MESHES), ids="{} devices".format)
def mesh(request):
    return make_mesh(MeshConfig(**MESHES[request.param]), jax.devices()[: request.param])


@pytest.fixture(scope="module")
def digits():
    return load_digits(return_X_y=True)


@pytest.fixture(scope="module")
def cancer():
    x, y = load_breast_cancer(return_X_y=True)
    return (x - x.mean(0)) / x.std(0), np.array(["malignant", "benign"])[y]


def relative(found, expected):
    """The largest error over the largest magnitude."""
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("num_clusters", [1, 10, 23])
def test_kmeans_plus_plus_draws_the_rows_of_sklearn(mesh, digits, num_clusters):
    x, _ = digits
    _, expected = sklearn_plus_plus(x, num_clusters, random_state=3)
    np.testing.assert_array_equal(classics.kmeans_plus_plus(x, num_clusters, mesh=mesh, seed=3), expected)


@pytest.mark.parametrize("given", [True, False], ids=["given start", "k-means++"])
def test_kmeans_is_that_of_sklearn(mesh, digits, given):
    x, _ = digits
    start = x[:10] if given else "k-means++"
    expected = KMeans(10, init=start, n_init=1, random_state=0, algorithm="lloyd").fit(x)
    found = classics.kmeans(x, 10, start=start, seed=0, mesh=mesh)
    np.testing.assert_array_equal(found.labels, expected.labels_)
    assert found.inertia == pytest.approx(expected.inertia_, rel=1e-5)
    assert relative(found.centers, expected.cluster_centers_) < 1e-5
    assert found.num_steps == expected.n_iter_
    np.testing.assert_array_equal(found.predict(x), expected.predict(x))


X, WEIGHT, LABELS = np.ones((8, 3), np.float32), np.ones(8, np.float32), np.zeros(8, np.int32)


@pytest.mark.parametrize(
    ("function", "args", "static", "products"),
    [
        (_lloyd, (X, WEIGHT, X[:2]), {"max_steps": 3, "tolerance": 0.1}, 5),
        (_distances_to_rows, (X, WEIGHT, LABELS), {}, 1),
        (_scatter, (X, WEIGHT), {}, 2),
        (_products, (X, WEIGHT, WEIGHT), {}, 4),
        (_sums, (X, WEIGHT, LABELS, np.ones((2, 4), np.float32)), {}, 4),
        (_loss, (X, WEIGHT, LABELS, np.ones((2, 4), np.float32)), {}, 2),
    ],
)
def test_every_product_is_of_float32(function, args, static, products):
    """Those with vectors too; on GPUs TF32 would round to 10 bits. On a CPU only the lowered program shows it."""
    with jax.default_matmul_precision("tensorfloat32"):
        mesh = make_mesh(MeshConfig(**MESHES[1]), jax.devices()[:1])
        text = on_all(mesh, function, **static).lower(*args).as_text()
    found = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(found) == products
    assert [one for one in found if "precision = [HIGHEST, HIGHEST]" not in one] == []


def test_an_empty_cluster_keeps_its_center(mesh):
    x = np.array([[0.0], [1.0], [10.0], [11.0], [12.0]])
    found = classics.kmeans(x, 3, start=[[0.0], [10.0], [1000.0]], mesh=mesh)
    np.testing.assert_allclose(found.centers, [[0.5], [11.0], [1000.0]], rtol=1e-6)
    np.testing.assert_array_equal(found.labels, [0, 0, 1, 1, 1])


def test_components_are_those_of_sklearn(mesh, digits):
    x, _ = digits
    expected = PCA(10, svd_solver="full").fit(x)
    found = classics.pca(x, 10, mesh=mesh)
    assert relative(found.components, expected.components_) < 1e-4, "of the same sign, too"
    assert relative(found.explained_variance, expected.explained_variance_) < 1e-6
    assert relative(found.explained_variance_ratio, expected.explained_variance_ratio_) < 1e-6
    assert relative(found.transform(x), expected.transform(x)) < 1e-4


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_ridge_is_that_of_sklearn(mesh, alpha):
    x, y = load_diabetes(return_X_y=True)
    expected = Ridge(alpha=alpha, solver="svd").fit(x, y)
    found = classics.ridge(x, y, alpha=alpha, mesh=mesh)
    assert relative(found.coefficients, expected.coef_) < 1e-4
    assert found.intercept == pytest.approx(expected.intercept_, rel=1e-5)
    assert relative(found.predict(x), expected.predict(x)) < 1e-5


def test_logistic_regression_of_two_classes_is_that_of_sklearn(mesh, cancer):
    x, y = cancer
    expected = LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000).fit(x, y)
    found = classics.logistic(x, y, c=0.5, mesh=mesh)
    np.testing.assert_array_equal(found.classes, expected.classes_)
    assert relative(found.coefficients, expected.coef_) < 1e-4
    assert relative(found.intercepts, expected.intercept_) < 1e-4
    np.testing.assert_allclose(found.probabilities(x), expected.predict_proba(x), atol=1e-5)
    np.testing.assert_array_equal(found.predict(x), expected.predict(x))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_logistic_regression_of_ten_classes_is_that_of_sklearn(mesh, digits):
    x, y = digits[0][:500] / 16, digits[1][:500]
    expected = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x, y)
    found = classics.logistic(x, y, mesh=mesh)
    assert relative(found.coefficients, expected.coef_) < 1e-4
    assert relative(found.intercepts, expected.intercept_) < 1e-4
    np.testing.assert_allclose(found.probabilities(x), expected.predict_proba(x), atol=1e-5)


@pytest.fixture(scope="module")
def noisy():
    """Two classes that overlap, of features of about size 1 (float64)."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 5)) * [1.0, 0.5, 2.0, 1.0, 3.0]
    return x, (x @ [1.0, -1.0, 0.5, 0.0, 0.2] + draw.normal(size=400) > 0).astype(int)


@pytest.mark.parametrize(
    ("mesh", "offset", "dtype"),
    [
        (8, 1e6, np.float32),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(1, 1e4, np.float64), (1, 1e5, np.float32)]),
    ],
    indirect=["mesh"],
)
def test_an_offset_of_the_features_takes_no_digits(mesh, noisy, offset, dtype):
    """What scikit-learn finds in float64, for the numbers as they are given."""
    given = (noisy[0] + offset).astype(dtype)
    near = given.astype(np.float64) - offset  # scikit-learn needs many steps for offsets, and no other result.
    y, x = noisy[1], given.astype(np.float64)
    expected = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(near, y)
    found = classics.logistic(given, y, c=0.1, mesh=mesh)
    assert found.converged
    assert relative(found.coefficients, expected.coef_) < 1e-4
    np.testing.assert_allclose(found.probabilities(given), expected.predict_proba(near), atol=1e-5)
    parts = PCA(3, svd_solver="full").fit(near)
    found = classics.pca(given, 3, mesh=mesh)
    assert relative(found.components, parts.components_) < 1e-4
    assert relative(found.explained_variance, parts.explained_variance_) < 1e-5
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-9, atol=1e-6)
    target = near @ np.arange(5) + offset
    line, expected = classics.ridge(given, target, mesh=mesh), Ridge(solver="svd").fit(near, target)
    assert relative(line.coefficients, expected.coef_) < 1e-5
    np.testing.assert_allclose(line.predict(given) - offset, expected.predict(near) - offset, atol=2e-4)
    start = near[:3]
    groups = KMeans(3, init=start, n_init=1, algorithm="lloyd").fit(near)
    found = classics.kmeans(given, 3, start=x[:3], mesh=mesh)
    np.testing.assert_array_equal(found.labels, groups.labels_)
    assert relative(found.centers - offset, groups.cluster_centers_) < 1e-5
    np.testing.assert_array_equal(found.predict(given), groups.labels_)


@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_offsets_of_some_features_of_several_classes(mesh, digits):
    x, y = digits[0][:300, :20], digits[1][:300] % 3
    size = np.where(np.arange(20) % 3, 1.0, 1e-3)
    expected = LogisticRegression(C=1.0, tol=1e-10, max_iter=50_000).fit(x * size, y)
    found = classics.logistic(x * size + 2000.0 * (np.arange(20) % 2), y, mesh=mesh)
    assert relative(found.coefficients, expected.coef_) < 1e-4, "the penalty is of the features as they are given"
    assert abs(found.intercepts.mean()) < 1e-9
    np.testing.assert_allclose(found.predict(x * size + 2000.0 * (np.arange(20) % 2)), expected.predict(x * size))


def test_a_fit_that_ends_before_the_minimum_says_so(noisy):
    with pytest.warns(RuntimeWarning, match="the minimum was not reached: max_steps = 1 were made"):
        assert not classics.logistic(*noisy, max_steps=1).converged


def test_only_sums_travel(digits):
    """The iterations of k-means all-reduce sums of clusters and of rows, and never gather the table."""
    x, _ = digits
    rows = as_rows(x, make_mesh(MeshConfig(replica=4, fsdp=2)), "test")
    program = on_all(rows.mesh, _lloyd, max_steps=10, tolerance=0.0).lower(rows.x, rows.weight, rows.x[:10]).compile()
    collectives = re.findall(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute)\(", program.as_text())
    sizes = {
        (kind, int(np.prod([int(one) for one in shape.split(",") if one])))
        for types, kind in collectives
        for shape in re.findall(r"\w+\[([\d,]*)\]", types)
    }
    assert ("all-reduce", 10 * 64) in sizes
    assert max(size for kind, size in sizes if kind == "all-reduce") <= 10 * 64
    assert {size for kind, size in sizes if kind != "all-reduce"} <= {len(rows.x)}, "the labels, one number a row"


def test_padding_has_no_weight():
    """13 rows on 8 devices: 3 rows of padding, which would move means and counts."""
    random = np.random.default_rng(0)
    x, mesh = random.normal(size=(13, 3)) + 5, make_mesh(MeshConfig(replica=8, fsdp=1))
    y = x @ [1.0, 2.0, 3.0] + 4
    assert as_rows(x, mesh, "test").x.shape == (16, 3)
    np.testing.assert_allclose(classics.pca(x, 3, mesh=mesh).mean, x.mean(0), rtol=1e-6)
    line = classics.ridge(x, y, alpha=0.0, mesh=mesh)
    np.testing.assert_allclose([*line.coefficients, line.intercept], [1, 2, 3, 4], rtol=1e-4)
    assert len(classics.kmeans(x, 2, mesh=mesh).labels) == 13
    two, four = (classics.logistic(x, y > 30, mesh=make_mesh(MeshConfig(replica=count, fsdp=1), jax.devices()[:count]))
                 for count in (1, 8))  # fmt: skip
    np.testing.assert_allclose(two.coefficients, four.coefficients, rtol=1e-4)


X = np.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: classics.kmeans(X[:, 0], 2), r"x has the shape \[6\]"),
        (lambda: classics.kmeans(X, 7), "7 clusters of 6 rows"),
        (lambda: classics.kmeans(X, 2, start="random"), 'start = "random"'),
        (lambda: classics.kmeans(X, 2, start=X[:3]), r"start has the shape \[3, 2\]"),
        (lambda: classics.kmeans(X, 2, max_steps=0), "max_steps = 0"),
        (lambda: classics.pca(X, 3), "3 components of 6 rows of 2 features"),
        (lambda: classics.pca(np.where(X == 3, np.nan, X), 1), "NaN or infinite"),
        (lambda: classics.pca([["a", "b"]], 1), "not numbers"),
        (lambda: classics.ridge(X, X[:3, 0]), r"y has the shape \[3\], and x 6 rows"),
        (lambda: classics.ridge(X, X[:, 0], alpha=-1), "alpha = -1"),
        (lambda: classics.ridge(X, X[:, 0], alpha=0), "depend on each other too closely"),
        (lambda: classics.logistic(X, np.ones(6)), "all rows are of class 1.0"),
        (lambda: classics.logistic(X, [0, 1] * 3, c=0), "c = 0"),
        (lambda: classics.pca(X, 1).transform(X[:, :1]), "the fit was on 2 features"),
        (lambda: classics.pca(X * 1e25, 1), "pca: x: its numbers are too large for float32"),
        (lambda: classics.kmeans(X * 1e25, 2), "kmeans: x: its numbers are too large for float32"),
        (lambda: classics.kmeans(X, 2, start=X[:2] * 1e25), "kmeans: start: its numbers are too large for float32"),
        (lambda: classics.ridge(X * 1e25, X[:, 0]), "ridge: x: its numbers are too large for float32"),
        (lambda: classics.ridge(X, X[:, 0] * 1e25), "ridge: y: its numbers are too large for float32"),
        (lambda: classics.logistic(X * 1e25, [0, 1] * 3), "logistic: x: its numbers are too large for float32"),
        (lambda: classics.logistic(X, np.array(["a", None, 1] * 2, object)), "y has values that cannot be ordered"),
        (lambda: classics.logistic(X, [0, 1] * 3, c="1"), "c = '1'"),
        (lambda: classics.logistic(X, [0, 1] * 3, max_steps=2.0), r"max_steps = 2\.0"),
        (lambda: classics.ridge(X, X[:, 0], alpha=None), "alpha = None"),
        (lambda: classics.pca(X, 2.0), r"2\.0 components of 6 rows"),
        (lambda: classics.kmeans(X, 2.0), r"2\.0 clusters of 6 rows"),
        (lambda: classics.kmeans(X, 2, tolerance="0"), "tolerance = '0'"),
        (lambda: classics.kmeans(X, 2, max_steps=1.5), r"max_steps = 1\.5"),
        (lambda: classics.kmeans_plus_plus(X, 2, seed=-1), "seed = -1"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_rows_that_are_all_alike_have_no_variance(recwarn):
    found = classics.pca(np.ones((6, 2)), 2)
    assert found.explained_variance.tolist() == found.explained_variance_ratio.tolist() == [0, 0]
    assert not [one for one in recwarn if one.category is RuntimeWarning]


@pytest.mark.parametrize("kind", [np.int64, jax.numpy.int32])
def test_counts_of_numpy_and_jax_are_counts(kind):
    assert classics.pca(X, kind(2)).components.shape == (2, 2)


def test_numbers_as_large_as_float32_sums_allow():
    np.testing.assert_allclose(
        classics.pca(X * 1e17, 2).explained_variance, classics.pca(X, 2).explained_variance * 1e34
    )


def test_newton_needs_few_steps_for_classes_that_are_nearly_separable(cancer):
    assert classics.logistic(*cancer, c=100.0).num_steps < 15


@pytest.mark.parametrize("y", [[0.0, 1.0, np.nan, 1.0], [0.25, 1.0, 0.5, 0.75]])
def test_numbers_are_no_classes(y):
    with pytest.raises(ConfigError, match="logistic: some of y are no classes but numbers"):
        classics.logistic(np.eye(4), np.array(y))

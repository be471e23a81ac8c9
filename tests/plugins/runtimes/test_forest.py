"""Backend forest: probabilities of the training library, FIL's parameters, and damaged files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, Session
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import InvalidRequest, LoadError

pytestmark = pytest.mark.full

treelite = pytest.importorskip("treelite")
xgboost = pytest.importorskip("xgboost")
lightgbm = pytest.importorskip("lightgbm")
datasets = pytest.importorskip("sklearn.datasets")
ensemble = pytest.importorskip("sklearn.ensemble")

TOLERANCE = 2e-6
Array = np.ndarray
Job = Callable[..., Any]


def save_sklearn(model: Any, folder: Path) -> None:
    treelite.sklearn.import_model(model).serialize(folder / "checkpoint.tl")


def digits() -> tuple[Array, Array]:
    rows, classes = datasets.load_digits(return_X_y=True)
    return rows.astype("f4"), classes


def cancer() -> tuple[Array, Array]:
    rows, classes = datasets.load_breast_cancer(return_X_y=True)
    return rows.astype("f4"), classes


TRAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Path], None]]] = {
    "xgboost_json": (
        lambda: xgboost.XGBClassifier(n_estimators=20, n_jobs=1),
        lambda model, folder: model.save_model(folder / "xgboost.json"),
    ),
    "xgboost_ubj": (
        lambda: xgboost.XGBClassifier(n_estimators=20, n_jobs=1),
        lambda model, folder: model.save_model(folder / "xgboost.ubj"),
    ),
    "lightgbm": (
        lambda: lightgbm.LGBMClassifier(n_estimators=15, verbose=-1, n_jobs=1),
        lambda model, folder: model.booster_.save_model(folder / "model.txt"),
    ),
    "random_forest": (lambda: ensemble.RandomForestClassifier(20, random_state=0), save_sklearn),
    "extra_trees": (lambda: ensemble.ExtraTreesClassifier(20, random_state=0), save_sklearn),
    "gradient_boosting": (lambda: ensemble.GradientBoostingClassifier(n_estimators=5, random_state=0), save_sklearn),
    "hist_gradient_boosting": (lambda: ensemble.HistGradientBoostingClassifier(max_iter=10), save_sklearn),
}


class Trained:
    """A forest on disk as version 1 of a model, what it was trained on, and the model in its library's hands."""

    def __init__(self, folder: Path, rows: Array, model: Any) -> None:
        self.file = ModelFile(folder, folder.parent, 1)
        self.rows = rows
        self.model = model


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Return a function that trains a classifier of TRAINERS once, on "digits" or "cancer"."""
    made: dict[tuple[str, str], Trained] = {}

    def train(kind: str, data: str) -> Trained:
        if (kind, data) not in made:
            rows, classes = {"digits": digits, "cancer": cancer}[data]()
            folder = tmp_path_factory.mktemp(f"{kind}_{data}") / "forest" / "1"
            folder.mkdir(parents=True)
            make, save = TRAINERS[kind]
            model = make().fit(rows, classes)
            save(model, folder)
            made[kind, data] = Trained(folder, rows, model)
        return made[kind, data]

    return train


@pytest.fixture
def backend() -> Backend:
    return load_backend("fil")


def opened(backend: Backend, job: Job, file: ModelFile, *, columns: int | None = None, **parameters: str) -> Session:
    signature = backend.inspect(file, parameters)
    assert signature is not None
    dims = (columns,) if columns else signature.outputs[0].dims[1:]
    session = backend.open(
        job(
            file,
            inputs=[InputSpec("input__0", DType.FP32, signature.inputs[0].dims[1:])],
            outputs=[OutputSpec("output__0", DType.FP32, dims)],
            max_batch_size=8192,
            parameters=parameters,
        )
    )
    assert isinstance(session, Session)
    return session


def answers(session: Session, rows: Array) -> Array:
    found = session.run({"input__0": rows}, ["output__0"])["output__0"]
    assert found.dtype == np.float32
    return found


@pytest.mark.parametrize("engine", ["auto", "treelite"])
@pytest.mark.parametrize("data", ["digits", "cancer"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_probabilities_equal_those_of_the_training_library(
    kind: str, data: str, engine: str, backend: Backend, job: Job, trained: Any
) -> None:
    forest = trained(kind, data)
    session = opened(backend, job, forest.file, predict_proba="true", output_class="true", engine=engine)
    found = answers(session, forest.rows)
    np.testing.assert_allclose(found, forest.model.predict_proba(forest.rows), rtol=0, atol=TOLERANCE)
    for row in (0, 7):
        np.testing.assert_allclose(answers(session, forest.rows[row : row + 1])[0], found[row], rtol=0, atol=TOLERANCE)
    session.close()


@pytest.mark.parametrize("kind", ["xgboost_json", "lightgbm", "gradient_boosting"])
def test_a_missing_value_takes_the_branch_that_training_chose(
    kind: str, backend: Backend, job: Job, trained: Any
) -> None:
    forest = trained(kind, "cancer")
    rows = forest.rows.copy()
    rows[np.random.default_rng(0).random(rows.shape) < 0.3] = np.nan
    results = [
        answers(opened(backend, job, forest.file, engine=engine), rows) for engine in ("onnxruntime", "treelite")
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=TOLERANCE)
    if kind != "gradient_boosting":  # which refuses to predict what it was not trained on
        np.testing.assert_allclose(results[0], forest.model.predict_proba(rows), rtol=0, atol=TOLERANCE)


def test_regressions_and_isolation_forests_return_their_score(backend: Backend, job: Job, tmp_path: Path) -> None:
    rows, values = datasets.load_diabetes(return_X_y=True)
    rows = rows.astype("f4")
    isolation = ensemble.IsolationForest(n_estimators=20, random_state=0).fit(rows)
    poisson = xgboost.XGBRegressor(n_estimators=20, objective="count:poisson").fit(rows, values)
    forest = ensemble.RandomForestRegressor(20, random_state=0).fit(rows, values)
    boosted = lightgbm.LGBMRegressor(n_estimators=20, verbose=-1).fit(rows, values)
    cases: list[tuple[str, Callable[[Path], object], Array]] = [
        ("isolation", lambda folder: save_sklearn(isolation, folder), -isolation.score_samples(rows)),
        ("poisson", lambda folder: poisson.save_model(folder / "xgboost.json"), poisson.predict(rows)),
        ("forest", lambda folder: save_sklearn(forest, folder), forest.predict(rows)),
        ("boosted", lambda folder: boosted.booster_.save_model(folder / "model.txt"), boosted.predict(rows)),
    ]
    for name, save, expected in cases:
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True)
        save(folder)
        for engine in ("onnxruntime", "treelite"):
            session = opened(backend, job, ModelFile(folder, folder.parent, 1), output_class="false", engine=engine)
            np.testing.assert_allclose(answers(session, rows)[:, 0], expected, rtol=1e-5)


def test_without_predict_proba_a_classifier_returns_the_class_index(backend: Backend, job: Job, trained: Any) -> None:
    many, two = trained("xgboost_json", "digits"), trained("xgboost_json", "cancer")
    found = answers(opened(backend, job, many.file, output_class="true"), many.rows)
    np.testing.assert_array_equal(found[:, 0], many.model.predict(many.rows))
    found = answers(opened(backend, job, two.file, is_classifier="true", threshold="0.9"), two.rows)
    np.testing.assert_array_equal(found[:, 0], two.model.predict_proba(two.rows)[:, 1] > 0.9)


def test_two_classes_give_one_probability_if_so_configured(backend: Backend, job: Job, trained: Any) -> None:
    forest = trained("lightgbm", "cancer")
    one = answers(opened(backend, job, forest.file, columns=1, predict_proba="true"), forest.rows)
    np.testing.assert_allclose(one[:, 0], forest.model.predict_proba(forest.rows)[:, 1], atol=TOLERANCE)
    with pytest.raises(LoadError, match=r"output 'output__0' dims: expected 1 or 2, given 3"):
        opened(backend, job, forest.file, columns=3, predict_proba="true")


def test_configuration_of_two_classes_is_completed_with_both(backend: Backend, trained: Any) -> None:
    file = trained("lightgbm", "cancer").file
    completed = backend.auto_complete(file, '{"parameters":{"predict_proba":{"string_value":"true"}}}')
    assert completed is not None
    assert '"dims": [2]' in completed
    assert '"max_batch_size": 8192' in completed
    stated = '{"max_batch_size":4,"output":[{"name":"output__0","dims":[1]}]}'
    assert backend.auto_complete(file, stated) is None
    assert backend.auto_complete(trained("lightgbm", "digits").file, "{}") is None


def test_categorical_splits_are_run_by_treelite(backend: Backend, job: Job, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = np.stack([random.integers(0, 12, 400), random.random(400)], axis=1).astype("f4")
    classes = np.isin(rows[:, 0], (1, 4, 9)) ^ (rows[:, 1] > 0.8)
    model = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1, min_data_per_group=1, cat_smooth=0)
    model.fit(rows, classes, categorical_feature=[0])
    folder = tmp_path / "categories" / "1"
    folder.mkdir(parents=True)
    model.booster_.save_model(folder / "model.txt")
    file = ModelFile(folder, folder.parent, 1)
    session = opened(backend, job, file)
    assert session.info.options["engine"] == "treelite"
    np.testing.assert_allclose(answers(session, rows), model.predict_proba(rows), atol=TOLERANCE)
    with pytest.raises(LoadError, match="cannot split on sets of categories"):
        opened(backend, job, file, engine="onnxruntime")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"model_type": "catboost"}, "parameter model_type must be one of xgboost_json"),
        ({"engine": "gpu"}, "parameter engine must be one of auto, onnxruntime, treelite, got 'gpu'"),
        ({"output_class": "perhaps"}, "parameter output_class must be yes or no"),
        ({"threshold": "much", "output_class": "1"}, "parameter threshold must be a number, got 'much'"),
        ({"cpu_nthread": "-3"}, "parameter cpu_nthread must be a whole number"),
        ({"model_type": "lightgbm"}, "treelite cannot load it"),
    ],
)
def test_an_invalid_parameter_is_a_load_error_that_names_it(
    parameters: dict[str, str], message: str, backend: Backend, job: Job, trained: Any
) -> None:
    folder = trained("xgboost_json", "cancer").file
    file = ModelFile(folder.path / "xgboost.json", folder.model_dir, 1)
    with pytest.raises(LoadError, match=message):
        opened(backend, job, file, **parameters)


def test_several_forests_in_one_folder_need_a_model_type(
    backend: Backend, job: Job, trained: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "both" / "1"
    folder.mkdir(parents=True)
    forest = trained("xgboost_json", "cancer")
    for name in ("xgboost.json", "model.txt"):
        (folder / name).write_bytes((forest.file.path / "xgboost.json").read_bytes())
    file = ModelFile(folder, folder.parent, 1)
    with pytest.raises(LoadError, match=r"holds xgboost\.json, model\.txt; model_type says which"):
        backend.inspect(file, {})
    assert opened(backend, job, file, model_type="xgboost_json").info.options["engine"] == "onnxruntime"


@pytest.mark.parametrize("kind", ["xgboost_json", "xgboost_ubj", "lightgbm", "random_forest"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "random"])
def test_a_damaged_forest_is_a_load_error_in_one_line_and_nothing_is_printed(
    damage: str, kind: str, backend: Backend, trained: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (good,) = trained(kind, "cancer").file.path.iterdir()
    whole = good.read_bytes()
    folder = tmp_path / "broken" / "3"
    folder.mkdir(parents=True)
    made = {
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "garbage": b"hello world\n" * 1000,
        "random": np.random.default_rng(0).bytes(3_000_000),
    }
    (folder / good.name).write_bytes(made[damage])
    caught: list[LoadError] = []

    def attempt() -> None:
        try:
            backend.inspect(ModelFile(folder, folder.parent, 3), {})
        except LoadError as error:
            caught.append(error)

    # On a thread of its own: treelite keeps for each thread where it prints to.
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    (error,) = caught
    assert "model 'broken' version 3" in error.message
    assert "\n" not in error.message
    assert len(error.message) < 1000
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_with_out_of_range_nodes_is_refused(backend: Backend, trained: Any, tmp_path: Path) -> None:
    forest = treelite.Model.deserialize(trained("random_forest", "cancer").file.path / "checkpoint.tl")
    tree = forest.get_tree_accessor(3)
    children = np.array(tree.get_field("cleft"))
    children[0] = 1_000_000
    tree.set_field("cleft", children)
    folder = tmp_path / "far" / "1"
    folder.mkdir(parents=True)
    forest.serialize(folder / "checkpoint.tl")
    with pytest.raises(LoadError, match=r"tree 3 of .* nodes has a child that is none of them"):
        backend.inspect(ModelFile(folder, folder.parent, 1), {})


@pytest.mark.parametrize("engine", ["onnxruntime", "treelite"])
def test_inputs_are_read_in_place_not_changed_and_released(
    engine: str, backend: Backend, job: Job, trained: Any
) -> None:
    forest = trained("xgboost_json", "cancer")
    session = opened(backend, job, forest.file, engine=engine)
    expected = answers(session, forest.rows[:4].copy())
    body = b"x" + forest.rows[:4].tobytes()
    unaligned = np.frombuffer(body, dtype="u1")[1:].view("f4").reshape(4, -1)
    before = sys.getrefcount(unaligned)
    np.testing.assert_array_equal(answers(session, unaligned), expected)
    assert sys.getrefcount(unaligned) == before
    with pytest.raises(InvalidRequest, match=r"input 'input__0': expected \[rows, 30\], given \[2, 3\]"):
        answers(session, np.zeros((2, 3), "f4"))
    session.close()


@pytest.mark.parametrize("engine", ["onnxruntime", "treelite"])
def test_a_forest_releases_the_gil_while_it_computes(engine: str, backend: Backend, job: Job, trained: Any) -> None:
    forest = trained("xgboost_json", "digits")
    session = opened(backend, job, forest.file, engine=engine)
    rows = np.tile(forest.rows, (4, 1))
    go, progress = threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), progress.append(1)))
    other.start()
    interval = sys.getswitchinterval()
    # The interpreter now never switches threads by itself: the other thread runs only if the run releases the GIL.
    sys.setswitchinterval(1000)
    try:
        go.set()
        answers(session, rows)
        seen = list(progress)
    finally:
        sys.setswitchinterval(interval)
        other.join()
        session.close()
    assert seen == [1]


def test_instances_share_one_forest_and_outlive_each_other(backend: Backend, job: Job, trained: Any) -> None:
    forest = trained("random_forest", "digits")
    first, second = (opened(backend, job, forest.file) for _ in range(2))
    expected = answers(first, forest.rows[:3])
    first.close()
    np.testing.assert_array_equal(answers(second, forest.rows[:3]), expected)
    second.close()

"""Scikit-learn's own checks of estimators, on features, and its tools around the classifier."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from classify_helpers import clustered_features, examples
from forked import ForkedPython
from vsm import FewShotClassifier
from vsm.data import open_images
from vsm.errors import ClassifierError

NOT_APPLICABLE = {
    "check_supervised_y_2d": "a column of labels is refused, where scikit-learn warns and flattens",
    "check_classifiers_classes": "-1 marks unlabeled rows, as in sklearn.semi_supervised, whose "
    "classifiers are not checked with it as a class either",
}


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".* does not inherit from `sklearn.base")
    every_check = parametrize_with_checks(
        [FewShotClassifier()], expected_failed_checks=lambda _: NOT_APPLICABLE
    )


@every_check  # type: ignore[untyped-decorator]  # scikit-learn's
def test_scikit_learns_checks_pass(estimator: FewShotClassifier, check: Any) -> None:
    check(estimator)


def labeled_rows() -> tuple[Any, Any]:
    features, class_ids, names = clustered_features(8, 12)
    return features.numpy(), np.asarray(names)[class_ids]


def test_it_works_in_pipelines_validations_and_searches() -> None:
    rows, labels = labeled_rows()
    pipeline = make_pipeline(StandardScaler(), FewShotClassifier())
    assert cross_val_score(pipeline, rows, labels, cv=3).mean() > 0.5
    choices = {"fewshotclassifier__temperature": [1.0, 10.0, 1000.0]}
    search = GridSearchCV(pipeline, choices, cv=3, scoring="neg_log_loss").fit(rows, labels)
    assert search.best_params_["fewshotclassifier__temperature"] == 10.0
    assert search.predict_proba(rows[:2]).shape == (2, 8)
    assert search.best_estimator_.n_features_in_ == 24


def test_rows_know_their_width_and_images_do_not() -> None:
    rows, labels = labeled_rows()
    classifier = FewShotClassifier().learn_memory(rows, labels)
    assert not hasattr(classifier, "n_features_in_")
    assert classifier.fit(rows, labels).n_features_in_ == 24
    images, names = examples(open_images("glyphs"), {0: 1, 1: 1})
    of_images = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(images, names)
    assert not hasattr(of_images, "n_features_in_")


def test_a_classifier_that_is_not_fitted_raises_scikit_learns_error_and_ours() -> None:
    with pytest.raises(NotFittedError, match="knows no classes yet; call fit first") as told:
        FewShotClassifier().predict(np.zeros((1, 3)))
    assert isinstance(told.value, ClassifierError)


def test_labels_are_strings_or_whole_numbers() -> None:
    rows = np.arange(6.0).reshape(3, 2)
    kinds: list[Any] = [
        [0.0, 2.0, 2.0],
        np.asarray([0, 2, 2], object),
        np.asarray([0, 2, 2]),
        np.asarray([0, 2, 2], np.uint8),
        np.asarray([*np.asarray([0, 2, 2])], object),
    ]
    for labels in kinds:
        fitted = FewShotClassifier().fit(rows, labels)
        assert fitted.classes_.tolist() == [0, 2]
        assert fitted.classes_.dtype.kind == "i"
    for wrong in ([0.5, 1.0, 1.0], [0.0, np.inf, 1.0], [0.0, np.nan, 1.0]):
        with pytest.raises(ClassifierError, match="Unknown label type: continuous"):
            FewShotClassifier().fit(rows, wrong)
    with pytest.raises(ClassifierError, match="a mixture, like 'a'; expected all strings"):
        FewShotClassifier().fit(rows, np.asarray(["a", 1, 2], object))


def test_rows_may_be_of_any_real_type() -> None:
    rows = np.eye(3)
    for kind in (">f4", np.longdouble, np.float16, np.int8, bool):
        given = rows.astype(kind)
        if kind is bool:
            with pytest.raises(ClassifierError, match="expected numbers"):
                FewShotClassifier().fit(given, [0, 1, 2])
        else:
            assert FewShotClassifier().fit(given, [0, 1, 2]).predict(rows).tolist() == [0, 1, 2]


def test_a_classifier_of_images_is_pickled_with_all_it_knows() -> None:
    images, names = examples(open_images("glyphs"), {0: 2, 1: 2, 2: 2})
    classifier = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(images, names)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(images), classifier.predict_proba(images))
    np.testing.assert_array_equal(
        again.predict(images, reject=0.9), classifier.predict(images, reject=0.9)
    )


def test_using_the_classifier_does_not_load_scikit_learn(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, numpy as np\n"
        "from vsm import FewShotClassifier\n"
        "classifier = FewShotClassifier()\n"
        "try: classifier.predict(np.eye(2))\n"
        "except ValueError as error: print(error)\n"
        "print(classifier.fit(np.eye(2), [0, 1]).predict(np.eye(2)))\n"
        "sys.exit('sklearn' in sys.modules)"
    )
    process = ForkedPython({}, program)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert printed == "this classifier knows no classes yet; call fit first\n[0 1]\n"

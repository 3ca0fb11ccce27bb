from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch

from vsm.data import SPLITS, EpisodeSampler, ImageDataset, Split, glyphs


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageDataset]:
    """Glyphs, opened for the first time in an empty cache that lasts as long as this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSM_DATA", str(tmp_path_factory.mktemp("data")))
        yield glyphs.open_glyphs()


def _alphabets(dataset: ImageDataset, split: Split) -> set[str]:
    return {dataset.class_names[c].split("/")[0] for c in dataset.classes(split)}


@pytest.mark.parametrize(("split", "fewest"), [("train", 600), ("validation", 100), ("test", 200)])
def test_every_split_has_enough_classes(dataset: ImageDataset, split: Split, fewest: int) -> None:
    assert len(dataset.classes(split)) >= fewest


def test_every_class_has_twenty_drawings_of_28_by_28(dataset: ImageDataset) -> None:
    assert dataset.image_shape == (1, 28, 28)
    assert (dataset.class_sizes == 20).all()


def test_splits_share_no_class_and_no_alphabet(dataset: ImageDataset) -> None:
    for one, other in combinations(SPLITS, 2):
        assert not set(dataset.classes(one)) & set(dataset.classes(other))
        assert not _alphabets(dataset, one) & _alphabets(dataset, other)


def test_classes_have_unique_readable_names(dataset: ImageDataset) -> None:
    assert len(set(dataset.class_names)) == len(dataset.class_names)
    assert dataset.class_names[0] == "alphabet00/character00"


def test_alphabets_differ_in_size(dataset: ImageDataset) -> None:
    names = [name.split("/")[0] for name in dataset.class_names]
    sizes = np.unique(names, return_counts=True)[1]
    assert 16 <= sizes.min() < sizes.max() <= 30


def test_the_same_seed_draws_the_same_bytes(dataset: ImageDataset) -> None:
    again = glyphs.draw_alphabet(glyphs.SEED, 0)
    stored = dataset.images[: again.shape[0] * again.shape[1]]
    assert stored.tobytes() == again.tobytes()


def test_another_seed_draws_another_alphabet() -> None:
    one, other = (glyphs.draw_alphabet(seed, 0) for seed in (0, 1))
    assert one.tobytes() != other.tobytes()


def test_characters_of_an_alphabet_look_different() -> None:
    random = np.random.Generator(np.random.PCG64(0))
    alphabet = glyphs._design_alphabet(random)
    characters = glyphs._design_characters(alphabet, 20, random)
    looks = np.stack([glyphs._look(alphabet, character) for character in characters])
    assert (looks @ looks.T)[~np.eye(20, dtype=bool)].max() < 0.95


def test_curves_pass_through_their_control_points() -> None:
    controls = np.random.Generator(np.random.PCG64(0)).normal(size=(glyphs.NUM_CONTROLS, 2))
    for roundness in (0.0, 0.5, 1.0):
        curve = glyphs._curve_basis(roundness) @ controls
        np.testing.assert_allclose(curve[[0, -1]], controls[[0, -1]], atol=1e-12)


def test_a_second_opening_reads_the_same_bytes_from_the_cache(
    dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyphs, "draw_alphabet", None)  # drawing again would fail
    again = glyphs.open_glyphs()
    assert again.name == "glyphs"
    assert again.class_names == dataset.class_names
    assert again.images.tobytes() == dataset.images.tobytes()


def test_a_changed_generator_does_not_read_an_old_cache(
    dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyphs, "NUM_ALPHABETS", dict.fromkeys(SPLITS, 1))
    monkeypatch.setattr(glyphs, "GENERATOR_VERSION", glyphs.GENERATOR_VERSION + 1)
    assert len(glyphs.open_glyphs().class_names) < len(dataset.class_names)


def test_ink_is_bright_on_dark_paper_and_away_from_the_border(dataset: ImageDataset) -> None:
    images = dataset.images[..., 0]
    assert (images.max(axis=(1, 2)) > 200).all()
    assert 0.05 < (images > 127).mean() < 0.25
    assert (images[:, [0, 0, -1, -1], [0, -1, 0, -1]] == 0).mean() > 0.99
    frame = np.ones((28, 28), dtype=bool)
    frame[1:-1, 1:-1] = False
    assert (images[:, frame] > 127).any(axis=1).mean() < 0.01


def test_normalization_constants_are_those_of_the_train_pixels(dataset: ImageDataset) -> None:
    last = int(dataset.class_starts[dataset.classes("train")[-1] + 1])
    train = dataset.images[:last] / 255
    assert dataset.normalization == glyphs.NORMALIZATION
    assert glyphs.NORMALIZATION.mean == pytest.approx([train.mean()], abs=5e-4)
    assert glyphs.NORMALIZATION.std == pytest.approx([train.std()], abs=5e-4)


def test_nearest_neighbors_of_raw_pixels_find_it_hard_but_not_hopeless(
    dataset: ImageDataset,
) -> None:
    sampler = EpisodeSampler(dataset, "test", way=5, shot=1, queries=5)
    labels = torch.arange(5).repeat_interleave(5)
    correct = []
    for episodes in sampler.evaluation_episodes(400, seed=0):
        pixels = dataset.load(episodes.image_ids).float().flatten(3)  # [T, 5, 6, 784]
        distance = torch.cdist(pixels[:, :, 1:].flatten(1, 2), pixels[:, :, 0])  # [T, 25, 5]
        correct.append(distance.argmin(dim=-1) == labels)
    assert 0.25 < torch.cat(correct).float().mean().item() < 0.60

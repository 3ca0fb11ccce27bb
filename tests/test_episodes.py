"""Episodes: shape, distinctness, determinism, and refusal of what cannot be."""

import numpy as np
import pytest
import torch

from vsm.data import EpisodeSampler, ImageDataset, PixelNormalization
from vsm.errors import EpisodeError


def sampler(dataset: ImageDataset, way: int = 3, shot: int = 2, queries: int = 4) -> EpisodeSampler:
    return EpisodeSampler(dataset, "train", way, shot, queries)


def test_episodes_have_distinct_classes_and_images_of_those_classes(
    tiny_dataset: ImageDataset, random: torch.Generator
) -> None:
    batch = sampler(tiny_dataset).draw(20, random)
    assert batch.class_ids.shape == (20, 3)
    assert batch.image_ids.shape == (20, 3, 6)
    for classes, images in zip(batch.class_ids, batch.image_ids, strict=True):
        assert len(set(classes.tolist())) == 3
        assert set(classes.tolist()) <= set(tiny_dataset.splits["train"].tolist())
        for class_id, of_class in zip(classes.tolist(), images, strict=True):
            assert len(set(of_class.tolist())) == 6
            assert set(of_class.tolist()) <= set(tiny_dataset.image_ids(class_id).tolist())


def test_uneven_classes_never_lend_each_other_images(random: torch.Generator) -> None:
    sizes = [7, 12, 6, 30]
    dataset = ImageDataset(
        name="uneven",
        images=np.zeros((sum(sizes), 2, 2, 1), np.uint8),
        class_names=("a", "b", "c", "d"),
        class_starts=np.concatenate([[0], np.cumsum(sizes)]),
        splits={"train": np.arange(4)},
        normalization=PixelNormalization((0.0,), (1.0,)),
    )
    batch = EpisodeSampler(dataset, "train", 4, 1, 5).draw(200, random)
    for classes, images in zip(batch.class_ids, batch.image_ids, strict=True):
        for class_id, of_class in zip(classes.tolist(), images, strict=True):
            assert set(of_class.tolist()) <= set(dataset.image_ids(class_id).tolist())


def test_every_class_and_image_is_drawn_equally_often(
    tiny_dataset: ImageDataset, random: torch.Generator
) -> None:
    batch = sampler(tiny_dataset).draw(4000, random)
    frequency = torch.bincount(batch.class_ids.flatten(), minlength=30) / 4000
    torch.testing.assert_close(frequency, torch.full((30,), 3 / 30), rtol=0.25, atol=0)
    support = torch.bincount(batch.image_ids[..., :2].flatten(), minlength=360) / 8000
    assert support.min() > 0


def test_the_evaluation_list_is_a_function_of_its_description_alone(
    tiny_dataset: ImageDataset,
) -> None:
    def listed(count: int, seed: int, **change: int) -> torch.Tensor:
        episodes = sampler(tiny_dataset, **change).evaluation_episodes(count, seed)
        return torch.cat([batch.image_ids for batch in episodes])

    assert torch.equal(listed(120, 0), listed(120, 0))
    assert torch.equal(listed(120, 0)[:70], listed(70, 0))
    assert len(listed(70, 0)) == 70
    assert not torch.equal(listed(50, 0), listed(50, 1))
    assert not torch.equal(listed(50, 0, queries=5)[..., :6], listed(50, 0))


@pytest.mark.parametrize(
    ("way", "shot", "queries", "message"),
    [
        (31, 1, 1, "way: 31 classes asked for, but the train split of tiny has 30"),
        (
            3,
            5,
            8,
            r"shot \+ queries: 5 \+ 8 = 13 .* 'pattern00' of the train split of tiny holds 12",
        ),
        (1, 1, 1, "way: must be at least 2, got 1"),
        (3, 0, 1, "shot: must be at least 1, got 0"),
        (3, 1, 0, "queries: must be at least 1, got 0"),
    ],
)
def test_infeasible_episodes_are_refused_when_the_sampler_is_built(
    tiny_dataset: ImageDataset, way: int, shot: int, queries: int, message: str
) -> None:
    with pytest.raises(EpisodeError, match=message):
        sampler(tiny_dataset, way, shot, queries)


def test_images_are_loaded_channels_last_and_normalized(tiny_dataset: ImageDataset) -> None:
    ids = torch.tensor([[0, 13], [2, 7]])
    pixels = tiny_dataset.load(ids)
    assert pixels.shape == (2, 2, 1, 28, 28)
    assert pixels.dtype == torch.uint8
    assert pixels.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    expected = (torch.from_numpy(tiny_dataset.images[13]) / 255 - 0.5) / 0.25
    torch.testing.assert_close(tiny_dataset.normalize(pixels)[0, 1, 0], expected[..., 0])

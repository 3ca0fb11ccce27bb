"""Datasets, episodes and preprocessing."""

from vsm.data.catalog import describe, list_datasets, open_dataset, open_images, prepare
from vsm.data.dataset import (
    SPLITS,
    Augmentation,
    Dataset,
    FeatureDataset,
    ImageDataset,
    PixelNormalization,
    Split,
)
from vsm.data.episodes import EpisodeBatch, EpisodeSampler, EvaluationBatch

__all__ = [
    "SPLITS",
    "Augmentation",
    "Dataset",
    "EpisodeBatch",
    "EpisodeSampler",
    "EvaluationBatch",
    "FeatureDataset",
    "ImageDataset",
    "PixelNormalization",
    "Split",
    "describe",
    "list_datasets",
    "open_dataset",
    "open_images",
    "prepare",
]

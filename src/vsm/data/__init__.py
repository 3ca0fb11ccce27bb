"""Datasets and episodes. This room knows images and classes, and nothing of models."""

from vsm.data.augmentation import Augmentation
from vsm.data.catalogue import describe, list_datasets, open_dataset, prepare
from vsm.data.dataset import SPLITS, ImageDataset, Normalisation, Split
from vsm.data.episodes import EpisodeBatch, EpisodeSampler

__all__ = [
    "SPLITS",
    "Augmentation",
    "EpisodeBatch",
    "EpisodeSampler",
    "ImageDataset",
    "Normalisation",
    "Split",
    "describe",
    "list_datasets",
    "open_dataset",
    "prepare",
]

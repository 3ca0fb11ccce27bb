"""Datasets and episodes. This room knows images and classes, and nothing of models."""

from vsm.data.catalogue import open_dataset
from vsm.data.dataset import SPLITS, ImageDataset, Normalisation, Split
from vsm.data.episodes import EpisodeBatch, EpisodeSampler

__all__ = [
    "SPLITS",
    "EpisodeBatch",
    "EpisodeSampler",
    "ImageDataset",
    "Normalisation",
    "Split",
    "open_dataset",
]

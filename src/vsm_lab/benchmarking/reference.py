"""A reference ProtoNet as public few-shot libraries write it.

Default memory layout (NCHW), ReLU before pooling, distances by broadcasting, default Adam. One task
per step, as in learn2learn and easyfsl; several at once take longer on a CPU. Support and queries
are embedded together as in learn2learn, the fastest. Pooling is that of
:class:`vsm.encoders.Conv4`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.encoders import Conv4
from vsm.seeding import default_generator
from vsm_lab.benchmarking.benchmarks import EVALUATION_SEED, episode_images, evaluation_episodes
from vsm_lab.benchmarking.processes import Benchmark
from vsm_lab.benchmarking.suite import Sizes

LEARNING_RATE = 1e-3


class ReferenceConv4(nn.Module):
    """Blocks of 3×3 convolution, batch norm, ReLU and 2×2 max pooling; loads weights of Conv4."""

    def __init__(self, image_shape: tuple[int, int, int], channels: int = 64) -> None:
        super().__init__()
        ours = Conv4(image_shape, channels)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(image_shape[0] if block == 0 else channels, channels, 3, padding=1),
                    nn.BatchNorm2d(channels),
                    nn.ReLU(),
                    nn.MaxPool2d(2, ceil_mode=ours.pool_rounds_up),
                )
                for block in range(len(ours.blocks))
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Embed images ``[B, C, H, W]``: ``[B, D]``."""
        return torch.flatten(self.blocks(images), 1)


def channels_first(images: Tensor) -> Tensor:
    """Copy images ``[..., C, H, W]`` to torch's default layout."""
    # A copy, since images of one channel are contiguous in both layouts and would keep strides.
    return images.clone(memory_format=torch.contiguous_format)


def reference_logits(backbone: nn.Module, images: Tensor, shot: int) -> Tensor:
    """Return −‖h(x) − h̄_n‖² of every query and class ``[T, N·Q, N]``, queries ordered by class.

    Of ``images [T, N, K + Q, C, H, W]`` the first K of each class are its support.
    """
    features: Tensor = backbone(images.flatten(0, 2)).unflatten(0, images.shape[:3])
    prototypes = features[:, :, :shot].mean(2)  # [T, N, D]
    queries = features[:, :, shot:].flatten(1, 2)  # [T, N·Q, D]
    differences = queries.unsqueeze(2) - prototypes.unsqueeze(1)  # [T, N·Q, N, D]
    return -(differences**2).sum(-1)


def reference_loss(backbone: nn.Module, images: Tensor, shot: int) -> Tensor:
    """Mean cross-entropy of the queries of ``images [T, N, K + Q, C, H, W]``."""
    logits = reference_logits(backbone, images, shot)
    return F.cross_entropy(logits.flatten(0, 1), _labels(logits).repeat(len(images)))


@torch.no_grad()
def reference_accuracies(backbone: nn.Module, episodes: Iterable[Tensor], shot: int) -> list[float]:
    """Accuracy of each episode ``[N, K + Q, C, H, W]``; images are embedded for every episode."""
    backbone.eval()
    accuracies = []
    for images in episodes:
        logits = reference_logits(backbone, images.unsqueeze(0), shot)
        correct = logits.argmax(-1).squeeze(0) == _labels(logits)
        accuracies.append(correct.float().mean().item())
    return accuracies


def reference_steps(**sizes: int) -> Benchmark:
    """Train the reference on all tasks of a step, one per update."""
    size = Sizes(**sizes)
    with default_generator(0, "reference"):
        backbone = ReferenceConv4(size.image_shape, size.channels)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=LEARNING_RATE)
    images = channels_first(episode_images(size))

    def train() -> list[float]:
        losses = []
        backbone.train()
        for task in images.split(1):
            optimizer.zero_grad()
            loss = reference_loss(backbone, task, size.shot)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


def reference_evaluation(episodes: int, **sizes: int) -> Benchmark:
    """Evaluate the reference on episodes sampled beforehand."""
    size = Sizes(**sizes)
    dataset, sampler = evaluation_episodes(size)
    with default_generator(0, "reference"):
        backbone = ReferenceConv4(dataset.image_shape, size.channels)
    batches = sampler.evaluation_episodes(episodes, EVALUATION_SEED)
    drawn = torch.cat([batch.image_ids for batch in batches])

    def measure() -> list[float]:
        # Copies each episode into its own batch, as data loaders of public libraries do.
        images = (channels_first(dataset.normalize(dataset.load(ids))) for ids in drawn)
        return reference_accuracies(backbone, images, size.shot)

    return measure


def _labels(logits: Tensor) -> Tensor:
    """Return the classes of queries ordered by class ``[N·Q]``."""
    _, num_queries, way = logits.shape
    return torch.arange(way).repeat_interleave(num_queries // way)

"""The exported modules: images to features, and features to probabilities.

They compute what :class:`vsm.FewShotClassifier` does, by the same code.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.memory import SupportSet
from vsm.nn.networks import mean_distance, predictive
from vsm.runs.trained_model import TrainedModel
from vsm.seeding import generator

TASK_NAMES = ("support_features", "support_labels", "query_features")


class EncoderGraph(nn.Module):
    """Images, or rows of features, to the features that a classifier takes."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model, self.preprocessing = trained.model, trained.preprocessing
        self.input_name = "raw_features" if self.preprocessing is None else "images"
        self.defaults: dict[str, Tensor] = {}

    def sample(self, count: int) -> Tensor:
        """Draw ``count`` inputs to check with: images between empty and full, or features."""
        random = generator(0, "export", "inputs", count)
        if self.preprocessing is None:
            return torch.randn(count, self.model.num_features, generator=random)
        density = torch.rand(count, 1, 1, 1, generator=random)
        return torch.rand(count, *self.preprocessing.input_shape, generator=random) * density

    def signature(self) -> dict[str, Any]:
        """Return arguments of ``torch.onnx.export``: inputs, their variable axes, and names."""
        return {
            "args": (self.sample(3),),
            "dynamic_shapes": ({0: "batch"},),
            "input_names": (self.input_name,),
            "output_names": ("features",),
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed images ``[n, C, H, W]`` from 0 to 1, or features ``[n, D]``: ``[n, D]``."""
        if self.preprocessing is not None:
            constants = (self.preprocessing.mean, self.preprocessing.std)
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in constants)
            inputs = (inputs - mean) / std
        return self.model.embed(inputs)


class Answers(NamedTuple):
    """Outputs of a classifier's graph for Q queries and N classes."""

    probabilities: Tensor  # [Q, N]
    distances: Tensor  # to each class's prototype [Q, N]
    recalled_weights: Tensor | None  # λ [N, A]; None for methods without memory


class ClassifierGraph(nn.Module):
    """Support and queries to probabilities, with the memory inside."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.trained, self.model = trained, trained.model
        fitted = sorted(trained.calibration.temperatures.items()) or [(1, 1.0)]
        self.log_shots, self.log_temperatures = torch.tensor(fitted).log().unbind(1)
        self.defaults = {"temperature": torch.zeros(())}  # of inputs that are not given
        if trained.state is not None:
            self.defaults["slot_mask"] = torch.zeros(1, len(trained.state), dtype=torch.bool)
            trained.state.project(torch.zeros(1, self.model.num_features))  # decompose it now

    def signature(self) -> dict[str, Any]:
        """See ``EncoderGraph``; sizes differ, so that no axis is taken for another."""
        support, way, queries, width = 7, 3, 4, self.model.num_features
        slot_mask = self.defaults.get("slot_mask")
        inputs = (
            torch.randn(support, width, generator=generator(0, "export", "support")),
            F.one_hot(torch.arange(support) % way).float(),
            torch.randn(queries, width, generator=generator(0, "export", "queries")),
            torch.ones(()),
            None if slot_mask is None else slot_mask.repeat(2, 1),
        )
        axes = ({0: "support"}, {0: "support", 1: "way"}, {0: "queries"})
        hidden = None if slot_mask is None else {0: "hidden_classes"}
        return {
            "args": inputs,
            "dynamic_shapes": (*axes, {}, hidden),
            "input_names": (*TASK_NAMES, *self.defaults),
            "output_names": Answers._fields[: 2 if slot_mask is None else 3],
        }

    def temperature(self, shots: Tensor) -> Tensor:
        """``Calibration.temperature`` of shots ``[N, 1]``, as tensor operations: ``[]``."""
        starts, steps = self.log_shots[:-1], self.log_shots.diff()
        passed = (shots.log().mean() - starts).clamp_min(0).minimum(steps)
        slopes = self.log_temperatures.diff() / steps
        return (self.log_temperatures[0] + (slopes * passed).sum()).exp()

    def forward(
        self,
        support_features: Tensor,  # [S, D], of all classes in any order
        support_labels: Tensor,  # [S, N], 1 where an example is of a class; zeros do not count
        query_features: Tensor,  # [Q, D]
        temperature: Tensor,  # T of p^(1/T) / Z []; 0: the model's own
        slot_mask: Tensor | None,  # slots that a class may not recall, boolean [N, A] or [1, A]
    ) -> Answers:
        """Infer the classes, and classify; only methods without memory have no ``slot_mask``."""
        shots = support_labels.sum(0).unsqueeze(-1)  # [N, 1]
        support_features, query_features = (
            self.model.project(part, self.trained.state)
            for part in (support_features, query_features)
        )
        mean = (support_labels.mT @ support_features / shots).unsqueeze(0)
        support = SupportSet(mean.unsqueeze(2), mean, shots.unsqueeze(0))
        if slot_mask is not None:
            rows = torch.arange(mean.shape[1]) % torch.full((1,), slot_mask.shape[0])
            slot_mask = slot_mask[rows].unsqueeze(0)  # [1, N, A]
        nothing_drawn = torch.Generator()
        posterior = self.model.infer(support, self.trained.state, nothing_drawn, slot_mask)
        queries = query_features.unsqueeze(0)
        log_probabilities = predictive(posterior.log_probabilities(queries))
        chosen = torch.where(temperature > 0, temperature, self.temperature(shots))
        distances = mean_distance(queries, posterior.prototypes, self.model.classifier.distance)
        recalled = posterior.weights
        return Answers(
            F.softmax(log_probabilities / chosen, dim=-1)[0],
            distances[0],
            None if recalled is None else recalled[0],
        )

    def by_name(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map inputs to answers, both by the names that the graph uses."""
        given = (inputs[name] for name in (*TASK_NAMES, "temperature"))
        answers = self(*given, inputs.get("slot_mask"))
        return {name: value for name, value in answers._asdict().items() if value is not None}

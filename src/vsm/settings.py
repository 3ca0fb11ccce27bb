"""Every setting of a run, typed; the line under a field is its ``--help``.

Nothing here imports torch, so that the command line answers at once. Letters in brackets are the
paper's symbols.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

from vsm.errors import SettingsError

Method = Literal["protonet", "vpn", "rote", "transformed", "vsm"]
METHODS: tuple[Method, ...] = get_args(Method)

BaselineName = Literal[
    "simpleshot", "simpleshot_l2n", "simpleshot_un", "cosine", "logistic", "calibration"
]
BASELINE_NAMES: tuple[BaselineName, ...] = get_args(BaselineName)


@dataclass(frozen=True)
class ModelSettings:
    """The network around the memory."""

    backbone: Literal["conv4", "resnet12", "wrn28_10"] = "conv4"
    """Feature extractor; conv4 adapts its depth to the images, the deep ones give 640 features."""
    channels: int = 64
    """Width of the backbone; 64 is the published one (conv4: channels of every convolution)."""
    keep_probability: float = 1.0
    """Chance to survive dropout (the paper's conv4: 0.9 Omniglot, 0.5 others; resnet12: 0.9)."""
    hidden_units: int = 256
    """Width of the hidden layers of the inference and prior networks."""
    residual: bool = True
    """Networks add to their input and start as the identity; the paper's do not."""
    initial_log_variance: float = -3.0
    """Where log-variances start; 0 leaves the default initialisation."""
    normalise_features: bool = False
    """Scale every feature vector to length one."""
    distance: Literal["squared_euclidean", "cosine"] = "squared_euclidean"
    """d of Eq. 1 between a query's features and a prototype."""
    temperature: float = 1.0
    """Distances are divided by this before the softmax."""
    learn_temperature: bool = False
    """Train the temperature with the other parameters."""

    def __post_init__(self) -> None:
        _require_known_choices(self)
        _require_positive(self, "channels", "hidden_units", "temperature")
        _require_between(self, -9.0, 9.0, "initial_log_variance")
        _require_between(self, 0.0, 1.0, "keep_probability", low_open=True)


@dataclass(frozen=True)
class MemorySettings:
    """How the memory is addressed, recalled, updated and bounded."""

    recall: Literal["soft", "mixture", "gumbel"] = "soft"
    """How the latent memory m is drawn: from one Gaussian, ancestrally, or by Gumbel-softmax."""
    soft_variance: Literal["moment_matched", "averaged"] = "moment_matched"
    """Variance of soft recall: the mixture's, or the plain average of the slots' variances."""
    gumbel_temperature: float = 0.5
    """Temperature of the relaxed one-hot weights of Gumbel recall."""
    addressing: Literal["cosine", "dot"] = "cosine"
    """Similarity g of Eq. 9 between a slot and the support mean."""
    centre_addressing: bool = True
    """Compare relative to the mean of all slots, since post-ReLU features share a common part."""
    addressing_scale: float | None = None
    """Factor on the similarity before the softmax; unset: 30 for cosine, 1 for dot."""
    learn_addressing_scale: bool = True
    """Train that factor with the other parameters."""
    top_k: int | None = None
    """Address only the k most similar slots."""
    update: Literal["attention", "mean"] = "attention"
    """New content of a slot: graph attention over its samples (Eqs. 11-12), or their mean."""
    update_activation: Literal["identity", "softmax", "relu", "tanh"] = "identity"
    """σ of Eq. 12."""
    retention: float = 0.7
    """α of Eq. 13: how much old content stays (the paper: 0.7 for 1-shot, 0.8 for 5-shot)."""
    mask: Literal["none", "own", "task"] = "task"
    """Slots hidden from a class in training: none, its own, or those of its whole task."""
    capacity: int | None = None
    """Largest number of slots; unset: one for every class ever seen."""
    capacity_policy: Literal["first_come", "least_recently_updated"] = "first_come"
    """When full: ignore new classes, or drop the slot whose last update is the oldest."""

    def __post_init__(self) -> None:
        _require_known_choices(self)
        _require_positive(self, "gumbel_temperature", "addressing_scale", "top_k", "capacity")
        _require_between(self, 0.0, 1.0, "retention")


@dataclass(frozen=True)
class SamplingSettings:
    """Monte Carlo samples, separately for training and for evaluation."""

    train_memory: int = 150
    """Latent memories m drawn for a class in training (J)."""
    train_prototypes: int = 100
    """Prototypes z drawn for a class in training (L)."""
    evaluation_memory: int = 150
    """J at validation and test."""
    evaluation_prototypes: int = 100
    """L at validation and test."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "train_memory", "train_prototypes", "evaluation_memory", "evaluation_prototypes"
        )


@dataclass(frozen=True)
class ObjectiveSettings:
    """Weights and estimators of Eq. 14."""

    beta_z: float = 1e-3
    """Weight of the KL of the prototypes (its KL is summed over features)."""
    beta_m: float = 1e-3
    """Weight of the KL of the latent memory."""
    kl: Literal["bound", "monte_carlo"] = "bound"
    """KL of a mixture: the convexity bound, or an unbiased Monte Carlo estimate."""
    likelihood: Literal["mean_of_logs", "log_of_mean"] = "mean_of_logs"
    """Average over prototype samples outside the log as in Eq. 14, or inside it."""

    def __post_init__(self) -> None:
        _require_known_choices(self)
        _require_not_negative(self, "beta_z", "beta_m")


@dataclass(frozen=True)
class OptimiserSettings:
    """Adam and its schedule."""

    learning_rate: float = 1e-3
    """Step size (the paper: 2.5e-4 for 1-shot, 1e-4 for 5-shot)."""
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """Learning rate over the run: constant as in the paper, cosine to zero, or halved in steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from zero."""
    halve_every: int = 2000
    """Steps between halvings of the `step` schedule."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    clip_norm: float | None = None
    """Largest norm of the gradient; unset: no clipping."""

    def __post_init__(self) -> None:
        _require_known_choices(self)
        _require_positive(self, "learning_rate", "halve_every", "clip_norm")
        _require_not_negative(self, "warmup_steps", "weight_decay")


@dataclass(frozen=True)
class ValidationSettings:
    """Validation while training; the best model by it is kept."""

    every: int = 500
    """Steps between validations; the last step is always validated."""
    episodes: int = 400
    """Episodes of each validation."""

    def __post_init__(self) -> None:
        _require_positive(self, "every")
        if self.episodes < 2:
            raise SettingsError(f"episodes: an interval needs at least 2, got {self.episodes}")


@dataclass(frozen=True)
class RunSettings:
    """All that defines a training run; written to config.yaml in its directory."""

    data: str = "glyphs"
    """Dataset by name (see `vsm data list`), or folder:PATH."""
    method: Method = "vsm"
    """protonet (means), vpn (Eq. 4), or a memory: rote, transformed, vsm."""
    way: int = 5
    """Classes of an episode (N)."""
    shot: int = 1
    """Support images of a class (K)."""
    queries: int = 15
    """Query images of a class (Q) in training and validation."""
    augment: bool = True
    """Vary training images by the dataset's preset (crop, mirror, colours); none for characters."""
    tasks: int = 8
    """Episodes of one training step (T)."""
    steps: int = 2000
    """Training steps."""
    seed: int = 0
    """The one seed from which all randomness is derived."""
    checkpoint_every: int = 100
    """Steps between saves of the state from which --resume continues."""
    model: ModelSettings = field(default_factory=ModelSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    def __post_init__(self) -> None:
        _require_known_choices(self)
        _require_positive(self, "way", "shot", "queries", "tasks", "steps", "checkpoint_every")

    @property
    def uses_memory(self) -> bool:
        """Whether the method has a long-term memory."""
        return self.method in ("rote", "transformed", "vsm")


@dataclass(frozen=True)
class BaselineSettings:
    """Hyper-parameters of the simple classifiers that a run's features are also measured with."""

    temperature: float = 1.0
    """Nearest centroids: distances are divided by this before the softmax; changes no decision."""
    inverse_penalty: float = 1.0
    """Logistic regression: C of scikit-learn, the weight of the loss against the penalty."""
    tolerance: float = 1e-5
    """Logistic regression: largest entry of the mean loss's gradient at which it has converged."""
    max_iterations: int = 1000
    """Logistic regression: steps of L-BFGS at most."""
    power: float = 0.5
    """Calibration: λ of Tukey's ladder of powers."""
    transform_base: bool = False
    """Calibration: transform base classes too; the authors' code transforms the episode alone."""
    nearest_classes: int = 2
    """Calibration: base classes that lend their statistics to a support image (k)."""
    dispersion: float = 0.21
    """Calibration: α, added to every entry of the covariance."""
    samples: int = 750
    """Calibration: features drawn for a class, shared evenly by its support images."""

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "temperature",
            "inverse_penalty",
            "tolerance",
            "max_iterations",
            "power",
            "nearest_classes",
            "samples",
        )
        _require_not_negative(self, "dispersion")


def _require_known_choices(settings: object) -> None:
    """Check every field that is a choice among words, for settings that are built in Python."""
    for name, kind in get_type_hints(type(settings)).items():
        if get_origin(kind) is Literal and getattr(settings, name) not in get_args(kind):
            known = ", ".join(map(str, get_args(kind)))
            raise SettingsError(f"{name}: expected one of {known}, got {getattr(settings, name)!r}")


def _require_not_negative(settings: object, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < 0:
            raise SettingsError(f"{name}: must not be negative, got {getattr(settings, name)}")


def _require_positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise SettingsError(f"{name}: must be greater than 0, got {value}")


def _require_between(
    settings: object, low: float, high: float, *names: str, low_open: bool = False
) -> None:
    for name in names:
        value = getattr(settings, name)
        if not low <= value <= high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise SettingsError(f"{name}: must lie in {bracket}{low}, {high}], got {value}")

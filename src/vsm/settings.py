"""Every setting of a run, typed; the line under a field is its ``--help``.

Nothing here imports torch, so that the command line answers at once. Letters in brackets are the
paper's symbols.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from vsm.errors import SettingsError

Method = Literal["protonet", "vpn", "rote", "transformed", "vsm", "mann", "kanerva"]
METHODS: tuple[Method, ...] = get_args(Method)
Inference = Literal["gaussian", "conjugate", "network"]
Normalization = Literal["un", "l2n", "cl2n"]
RecallKind = Literal["soft", "mixture", "gumbel"]
BACKBONE_NAMES = ("conv4", "resnet12", "wrn28_10")
FROZEN_ENCODERS = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
ENCODER_KINDS = ("hf", "timm", "onnx")
"""Whose encoders others publish: ``hf:NAME``, ``timm:NAME``, ``onnx:FILE``."""

BaselineName = Literal[
    "simpleshot",
    "simpleshot_l2n",
    "simpleshot_un",
    "cosine",
    "knn",
    "logistic",
    "logistic-tuned",
    "calibration",
    "protonet-adapter",
]
BASELINE_NAMES: tuple[BaselineName, ...] = get_args(BaselineName)

LARGEST_NUMBER, LARGEST_WIDTH = 2**31 - 1, 65_536
LARGEST_SHIFT = 32
WIDTHS = ("channels", "hidden_units", "slots", "width", "reads", "controller_units")
"""Sizes of layers and memories, by whose square memory is asked for."""

NETWORK_SETTINGS = (
    "sampling.train_memory",
    "sampling.evaluation_memory",
    "objective.beta_m",
    "memory.recall",
    "memory.gumbel_temperature",
)
"""What has an effect only where the latent memory m is drawn; refused with other inferences."""


@dataclass(frozen=True)
class ModelSettings:
    """The network around the memory."""

    backbone: str = "conv4"
    """Feature extractor: conv4, resnet12, wrn28_10, or your own as module:attribute; with gaussian
    inference also efficientnet-lite0, -lite1 or -lite2, hf:NAME, timm:NAME or onnx:FILE."""
    channels: int = 64
    """Width of the backbone; 64 is the published one (conv4: channels of every convolution)."""
    keep_probability: float = 1.0
    """Chance to survive dropout (the paper's conv4: 0.9 Omniglot, 0.5 others; resnet12: 0.9)."""
    hidden_units: int = 256
    """Width of the hidden layers of the inference and prior networks."""
    inference: Inference = "conjugate"
    """Prototypes by Bayes' rule (gaussian: read of class statistics that `vsm memory learn` keeps;
    conjugate: from recalled slots, learned in training), or from the paper's network."""
    residual: bool = True
    """Networks add to their input and start as the identity; the paper's do not."""
    initial_log_variance: float = -3.0
    """Where log-variances start; 0 leaves the default initialization."""
    mirror: bool = False
    """Average the features of an image and of its mirror image; twice the work of the backbone."""
    shift: int = 0
    """Average also those of the image moved by so many pixels up, down, left and right; five times
    the work, ten times with mirror images; 0 moves nothing."""
    adapter: Literal["none", "linear"] = "none"
    """Linear map of the features that starts as the identity and is trained; for fixed features."""
    normalize_features: bool = False
    """Scale every feature vector to length one, after the adapter."""
    synchronize_batch_norm: bool = True
    """Batch norm of the full batch where several processes share it, as one process has it."""
    distance: Literal["squared_euclidean", "cosine"] = "squared_euclidean"
    """d of Eq. 1 between a query's features and a prototype."""
    temperature: float = 1.0
    """Distances are divided by this before the softmax."""
    learn_temperature: bool = False
    """Train the temperature with the other parameters."""

    def __post_init__(self) -> None:
        _check(self, positive="channels hidden_units temperature")
        if not self.is_frozen_encoder:
            _check_backbone(self.backbone)
        _check_interval(self, "shift", 0, LARGEST_SHIFT)
        _check_interval(self, "initial_log_variance", -9.0, 9.0)
        _check_interval(self, "keep_probability", open_below=True)
        if self.inference != "network" and not self.residual:
            raise SettingsError(
                "residual: conjugate inference needs memories in the space of the features, which "
                "networks that add to their input give; got false, which goes with "
                "--model.inference network"
            )

    @property
    def views(self) -> tuple[bool, int]:
        """Which views of an image are averaged: mirror images, and moved by how much."""
        return self.mirror, self.shift

    @property
    def own_backbone(self) -> str | None:
        """The backbone, if it is the user's own code ``module:attribute``; else None."""
        return own_code(self.backbone)

    @property
    def is_frozen_encoder(self) -> bool:
        """Whether the backbone was trained by others, and its weights are kept elsewhere."""
        return is_frozen_encoder(self.backbone)


@dataclass(frozen=True)
class MemorySettings:
    """How the memory is addressed, recalled, updated and bounded."""

    recall: RecallKind | None = None
    """How the network draws m: soft (one Gaussian), mixture (ancestral), gumbel; unset: soft."""
    soft_variance: Literal["moment_matched", "averaged"] = "moment_matched"
    """Variance of soft recall: the mixture's, or the plain average of the slots' variances."""
    gumbel_temperature: float | None = None
    """Temperature of the relaxed one-hot weights of Gumbel recall; unset: 0.5."""
    addressing: Literal["cosine", "dot"] = "cosine"
    """Similarity g of Eq. 9 between a slot and the support mean."""
    center_addressing: bool = True
    """Compare relative to the mean of visible slots; post-ReLU features share a common part."""
    addressing_scale: float | None = None
    """Factor on the similarity before the softmax; unset: 30 for cosine, 1 for dot."""
    learn_addressing_scale: bool = True
    """Train that factor with the other parameters."""
    top_k: int | None = None
    """Address only the k most similar slots."""
    control: Literal["none", "uniform", "permuted"] = "none"
    """For comparisons: address all slots alike, or give each slot the weight of another."""
    update: Literal["attention", "mean"] = "attention"
    """New content of a slot: graph attention over its samples (Eqs. 11-12), or their mean."""
    update_activation: Literal["identity", "softmax", "relu", "tanh"] = "identity"
    """σ of Eq. 12; softmax, the paper's example, leaves little to address (paper-literal)."""
    attention_scale: float = 1.0
    """Factor on the logits of Eq. 11. Where features have length one, logits are below that of
    w, and their softmax is almost the mean; 30 makes them as sharp as addressing is."""
    delayed_gradient: bool = True
    """Teach what updates the memory by the next step's loss; false: it stays as it began."""
    retention: float = 0.7
    """α of Eq. 13: how much old content stays (the paper: 0.7 for 1-shot, 0.8 for 5-shot)."""
    strength: float | None = None
    """Support images that a recollection counts for in conjugate inference (κ); unset: learned."""
    mask: Literal["none", "own", "task"] = "task"
    """Slots hidden from a class in training: none, its own, or those of its entire task."""
    refresh_steps: int = 0
    """Before a validation, rebuild the memory from so many steps of episodes, seen as at test."""
    capacity: int | None = None
    """Largest number of slots; unset: one for every class ever seen."""
    capacity_policy: Literal["first_come", "least_recently_updated"] = "first_come"
    """When full: ignore new classes, or drop the slot whose last update is the oldest."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive="gumbel_temperature addressing_scale attention_scale top_k capacity",
            not_negative="refresh_steps strength",
        )
        _check_interval(self, "retention")

    @property
    def makes_distributions(self) -> bool:
        """Whether updated slots sum to one, which features do not."""
        return self.update == "attention" and self.update_activation == "softmax"

    @property
    def recall_kind(self) -> RecallKind:
        """``recall``, or its default."""
        return self.recall or "soft"

    @property
    def gumbel_softmax_temperature(self) -> float:
        """``gumbel_temperature``, or its default."""
        return 0.5 if self.gumbel_temperature is None else self.gumbel_temperature


@dataclass(frozen=True)
class GaussianSettings:
    """How class statistics are read with gaussian inference; unset: chosen by likelihood."""

    normalization: Normalization | None = None
    """Of features: none (un), to length one (l2n), or that, less the center, and again (cl2n)."""
    epsilon: float | None = None
    """ε: mean variance within classes that is added in all directions; inf: nothing but that."""
    beta: float | None = None
    """β: covariance within classes, of the size of that between, added to it; inf: only that."""
    rho: float | None = None
    """ρ: how far the expected prototype of a class lies towards what it recalls, 0 to 1."""
    addressing_scale: float | None = None
    """Factor on the cosines by which it recalls."""
    exact_forgetting: bool = False
    """Keep every class's scatter apart, so that forgetting a class undoes all that it taught."""
    refresh_every: int = 100
    """In training: steps after which statistics are taken anew of the features that have changed.
    """

    def __post_init__(self) -> None:
        _check(self, positive="epsilon addressing_scale refresh_every", not_negative="beta")
        if self.rho is not None:
            _check_interval(self, "rho")


@dataclass(frozen=True)
class MannSettings:
    """The short-term memory of method mann; sizes are those of Santoro et al. (2016)."""

    slots: int = 128
    """Places of the memory."""
    width: int = 40
    """Numbers that a place holds."""
    reads: int = 4
    """Heads; each reads, and writes to a place of its own."""
    controller_units: int = 200
    """Width of the recurrent controller."""
    usage_decay: float = 0.99
    """γ: how much of a place's usage is left after every image shown."""

    def __post_init__(self) -> None:
        _check(self, positive="slots width reads controller_units")
        _check_interval(self, "usage_decay")
        if self.reads > self.slots:
            raise SettingsError(f"reads: must not exceed slots ({self.slots}), got {self.reads}")


@dataclass(frozen=True)
class KanervaSettings:
    """The Gaussian memory of method kanerva."""

    slots: int = 32
    """Rows of the memory, each with an address of its own."""
    retention: float = 0.99
    """How much weight old evidence keeps at every step; 1 is Bayes' rule without forgetting."""

    def __post_init__(self) -> None:
        _check(self, positive="slots")
        _check_interval(self, "retention")


@dataclass(frozen=True)
class SamplingSettings:
    """Monte Carlo samples, separately for training and for evaluation."""

    train_memory: int | None = None
    """Memories m that the network draws for a class in training (J); unset: 150."""
    train_prototypes: int = 100
    """Prototypes z drawn for a class in training (L)."""
    evaluation_memory: int | None = None
    """J at validation and test; unset: 150."""
    evaluation_prototypes: int = 100
    """L at validation and test."""

    def __post_init__(self) -> None:
        _check(self, positive=" ".join(vars(self)))

    def num_memories(self, training: bool) -> int:
        """J, or its default."""
        return (self.train_memory if training else self.evaluation_memory) or 150


@dataclass(frozen=True)
class ObjectiveSettings:
    """Weights and estimators of Eq. 14."""

    beta_z: float = 1e-3
    """Weight of the KL of the prototypes (its KL is summed over features)."""
    beta_m: float | None = None
    """Weight of the KL of the network's latent memory m; unset: 1e-3."""
    kl: Literal["bound", "monte_carlo"] = "bound"
    """KL of a mixture: the convexity bound, or an unbiased Monte Carlo estimate."""
    likelihood: Literal["mean_of_logs", "log_of_mean"] = "mean_of_logs"
    """Average over prototype samples outside the log as in Eq. 14, or inside it."""

    def __post_init__(self) -> None:
        _check(self, not_negative="beta_z beta_m")

    @property
    def kl_m_weight(self) -> float:
        """``beta_m``, or its default."""
        return 1e-3 if self.beta_m is None else self.beta_m


@dataclass(frozen=True)
class OptimizerSettings:
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
        positive = "learning_rate halve_every clip_norm"
        _check(self, positive, not_negative="warmup_steps weight_decay")


@dataclass(frozen=True)
class ValidationSettings:
    """Validation while training; the best model by it is kept."""

    every: int = 500
    """Steps between validations; the last step is always validated."""
    episodes: int = 400
    """Episodes of each validation."""

    def __post_init__(self) -> None:
        _check(self, positive="every")
        _check_episodes(self.episodes)


@dataclass(frozen=True)
class RunSettings:
    """All that defines a training run; written to config.yaml in its directory."""

    data: str = "glyphs"
    """Dataset by name (see `vsm data list`), folder:PATH, or features:PATH."""
    method: Method = "vsm"
    """protonet (means), vpn (no memory), or a memory: rote, transformed, vsm, mann, kanerva."""
    way: int = 5
    """Classes of an episode (N)."""
    shot: int = 1
    """Support images per class (K)."""
    queries: int = 15
    """Query images per class (Q) in training and validation."""
    augment: bool = True
    """Vary training images by the dataset's preset (crop, mirror, colors; characters: nothing)."""
    augment_colors: bool = True
    """With augment, vary brightness, contrast and saturation too; false: leave colors alone."""
    augment_affine: float = 0.0
    """With augment, rotate, scale, shear and move images too, by random affine maps: how far from
    the identity, e.g. 0.15; 0: not at all."""
    tasks: int = 8
    """Episodes of one training step (T)."""
    steps: int = 2000
    """Training steps."""
    seed: int = 0
    """The one seed from which all randomness is derived."""
    checkpoint_every: int = 100
    """Steps between saves of the state from which --resume continues."""
    init: str | None = None
    """Directory of `vsm pretrain` or `vsm train` whose backbone the run begins with."""
    freeze_backbone: bool = False
    """Keep that backbone as it is; features are computed once and the rest trains in seconds."""
    model: ModelSettings = field(default_factory=ModelSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    gaussian: GaussianSettings = field(default_factory=GaussianSettings)
    mann: MannSettings = field(default_factory=MannSettings)
    kanerva: KanervaSettings = field(default_factory=KanervaSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    def __post_init__(self) -> None:
        _check_affine(self)
        _check(self, positive="way shot queries tasks steps checkpoint_every")
        if self.augment_affine and (self.freeze_backbone or self.data.startswith("features:")):
            raise SettingsError(
                "augment_affine: has no effect where images are features already, as stored ones "
                "and those of a frozen backbone are; leave it out"
            )
        if self.freeze_backbone and self.init is None:
            raise SettingsError(
                "freeze_backbone: only a trained backbone is worth keeping; name one with --init"
            )
        if self.inference != "network":
            for name in NETWORK_SETTINGS:
                if attrgetter(name)(self) is not None:
                    raise SettingsError(
                        f"{name}: has no effect with model.inference {self.inference}, which "
                        "integrates m out; leave it out (null), or use --model.inference network"
                    )
        if self.inference != "conjugate" and self.memory.strength is not None:
            cause, way_out = f"model.inference {self.inference}", "use --model.inference conjugate"
            if self.method == "mann":
                cause, way_out = "method mann, which always uses the network", "use another method"
            raise SettingsError(
                f"memory.strength: has no effect with {cause}; leave it out (null), or {way_out}"
            )
        self._check_gaussian()
        if self.inference == "conjugate" and self.memory.makes_distributions:
            raise SettingsError(
                "memory.update_activation: softmax makes slots of features that sum to one, which "
                "conjugate inference cannot average with features; use identity or tanh, or "
                "--model.inference network"
            )
        kind = self.memory.recall_kind
        if self.memory.gumbel_temperature is not None and kind != "gumbel":
            raise SettingsError(
                f"memory.gumbel_temperature: has no effect with memory.recall {kind}; leave it out "
                "(null), or use --memory.recall gumbel"
            )

    def _check_gaussian(self) -> None:
        """Refuse what has no effect with gaussian inference, and its own settings without it."""
        if self.inference != "gaussian":
            if self.gaussian != GaussianSettings():
                raise SettingsError(
                    f"gaussian: has no effect with model.inference {self.inference}; leave it out, "
                    "or use vsm memory learn"
                )
            return
        if self.method != "vsm":
            raise SettingsError(
                f"inference: gaussian reads the memory of the method vsm, got {self.method}"
            )
        if self.memory != MemorySettings():
            raise SettingsError(
                "memory: has no effect with model.inference gaussian, whose settings are those of "
                "gaussian; leave it out"
            )

    @property
    def inference(self) -> Inference:
        """How prototypes are inferred: ``model.inference``, except that mann needs the network."""
        return "network" if self.method == "mann" else self.model.inference

    @property
    def uses_memory(self) -> bool:
        """Whether the method has a long-term memory."""
        return self.method in ("rote", "transformed", "vsm", "kanerva")


@dataclass(frozen=True)
class BaselineSettings:
    """Hyper-parameters of the simple classifiers that a run's features are also measured with."""

    temperature: float = 1.0
    """Nearest centroids and neighbors: distances are divided by this, with the ProtoNet adapter by
    a tenth of it, before the softmax; changes no decision."""
    inverse_penalty: float = 1.0
    """Logistic regression: C of scikit-learn, the weight of the loss against the penalty; the one
    that is tuned chooses its own."""
    tolerance: float = 1e-5
    """Logistic regression: largest entry of the mean loss's gradient at which it has converged."""
    max_iterations: int = 1000
    """Logistic regression: steps of L-BFGS at most."""
    power: float = 0.5
    """Calibration: λ of Tukey's ladder of powers."""
    transform_base: bool = True
    """Calibration: transform base classes too; the authors' code transforms the episode alone."""
    nearest_classes: int = 2
    """Calibration: base classes that lend their statistics to a support image (k)."""
    dispersion: float = 0.21
    """Calibration: α, added to every entry of the covariance."""
    samples: int = 750
    """Calibration: features drawn for a class, shared evenly by its support images."""
    adapter_steps: int = 600
    """ProtoNet adapter: training steps of 8 tasks each; 0 leaves features as they are."""
    adapter_learning_rate: float = 1e-3
    """ProtoNet adapter: first learning rate of Adam, which falls to zero as a cosine."""

    def __post_init__(self) -> None:
        others = (
            "temperature inverse_penalty tolerance max_iterations power nearest_classes samples "
            "adapter_learning_rate"
        )
        _check(self, positive=others, not_negative="dispersion adapter_steps")


@dataclass(frozen=True)
class OneCycleSettings:
    """Stochastic gradient descent whose learning rate rises once and falls once."""

    learning_rate: float = 0.1
    """Highest learning rate, reached when the warm-up ends."""
    warmup_share: float = 0.3
    """Share of all steps over which the learning rate rises."""
    initial_divisor: float = 25.0
    """The first learning rate is the highest divided by this."""
    final_divisor: float = 1e4
    """The last learning rate is the first divided by this."""
    momentum: float = 0.9
    """Share of the previous direction that every step keeps."""
    nesterov: bool = True
    """Look ahead along the momentum (Nesterov); needs momentum above 0."""
    weight_decay: float = 5e-4
    """Weight decay, coupled to the gradient as plain SGD has it."""

    def __post_init__(self) -> None:
        positive = "learning_rate initial_divisor final_divisor"
        _check(self, positive, not_negative="weight_decay")
        _check_interval(self, "warmup_share")
        _check_interval(self, "momentum")
        if self.nesterov and self.momentum == 0:
            raise SettingsError(
                "nesterov: needs momentum above 0, got momentum 0; set nesterov to false"
            )


@dataclass(frozen=True)
class DistillationSettings:
    """Learn from the scores of a finished pre-training as well (born-again networks)."""

    teacher: str | None = None
    """Directory of `vsm pretrain` on the same data, of any backbone; unset: none."""
    weight: float = 0.5
    """α: weight of the teacher's probabilities; that of the labels is 1 - α."""
    temperature: float = 4.0
    """T: scores of both are divided by this before the softmax."""

    def __post_init__(self) -> None:
        _check(self, positive="temperature")
        _check_interval(self, "weight")


@dataclass(frozen=True)
class FewShotValidationSettings:
    """Nearest prototypes of unseen classes while pre-training; the best backbone is kept."""

    every: int = 5
    """Epochs between validations; the last epoch is always validated."""
    episodes: int = 600
    """Episodes of each validation, for each number of support images."""
    way: int = 5
    """Classes of an episode; fewer where the split has fewer."""
    shots: tuple[int, ...] = (1, 5)
    """Support images per class; the best backbone has the highest mean accuracy over them."""
    queries: int = 15
    """Query images per class."""

    def __post_init__(self) -> None:
        _check(self, positive="every queries")
        _check_episodes(self.episodes)
        if self.way < 2:
            raise SettingsError(f"way: a choice needs at least 2 classes, got {self.way}")
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise SettingsError(
                f"shots: expected different numbers of at least 1, got {list(self.shots)}"
            )


@dataclass(frozen=True)
class PretrainSettings:
    """All that defines a pre-training; written to config.yaml in its directory."""

    data: str = "glyphs"
    """Dataset by name (see `vsm data list`), or folder:PATH; all its training classes are used."""
    backbone: str = "conv4"
    """Feature extractor: conv4, resnet12, wrn28_10, or your own as module:attribute."""
    channels: int = 64
    """Width of the backbone; 64 is the published one (conv4: channels of every convolution)."""
    keep_probability: float = 1.0
    """Chance to survive dropout in the backbone."""
    epochs: int = 60
    """Passes over all training images."""
    batch_size: int = 128
    """Images of one step; the rest of an epoch that fills no batch is left out of it."""
    label_smoothing: float = 0.1
    """Share of the target that is spread evenly over all classes."""
    augment: bool = True
    """Vary training images by the dataset's preset (crop, mirror, colors; characters: nothing)."""
    augment_colors: bool = True
    """With augment, vary brightness, contrast and saturation too; false: leave colors alone."""
    augment_affine: float = 0.0
    """With augment, rotate, scale, shear and move images too, by random affine maps: how far from
    the identity, e.g. 0.15; 0: not at all."""
    seed: int = 0
    """The one seed from which all randomness is derived."""
    checkpoint_every: int = 200
    """Steps between saves of the state from which --resume continues."""
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    optimizer: OneCycleSettings = field(default_factory=OneCycleSettings)
    validation: FewShotValidationSettings = field(default_factory=FewShotValidationSettings)

    def __post_init__(self) -> None:
        _check_affine(self)
        _check(self, positive="channels epochs checkpoint_every")
        _check_backbone(self.backbone)
        _check_interval(self, "keep_probability", open_below=True)
        _check_interval(self, "label_smoothing")
        if self.batch_size < 2:
            raise SettingsError(
                f"batch_size: batch norm needs at least 2 images, got {self.batch_size}"
            )


@dataclass(frozen=True)
class SlurmSettings:
    """What to ask a scheduler for; belongs to the machine and is not stored with a run."""

    nodes: int = 1
    """Machines."""
    processes_per_node: int = 1
    """Processes on each machine, which share the tasks of a step."""
    gpus_per_node: int = 0
    """GPUs on each machine, one for each of its processes; 0 computes on CPUs."""
    cpus_per_process: int = 2
    """CPU cores of a process."""
    memory_gb: float | None = None
    """Memory of a machine; unset: the cluster's default."""
    hours: float = 24.0
    """Longest time before the job is put back into the queue and resumed."""
    restarts: int = 20
    """How often that may happen."""
    warning_seconds: int = 120
    """Time before the limit at which the job saves its state."""
    partition: str | None = None
    """Queue; unset: the cluster's default."""
    account: str | None = None
    """Whom to charge; unset: the cluster's default."""
    qos: str | None = None
    """Quality of service; unset: the cluster's default."""
    constraint: str | None = None
    """Features that machines must have."""

    def __post_init__(self) -> None:
        positive = "nodes processes_per_node cpus_per_process memory_gb hours"
        _check(self, positive, not_negative="gpus_per_node restarts warning_seconds")
        if 0 < self.gpus_per_node < self.processes_per_node:
            raise SettingsError(
                f"gpus_per_node: {self.processes_per_node} processes of a machine need as many "
                f"GPUs, got {self.gpus_per_node}; use 0 to compute on CPUs"
            )

    @property
    def processes(self) -> int:
        """Processes of the job on all machines."""
        return self.nodes * self.processes_per_node


def is_frozen_encoder(backbone: str) -> bool:
    """Tell whether it is one that others trained and that is used as it is."""
    kind, colon, name = backbone.partition(":")
    return backbone in FROZEN_ENCODERS or (kind in ENCODER_KINDS and bool(colon and name))


def own_code(backbone: str) -> str | None:
    """Return ``backbone`` if it is the user's own code ``module:attribute``; else None."""
    return backbone if ":" in backbone and not is_frozen_encoder(backbone) else None


def _check(settings: object, positive: str = "", not_negative: str = "") -> None:
    """Check every choice among words, and the numbers that are named; None passes."""
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        is_optional = get_origin(kind) in (Union, UnionType)
        choice = get_args(kind)[0] if is_optional and value is not None else kind
        if get_origin(choice) is Literal and value not in get_args(choice):
            known = ", ".join(map(str, get_args(choice)))
            raise SettingsError(f"{name}: expected one of {known}, got {value!r}")
    for name in positive.split():
        if (value := getattr(settings, name)) is not None and not value > 0:  # nor is NaN
            raise SettingsError(f"{name}: must be greater than 0, got {value}")
    for name in not_negative.split():
        if (value := getattr(settings, name)) is not None and not value >= 0:
            raise SettingsError(f"{name}: must not be negative, got {value}")
    for name in (*positive.split(), *not_negative.split()):
        if isinstance(value := getattr(settings, name), int) and value > LARGEST_NUMBER:
            raise SettingsError(f"{name}: must be at most {LARGEST_NUMBER:,}, got more")
    for name in WIDTHS:
        if (value := getattr(settings, name, 0)) > LARGEST_WIDTH:
            raise SettingsError(f"{name}: must be at most {LARGEST_WIDTH:,}, got {value:,}")


def _check_interval(
    settings: object, name: str, low: float = 0.0, high: float = 1.0, open_below: bool = False
) -> None:
    value = getattr(settings, name)
    if not low <= value <= high or (open_below and value == low):
        raise SettingsError(
            f"{name}: must lie in {'(' if open_below else '['}{low}, {high}], got {value}"
        )


def _check_affine(settings: RunSettings | PretrainSettings) -> None:
    _check_interval(settings, "augment_affine", high=0.5)  # beyond, maps may fold
    if settings.augment_affine and not settings.augment:
        raise SettingsError(
            "augment_affine: has no effect with augment false; leave it out, or give --augment true"
        )


def _check_episodes(episodes: int) -> None:
    if episodes < 2:
        raise SettingsError(f"episodes: an interval needs at least 2, got {episodes}")


def _check_backbone(backbone: str) -> None:
    module, colon, attribute = backbone.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    if backbone not in BACKBONE_NAMES and not (colon and all(map(str.isidentifier, names))):
        raise SettingsError(
            f"backbone: expected {', '.join(BACKBONE_NAMES)}, or your own as module:attribute, "
            f"got {backbone!r}"
        )

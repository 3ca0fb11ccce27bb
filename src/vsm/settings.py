"""Every setting of a run, typed; the line under a field is its ``--help``.

A setting that has an effect only where another one has certain values says so beside its default.
Giving it elsewhere is an error. Nothing here imports torch, so that the command line answers at
once. Letters in brackets are the paper's symbols.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints

from vsm.errors import SettingsError

Method = Literal["protonet", "vpn", "rote", "transformed", "vsm", "mann", "kanerva"]
METHODS: tuple[Method, ...] = get_args(Method)
Inference = Literal["gaussian", "conjugate", "network"]
Normalization = Literal["un", "l2n", "cl2n"]
RecallKind = Literal["soft", "mixture", "gumbel"]
BACKBONE_NAMES = ("conv4", "resnet12", "wrn28_10")
FROZEN_ENCODERS = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
ENCODER_KINDS = ("hf", "timm", "onnx")
"""Sources of published encoders: ``hf:NAME``, ``timm:NAME``, ``onnx:FILE``."""

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
"""Of counts, and of layers and memories, whose size in memory may grow with the square."""

AnySettings = TypeVar("AnySettings")


class Condition(NamedTuple):
    """Where a setting has an effect: where ``name`` has one of ``values``, or none of them."""

    name: str
    values: tuple[object, ...]
    excluded: bool = False

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the setting has an effect among ``values``, by dotted names."""
        return (values[self.name] in self.values) != self.excluded

    def describe(self) -> str:
        """Return the condition as a part of ``--help``."""
        if self.name == "data":
            return "only for images"
        if self.excluded and self.values == (None,):
            return f"only with {self.name}"
        return f"{'not' if self.excluded else 'only'} with {self.name} {self._choices()}"

    def refusal(self, name: str, values: Mapping[str, Any]) -> str:
        """Say why setting ``name`` has no effect among ``values``, and what to do."""
        if self.name == "data":
            return f"{name}: has no effect on stored features; leave it out"
        cause = f"with {self.name} {_shown(values[self.name])}"
        if self.excluded and self.values == (None,):
            cause, remedy = f"without {self.name}", f"set --{self.name}"
        elif self.excluded:
            remedy = f"use another --{self.name}"
        else:
            remedy = f"use --{self.name} {self._choices()}"
        return f"{name}: has no effect {cause}; leave it out, or {remedy}"

    def _choices(self) -> str:
        *some, last = map(_shown, self.values)
        return f"{', '.join(some)} or {last}" if some else last


def only_with(name: str, *values: object) -> Condition:
    """Return the condition that the setting ``name`` has one of ``values``."""
    return Condition(name, values)


def not_with(name: str, *values: object) -> Condition:
    """Return the condition that the setting ``name`` has none of ``values``."""
    return Condition(name, values, excluded=True)


ON_IMAGES = only_with("data", "images")  # see _context
BUILT_IN = (ON_IMAGES, only_with("model.backbone", *BACKBONE_NAMES))
TRAINED = only_with("freeze_backbone", False)
TRAINED_ON_IMAGES = (ON_IMAGES, TRAINED)
PRETRAINED_BUILT_IN = only_with("backbone", *BACKBONE_NAMES)  # of pre-training
AUGMENTED = only_with("augment", True)
VARIATIONAL = (not_with("method", "protonet"), not_with("model.inference", "gaussian"))
LATENT = (only_with("method", "vsm", "kanerva"), only_with("model.inference", "network"))
GAUSSIAN = only_with("model.inference", "gaussian")
NOT_GAUSSIAN = not_with("model.inference", "gaussian")
CONJUGATE = only_with("model.inference", "conjugate")
MEMORY = (only_with("method", "rote", "transformed", "vsm", "kanerva"), NOT_GAUSSIAN)
SLOT_METHOD = only_with("method", "rote", "transformed", "vsm")
SLOTS = (SLOT_METHOD, NOT_GAUSSIAN)
ADDRESSED = (*SLOTS, not_with("memory.control", "uniform"))
ATTENTION = only_with("memory.update", "attention")
NEAREST = only_with(
    "classifier",
    *("simpleshot", "simpleshot_l2n", "simpleshot_un", "cosine", "knn", "protonet-adapter"),
)
UNTUNED = only_with("classifier", "logistic", "calibration")
LOGISTIC = only_with("classifier", "logistic", "logistic-tuned", "calibration")
CALIBRATION = only_with("classifier", "calibration")
ADAPTER = only_with("classifier", "protonet-adapter")


def setting(
    default: Any,
    *conditions: Condition,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a field of settings: where it has an effect, and the range of its values."""
    limits = (above, least, most)
    return field(default=default, metadata={"conditions": conditions, "limits": limits})


def section(kind: type, *conditions: Condition) -> Any:
    """Declare settings of their own, all of which have an effect under ``conditions`` only."""
    return field(default_factory=kind, metadata={"conditions": conditions})


def _check_range(
    name: str, value: Any, above: float | None, least: float | None, most: float | None
) -> None:
    low = least if above is None else above
    if low is None:
        return
    is_low = not (value >= low if above is None else value > low)  # nor is NaN
    if most is not None and (is_low or not value <= most):
        begin = "[" if above is None else "("
        raise SettingsError(f"{name}: must lie in {begin}{low:,}, {most:,}], got {_shown(value)}")
    if is_low:
        expected = "not be negative" if low == 0 else f"be at least {low}"
        expected = expected if above is None else f"be greater than {low}"
        raise SettingsError(f"{name}: must {expected}, got {value}")
    if isinstance(value, int) and value > LARGEST_NUMBER:
        raise SettingsError(f"{name}: must be at most {LARGEST_NUMBER:,}, got more")


@dataclass(frozen=True)
class Settings:
    """Checks every value: choices among words, and the range of numbers."""

    def __post_init__(self) -> None:
        types = _types(cast(type, type(self)))
        for one in fields(cast(Any, self)):
            value, kinds = getattr(self, one.name), types[one.name]
            choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
            if choices and value not in choices and not (value is None and NoneType in kinds):
                known = ", ".join(map(str, choices))
                raise SettingsError(f"{one.name}: expected one of {known}, got {value!r}")
            if value is not None and "limits" in one.metadata:
                _check_range(one.name, value, *one.metadata["limits"])


@cache
def _types(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field may have."""
    return {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in type_hints(kind).items()
    }


def _shown(value: object) -> str:
    """Return a value as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def flatten(settings: object) -> dict[str, Any]:
    """Return the values of settings by their dotted names."""
    return flatten_parts(vars(settings))


def flatten_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted names, where some are sections of settings."""
    values: dict[str, Any] = {}
    for name, value in parts.items():
        if is_dataclass(value):
            values |= {f"{name}.{inner}": part for inner, part in flatten(value).items()}
        else:
            values[name] = value
    return values


@cache
def _declared(kind: type) -> dict[str, tuple[Any, tuple[Condition, ...]]]:
    """Return the default of each setting and where it has an effect, by dotted names."""
    found: dict[str, tuple[Any, tuple[Condition, ...]]] = {}
    types = type_hints(kind)
    for one in fields(cast(Any, kind)):
        own = one.metadata.get("conditions", ())
        if is_dataclass(types[one.name]):
            for name, (default, more) in _declared(cast(type, types[one.name])).items():
                found[f"{one.name}.{name}"] = (default, (*own, *more))
        else:
            found[one.name] = (one.default, own)
    return found


def default_values(kind: type) -> dict[str, Any]:
    """Return the defaults of settings by dotted names."""
    return {name: default for name, (default, _) in _declared(kind).items()}


def describe_conditions(kind: type) -> dict[str, str]:
    """Return where settings have an effect, by dotted names, for ``--help``."""
    every = _declared(kind).items()
    return {name: "; ".join(one.describe() for one in needed) for name, (_, needed) in every}


def _context(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that conditions are about.

    Method mann always uses the network. Inputs are stored features or images; a Gaussian memory of
    stored features may be that of an encoder, which has settings as any other.
    """
    context = dict(values)
    if context.get("method") == "mann":
        context["model.inference"] = "network"
    is_encoded = context.get("model.inference") == "gaussian"
    is_stored = str(context.get("data")).startswith("features:") and not is_encoded
    return context | {"data": "features" if is_stored else "images"}


def effective_values(settings: object) -> dict[str, Any]:
    """Return the settings that have an effect, by dotted names."""
    values, declared = flatten(settings), _declared(cast(type, type(settings)))
    context = _context(values)
    return {
        name: value
        for name, value in values.items()
        if all(condition.holds(context) for condition in declared[name][1])
    }


def _refusals(kind: type, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every setting that has no effect and not its default, and an error message."""
    context = _context(values)
    for name, (default, needed) in _declared(kind).items():
        broken = next((one for one in needed if not one.holds(context)), None)
        if broken is not None and values[name] != default:
            yield name, broken.refusal(name, context)


def require_effect(settings: object) -> None:
    """Refuse settings that have no effect, unless they have their default values."""
    for _, refusal in _refusals(type(settings), flatten(settings)):
        raise SettingsError(refusal)


def effective_settings(
    kind: type[AnySettings], values: Mapping[str, Any], given: Collection[str] = ()
) -> AnySettings:
    """Build settings from values by dotted names that may be meant for several methods.

    What has no effect gets its default, except for the names in ``given``, which are refused.
    """
    values, usual = dict(values), default_values(kind)
    while ineffective := dict(_refusals(kind, values)):
        for name, refusal in ineffective.items():
            if name in given:
                raise SettingsError(refusal)
            values[name] = usual[name]
    return _build(kind, values)


def _build(kind: type[AnySettings], values: Mapping[str, Any]) -> AnySettings:
    parts: dict[str, Any] = {}
    for name, hint in type_hints(kind).items():
        if is_dataclass(hint):
            prefix = f"{name}."
            inner = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
            parts[name] = _build(cast(type, hint), inner)
        else:
            parts[name] = values[name]
    return kind(**parts)


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The network around the memory."""

    backbone: str = setting("conv4", ON_IMAGES)
    """Feature extractor: conv4, resnet12, wrn28_10, or your own as module:attribute; with gaussian
    inference also efficientnet-lite0, -lite1 or -lite2, hf:NAME, timm:NAME or onnx:FILE."""
    channels: int = setting(64, *BUILT_IN, above=0, most=LARGEST_WIDTH)
    """Width of the backbone; 64 is the published one (conv4: channels of every convolution)."""
    keep_probability: float = setting(1.0, *BUILT_IN, TRAINED, above=0.0, most=1.0)
    """Chance to survive dropout (the paper's conv4: 0.9 Omniglot, 0.5 others; resnet12: 0.9)."""
    hidden_units: int = setting(256, *VARIATIONAL, above=0, most=LARGEST_WIDTH)
    """Width of the hidden layers of the inference and prior networks."""
    inference: Inference = setting("conjugate", not_with("method", "protonet", "mann"))
    """Prototypes by Bayes' rule (gaussian: read of class statistics that `vsm memory learn` keeps;
    conjugate: from recalled slots, learned in training), or from the paper's network."""
    residual: bool = setting(True, *VARIATIONAL)
    """Networks add to their input and start as the identity; the paper's do not."""
    initial_log_variance: float = setting(-3.0, *VARIATIONAL, least=-9.0, most=9.0)
    """Where log-variances start; 0 leaves the default initialization."""
    mirror: bool = setting(False, ON_IMAGES)
    """Average the features of an image and of its mirror image; twice the work of the backbone."""
    shift: int = setting(0, ON_IMAGES, least=0, most=32)
    """Average also those of the image moved by so many pixels up, down, left and right; five times
    the work, ten times with mirror images; 0 moves nothing."""
    adapter: Literal["none", "linear"] = "none"
    """Linear map of the features that starts as the identity and is trained; for fixed features."""
    normalize_features: bool = False
    """Scale every feature vector to length one, after the adapter."""
    synchronize_batch_norm: bool = setting(True, *TRAINED_ON_IMAGES)
    """Batch norm of the full batch where several processes share it, as one process has it."""
    distance: Literal["squared_euclidean", "cosine"] = setting("squared_euclidean", NOT_GAUSSIAN)
    """d of Eq. 1 between a query's features and a prototype."""
    temperature: float = setting(1.0, NOT_GAUSSIAN, above=0)
    """Distances are divided by this before the softmax."""
    learn_temperature: bool = setting(False, NOT_GAUSSIAN)
    """Train the temperature with the other parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_frozen_encoder:
            _check_backbone(self.backbone)

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
        """Whether the backbone is a published encoder, whose weights are kept elsewhere."""
        return is_frozen_encoder(self.backbone)


@dataclass(frozen=True)
class MemorySettings(Settings):
    """How the memory is addressed, recalled, updated and bounded."""

    recall: RecallKind = setting(
        "soft", only_with("method", "vsm"), only_with("model.inference", "network")
    )
    """How the network draws m: soft (one Gaussian), mixture (ancestral), gumbel."""
    gumbel_temperature: float = setting(0.5, only_with("memory.recall", "gumbel"), above=0)
    """Temperature of the relaxed one-hot weights of Gumbel recall."""
    addressing: Literal["cosine", "dot"] = setting("cosine", *ADDRESSED)
    """Similarity g of Eq. 9 between a slot and the support mean."""
    center_addressing: bool = setting(True, *ADDRESSED)
    """Compare relative to the mean of visible slots; post-ReLU features share a common part."""
    addressing_scale: float | None = setting(None, *ADDRESSED, above=0)
    """Factor on the similarity before the softmax; unset: 30 for cosine, 1 for dot."""
    learn_addressing_scale: bool = setting(True, *ADDRESSED)
    """Train that factor with the other parameters."""
    control: Literal["none", "uniform", "permuted"] = setting("none", *SLOTS)
    """For comparisons: address all slots alike, or give each slot the weight of another."""
    update: Literal["attention", "mean"] = setting("attention", *SLOTS)
    """New content of a slot: graph attention over its samples (Eqs. 11-12), or their mean."""
    update_activation: Literal["identity", "softmax", "relu", "tanh"] = setting(
        "identity", *SLOTS, ATTENTION
    )
    """σ of Eq. 12; softmax, the paper's example, leaves little to address (paper-literal)."""
    attention_scale: float = setting(1.0, *SLOTS, ATTENTION, above=0)
    """Factor on the logits of Eq. 11; 30 makes attention sharp where features have length one."""
    delayed_gradient: bool = setting(True, *MEMORY, ATTENTION)
    """Teach what updates the memory by the next step's loss; false: it stays as it began."""
    retention: float = setting(0.7, *SLOTS, least=0.0, most=1.0)
    """α of Eq. 13: how much old content stays (the paper: 0.7 for 1-shot, 0.8 for 5-shot)."""
    strength: float | None = setting(None, *MEMORY, CONJUGATE, least=0)
    """Support images that a recollection counts for in conjugate inference (κ); unset: learned."""
    mask: Literal["none", "own", "task"] = setting("task", SLOT_METHOD)
    """Slots hidden from a class in training: none, its own, or those of its entire task."""
    refresh_steps: int = setting(0, *MEMORY, least=0)
    """Before a validation, rebuild the memory from so many steps of episodes, seen as at test."""
    capacity: int | None = setting(None, *SLOTS, above=0)
    """Largest number of slots, beyond which new classes are ignored; unset: no limit."""


@dataclass(frozen=True)
class GaussianSettings(Settings):
    """How class statistics are read with gaussian inference; unset: chosen by likelihood."""

    normalization: Normalization | None = None
    """Of features: none (un), to length one (l2n), or that, less the center, and again (cl2n)."""
    epsilon: float | None = setting(None, above=0)
    """ε: mean variance within classes that is added in all directions; inf: nothing but that."""
    beta: float | None = setting(None, least=0)
    """β: covariance within classes, of the size of that between, added to it; inf: only that."""
    rho: float | None = setting(None, least=0.0, most=1.0)
    """ρ: how far the expected prototype of a class lies towards what it recalls, 0 to 1."""
    addressing_scale: float | None = setting(None, not_with("gaussian.rho", 0.0), above=0)
    """Factor on the cosines by which it recalls."""
    exact_forgetting: bool = False
    """Keep every class's scatter apart, so that forgetting a class undoes all that it taught."""
    refresh_every: int = setting(100, above=0)
    """Steps of training after which statistics are taken anew of features that have changed."""


@dataclass(frozen=True)
class MannSettings(Settings):
    """The short-term memory of method mann; sizes are those of Santoro et al. (2016)."""

    slots: int = setting(128, above=0, most=LARGEST_WIDTH)
    """Places of the memory."""
    width: int = setting(40, above=0, most=LARGEST_WIDTH)
    """Numbers that a place holds."""
    reads: int = setting(4, above=0, most=LARGEST_WIDTH)
    """Heads; each reads, and writes to a place of its own."""
    controller_units: int = setting(200, above=0, most=LARGEST_WIDTH)
    """Width of the recurrent controller."""
    usage_decay: float = setting(0.99, least=0.0, most=1.0)
    """γ: how much of a place's usage is left after every image shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads > self.slots:
            raise SettingsError(f"reads: must not exceed slots ({self.slots}), got {self.reads}")


@dataclass(frozen=True)
class KanervaSettings(Settings):
    """The Gaussian memory of method kanerva."""

    slots: int = setting(32, above=0, most=LARGEST_WIDTH)
    """Rows of the memory, each with an address of its own."""
    retention: float = setting(0.99, least=0.0, most=1.0)
    """How much weight old evidence keeps at every step; 1 is Bayes' rule without forgetting."""


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """Monte Carlo samples, separately for training and for evaluation."""

    train_memory: int = setting(150, *LATENT, above=0)
    """Memories m that the network draws for a class in training (J)."""
    train_prototypes: int = setting(100, *VARIATIONAL, above=0)
    """Prototypes z drawn for a class in training (L)."""
    evaluation_memory: int = setting(150, *LATENT, above=0)
    """J at validation and test."""
    evaluation_prototypes: int = setting(100, *VARIATIONAL, above=0)
    """L at validation and test."""


@dataclass(frozen=True)
class ObjectiveSettings(Settings):
    """Weights and estimators of Eq. 14."""

    beta_z: float = setting(1e-3, *VARIATIONAL, least=0)
    """Weight of the KL of the prototypes (its KL is summed over features)."""
    beta_m: float = setting(1e-3, *LATENT, least=0)
    """Weight of the KL of the network's latent memory m."""
    kl: Literal["bound", "monte_carlo"] = setting("bound", *VARIATIONAL)
    """KL of a mixture: the convexity bound, or an unbiased Monte Carlo estimate."""
    likelihood: Literal["mean_of_logs", "log_of_mean"] = setting(
        "mean_of_logs", *VARIATIONAL, not_with("sampling.train_prototypes", 1)
    )
    """Average over prototype samples outside the log as in Eq. 14, or inside it."""


@dataclass(frozen=True)
class OptimizerSettings(Settings):
    """Adam and its schedule."""

    learning_rate: float = setting(1e-3, above=0)
    """Step size (the paper: 2.5e-4 for 1-shot, 1e-4 for 5-shot)."""
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """Learning rate over the run: constant as in the paper, cosine to zero, or halved in steps."""
    warmup_steps: int = setting(0, least=0)
    """Steps over which the learning rate rises linearly from zero."""
    halve_every: int = setting(2000, only_with("optimizer.schedule", "step"), above=0)
    """Steps between halvings of the `step` schedule."""
    weight_decay: float = setting(0.0, least=0)
    """Decoupled weight decay (AdamW)."""
    clip_norm: float | None = setting(None, above=0)
    """Largest norm of the gradient; unset: no clipping."""


@dataclass(frozen=True)
class ValidationSettings(Settings):
    """Validation while training; the best model by it is kept."""

    every: int = setting(500, above=0)
    """Steps between validations; the last step is always validated."""
    episodes: int = setting(400, least=2)
    """Episodes of each validation."""


@dataclass(frozen=True)
class RunSettings(Settings):
    """All that defines a training run; written to config.yaml in its directory."""

    data: str = "glyphs"
    """Dataset by name (see `vsm data list`), folder:PATH, or features:PATH."""
    method: Method = "vsm"
    """protonet (means), vpn (no memory), or a memory: rote, transformed, vsm, mann, kanerva."""
    way: int = setting(5, above=0)
    """Classes of an episode (N)."""
    shot: int = setting(1, above=0)
    """Support images per class (K)."""
    queries: int = setting(15, above=0)
    """Query images per class (Q) in training and validation."""
    augment: bool = setting(True, *TRAINED_ON_IMAGES)
    """Vary training images by the dataset's preset (crop, mirror, colors; characters: nothing)."""
    augment_colors: bool = setting(True, *TRAINED_ON_IMAGES, AUGMENTED)
    """With augment, vary brightness, contrast and saturation too; false: leave colors alone."""
    augment_affine: float = setting(0.0, *TRAINED_ON_IMAGES, AUGMENTED, least=0.0, most=0.5)
    """With augment, rotate, scale, shear and move images too, by random affine maps: how far from
    the identity, e.g. 0.15; 0: not at all."""
    tasks: int = setting(8, above=0)
    """Episodes of one training step (T)."""
    steps: int = setting(2000, above=0)
    """Training steps."""
    seed: int = 0
    """The one seed from which all randomness is derived."""
    checkpoint_every: int = setting(100, above=0)
    """Steps between saves of the state from which --resume continues."""
    init: str | None = setting(None, ON_IMAGES)
    """Directory of `vsm pretrain` or `vsm train` whose backbone the run begins with."""
    freeze_backbone: bool = setting(False, ON_IMAGES, NOT_GAUSSIAN)
    """Keep that backbone as it is; features are computed once and the rest trains in seconds."""
    model: ModelSettings = section(ModelSettings)
    memory: MemorySettings = section(MemorySettings)
    gaussian: GaussianSettings = section(GaussianSettings, GAUSSIAN)
    mann: MannSettings = section(MannSettings, only_with("method", "mann"))
    kanerva: KanervaSettings = section(KanervaSettings, only_with("method", "kanerva"))
    sampling: SamplingSettings = section(SamplingSettings)
    objective: ObjectiveSettings = section(ObjectiveSettings)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    validation: ValidationSettings = section(ValidationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self)
        if self.freeze_backbone and self.init is None:
            raise SettingsError(
                "freeze_backbone: only a trained backbone is worth keeping; name one with --init"
            )
        if self.inference == "gaussian" and self.method != "vsm":
            raise SettingsError(
                f"model.inference: gaussian reads the memory of method vsm, got {self.method}"
            )
        if self.inference == "conjugate" and not self.model.residual:
            raise SettingsError(
                "model.residual: conjugate inference needs memories in the space of the features, "
                "which residual networks give; use true, or --model.inference network"
            )
        if self.inference == "conjugate" and self.memory.update_activation == "softmax":
            raise SettingsError(
                "memory.update_activation: softmax makes slots of features that sum to one, which "
                "conjugate inference cannot average with features; use identity or tanh, or "
                "--model.inference network"
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
class BaselineSettings(Settings):
    """Hyper-parameters of the simple classifiers that a run's features are also measured with."""

    temperature: float = setting(1.0, NEAREST, above=0)
    """Nearest centroids and neighbors: distances are divided by this, with the ProtoNet adapter by
    a tenth of it, before the softmax; changes no decision."""
    inverse_penalty: float = setting(1.0, UNTUNED, above=0)
    """Logistic regression: C of scikit-learn, the weight of the loss against the penalty, which
    logistic-tuned chooses itself."""
    tolerance: float = setting(1e-5, LOGISTIC, above=0)
    """Logistic regression: largest entry of the mean loss's gradient at which it has converged."""
    max_iterations: int = setting(1000, LOGISTIC, above=0)
    """Logistic regression: steps of L-BFGS at most."""
    power: float = setting(0.5, CALIBRATION, above=0)
    """Calibration: λ of Tukey's ladder of powers."""
    transform_base: bool = setting(True, CALIBRATION)
    """Calibration: transform base classes too; the authors' code transforms the episode alone."""
    nearest_classes: int = setting(2, CALIBRATION, above=0)
    """Calibration: base classes that lend their statistics to a support image (k)."""
    dispersion: float = setting(0.21, CALIBRATION, least=0)
    """Calibration: α, added to every entry of the covariance."""
    samples: int = setting(750, CALIBRATION, above=0)
    """Calibration: features drawn for a class, shared evenly by its support images."""
    adapter_steps: int = setting(600, ADAPTER, least=0)
    """ProtoNet adapter: training steps of 8 tasks each; 0 leaves features as they are."""
    adapter_learning_rate: float = setting(1e-3, ADAPTER, above=0)
    """ProtoNet adapter: first learning rate of Adam, which falls to zero as a cosine."""

    def require_effect(self, classifiers: Collection[str]) -> None:
        """Refuse settings that none of these classifiers has, unless they have their defaults."""
        for name, (default, [condition]) in _declared(BaselineSettings).items():
            known = any(condition.holds({"classifier": one}) for one in classifiers)
            if getattr(self, name) != default and not known:
                raise SettingsError(
                    f"baseline.{name}: has an effect {condition.describe()}; leave it out"
                )


@dataclass(frozen=True)
class OneCycleSettings(Settings):
    """Stochastic gradient descent whose learning rate rises once and falls once."""

    learning_rate: float = setting(0.1, above=0)
    """Highest learning rate, reached when the warm-up ends."""
    warmup_share: float = setting(0.3, least=0.0, most=1.0)
    """Share of all steps over which the learning rate rises."""
    initial_divisor: float = setting(25.0, above=0)
    """The first learning rate is the highest divided by this."""
    final_divisor: float = setting(1e4, above=0)
    """The last learning rate is the first divided by this."""
    momentum: float = setting(0.9, least=0.0, most=1.0)
    """Share of the previous direction that every step keeps."""
    nesterov: bool = True
    """Look ahead along the momentum (Nesterov); needs momentum above 0."""
    weight_decay: float = setting(5e-4, least=0)
    """Weight decay, coupled to the gradient as plain SGD has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise SettingsError(
                "nesterov: needs momentum above 0, got momentum 0; set nesterov to false"
            )


@dataclass(frozen=True)
class DistillationSettings(Settings):
    """Learn from the scores of a finished pre-training as well (born-again networks)."""

    teacher: str | None = None
    """Directory of `vsm pretrain` on the same data, of any backbone; unset: none."""
    weight: float = setting(0.5, not_with("distillation.teacher", None), least=0.0, most=1.0)
    """α: weight of the teacher's probabilities; that of the labels is 1 - α."""
    temperature: float = setting(4.0, not_with("distillation.teacher", None), above=0)
    """T: scores of both are divided by this before the softmax."""


@dataclass(frozen=True)
class FewShotValidationSettings(Settings):
    """Nearest prototypes of unseen classes while pre-training; the best backbone is kept."""

    every: int = setting(5, above=0)
    """Epochs between validations; the last epoch is always validated."""
    episodes: int = setting(600, least=2)
    """Episodes of each validation, for each number of support images."""
    way: int = setting(5, least=2)
    """Classes of an episode; fewer where the split has fewer."""
    shots: tuple[int, ...] = (1, 5)
    """Support images per class; the best backbone has the highest mean accuracy over them."""
    queries: int = setting(15, above=0)
    """Query images per class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise SettingsError(
                f"shots: expected different numbers of at least 1, got {list(self.shots)}"
            )


@dataclass(frozen=True)
class PretrainSettings(Settings):
    """All that defines a pre-training; written to config.yaml in its directory."""

    data: str = "glyphs"
    """Dataset by name (see `vsm data list`), or folder:PATH; all its training classes are used."""
    backbone: str = "conv4"
    """Feature extractor: conv4, resnet12, wrn28_10, or your own as module:attribute."""
    channels: int = setting(64, PRETRAINED_BUILT_IN, above=0, most=LARGEST_WIDTH)
    """Width of the backbone; 64 is the published one (conv4: channels of every convolution)."""
    keep_probability: float = setting(1.0, PRETRAINED_BUILT_IN, above=0.0, most=1.0)
    """Chance to survive dropout in the backbone."""
    epochs: int = setting(60, above=0)
    """Passes over all training images."""
    batch_size: int = setting(128, least=2)
    """Images of one step; the rest of an epoch that fills no batch is left out of it."""
    label_smoothing: float = setting(0.1, least=0.0, most=1.0)
    """Share of the target that is spread evenly over all classes."""
    augment: bool = True
    """Vary training images by the dataset's preset (crop, mirror, colors; characters: nothing)."""
    augment_colors: bool = setting(True, AUGMENTED)
    """With augment, vary brightness, contrast and saturation too; false: leave colors alone."""
    augment_affine: float = setting(0.0, AUGMENTED, least=0.0, most=0.5)
    """With augment, rotate, scale, shear and move images too, by random affine maps: how far from
    the identity, e.g. 0.15; 0: not at all."""
    seed: int = 0
    """The one seed from which all randomness is derived."""
    checkpoint_every: int = setting(200, above=0)
    """Steps between saves of the state from which --resume continues."""
    distillation: DistillationSettings = section(DistillationSettings)
    optimizer: OneCycleSettings = section(OneCycleSettings)
    validation: FewShotValidationSettings = section(FewShotValidationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_backbone(self.backbone)
        require_effect(self)


@dataclass(frozen=True)
class SlurmSettings(Settings):
    """What to ask a scheduler for; belongs to the machine and is not stored with a run."""

    nodes: int = setting(1, above=0)
    """Machines."""
    processes_per_node: int = setting(1, above=0)
    """Processes on each machine, which share the tasks of a step."""
    gpus_per_node: int = setting(0, least=0)
    """GPUs on each machine, one for each of its processes; 0 computes on CPUs."""
    cpus_per_process: int = setting(2, above=0)
    """CPU cores of a process."""
    memory_gb: float | None = setting(None, above=0)
    """Memory of a machine; unset: the cluster's default."""
    hours: float = setting(24.0, above=0)
    """Longest time before the job is put back into the queue and resumed."""
    restarts: int = setting(20, least=0)
    """How often that may happen."""
    warning_seconds: int = setting(120, least=0)
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
        super().__post_init__()
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
    """Whether ``backbone`` is a published encoder that is used as it is."""
    kind, colon, name = backbone.partition(":")
    return backbone in FROZEN_ENCODERS or (kind in ENCODER_KINDS and bool(colon and name))


def own_code(backbone: str) -> str | None:
    """Return ``backbone`` if it is the user's own code ``module:attribute``; else None."""
    return backbone if ":" in backbone and not is_frozen_encoder(backbone) else None


def _check_backbone(backbone: str) -> None:
    module, colon, attribute = backbone.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    if backbone not in BACKBONE_NAMES and not (colon and all(map(str.isidentifier, names))):
        raise SettingsError(
            f"backbone: expected {', '.join(BACKBONE_NAMES)}, or your own as module:attribute, "
            f"got {backbone!r}"
        )

"""What the command line needs to know of machines and processes before torch is loaded."""

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from vsm.system.devices import Placement


def is_one_of_several() -> bool:
    """Whether the environment announces other processes of the same job, as torchrun's does."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_process() -> bool:
    """Whether this process is alone, or the first of a job: the one that speaks."""
    return not is_one_of_several() or os.environ.get("RANK", "0") == "0"


def add_placement_arguments(parser: "ArgumentParser") -> None:
    """Declare where to compute; this belongs to the machine and is not stored with a run."""
    parser.add_argument(
        "--device",
        type=str,
        default="auto",
        help="cpu, cuda, cuda:1 or mps; auto: a GPU if there is one, each process its own.",
    )
    parser.add_argument(
        "--precision",
        type=Literal["auto", "float32", "bfloat16"],
        default="auto",
        help="Of the backbone; auto: bfloat16 on GPUs that have it, else float32.",
    )


def prepare_placement(parsed: "Namespace") -> "Placement":
    """Set this process up for computing, and return where the arguments above say to compute."""
    from vsm.system.allocator import keep_allocations
    from vsm.system.devices import choose_placement

    keep_allocations()
    return choose_placement(parsed.device, parsed.precision)

"""Declares every setting, once: name, kind, default, meaning and aliases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from autovaruna.config.kinds import (
    AUTO_SEED,
    BOOLEAN,
    BYTES,
    CALLABLE,
    NAMES,
    PATH,
    RANK_LISTS,
    TEXT,
    Kind,
    choice,
    count,
    either,
    number,
)

T = TypeVar("T")
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Alias:
    """Another name of a setting, with its own kind and a conversion to the setting's value."""

    name: str
    kind: Kind
    convert: Callable[[Any], object]


def _setting(kind: Kind, default: T, meaning: str, *aliases: str | Alias) -> T:
    same_kind = tuple(Alias(each, kind, lambda value: value) for each in aliases if isinstance(each, str))
    others = tuple(each for each in aliases if isinstance(each, Alias))
    metadata = {"kind": kind, "meaning": meaning, "aliases": same_kind + others}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, each read from its sources and of the right kind."""

    # The plan.
    num_stages: int = _setting(
        count(),
        0,
        "Stages of the pipeline, several a rank if there are more than ranks; 0: the planner decides.",
        "partition_num",
        "nstages",
    )
    max_stages_per_rank: int = _setting(
        count(),
        0,
        "Most stages the planner may give a rank; 0: as many as pay, up to 4, or 8 with more than 16 ranks; 1: one.",
    )
    num_replicas: int = _setting(count(), 0, "Replicas of every stage; 0: the planner decides.", "replica_num")
    num_micro_batches: int = _setting(count(), 0, "Micro-batches of a step; 0: the planner decides.", "pipeline_num")
    micro_batch_size: int = _setting(
        count(), 0, "Samples of a micro-batch, in place of num_micro_batches; 0: the planner decides.", "chunk_size"
    )
    min_micro_batches: int = _setting(count(1), 1, "Fewest micro-batches the planner may choose.", "min_pipeline")
    max_micro_batches: int = _setting(
        count(),
        64,
        "Most micro-batches the planner may choose; 0: no limit. The default gives way where nothing else fits.",
        "max_pipeline",
    )
    memory_limit_bytes: int = _setting(
        BYTES,
        0,
        "Memory of a rank for the model, as a number of bytes, or as 2GiB, 500MB; 0: what its device has.",
        Alias("mem_limit_gb", number(), lambda gigabytes: int(gigabytes * GIBIBYTE)),
    )
    memory_margin: float = _setting(
        number(0, below=1), 0.1, "Share of a rank's memory that a plan leaves free.", "mem_margin"
    )
    optimizer_bytes_factor: float | Literal["auto"] = _setting(
        either(number(), choice("auto")),
        "auto",
        "Bytes of optimizer state for each byte of parameters; auto: found from the optimizer.",
        "opt_param_factor",
    )
    recompute: Literal["auto", "all", "none"] = _setting(
        choice("auto", "all", "none"),
        "auto",
        "Stages that run forward again before backward, to save memory; auto: the planner decides.",
        Alias("checkpointing", BOOLEAN, lambda is_on: "all" if is_on else "none"),
    )
    schedule: str = _setting(
        choice("auto", "gpipe", "1f1b", "varuna", "interleaved", "deepest_first", "zero_bubble"),
        "auto",
        "Order of the instructions of a step; auto: the planner decides.",
    )
    in_flight: int = _setting(count(), 0, "Most forwards a stage runs ahead of its backwards; 0: the planner decides.")
    cuts: tuple[str, ...] = _setting(
        NAMES, (), "Blocks or modules at which a new stage starts, in order; empty: the planner decides."
    )
    cutpoints: Literal["only", "prefer", "ignore"] = _setting(
        choice("only", "prefer", "ignore"),
        "prefer",
        "Whether stages start at the CutPoints of the model alone, rather there, or anywhere; prefer: elsewhere if "
        "that makes a step more than 5 % faster.",
    )
    stage_ranks: tuple[tuple[int, ...], ...] = _setting(
        RANK_LISTS, (), "Ranks of each stage, as [[0, 1], [2]]; empty: the planner decides.", "stage_to_rank_map"
    )

    # What a step means.
    inputs: Literal["per_rank", "per_replica", "replicated"] = _setting(
        choice("per_rank", "per_replica", "replicated"),
        "per_rank",
        "Whether each rank passes a mini-batch of its own, or the ranks at one place of every list of stage_ranks pass "
        "the same, or all ranks do.",
    )
    batch_inputs: tuple[str, ...] = _setting(
        NAMES, (), "Inputs whose first dimension is the batch; empty: found by their size."
    )
    dynamic_batch: bool = _setting(
        BOOLEAN, True, "Whether the model is traced for any batch size; false: for the first one's alone."
    )
    check_trace: bool = _setting(
        BOOLEAN,
        True,
        "Whether what a trace computes is compared with the model itself, on a few samples, before it is split.",
    )
    reduction: Literal["mean", "sum"] = _setting(
        choice("mean", "sum"), "mean", "Whether the model's loss is a mean over its samples, or their sum."
    )
    micro_batch_weight: Callable[..., float] | None = _setting(
        CALLABLE,
        None,
        "Weight of a micro-batch in the loss, a function of its batch; not given: the loss is that of the whole batch.",
    )
    loss_mode: Literal["auto", "loss", "outputs"] = _setting(
        choice("auto", "loss", "outputs"),
        "auto",
        "Whether a call runs the whole step (loss) or its forwards (outputs); auto: the whole step if there is a loss.",
    )
    outputs: Literal["all", "loss"] = _setting(
        choice("all", "loss"), "all", "What a whole step gives back: all outputs, or the loss alone."
    )
    seed: int | None = _setting(
        AUTO_SEED, None, "Seed of random operations such as dropout; auto: torch's seed on rank 0."
    )

    # Measuring, and the files of a run.
    profile_iterations: int = _setting(count(1), 5, "Measurements of each block.", "profiling_iter")
    profile_cache: bool | str = _setting(
        either(BOOLEAN, PATH),
        "auto",
        "Where measured costs are kept for other runs and models: a directory; auto: profiles in the conf directory; "
        "false: nowhere.",
    )
    load_deployment: bool | Literal["auto"] = _setting(
        either(BOOLEAN, choice("auto")),
        "auto",
        "Whether a saved plan is used; auto: if it is valid for this run; true: a stale one is an error.",
    )
    save_deployment: bool = _setting(BOOLEAN, True, "Whether a new plan is saved.")
    deployment_file: str = _setting(PATH, "deployment.json", "File of the saved plan.")
    trace_events: bool = _setting(BOOLEAN, False, "Whether the begin and end of every instruction are recorded.")
    trace_events_file: str = _setting(
        PATH, "events.trace.json", "File of the recorded events, for a trace viewer.", "event_trace_file"
    )
    dump_graph: str = _setting(
        PATH, "", "File to write the traced graph to, as JSON; empty: none.", "dump_graph_prefix"
    )

    # The run.
    device: str = _setting(
        TEXT,
        "auto",
        "Device of a rank, as torch names it; auto: where the model is; of several GPUs each rank has its own.",
    )
    offload: bool = _setting(
        BOOLEAN,
        False,
        "Whether stages that recompute keep what they received in the host's memory until then; for GPUs.",
    )
    channel: Literal["auto", "mpi", "nccl", "gloo"] = _setting(
        choice("auto", "mpi", "nccl", "gloo"),
        "auto",
        "What carries tensors between ranks; auto: NCCL if each rank has a GPU of its own, else MPI, and for messages "
        "of at most 8 MiB within a host memory that its ranks share; mpi: MPI alone; gloo: for tests.",
    )
    compile_stages: bool | Literal["inductor", "aot_eager", "eager"] = _setting(
        either(BOOLEAN, choice("inductor", "aot_eager", "eager")),
        False,
        "Whether stages go through torch.compile, by its own backend or a named one.",
    )
    progress: bool = _setting(BOOLEAN, True, "Whether rank 0 shows a progress bar while it measures.")
    show_settings: bool = _setting(BOOLEAN, False, "Whether each setting is logged at the start.", "show_config_items")

    _sources: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def source_of(self, name: str) -> str:
        """Returns where a setting's value came from: a file, a variable, a keyword or ``default``."""
        assert name in self.as_dict(), name
        return dict(self._sources).get(name, "default")

    def as_dict(self) -> dict[str, Any]:
        """Returns the value of each setting by name."""
        return {each.name: getattr(self, each.name) for each in declarations()}


def declarations() -> tuple[Field[Any], ...]:
    """Returns the declarations: ``name``, ``default`` and, in ``metadata``, kind, meaning and aliases."""
    return tuple(each for each in fields(Settings) if "kind" in each.metadata)


def known_names() -> dict[str, tuple[Field[Any], Alias]]:
    """Returns, for each name and alias, the declaration and how its value is read."""
    known: dict[str, tuple[Field[Any], Alias]] = {}
    for each in declarations():
        own = Alias(each.name, each.metadata["kind"], lambda value: value)
        known |= {alias.name: (each, alias) for alias in (own, *each.metadata["aliases"])}
    return known

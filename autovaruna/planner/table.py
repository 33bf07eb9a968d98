"""Shows a plan as a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich import box
from rich.table import Table
from rich.text import Text

from autovaruna.graph.records import Graph
from autovaruna.log import readable
from autovaruna.planner.infeasible import ranks_text
from autovaruna.planner.prediction import fold, pipeline_of, policy_of, representative
from autovaruna.planner.records import Plan
from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.simulator import simulate

_LEAST_SHOWN = 0.001  # of a step: it is printed as 0.1 %
_MOST_SUMMED_UP = 4  # stages that fit into a line


def plan_table(plan: Plan, places: Sequence[str], what: str = "modules", *, has_depths: bool = False) -> Table:
    """Returns the stages of a plan as a table; times are predicted, for one micro-batch. `places` say what each has."""
    table = Table(title=_title(plan), box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("stage", "ranks", what, "parameters", "forward +\nbackward ms", "memory", "recompute"):
        is_text = name in ("ranks", what, "recompute")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != what)
    if has_depths:
        table.add_column("in\nflight", justify="right")
    for number, (stage, place) in enumerate(zip(plan.stages, places, strict=True)):
        table.add_row(
            str(number),
            ranks_text(stage.ranks),
            Text(place),
            readable(stage.parameter_bytes),
            f"{stage.forward_seconds * 1e3:.3g} + {stage.backward_seconds * 1e3:.3g}",
            readable(plan.bytes_of(stage)),
            "yes" if stage.needs_recompute else "no",
            *[str(stage.in_flight)] * has_depths,
        )
    return table


def summary(plan: Plan, graph: Graph) -> str:
    """Returns a plan in two lines: what it is, and what each rank has, or the ranks of the first stages of many."""
    stages = []
    for stage in plan.stages[:_MOST_SUMMED_UP]:
        ranks = f"rank{'s' * (len(stage.ranks) > 1)} {ranks_text(stage.ranks)}"
        stages.append(f"{ranks}: {module_range(stage.blocks, graph)}, {readable(plan.bytes_of(stage))}")
    left = plan.num_stages - len(stages)
    return f"{_title(plan)}\n  {'; '.join(stages + [_count(left, 'more stage')] * (left > 0))}"


def _title(plan: Plan) -> str:
    title = f"{_count(plan.num_stages, 'stage')}, {_count(plan.num_micro_batches, 'micro-batch')}, {plan.schedule}"
    title += f": predicted {seconds(plan.predicted_seconds)} a step" if plan.predicted_seconds else ""
    return title + ("" if plan.is_measured else " (roofline)")


def explain(plan: Plan, graph: Graph) -> str:
    """Returns lines that say what the plan is predicted to cost, how good that is, and where time is lost."""
    pipeline = pipeline_of(plan, graph)
    simulation = simulate(representative(pipeline), policy_of(plan.schedule))
    lost = simulation.lost
    used = sorted({rank for stage in plan.stages for rank in stage.ranks})
    step = plan.predicted_seconds or 1.0
    lines = [f"predicted step  {seconds(plan.predicted_seconds)}"]
    if plan.bound_seconds:
        lines.append(f"bound           {seconds(plan.bound_seconds)}: at most {plan.gap:.1%} above the best plan")
    if plan.given_up:
        lines.append(f"simplicity      {plan.given_up}")
    lines.append(f"these stages    no schedule of them takes less than {seconds(lower_bound(fold(pipeline)))}")
    if sum(len(stage.ranks) for stage in plan.stages) > len(used):
        peaks = [plan.rank_bytes()[rank] for rank in used]
        lines.append(f"memory of ranks {readable(min(peaks))} to {readable(max(peaks))}, for all stages of a rank")
    if plan.block_bytes and plan.block_bytes.fragmentation > 1:
        factor = f"{plan.block_bytes.fragmentation:.3g} times what micro-batches make and free"
        lines.append(f"fragmentation   predicted memory is what lasts, gradients, and {factor}")
    if plan.cores_per_rank < 1:
        cores = f"{plan.num_ranks} ranks share {plan.num_ranks * plan.cores_per_rank:.3g}"
        lines.append(f"cores           {cores}: those that work at one time divide them")
    if plan.shares_state:
        lines.append("optimizer state shared by the replicas of a stage: each keeps that of its own parameters")
    if len(used) < plan.num_ranks:
        lines.append(f"ranks used      {len(used)} of {plan.num_ranks}: more are not faster, or were not asked for")
    shown = [each.parts for each in ([lost[rank] for rank in used] if len(lost) == plan.num_ranks else lost)]
    for name in shown[0]:
        parts = [each[name] for each in shown]
        mean = sum(parts) / len(parts)
        if max(parts) > 0:
            spread = f"{min(parts) / step:.1%} to {max(parts) / step:.1%}"
            lines.append(f"{name:<15} {mean / step:6.1%}  (mean over ranks; {spread})")
    exchange = plan.predicted_seconds - simulation.step_seconds
    if exchange >= _LEAST_SHOWN * step:
        lines.append(f"exchange        {exchange / step:6.1%}  (samples, outputs, agreement, the engine)")
    return "\n".join(lines)


def module_range(stage: Sequence[int], graph: Graph) -> str:
    """Returns the modules of a stage in short: ``embed .. layers.5 (part)``, (part) for a module that is cut."""
    inside = set(stage)
    whole = _whole_module(inside, graph)
    if whole:
        return whole
    first, last = graph.blocks[min(inside)].module, graph.blocks[max(inside)].module
    shared = _shared_prefix(first, last)
    ends = [_short(path, shared, inside, graph) for path in (first, last)]
    if ends[0] == ends[1]:
        return ends[0]
    return f"{ends[0]} .. {ends[1].removeprefix(shared + '.')}"


def seconds(value: float) -> str:
    """Returns seconds as a person writes them: ``12.3 ms``."""
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.4g} ms" if value >= 1e-3 else f"{value * 1e6:.4g} us"


def _whole_module(inside: set[int], graph: Graph) -> str:
    """Returns the module whose blocks are just these, or an empty text."""
    path = _shared_prefix(*(graph.blocks[end(inside)].module for end in (min, max)))
    blocks = {block.index for block in graph.blocks if (block.module + ".").startswith(path + ".")}
    return path if path and blocks == inside else ""


def _short(path: str, shared: str, inside: set[int], graph: Graph) -> str:
    """Cuts a path below the first part in which the two ends of the stage differ; says if the module is cut."""
    parts, depth = path.split("."), len(shared.split(".")) + 1 if shared else 1
    if len(parts) > depth and parts[depth].isdigit():
        depth += 1
    name = ".".join(parts[:depth])
    blocks = [block.index for block in graph.blocks if (block.module + ".").startswith(name + ".")]
    is_whole = not name or all(index in inside for index in blocks)
    return (name or "(model)") + ("" if is_whole else " (part)")


def _shared_prefix(first: str, last: str) -> str:
    pairs = zip(first.split("."), last.split("."), strict=False)
    return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"

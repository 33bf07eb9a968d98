"""Defines `Metrics`: the last step of a model that went backward, in numbers: loss, rates, seconds, memory.

Each rank counts for itself. What it shows of others they have sent with what ranks report of their calls anyway:
seconds and memory about once a second, their part of the norm of gradients at the call after the step.

call of the model     begin_call ─ seconds of its parts are added up ─┐   several, if gradients are accumulated
loss.backward()       record                                         ─┘
optimizer.step()      begin_optimizer (rates, norm) ─ end_optimizer: the step has ended
next call             report ─ agreement of ranks ─ collect
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from autovaruna._torch import foreach_norm
from autovaruna.log import readable
from autovaruna.schedule.simulation import StepSeconds

logger = logging.getLogger(__name__)
_NUM_FIRST_STEPS = 8  # after each of which ranks send their seconds and memory; later about once in these seconds:
_SECONDS_BETWEEN = 1.0
_UNKNOWN = -1.0  # in place of bytes: the system does not say
_SHARE_FOR_NORM = 0.004
"""The most of a run's seconds that norms of gradients may take: where one takes more, some steps have none."""
_NUM_SHOWN = 8  # ranks in a text
_COUNTED = ("step", "work", "bubble", "messages", "sums", "optimizer")


Parameters = Callable[[], Iterable[Tensor]]


@dataclass(slots=True)
class Account:
    """The seconds of this rank's calls so far, by the parts of `StepSeconds`."""

    work: float = 0.0
    bubble: float = 0.0
    messages: float = 0.0
    sums: float = 0.0

    @property
    def of_instructions(self) -> float:
        """The seconds of instructions, and of waits for sums: what is left of a call is that of messages."""
        return self.work + self.bubble + self.sums

    def copy(self) -> Account:
        return Account(self.work, self.bubble, self.messages, self.sums)

    def since(self, before: Account) -> tuple[float, float, float, float]:
        """Returns the seconds of each part that have come since."""
        messages, sums = self.messages - before.messages, self.sums - before.sums
        return self.work - before.work, self.bubble - before.bubble, messages, sums


@dataclass(frozen=True)
class Subject:
    """What the steps are of.

    Attributes:
        parameters: gives what returns those whose gradients this rank counts in a norm, over all ranks each once.
        memory: returns the bytes that this process holds; None: it is not known.
        bound: the lower bound of a step, and the samples of its batch.
        is_plain: whether the model is called as it is.
    """

    rank: int = 0
    num_ranks: int = 1
    parameters: Callable[[], Parameters | None] = lambda: None
    memory: Callable[[], float | None] = lambda: None
    predicted_seconds: float = 0.0
    bound: tuple[float, float] = (0.0, 0.0)
    is_plain: bool = True


@dataclass(slots=True)
class _Begun:
    """A step that has begun: its calls that have gone backward, with their samples and tokens."""

    began: float
    before: Account
    num_calls: int = 0
    samples: int = 0
    tokens: int = 0


class _Number:
    """The loss of a step, or what is finite if its gradient is: looked at when it is asked for, or in the next step."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._value: float | None = None
        self._where: Callable[[], str] = str
        self.is_loss = self._has_warned = False

    def put(self, tensor: Tensor | None, where: Callable[[], str], is_loss: bool) -> None:
        self._tensor, self._where, self.is_loss, self._value = tensor, where, is_loss, None

    def resolve(self, step: int) -> float | None:
        if self._tensor is not None:
            self._value, self._tensor = float(self._tensor.item()), None
            if not math.isfinite(self._value) and not self._has_warned and (words := self._where()):
                self._has_warned = True
                logger.warning("step %d: %s; told once, model.metrics.is_finite says it of every step", step, words)
            self._where = str  # lets the step go
        return self._value


class _GradientNorm:
    """The sum of squares of all gradients, `known` with its step; measured where it `is_due`, for somebody asks."""

    def __init__(self) -> None:
        self.known: tuple[int, float] | None = None
        self.is_wanted, self.is_due = True, False
        self._own: tuple[int, Tensor] | None = None
        self._seconds = self._ended = 0.0

    def may_be_due(self) -> bool:
        """Whether it is wanted, and the last one took little of the time since."""
        return self.is_wanted and self._seconds <= _SHARE_FOR_NORM * (perf_counter() - self._ended)

    def measure(self, step: int, gradients: Sequence[Tensor], is_alone: bool) -> None:
        began = perf_counter()
        squares = sum_of_squares(gradients)
        self._own, self.is_due, self.is_wanted = (step, squares), False, False
        if is_alone:
            self.known, self._own = (step, float(squares)), None
        self._ended = perf_counter()
        self._seconds = self._ended - began

    def pop(self) -> tuple[float, float]:
        """Returns the step and the sum of this rank, or zeros, to be sent once."""
        own, self._own = self._own, None
        return (0.0, 0.0) if own is None else (float(own[0]), float(own[1]))


class Metrics:
    """The last step of a model that went backward, as this rank knows it; None: not known.

    Attributes:
        step: the number of its call, from 1 on; 0: there was none.
        learning_rates: of each group of the optimizer, as it stepped.
        samples_per_second, tokens_per_second: of all ranks, from the end of the step before to the end of this one.
            Tokens are the elements of the first input of whole numbers with the shape (batch, length).
        seconds: where the step of this rank went.
        share_of_bound: the plan's lower bound of a step over the seconds of this one.
        rank_seconds, rank_memory_bytes: by rank, as last reported, of this rank the last. Memory on a GPU is the peak
            of torch's allocator, else the resident set, without what the process had before the model.
        account: the parts of `seconds`, of all calls so far.
    """

    def __init__(self) -> None:
        self.step, self.account = 0, Account()
        self.learning_rates: tuple[float, ...] = ()
        self.samples_per_second: float | None = None
        self.tokens_per_second: float | None = None
        self.seconds: StepSeconds | None = None
        self.share_of_bound: float | None = None
        self.rank_seconds: dict[int, StepSeconds] = {}
        self.rank_memory_bytes: dict[int, float] = {}
        self.on_step: Callable[[], None] | None = None  # called when a step has ended
        self._number, self._norm = _Number(), _GradientNorm()
        self._subject, self._interval, self._num_ended = Subject(), 0, 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_began, self._before_optimizer = 0.0, Account()
        self._begun = _Begun(0.0, self._before_optimizer)
        self._pending: tuple[int, int] | None = None  # samples and tokens of a call that has not gone backward
        self._ended: float | None = None
        self._numbers: tuple[float, ...] | None = None

    @property
    def loss(self) -> float | None:
        """The loss of the global batch; None where the script computes it."""
        return self._number.resolve(self.step) if self._number.is_loss else None

    @property
    def is_finite(self) -> bool | None:
        """Whether the loss is, or the gradient that came from a loss of the script's own; None: it is not known."""
        value = self._number.resolve(self.step)
        return None if value is None else math.isfinite(value)

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients before they are clipped, over all ranks: of `gradient_norm_step`.

        That is the last step on one process, else as a rule the one before. It is measured while somebody asks, and in
        every step unless that would take more than 0.4 % of the time.
        """
        self._norm.is_wanted = True
        return None if self._norm.known is None else math.sqrt(self._norm.known[1])

    @property
    def gradient_norm_step(self) -> int | None:
        """The step of `gradient_norm`."""
        return None if self._norm.known is None else self._norm.known[0]

    def to_dict(self) -> dict[str, float]:
        """Returns all that is known as numbers by name, as trackers take them."""
        named: dict[str, float | None] = {"loss": self.loss, "gradient_norm": self.gradient_norm}
        several = len(self.learning_rates) > 1
        named |= {f"learning_rate/{k}" if several else "learning_rate": lr for k, lr in enumerate(self.learning_rates)}
        named |= {"samples_per_second": self.samples_per_second, "tokens_per_second": self.tokens_per_second}
        if self.seconds is not None:
            named |= {f"seconds/{name}": value for name, value in _counted(self.seconds).items()}
        named["share_of_bound"] = self.share_of_bound
        named |= {f"memory_bytes/rank_{rank}": value for rank, value in sorted(self.rank_memory_bytes.items())}
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        """Returns a line for each kind of number that is known."""
        rows = [("step", [str(self.step)]), ("loss", _texts("{:.6g}", self.loss))]
        rows.append(("gradient norm", _texts("{:.6g}", self.gradient_norm)))
        if self.gradient_norm_step not in (None, self.step):
            rows[-1][1].append(f"(of step {self.gradient_norm_step})")
        rows.append(("learning rate", _texts("{:.6g}", *self.learning_rates)))
        rates = ("samples/s", self.samples_per_second), ("tokens/s", self.tokens_per_second)
        rows.append(("throughput", [f"{value:,.6g} {unit}" for unit, value in rates if value is not None]))
        known = {**self.rank_seconds, **({} if self.seconds is None else {self._subject.rank: self.seconds})}
        for rank, each in sorted(known.items())[:_NUM_SHOWN]:
            parts = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in list(_counted(each).items())[1:])
            rows.append((f"rank {rank}", [f"{1e3 * each.step:.2f} ms: {parts}"]))
        rows.append(("share of bound", _texts("{:.1%}", self.share_of_bound)))
        memory = sorted(self.rank_memory_bytes.items())[:_NUM_SHOWN]
        rows.append(("memory", [f"rank {rank}: {readable(num_bytes)}" for rank, num_bytes in memory]))
        return "\n".join(f"{name:<15} {'  '.join(texts)}" for name, texts in rows if texts)

    __repr__ = __str__

    def follow(self, subject: Subject) -> None:
        """Says what the steps are of."""
        self._subject, self._interval = subject, _interval_of(subject.predicted_seconds)

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer whose steps end those of the model; without one, a step ends where the next begins."""
        self._optimizer = optimizer

    def begin_call(self, began: float, samples: int, tokens: int, exchange_seconds: float = 0.0) -> None:
        """Begins a call that may go backward: when, with how much of all ranks, after so long an exchange."""
        if self._optimizer is None and self._begun.num_calls:
            self._end(began)
        if not self._begun.num_calls:
            self._begun = _Begun(began, self.account.copy())
        self.account.messages += exchange_seconds
        self._pending = samples, tokens

    def record(self, step: int, number: Tensor | None, where: Callable[[], str], *, is_loss: bool) -> None:
        """Records that a call goes backward, by its number.

        Args:
            number: The loss, or what is finite if its gradient is; None: nothing is known. A GPU computes it while the
                script goes on: it is looked at when it is asked for, or in the next step.
            where: Says where it was found, in words; empty: not on this rank.
        """
        self._number.resolve(self.step)
        if self._pending is not None:
            begun, (samples, tokens), self._pending = self._begun, self._pending, None
            begun.num_calls += 1
            begun.samples += samples
            begun.tokens += tokens
        self.step = step
        self._number.put(number, where, is_loss)
        if number is not None and number.is_cpu:
            self._number.resolve(step)

    def begin_optimizer(self) -> None:
        """Begins a step of the optimizer."""
        self.before_clipping()
        assert self._optimizer is not None
        rates = [group["lr"] for group in self._optimizer.param_groups if "lr" in group]
        self.learning_rates = tuple(map(float, rates))
        self._optimizer_began, self._before_optimizer = perf_counter(), self.account.copy()

    def end_optimizer(self) -> None:
        """Ends a step of the optimizer, and with it that of the model."""
        if self._begun.num_calls:
            self._end(perf_counter())

    def before_clipping(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Measures the norm of gradients, if it is due, before those of `parameters`, if they are ours, change."""
        norm = self._norm
        subject = self._subject
        if not (norm.is_due or (subject.is_plain and norm.may_be_due())) or not self._begun.num_calls:
            return
        known = subject.parameters()
        every, changing = [] if known is None else list(known()), set(map(id, parameters or ()))
        if parameters is not None and not any(id(each) in changing for each in every):
            return
        norm.measure(self.step, [each.grad for each in every if each.grad is not None], subject.num_ranks == 1)

    def report(self) -> tuple[bool, tuple[float, ...]]:
        """Returns what this rank sends the others with its call: whether it wants the norm, and numbers.

        As a rule there are none. They are a step and the sum of squares of the gradients that this rank counts, or
        zeros, then its seconds and its memory, or nothing.
        """
        wants_norm, norm = self._norm.may_be_due(), self._norm.pop()
        numbers, self._numbers = self._numbers, None
        return wants_norm, (*norm, *(numbers or ())) if norm[0] or numbers else ()

    def collect(self, wants_norm: bool, reports: Sequence[tuple[float, ...]]) -> None:
        """Takes what all ranks have sent with one call, and whether any wants the norm."""
        self._norm.is_due |= wants_norm
        if all(each and each[0] for each in reports):
            self._norm.known = int(reports[0][0]), sum(each[1] for each in reports)
        for rank, each in enumerate(reports):
            if each[2:]:
                self._show(rank, each[2:])

    def _end(self, now: float) -> None:
        """Ends a step, and counts it."""
        begun, subject, optimizer, began = self._begun, self._subject, 0.0, self._begun.began
        work, bubble, messages, sums = self.account.since(begun.before)
        if self._optimizer is not None:  # a closure that it calls may have called the model
            began = min(began, self._optimizer_began)
            optimizer = now - self._optimizer_began - sum(self.account.since(self._before_optimizer))
        step = now - began
        work = step - optimizer if subject.is_plain else work
        self.seconds = StepSeconds(step, work, bubble, messages, sums, optimizer)
        period = step if self._ended is None else now - self._ended
        self.samples_per_second = begun.samples / period
        self.tokens_per_second = begun.tokens / period if begun.tokens else None
        bound, samples = subject.bound
        is_as_planned = begun.num_calls == 1 and abs(samples - begun.samples) < 0.5
        self.share_of_bound = bound / step if bound and is_as_planned else None
        self._interval = self._interval or _interval_of(step)
        if self._num_ended < _NUM_FIRST_STEPS or self._num_ended % self._interval == 0:
            memory = subject.memory()
            self._numbers = (*self.seconds[: len(_COUNTED)], _UNKNOWN if memory is None else memory)
            self._show(subject.rank, self._numbers)
        self._num_ended += 1
        self._begun = _Begun(began, begun.before)
        self._ended = now
        if self.on_step is not None:
            self.on_step()

    def _show(self, rank: int, numbers: Sequence[float]) -> None:
        self.rank_seconds[rank] = StepSeconds(*numbers[:-1])
        if numbers[-1] != _UNKNOWN:
            self.rank_memory_bytes[rank] = numbers[-1]


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, in float64."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        values = each.coalesce().values() if each.is_sparse else each
        alike.setdefault((values.dtype, values.device), []).append(values.detach())
    sums = [torch.stack(foreach_norm(some, 2)).double().square().sum() for some in alike.values()]
    return sum(sums[1:], sums[0]) if sums else torch.zeros((), dtype=torch.float64)


def _counted(seconds: StepSeconds) -> dict[str, float]:
    """Returns the seconds of a step, and of its parts that are counted, by name."""
    return dict(zip(_COUNTED, seconds, strict=False))


def _interval_of(step_seconds: float) -> int:
    """Returns how many steps lie between two reports of seconds and memory; 0: it is not known yet."""
    return max(1, round(_SECONDS_BETWEEN / step_seconds)) if step_seconds > 0 else 0


def _texts(form: str, *values: float | None) -> list[str]:
    return [form.format(value) for value in values if value is not None]

"""A checker of small concurrent programs on a weakly ordered memory: every execution, one by one.

Theory of operation
-------------------
All threads share one memory: a store becomes visible to all other threads at once, as on x86-64, aarch64 and RISC-V.
But a thread may perform its operations out of order. It issues them in the order of its program into a window. From
there, it may perform any operation that need not wait for an earlier one by the rules of `must_wait`.

A program may need the value of a load that has not been performed. Then the checker guesses: it continues one execution
for every value that the place can have, and drops an execution when the load returns another value. So loads run ahead
of branches, as on processors, and stores do not.

A program is a generator function: it yields operations, and the checker sends it the values of its loads. The values
read determine its state, so the checker replays a program instead of copying it. It visits each state once, so a
program may have only a finite number of loads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Place = str


@dataclass(frozen=True, slots=True)
class Load:
    """Read a place. An `acquire` load is performed before all later operations.

    With `expect`, the value is data: no branch depends on it, and any other value is a `Violation`.
    """

    place: Place
    acquire: bool = False
    expect: int | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """Write a place. A `release` store is performed after all earlier operations."""

    place: Place
    value: int
    release: bool = False


@dataclass(frozen=True, slots=True)
class Fence:
    """Separate all earlier operations of the thread from all later ones."""


@dataclass(frozen=True, slots=True)
class RemoteFence:
    """A fence here and, at any point of its program, in the other thread: membarrier(2)."""

    thread: int


@dataclass(frozen=True, slots=True)
class Await:
    """Sleep until a place is not zero: poll(2) on an eventfd."""

    place: Place


@dataclass(frozen=True, slots=True)
class Exchange:
    """Set a place in a system call that takes a lock, which orders earlier and later operations: eventfd."""

    place: Place
    value: int


Operation = Load | Store | Fence | RemoteFence | Await | Exchange
Program = Callable[[], Generator[Operation, int, None]]

BITS = 8
MASK = (1 << BITS) - 1


class Violation(Exception):  # noqa: N818 — what a checker finds is no error of its own
    """An execution that breaks a promise of the program."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An operation in the window. `guess` is the value with which the program has continued."""

    operation: Operation
    guess: int | None = None
    performed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Thread:
    """The state of a thread: the values that it has read, the number of issued operations, and its window.

    A checker makes only one object for equal threads, so that it can compare threads by identity.
    """

    index: int
    read: tuple[int, ...] = ()
    issued: int = 0
    window: tuple[Issued, ...] = ()
    needs_value: bool = False  # the operation issued last is a load without a value yet


State = tuple[tuple[Thread, ...], int]  # the memory is an integer with some bits for each place


def must_wait(earlier: Operation, later: Operation) -> bool:
    """Return whether `later` cannot be performed before `earlier`, which precedes it in the program."""
    if isinstance(earlier, Fence | RemoteFence | Await | Exchange) or isinstance(later, Fence | RemoteFence | Exchange):
        return True
    if isinstance(earlier, Load) and earlier.acquire:
        return True
    if isinstance(later, Store) and later.release:
        return True
    if getattr(earlier, "place", None) == getattr(later, "place", None):
        return True
    # While a branch is undecided, no operation that other threads could see is performed.
    decides = isinstance(earlier, Load) and earlier.expect is None
    return decides and isinstance(later, Store | Await)


@dataclass
class Checker:
    """Runs `programs` in every order, beginning with a memory of zeros.

    Attributes:
        programs: one program for each thread.
        values: for each place whose loads may be guessed, the values that it can have. All values are small.
        window: the largest number of operations in the window of a thread.
    """

    programs: Sequence[Program]
    values: Mapping[Place, Sequence[int]] = field(default_factory=dict)
    window: int = 4

    def __post_init__(self) -> None:
        # There are few threads and many states. So results that depend on one thread alone are cached.
        self._next = cache(self._replay)
        self._thread = cache(Thread)
        self._guesses = cache(self._guessed)
        self._performable = cache(self._not_waiting)
        self._after = cache(self._performed)
        self._ended = cache(self._is_through)
        self._shifts: dict[Place, int] = {}

    def run(self) -> int:
        """Return the number of states.

        Raises:
            Violation: a load has returned other data than expected, or all threads sleep.
        """
        start: State = (tuple(self._issue(Thread(index)) for index in range(len(self.programs))), 0)
        met = {start}
        left = [start]
        while left:
            state = left.pop()
            stuck = True
            for successor in self._successors(state):
                stuck = False
                if successor is not None and successor not in met:
                    met.add(successor)
                    left.append(successor)
            if stuck and not all(map(self._ended, state[0])):
                raise Violation("all threads sleep")
        return len(met)

    def _replay(self, index: int, read: tuple[int, ...], issued: int) -> Operation | None:
        """Return the operation after the first `issued` ones; None at the end of the program."""
        program = self.programs[index]()
        values = iter(read)
        try:
            operation = next(program)
            for _ in range(issued):
                decides = isinstance(operation, Load) and operation.expect is None
                operation = program.send(next(values) if decides else 0)
        except StopIteration:
            return None
        return operation

    def _is_through(self, thread: Thread) -> bool:
        return not thread.window and self._next(thread.index, thread.read, thread.issued) is None

    def _issue(self, thread: Thread) -> Thread:
        """Fill the window, up to an operation that needs a value."""
        first = next((i for i, issued in enumerate(thread.window) if not issued.performed), len(thread.window))
        window = thread.window[first:]
        count, needs_value = thread.issued, thread.needs_value
        while not needs_value and len(window) < self.window:
            operation = self._next(thread.index, thread.read, count)
            if operation is None:
                break
            if not window and isinstance(operation, Fence):
                count += 1
                continue
            window += (Issued(operation),)
            needs_value = isinstance(operation, Load) and operation.expect is None
            count += not needs_value
        return self._thread(thread.index, thread.read, count, window, needs_value)

    def _successors(self, state: State) -> Iterator[State | None]:
        """Yield the states after each possible next step, and None for a step that turns out to be impossible."""
        threads, memory = state
        for index, thread in enumerate(threads):
            before, behind = threads[:index], threads[index + 1 :]
            for guessed in self._guesses(thread):
                yield (*before, guessed, *behind), memory
            for place, operation, shift in self._performable(thread):
                kind, there, changed = type(operation), memory >> shift & MASK, memory
                if kind is Await and there == 0:
                    continue
                # The other thread passes the fence at a point where it has performed all operations that it has issued.
                if kind is RemoteFence and any(other.performed for other in threads[operation.thread].window):
                    continue
                if kind is Store or kind is Exchange:
                    changed += (operation.value - there) << shift
                moved = self._after(thread, place, there if kind is Load else 0)
                yield moved and ((*before, moved, *behind), changed)

    def _guessed(self, thread: Thread) -> list[Thread]:
        """Return the threads that `thread` may become by guessing the value of a load."""
        if not thread.needs_value:
            return []
        operation = thread.window[-1].operation
        assert isinstance(operation, Load)
        if operation.acquire or len(thread.window) == self.window:
            return []  # no operation can be performed before this one
        window = thread.window[:-1]
        return [
            self._issue(
                Thread(thread.index, (*thread.read, value), thread.issued + 1, (*window, Issued(operation, value)))
            )
            for value in self.values[operation.place]
        ]

    def _not_waiting(self, thread: Thread) -> list[tuple[int, Operation, int]]:
        """Return the operations that need not wait for an earlier one, with their positions and their places."""
        return [
            (place, issued.operation, self._shift(issued.operation))
            for place, issued in enumerate(thread.window)
            if not issued.performed
            and not any(
                not earlier.performed and must_wait(earlier.operation, issued.operation)
                for earlier in thread.window[:place]
            )
        ]

    def _shift(self, operation: Operation) -> int:
        if isinstance(operation, Fence | RemoteFence):
            return 0
        return self._shifts.setdefault(operation.place, BITS * len(self._shifts))

    def _performed(self, thread: Thread, place: int, value: int) -> Thread | None:
        """Return the thread after it has performed an operation; None if it has guessed another value of a load."""
        issued = thread.window[place]
        operation = issued.operation
        read, count, needs_value = thread.read, thread.issued, thread.needs_value
        if isinstance(operation, Load):
            if operation.expect is not None and value != operation.expect:
                raise Violation(f"{operation.place} is {value} where {operation.expect} is expected")
            if issued.guess is not None and value != issued.guess:
                return None
            if operation.expect is None and issued.guess is None:
                read, count, needs_value = (*read, value), count + 1, False
        window = (*thread.window[:place], Issued(operation, issued.guess, True), *thread.window[place + 1 :])
        return self._issue(Thread(thread.index, read, count, window, needs_value))

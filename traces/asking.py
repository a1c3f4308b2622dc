"""Questions to a storage side by side: one far away answers many in the time of one."""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

_AT_ONCE = 16  # questions

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def ask_all(ask: Callable[[Asked], Answer], wanted: Iterable[Asked]) -> list[Answer]:
    """The answers to all questions, in their order.

    Raises what one raises as soon as it fails. Then, or on Ctrl-C, those that wait for their turn are not asked any
    more, and those under way are not waited for, neither here nor where the process ends.
    """
    waiting: queue.SimpleQueue[tuple[int, Asked]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, Answer | None, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                number, one = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.put((number, ask(one), None))
            except BaseException as error:  # handed to the thread that gathers, which raises it
                answers.put((number, None, error))

    for question in enumerate(wanted):
        waiting.put(question)
    found: dict[int, Answer] = {}
    questions = waiting.qsize()
    try:
        for _ in range(min(_AT_ONCE, questions)):  # no pool: the threads of one are waited for where the process ends
            threading.Thread(target=work, name="replay-storage", daemon=True).start()
        while len(found) < questions:
            number, answer, error = answers.get()
            if error is not None:
                raise error
            found[number] = cast(Answer, answer)
        return [found[number] for number in range(questions)]
    finally:
        stopped.set()

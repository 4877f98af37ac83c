"""Reading ahead: a thread that prepares what will be asked for, a bounded number of items before it
is.
"""

import threading
from collections.abc import Callable
from queue import Queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Items `first` to `stop` of `read`, in order, each read in a thread before it is taken.

    At most `depth` wait, and one more is being read. What `read` raises is raised by the `take`
    whose item it was, with a note of its number; the thread has ended then.
    """

    def __init__(self, read: Callable[[int], Item], first: int, stop: int, depth: int):
        self._ready: Queue[Item | _Failure] = Queue(depth)
        self._closed = threading.Event()
        arguments = (read, range(first, stop), self._ready, self._closed)
        # It holds nothing of ours but the queue: whoever reads may be dropped while it runs.
        self._thread = threading.Thread(
            target=_work, args=arguments, name="fsdp_jax reads ahead", daemon=True
        )
        self._thread.start()

    def take(self) -> Item:
        """The next item; waits until it is read. Not to be called for more than there are, or after
        `close`.
        """
        found = self._ready.get()
        if isinstance(found, _Failure):
            raise found.error
        return found

    def close(self) -> None:
        """Ends the thread, and waits for the item that it is reading."""
        self._closed.set()
        while not self._ready.empty():  # it may wait for room
            self._ready.get()
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Failure:
    """What was raised instead of an item."""

    def __init__(self, error: BaseException):
        self.error = error


def _work(
    read: Callable[[int], Item],
    numbers: range,
    ready: "Queue[Item | _Failure]",
    closed: threading.Event,
) -> None:
    for number in numbers:
        if closed.is_set():
            return
        try:
            item: Item | _Failure = read(number)
        except BaseException as error:
            error.add_note(f"(while batch {number} was read ahead)")
            item = _Failure(error)
        if closed.is_set():
            return
        ready.put(item)
        if isinstance(item, _Failure):
            return

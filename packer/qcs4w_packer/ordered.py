"""Work spread over threads whose results come back in the order in which the work was given."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Drained:
    """Given between jobs: nothing after it is begun before everything before it has been taken."""


DRAINED = Drained()


def cores() -> int:
    """Return how many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def in_order(jobs: Iterator[Callable[[], T] | Drained], threads: int) -> Generator[T]:
    """Run jobs in threads and yield their results in order.

    Only a few jobs more than there are threads are begun ahead of what has been taken, so that memory stays bounded.
    The first error, in the order of the jobs, is raised where its result would have been.

    Args:
        jobs: asked for one at a time, in the caller's thread.
        threads: how many work at once.
    """
    pool = ThreadPoolExecutor(threads, "qcs4w-pack")
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            if isinstance(job, Drained):
                while waiting:
                    yield waiting.popleft().result()
                continue
            waiting.append(pool.submit(job))
            del job  # what a finished job held must not stay
            if len(waiting) > threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Running a command for its time and memory; the benchmarks of this folder share it."""

import json
import subprocess
import sys
from collections.abc import Sequence

# A process's peak counts what its parent held when it was forked: this small parent holds nothing.
_TIMED = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
print(json.dumps([seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)]))
"""


def timed(command: Sequence[str]) -> tuple[float, float, int, int]:
    """Run a command without its output; return wall and processor seconds, peak resident bytes, exit code."""
    done = subprocess.run([sys.executable, "-c", _TIMED, *command], capture_output=True, text=True, check=True)  # noqa: S603
    seconds, processor, nbytes, code = json.loads(done.stdout)
    if code:
        sys.stderr.write(done.stderr)
    return seconds, processor, nbytes, code

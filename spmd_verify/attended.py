"""The command line as a child of a program that may go away at any time. Torch-free.

The parent holds the writing end of this process' stdin and writes nothing to it. When the pipe
ends - the parent closed it, was interrupted or was killed - the run is interrupted as by Ctrl-C,
so that ranks end and folders go. No process is left behind, whatever became of the parent.
"""

import os
import signal
import sys
import threading
import time
from typing import Final

from spmd_verify.cli import main
from spmd_verify.exit_codes import INTERRUPTED

# Ending ranks and removing folders takes below a second; a hung one is cut off.
_GRACE_SECONDS: Final = 5.0


def _leave_with_parent() -> None:
    """Wait until stdin ends, interrupt the main thread, and leave for good if it does not."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_SECONDS)
    os._exit(INTERRUPTED)


def attended_main() -> int:
    """Run the command line in `sys.argv`; end early when the parent does."""
    # A parent in the background of a shell ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    return main(sys.argv[1:])

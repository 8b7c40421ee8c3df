"""``flower-supernode`` that ends when it has stopped working.

Flower's own, after an error of its connection, goes on living for the sake of its local HTTP
server, and after an error of its sign-of-life thread goes on asking for work that an offline node
never gets; both look healthy. Here either ends the process, so that it can be started again.
"""

import os
import sys
import threading
import traceback

from flwr.supernode.cli import flower_supernode

WITHOUT_GOODBYE = 200  # exit code: the SuperLink may believe this node online


def end(code: int) -> None:
    """End this process whatever its other threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """End this process because a thread of it has failed."""
    traceback.print_exception(failed.exc_value)
    end(WITHOUT_GOODBYE)


def main() -> None:
    """Run the SuperNode until it ends; 0 after a goodbye and 1 if it was never let in."""
    threading.excepthook = end_with_thread
    code = WITHOUT_GOODBYE
    try:
        flower_supernode()  # returns only after an error
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    end(code)


if __name__ == "__main__":
    main()

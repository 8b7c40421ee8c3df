"""``flower-superlink`` that waits longer for its own database.

Flower's gives up after 5 s in which another thread writes, as happens where the disk is slow and
models are large, and answers 500; no client of Flower tries again after that, so the node or the
server app's process that asked is lost, and its run with it.
"""

import sys

from flwr.supercore import sql_mixin
from flwr.superlink.cli import flower_superlink

# clients give up waiting for an answer after 30 s, and then they do try again
BUSY_MILLISECONDS = 60_000

sql_mixin.SQLITE_PRAGMAS = tuple(
    (name, str(BUSY_MILLISECONDS) if name == "busy_timeout" else value)
    for name, value in sql_mixin.SQLITE_PRAGMAS
)

if __name__ == "__main__":
    sys.exit(flower_superlink())

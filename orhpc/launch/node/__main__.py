"""``python -m orhpc.launch.node [CONFIG] [key=value ...]``: the launcher of one node."""

import sys

from orhpc.launch.node.launcher import main

if __name__ == "__main__":
    sys.exit(main())

"""The flags of slime, miles and OpenReward's ``run.sh``: which setting each of them is.

In come the arguments of a command, out go ``section.key=value`` arguments.  One table (:mod:`.table`,
:mod:`.others`) is the source of the command line, of the reference page and of the ``args`` that functions
written for slime receive.  Nothing here may import the launcher, the trainer or the rollouts.
"""

from orhpc.config.flags.flag import Flag, Kind
from orhpc.config.flags.reading import ENGINE_FLAG, engine_option, settings_of, take
from orhpc.config.flags.table import FLAGS, SECTIONS

__all__ = ["ENGINE_FLAG", "FLAGS", "SECTIONS", "Flag", "Kind", "engine_option", "settings_of", "take"]

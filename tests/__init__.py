"""The test suite."""

import os

# Before anything imports the SDK, which reads these once.
os.environ["OPENREWARD_DISABLE_UPDATE_CHECK"] = "1"
os.environ["OPENREWARD_LOG_LEVEL"] = "CRITICAL"

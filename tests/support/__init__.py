"""What tests share."""

import os

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
"""CI runs the thorough profile: 1,000 hypothesis examples and the long seeded loops."""

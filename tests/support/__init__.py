"""What tests share."""

import os

from hypothesis import settings

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
"""CI runs the thorough profile: 1,000 hypothesis examples and the long seeded loops."""

FEW = settings(max_examples=150 if IN_CI else 50, deadline=None)
"""For examples that are a small fleet's hour each, of which a thousand take minutes."""

"""Hypothesis profiles: a quick one for the desk, a thorough one for CI (`CI=true`)."""

import os

from hypothesis import settings

settings.register_profile("fast", max_examples=100, deadline=None, derandomize=False)
settings.register_profile("ci", max_examples=1000, deadline=None, derandomize=False)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "fast")

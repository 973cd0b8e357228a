"""The errors of Braid, for programs: `from braid.errors import TopicExists`.

The tree of all errors is in `braid.model.errors`; docs/errors.md says what each means.
"""

from braid.model.errors import *  # noqa: F403 (all of them are public)

"""The zoo of models that the rules judge, with all entries: see `subjects`."""

import assembly_faults  # noqa: F401 - each of these adds to the zoo
import faults  # noqa: F401
import healthy  # noqa: F401
import small_faults  # noqa: F401
import small_healthy  # noqa: F401
from subjects import ZOO

__all__ = ["ZOO"]

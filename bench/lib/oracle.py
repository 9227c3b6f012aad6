"""`reference`, the tests' definition of the codec, with which benchmarks check results before they time them."""

import sys

from lib.common import REPOSITORY

sys.path.append(str(REPOSITORY / "tests" / "helpers"))
import reference  # noqa: E402

__all__ = ["reference"]

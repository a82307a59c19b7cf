"""Captures the passes of an engine as CUDA graphs at start, so that none is captured or compiled while serving."""

import logging
import time
from collections.abc import Callable

from specpool.engine.run.engine import Engine

log = logging.getLogger(__name__)


def capture_graphs(engine: Engine, report: Callable[[str], None] = log.info) -> None:
    """Capture the passes of an engine, unless its pass captures none. `report`: called before."""
    if not engine.forward_pass.captured_rows:
        return
    report("capturing CUDA graphs")
    began = time.perf_counter()
    count = engine.capture_graphs()
    log.info("captured %d CUDA graphs in %.1f s", count, time.perf_counter() - began)

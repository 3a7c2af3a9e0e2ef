"""Audit log: one line per change, with caller, target and outcome, also for failed and rejected changes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request

from kvstore.admin.problems import PreconditionError
from kvstore.core.errors import KVStoreError
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import admin as admin_metrics
from kvstore.rpc.auth.tokens import Principal

logger: Final = logging.getLogger("kvstore.audit")
logger.setLevel(logging.INFO)  # independent of log.level

Details = dict[str, object]


@contextmanager
def audited(request: Request, counters: Counters, action: str, target: str, **asked: object) -> Iterator[Details]:
    """Log a change when it ends. The caller puts the result into the yielded dictionary."""
    caller: Principal = request.state.caller
    began_s = time.monotonic()
    result: Details = {}
    outcome = "cancelled"
    try:
        yield result
        outcome = "done"
    except KVStoreError as error:
        outcome = error.kind.value
        raise
    except PreconditionError as refused:
        outcome = refused.error.kind.value
        raise
    except Exception:
        outcome = "internal"
        raise
    finally:
        counters.add(admin_metrics.CHANGES)
        line = {
            "who": caller.name,
            "role": caller.role.value,
            "from": request.client.host if request.client else "",
            "action": action,
            "target": target,
            **({"asked": asked} if asked else {}),
            "outcome": outcome,
            **({"result": result} if result else {}),
            "seconds": round(time.monotonic() - began_s, 3),
        }
        logger.info("%s", json.dumps(line))  # ASCII and one line, because names may contain any character

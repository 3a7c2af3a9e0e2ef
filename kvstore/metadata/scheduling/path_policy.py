"""The path policy in force: an operator's order if there is one, else the configured policy."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from kvstore.core.errors import Conflict, InvalidArgument
from kvstore.dualpath.policies import POLICIES
from kvstore.metadata.retention.settings_store import OperatorSettings, SettingsStore
from kvstore.metadata.scheduling.planner_service import PlannerService
from kvstore.observe.limited_log import LimitedLog

logger: Final = logging.getLogger(__name__)
_limited: Final = LimitedLog(logger)
SETTABLE_POLICIES: Final = tuple(name for name in POLICIES if name != "oracle")
"""All but ``oracle``, which reads nothing and serves measurements: it would turn every load into a miss."""


class PathPolicyOrder:
    """Makes the planner follow the operators' order. Use on the event loop.

    Args:
        settings: where the order is kept.
        planner: the planner.
        configured: the configured policy, which is in force without an order.
    """

    def __init__(self, settings: SettingsStore, planner: PlannerService, configured: str) -> None:
        self._settings = settings
        self._planner = planner
        self.configured: Final = configured
        """The configured policy."""

    def follow(self) -> None:
        """Let the planner use the policy in force. If the settings cannot be read, the planner keeps its policy."""
        settings = self._settings.read()
        if settings is not None:
            policy = self._in_force(settings)
            if policy != self._planner.default_policy:
                logger.warning("path policy changed: %s (before: %s)", policy, self._planner.default_policy)
                self._planner.default_policy = policy

    async def set(self, policy: str, expected: str | None) -> str:
        """Set the path policy. The configured policy ends the order.

        Args:
            policy: the policy of new plans.
            expected: the policy that must be in force; None: any.

        Returns:
            The policy before.

        Raises:
            InvalidArgument: there is no such policy.
            Conflict: another policy is in force, or the settings file cannot be read.
            CapacityExceeded: the disk is full.
            Unavailable: the settings cannot be written now.
        """
        if policy not in SETTABLE_POLICIES:
            raise InvalidArgument("unknown path policy", got=policy[:64], known=", ".join(SETTABLE_POLICIES))

        def edit(settings: OperatorSettings) -> OperatorSettings:
            before = self._in_force(settings)
            if expected is not None and before != expected:
                raise Conflict("the path policy differs from the expected one", policy=before, expected=expected[:64])
            return replace(settings, path_policy="" if policy == self.configured else policy)

        before, _ = await self._settings.change(edit)
        self.follow()
        return self._in_force(before)

    def _in_force(self, settings: OperatorSettings) -> str:
        ordered = settings.path_policy
        if ordered and ordered not in SETTABLE_POLICIES:
            _limited.warning("ordered path policy unknown to this version: %s", ordered)
            return self.configured
        return ordered or self.configured

"""One simulated run: sessions in, results out.

The steps of a request: engines (scheduler) → plan (planner) → space in the decode buffer, then in the prefill buffer → reads
over SNICs → prefill batch → push to the decode buffer, layer by layer → HBM → decode → the session's next turn. All requests
take the buffers in this order, which excludes a deadlock.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.dualpath.contract import PlanPart, PlanPolicy, PlanRequest, ReadSide
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.planner import Planner
from kvstore.dualpath.policies import policy_named
from kvstore.dualpath.scheduler import SchedulerLimits
from kvstore.dualpath.split import Split
from kvstore.roofline.calibration import ALPHA_S, BETA_S
from kvstore.roofline.engine_model import EngineModel, PrefillChunk
from kvstore.simulate.cluster import DispatchPolicy, SimConfig
from kvstore.simulate.engines.decode import DecodeUnit
from kvstore.simulate.engines.dispatch import Dispatch, RoundRobinDispatch, SchedulerDispatch, check_fits
from kvstore.simulate.engines.job import Job, SpaceQueue
from kvstore.simulate.engines.prefill import PrefillEngine, PrefillUnit
from kvstore.simulate.network.event_loop import EventLoop
from kvstore.simulate.network.fluid import FluidNetwork
from kvstore.simulate.network.links import PathLinks
from kvstore.simulate.result import SimResult, Traffic, collect
from kvstore.simulate.sessions import AgentSession

Progress = Callable[[int, int], None]
"""Callback with (finished requests, all requests)."""

_NO_PLAN_EXPIRES = 1e12
_SAMPLES = 400


@dataclass(frozen=True, slots=True)
class _Place:
    """An engine, its host, and its number on the host."""

    host: int
    local: int
    engine: Engine


def simulate(
    config: SimConfig,
    progress: Progress | None = None,
    *,
    until_s: float = math.inf,
    most_waiting: int | None = None,
) -> SimResult:
    """Run sessions on a cluster.

    Args:
        config: both.
        progress: called while requests finish.
        until_s: ends the run at this time, finished or not.
        most_waiting: ends the run when more requests than this are under way (of an open workload that is not kept up with).

    Raises:
        InvalidArgument: a request is larger than a buffer or an engine.
    """
    return _Run(config).run(progress, until_s, math.inf if most_waiting is None else most_waiting)


class _Run:
    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.hosts = config.hosts
        self.token_bytes = config.token_bytes
        self.links = PathLinks(config.hosts, config.storage)
        self.network = FluidNetwork(self.links.capacities)
        self.loop = EventLoop(self.network)
        self.oracle = config.variant.path == "oracle"
        self.layerwise = config.variant.layerwise
        self.planner = Planner(self._policy(), plan_life_s=_NO_PLAN_EXPIRES, decisions_kept=0)
        self.host_of = {host.name: index for index, host in enumerate(config.hosts)}
        for host in config.hosts:
            self.planner.add_node(host.name, host.snic, host.cnic * host.cnics)
        self.stage = [SpaceQueue(host.stage_bytes) for host in config.hosts]
        slots = math.inf if config.reads_in_flight is None else config.reads_in_flight
        self.slots = [SpaceQueue(slots) for _ in config.hosts]
        self.places = {role: self._places_of(role) for role in EngineKind}
        self.prefill = self._prefill()
        self.decode_units, self.decode_of = self._decode()
        self.dispatch = self._dispatch()
        groups = Counter(host.group for host in config.hosts)
        self.group_hosts = [groups[host.group] for host in config.hosts]
        self.written = [0.0] * len(config.hosts)
        self.jobs: list[Job] = []
        self.under_way = 0
        self.samples: list[tuple[float, list[float]]] = []
        self.sample_s = 1.0

    # ---- building ----

    def _policy(self) -> PlanPolicy:
        if self.config.variant.path == "split":
            return Split(least_bytes=self.config.split_least_bytes)
        return policy_named(self.config.variant.path)

    def _places_of(self, role: EngineKind) -> list[_Place]:
        space = self.config.decode.kv_space_bytes if role is EngineKind.DECODE else 0
        return [
            _Place(index, local, Engine(f"{host.name}/{local}", role, host.group, host.name, max(0, round(space))))
            for index, host in enumerate(self.hosts)
            if host.role is role
            for local in range(host.engines)
        ]

    def _units(self, role: EngineKind) -> list[list[int]]:
        """Return the groups of engines that compute in step, by index."""
        units: dict[object, list[int]] = {}
        together = self.config.prefill.model.expert_parallel
        for index, place in enumerate(self.places[role]):
            units.setdefault(place.engine.group if together else index, []).append(index)
        return list(units.values())

    def _prefill(self) -> list[tuple[PrefillUnit, PrefillEngine]]:
        """Create the unit and the queue of each prefill engine."""
        config = self.config
        model = config.prefill
        # no quota if the measured attention time is 0: it would admit any batch
        has_quota = self.layerwise and (model.measured is None or model.measured.pair_s > 0)
        space = max(model.kv_space_bytes, 1.0)
        found: list[tuple[PrefillUnit, PrefillEngine]] = []
        for unit in self._units(EngineKind.PREFILL):
            engines = [PrefillEngine(index, SpaceQueue(space)) for index in unit]
            host = self.hosts[self.places[EngineKind.PREFILL][unit[0]].host]
            stream = host.cnic * host.cnics / host.engines
            made = PrefillUnit(
                self.loop,
                engines,
                model,
                quota_s=config.quota_s if has_quota else None,
                batch_tokens=config.batch_tokens,
                stream_rate=stream if self.layerwise and not self.oracle else math.inf,
                token_bytes=self.token_bytes,
                compute=config.compute,
                started=self._pass_begins,
                done=self._computed,
                exchanged=self._exchange_prefill,
            )
            found += [(made, engine) for engine in engines]
        return found

    def _decode(self) -> tuple[list[DecodeUnit], list[DecodeUnit]]:
        units, of = [], []
        for unit in self._units(EngineKind.DECODE):
            made = DecodeUnit(self.loop, len(unit), unit[0], self.config.decode, compute=self.config.compute, done=self._decoded)
            units.append(made)
            of += [made] * len(unit)
        return units, of

    def _dispatch(self) -> Dispatch:
        decode = self.places[EngineKind.DECODE]
        if self.config.variant.scheduling is DispatchPolicy.ROUND_ROBIN:
            space = [place.engine.hbm_units for place in decode]
            return RoundRobinDispatch(len(self.places[EngineKind.PREFILL]), space, self._paired)
        engines = [place.engine for role in EngineKind for place in self.places[role]]
        return SchedulerDispatch(self.loop, engines, self._limits(), self.config.fetch_s, self._read_tokens, self._paired)

    def _limits(self) -> SchedulerLimits:
        """Return alpha and beta in tokens, derived from the links and the mean request."""
        alpha = ALPHA_S * min(host.snic for host in self.config.of(EngineKind.PREFILL)) / self.token_bytes
        turns = [turn for session in self.config.sessions[:64] for turn in session.turns]
        tokens = sum(turn.hit + turn.new for turn in turns) / max(1, len(turns))
        hit = sum(turn.hit for turn in turns) / max(1, len(turns))
        each = self.config.prefill.prefill_seconds([PrefillChunk(round(hit), max(1, round(tokens - hit)))] * 4) / 4
        return SchedulerLimits(round(alpha), round(BETA_S / each * tokens) if self.config.compute else 1 << 40)

    def _read_tokens(self, node: str) -> int:
        state = self.planner.queues.state(node, self.loop.now)
        return state.pending_tokens if state is not None else 0

    # ---- the run ----

    def run(self, progress: Progress | None, until_s: float, most_waiting: float) -> SimResult:
        """Run all sessions; see ``simulate``."""
        total = sum(len(session.turns) for session in self.config.sessions)
        self._check()
        for index, session in enumerate(self.config.sessions):
            if session.turns:
                self.loop.at(session.start_s + session.turns[0].think_s, lambda i=index, s=session: self._turn(i, s, 0))  # type: ignore[misc]
        self.finished = 0
        self.loop.after(self.sample_s, self._sample)
        reported = 0
        while self.finished < total and self.loop.now <= until_s and self.under_way <= most_waiting:
            if not self.loop.step():
                break
            if progress is not None and self.finished - reported >= 64:
                reported = self.finished
                progress(reported, total)
        self.network.settle(self.loop.now)
        if progress is not None:
            progress(self.finished, total)
        return collect(self.config, self.jobs, self._traffic(), self.loop, total)

    def _check(self) -> None:
        turns = [turn for session in self.config.sessions for turn in session.turns]
        longest = max((turn.hit + turn.new + turn.out for turn in turns), default=0) * self.token_bytes
        check_fits(longest, self.config.decode.kv_space_bytes, "HBM of a decode engine")
        if not self.layerwise:
            check_fits(longest, self.config.prefill.kv_space_bytes, "HBM of a prefill engine")
        if not self.oracle:
            check_fits(longest, min(host.stage_bytes for host in self.hosts), "host memory for staging")

    def _turn(self, session_index: int, session: AgentSession, turn_index: int) -> None:
        name = f"{session_index}.{turn_index}"
        job = Job(name, session_index, turn_index, session.turns[turn_index], self.loop.now)
        self.jobs.append(job)
        self.under_way += 1
        self.dispatch.submit(job, job.tokens * self.token_bytes)

    def _paired(self, job: Job, prefill: int, decode: int) -> None:
        """Plan the read of a request that has both engines, and wait for space."""
        job.prefill, job.decode = prefill, decode
        job.paired = self.loop.now
        if self.oracle:
            job.loaded = self.loop.now
            self._ready(job)
            return
        p, d = self.places[EngineKind.PREFILL][prefill].host, self.places[EngineKind.DECODE][decode].host
        blocks = job.turn.hit // self.config.block_tokens
        request = PlanRequest(
            job.name,
            blocks,
            self.config.full_block_bytes,
            self.config.block_tokens,
            self.hosts[p].name,
            self.hosts[d].name,
            self._relays(p, d) if blocks else (),
        )
        plan = self.planner.plan(request, self.loop.now)
        for part in plan.parts:
            nbytes = part.count * self.config.full_block_bytes
            job.read_bytes += nbytes
            if part.side is ReadSide.PREFILL:
                job.prefill_bytes += nbytes
            elif part.side is ReadSide.DECODE:
                job.decode_bytes += nbytes
        prompt = job.prompt_tokens * self.token_bytes
        staged = self.stage[p]
        self.stage[d].take(prompt, lambda: staged.take(job.prefill_bytes, lambda: self._read(job, plan.plan_id, plan.parts)))

    def _relays(self, prefill: int, decode: int) -> tuple[str, ...]:
        """Return the other nodes with the least to read. Only ``split`` uses them."""
        if self.config.variant.path != "split" or not self.config.relays:
            return ()
        others = [host.name for index, host in enumerate(self.hosts) if index not in (prefill, decode)]
        if len(others) <= self.config.relays:
            return tuple(others)
        return tuple(heapq.nsmallest(self.config.relays, others, key=self._read_tokens))

    # ---- loading ----

    def _read(self, job: Job, plan_id: int, parts: Sequence[PlanPart]) -> None:
        """Queue the parts of a read at their storage links, after all space was granted."""
        if not parts:
            self._all_read(job, plan_id)
            if self.layerwise:
                self._ready(job)
            return
        job.parts_left = len(parts)
        leading = [len(parts)]  # parts whose first layers have not come
        for part in parts:
            slot = self.slots[self.host_of[part.node]]
            slot.take(1, lambda part=part: self._read_part(job, plan_id, part, leading))  # type: ignore[misc]

    def _read_part(self, job: Job, plan_id: int, part: PlanPart, leading: list[int]) -> None:
        reader = self.host_of[part.node]
        p, d = self.places[EngineKind.PREFILL][job.prefill], self.places[EngineKind.DECODE][job.decode]
        if self.layerwise:
            path = self.links.read(reader, d.local if reader == d.host else 0, p.host, p.local)
        else:
            path = self.links.stage(reader)
        nbytes = part.count * self.config.full_block_bytes
        first = nbytes / self.config.layer_groups

        def layers_came() -> None:
            leading[0] -= 1
            if nbytes > first:
                self.network.start(path, nbytes - first, self.loop.now, part_came)
            else:
                part_came()
            if not leading[0] and self.layerwise:
                self._ready(job)

        def part_came() -> None:
            self.planner.progress(plan_id, part.index, part.count, self.loop.now)
            self.slots[reader].give(1)
            job.parts_left -= 1
            if not job.parts_left:
                self._all_read(job, plan_id)

        self.network.start(path, first, self.loop.now, layers_came)

    def _all_read(self, job: Job, plan_id: int) -> None:
        self.planner.finish(plan_id, self.loop.now)
        if not self.layerwise:
            hbm = self.prefill[job.prefill][1].hbm
            hbm.take(job.prompt_tokens * self.token_bytes, lambda: self._copy_in(job))
            return
        job.loaded = self.loop.now
        if not job.remaining and job.first_token < math.inf:  # computed before the last layers arrived
            self._first_token(job)

    def _copy_in(self, job: Job) -> None:
        """Copy a whole prompt from the prefill node's buffer to HBM, until it was sent (not layer-wise)."""
        p = self.places[EngineKind.PREFILL][job.prefill]

        def there() -> None:
            self.stage[p.host].give(job.prefill_bytes)
            job.loaded = self.loop.now
            self._ready(job)

        self.network.start(self.links.hand_over(p.host, p.local), job.read_bytes, self.loop.now, there)

    def _ready(self, job: Job) -> None:
        """Start the prefill of a request after its first layers have arrived."""
        unit, engine = self.prefill[job.prefill]
        unit.add(engine, job)

    # ---- computing ----

    def _pass_begins(self, job: Job) -> None:
        """Handle the start of the pass that computes the last token: layer-wise, KV is sent while it is computed."""
        if self.layerwise and not self.oracle:
            self._push(job)

    def _computed(self, job: Job) -> None:
        job.first_token = self.loop.now
        if not math.isnan(job.loaded):
            self._first_token(job)

    def _first_token(self, job: Job) -> None:
        job.first_token = self.loop.now
        self.dispatch.prefilled(job)
        if self.oracle:
            self._join(job)
            return
        if not self.layerwise:
            self._push(job)
            return
        self.stage[self.places[EngineKind.PREFILL][job.prefill].host].give(job.prefill_bytes)
        if job.pushed:
            self._hand_over(job)

    def _push(self, job: Job) -> None:
        """Send KV to the decode node, except the blocks that it read itself."""
        p, d = self.places[EngineKind.PREFILL][job.prefill], self.places[EngineKind.DECODE][job.decode]
        nbytes = job.prompt_tokens * self.token_bytes - job.decode_bytes

        def pushed() -> None:
            job.pushed = True
            if not self.layerwise:
                self.prefill[job.prefill][1].hbm.give(job.prompt_tokens * self.token_bytes)
            if not math.isnan(job.loaded) and not math.isnan(job.first_token):
                self._hand_over(job)

        self.network.start(self.links.push(p.host, p.local, d.host, d.local), max(0.0, nbytes), self.loop.now, pushed)

    def _hand_over(self, job: Job) -> None:
        """Move a prompt that is complete in the decode buffer to HBM, once."""
        d = self.places[EngineKind.DECODE][job.decode]
        prompt = job.prompt_tokens * self.token_bytes

        def there() -> None:
            self.stage[d.host].give(prompt)
            self._join(job)

        self.network.start(self.links.hand_over(d.host, d.local), prompt, self.loop.now, there)
        self._write_back(d, job.turn.new, from_hbm=False)

    def _join(self, job: Job) -> None:
        d = self.places[EngineKind.DECODE][job.decode]
        hosts = self.group_hosts[d.host]
        copies = self.config.decode.model.experts_active * (hosts - 1) / hosts
        self._exchange(d, self.config.decode, job.turn.out - 1, copies)
        if job.turn.out <= 1:
            self._decoded(job)
        else:
            self.decode_of[job.decode].join(job)

    def _decoded(self, job: Job) -> None:
        job.finished = self.loop.now
        self._write_back(self.places[EngineKind.DECODE][job.decode], job.turn.out, from_hbm=True)
        self.finished += 1
        self.under_way -= 1
        self.dispatch.finished(job, job.tokens * self.token_bytes)
        session = self.config.sessions[job.session]
        following = job.turn_index + 1
        if following < len(session.turns):
            self.loop.after(session.turns[following].think_s, lambda: self._turn(job.session, session, following))

    # ---- traffic that no request waits for ----

    def _write_back(self, place: _Place, tokens: int, *, from_hbm: bool) -> None:
        """Write the KV of a prompt's new tokens, or of an answer, to storage."""
        if not self.config.write_back or self.oracle:
            return
        nbytes = tokens * self.token_bytes
        self.written[place.host] += nbytes
        self.network.start(self.links.write_back(place.host, place.local, from_hbm=from_hbm), nbytes, self.loop.now, _nothing)

    def _exchange_prefill(self, engine: int, tokens: int) -> None:
        """Send the tokens of a pass to experts on the other hosts of the group: one copy for each host."""
        place = self.places[EngineKind.PREFILL][engine]
        copies = min(self.group_hosts[place.host] - 1, self.config.prefill.model.experts_active)
        self._exchange(place, self.config.prefill, tokens, copies)

    def _exchange(self, place: _Place, engine: EngineModel, tokens: int, copies: float) -> None:
        nbytes = engine.model.exchange_bytes(tokens, copies) * engine.scale.bytes
        if self.config.collectives and self.config.compute and nbytes > 0:
            self.network.start(self.links.exchange(place.host, place.local), nbytes, self.loop.now, _nothing)

    # ---- watching ----

    def _sample(self) -> None:
        """Record the bytes of the links, less often in a long run."""
        self.network.settle(self.loop.now)
        self.samples.append((self.loop.now, [self.network.moved[link] for link in self.links.snic]))
        if len(self.samples) >= _SAMPLES:
            self.samples = self.samples[1::2]
            self.sample_s *= 2
        self.loop.after(self.sample_s, self._sample)

    def _traffic(self) -> Traffic:
        moved = self.network.moved
        prefill = {id(unit): unit for unit, _ in self.prefill}.values()
        cnic = [self.links.cnic_bytes(moved, index) for index in range(len(self.hosts))]
        return Traffic(
            snic_bytes=[moved[link] for link in self.links.snic],
            cnic_out_bytes=[out for out, _ in cnic],
            cnic_in_bytes=[into for _, into in cnic],
            dram_bytes=[moved[link] for link in self.links.dram],
            samples=self.samples,
            prefill_busy_s=_mean([unit.busy_s for unit, _ in self.prefill]),
            decode_busy_s=_mean([unit.busy_s for unit in self.decode_units]),
            prefill_work=(sum(unit.flops for unit in prefill), sum(unit.hbm_bytes for unit in prefill)),
            decode_work=(sum(unit.flops for unit in self.decode_units), sum(unit.hbm_bytes for unit in self.decode_units)),
            written_bytes=self.written,
        )


def _nothing() -> None:
    """End of a flow that nothing waits for."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

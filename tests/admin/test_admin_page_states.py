"""States of the web page that a small store does not reach: large clusters, an hour of history, silent nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from page_browser import opened, said, show_all_nodes, show_node
from page_store import SPEC, Working, browsing, working

from kvproto.v1 import admin_pb2 as pb
from kvstore.control_api import serializers
from kvstore.health import codes
from kvstore.health.findings import HealthFinding


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    with working(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as made:
        yield made


def thirty_nodes(found: Any) -> Any:
    """The response for thirty nodes: copies of the first one, of which one drains."""
    node, volume = found["nodes"][0], found["volumes"][0]
    names = [f"rack-{number // 10}-host-{number}" for number in range(30)]
    nodes = [{**node, "node_id": name, "state": "active"} for name in names]
    nodes[17]["state"] = "draining"
    volumes = [
        {**volume, "node_id": name, "volume_id": f"{name}/dram", "tier": "dram", "capacity_bytes": 100, "used_bytes": number}
        for number, name in enumerate(names)
    ]
    activity = [{**found["activity"][0], "node_id": name} for name in names]
    return {**found, "nodes": nodes, "activity": activity, "volumes": volumes, "slow_loads": [], "known_nodes": 30}


def many_namespaces(found: Any) -> Any:
    """The response for 200 namespaces: copies of the first one."""
    first = found["items"][0]
    items = [
        {**first, "namespace_id": f"{number:032x}", "spec": {**first["spec"], "model": f"model-{number}"}, "asked_blocks": number}
        for number in range(200)
    ]
    return {**found, "items": items}


def whole_hour(found: Any) -> Any:
    """The response of a store that was recorded for an hour, with a fault half an hour ago."""
    last = found["points"][-1] if found["points"] else None
    end_s = int(found["now_s"]) // 10 * 10
    empty = {"dram": 0, "nvme": 0, "peer": 0, "data_plane": 0, "planned_prefill": 0, "planned_decode": 0, "planned_relay": 0}
    times = {"count": 5, "p50_s": 0.004, "p95_s": 0.01, "p99_s": 0.02}
    base = last or {"seconds": 10, "lookups": 1, "evicted_dram_blocks": 0, "evicted_nvme_blocks": 0, "faults": 0, "nodes": 3}
    points = [
        {**base, "at_s": end_s - age, "hit_ratio": 0.75, "lookup": times, "load": times, "throughput": {**empty, "dram": 10**9},
         "dram": {"used_bytes": 30, "capacity_bytes": 40}, "nvme": None}
        for age in range(3590, -10, -10)
    ]  # fmt: skip
    fault = {"at_s": end_s - 1800, "node_id": "host-2", "metric": "kvstore_peer_fetch_failed_total", "what": "failed fetches"}
    return {**found, "points": points, "faults": [{**fault, "count": 3}]}


def first_points(number: int, found: Any) -> Any:
    """The response of a store whose recording has begun a moment ago."""
    hour = whole_hour(found)
    return {**hour, "points": hour["points"][-number:], "faults": []}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_page_shows_first_points_as_dots(browser: Any, store: Working, number: int) -> None:
    with opened(browser, store.http.address, script={"/v1/history": partial(first_points, number)}) as page:
        said(page, "#ratio .legend", "75.0 %")
        dots = page.locator("#ratio rect.dot-in")
        assert dots.count() == number
        box = dots.last.bounding_box()
        assert min(box["width"], box["height"]) >= 4, "a dot that is smaller looks like a defect"
        assert page.locator("#ratio").get_by_text("The first figures").count() == (number < 3)


def test_page_says_that_inventories_arrive(browser: Any, store: Working) -> None:
    def arriving(found: Any) -> Any:
        return {**found, "volumes": [{**one, "arriving": True} for one in found["volumes"]]}

    with opened(browser, store.http.address, script={"/v1/overview": arriving}) as page:
        said(page, "#summary", "inventories arriving")


def test_page_draws_history_from_before_it_was_opened(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address, script={"/v1/history": whole_hour}) as page:
        said(page, "#ratio .legend", "75.0 %")
        drawn = page.locator("#ratio path").get_attribute("d")
        assert drawn.count("L") >= 355
        assert page.locator("#fill .legend").inner_text().startswith("DRAM 75.0 %")
        said(page, "#throughput .legend", "local DRAM 100 MB/s")
        said(page, "#summary", "75.0 %")
        said(page, "#timeline tbody tr", "failed fetches")
        said(page, "#timeline tbody tr", "30 min ago")
        assert page.locator("#timeline .fill-full").count() == 1


def test_page_recovers_from_an_unknown_response(browser: Any, store: Working) -> None:
    answers = itertools.count()

    def unknown_once(found: Any) -> Any:
        return found if next(answers) else {}

    with opened(browser, store.http.address, script={"/v1/overview": unknown_once}) as page:
        said(page, "#away", "cannot show the response of the server")
        page.locator("#nodes tbody a").first.wait_for()
        page.locator("#away").wait_for(state="hidden")


def test_page_of_thirty_nodes_is_filtered_and_sorted(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address, script={"/v1/overview": thirty_nodes}) as page:
        names = page.locator("#nodes tbody a")
        names.nth(29).wait_for()
        assert names.first.inner_text() == "rack-0-host-0"
        assert names.nth(2).inner_text() == "rack-0-host-2", "numbers are sorted as numbers"
        page.get_by_role("button", name="DRAM", exact=True).click()
        assert names.first.inner_text() == "rack-2-host-29"
        page.get_by_role("button", name="DRAM", exact=False).first.click()
        assert names.first.inner_text() == "rack-0-host-0"
        assert page.locator("#nodes th[aria-sort=descending]").count() == 1
        page.fill("#nodes-filter", "draining")
        assert names.all_inner_texts() == ["rack-1-host-17"]
        said(page, "#nodes .note", "1 of 30 nodes")
        page.fill("#nodes-filter", "nothing like it")
        said(page, "#nodes", "No node matches")
        assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_page_of_many_namespaces_has_pages_and_filter(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address, script={"/v1/namespaces": many_namespaces}) as page:
        said(page, "#namespaces .pager", "page 1 of 10, 200 namespaces")
        rows = page.locator("#namespaces tbody tr")
        assert rows.count() == 20
        assert "model-199" in rows.first.inner_text()
        page.get_by_role("button", name="Next").click()
        said(page, "#namespaces .pager", "page 2 of 10")
        assert "model-179" in rows.first.inner_text()
        page.fill("#namespaces-filter", "model-42")
        said(page, "#namespaces tbody tr", "model-42")
        assert rows.count() == 1


@pytest.mark.parametrize("width", [360, 1280])
def test_page_of_a_large_store_does_not_overflow(browser: Any, store: Working, width: int) -> None:
    script = {"/v1/overview": thirty_nodes, "/v1/namespaces": many_namespaces, "/v1/history": whole_hour}
    with opened(browser, store.http.address, script=script, viewport={"width": width, "height": 900}) as page:
        page.locator("#nodes tbody a").nth(29).wait_for()
        said(page, "#namespaces .pager", "page 1 of 10, 200 namespaces")
        said(page, "#ratio .legend", "75.0 %")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        show_node(page, "rack-1-host-17")
        assert page.evaluate("document.documentElement.scrollWidth") == width


def shards_of(servers: int, away: int = 0) -> Any:
    """The response for an index on this many servers, primaries with one replica each, of which the first ones are away."""
    shards = max(1, servers // 2)
    found = [
        pb.IndexServer(
            address=f"valkey-{number}.cache.example.org:6379",
            primary=number < shards,
            shard=number % shards,
            slots=16_384 // shards if number < shards else 0,
            replicas=int(servers > 1 and number < shards),
            lag_bytes=None if number < shards else 2_048,
            away_ms=7_000 if number < away else None,
            version="valkey 9.1.2",
            keys=1_234_567,
            used_bytes=7 << 30,
            limit_bytes=(8 << 30) if servers > 1 else 0,
            eviction_policy="allkeys-lru" if number == 1 else "noeviction",
            snapshots=number == 1,
        )
        for number in range(servers)
    ]
    serving = [
        pb.MetadataServerInfo(
            server_id=f"{number}", address=f"metadata-{number}.cache.example.org:7400", version="0.2.0", answers_here=not number
        )
        for number in range(2)
    ]
    message = pb.DescribeShardsResponse(
        servers=sorted(found, key=lambda one: one.shard), metadata_servers=serving, lost_ranges=away, suspect_ranges=2 * away
    )
    return lambda _: serializers.shards(message).model_dump(mode="json")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize(("servers", "away"), [(1, 0), (6, 0), (6, 1)])
def test_page_shows_servers_of_a_shared_index(
    browser: Any, store: Working, tmp_path: Path, width: int, servers: int, away: int
) -> None:
    script = {"/v1/index/shards": shards_of(servers, away)}
    with opened(browser, store.http.address, script=script, viewport={"width": width, "height": 900}) as page:
        said(page, "#shards", "valkey-0.cache.example.org:6379")
        table = page.get_by_role("table", name="servers of the index")
        assert table.locator("tbody tr").count() == servers
        assert table.locator(".badge.bad").all_inner_texts() == ["away for 7.00 s"] * away
        assert table.locator(".warn").all_inner_texts() == ["evicts: allkeys-lru, writes snapshots"] * (servers > 1)
        said(page, "#shards", "answers this page")
        notes = [
            "1 key range is lost until nodes have sent their blocks again.",
            "2 key ranges are suspect: nodes compare them first.",
        ]
        assert page.locator("#shards .note").all_inner_texts() == notes * away
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.locator("#shards-section").screenshot(path=tmp_path / f"shards-{servers}-{away}-{width}.png")
        show_node(page, "host-1")
        assert not page.locator("#shards-section").is_visible()


def test_page_of_an_index_in_a_file_shows_no_shards(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address) as page:
        said(page, "#problems", "No problems")
        assert store.http.get("/v1/index/shards")["servers"] == []
        assert not page.locator("#shards-section").is_visible()


def test_page_shows_an_information_beside_good_health(browser: Any, store: Working) -> None:
    def alone(found: Any) -> Any:
        finding = HealthFinding(codes.ONE_METADATA_SERVER, "", "Only this metadata server serves the index.")
        return {**found, "health": "ok", "findings": [serializers.finding(finding).model_dump()]}

    with opened(browser, store.http.address, script={"/v1/cluster": alone}) as page:
        said(page, "#problems li.info", "ONE_METADATA_SERVER")
        said(page, "#problems .well", "No problems")


def test_page_shows_the_load_latency_of_each_node(browser: Any, store: Working) -> None:
    def slow_node(found: Any) -> Any:
        times = {"count": 5, "p50_s": 0.4, "p95_s": 1.0, "p99_s": 1.5}
        return {**found, "load_by_node": {"host-1": {**times, "p99_s": 0.02}, "host-2": times}}

    with opened(browser, store.http.address, script={"/v1/history": slow_node}) as page:
        said(page, "#nodes tbody tr", "1.50 s")
        latencies = page.locator("#nodes td[data-label='p99 load']")
        assert latencies.all_inner_texts() == ["20 ms", "1.50 s", "—"]
        page.get_by_role("button", name="p99 load").click()
        assert page.locator("#nodes tbody a").first.inner_text() == "host-2"


def test_page_charts_say_which_node_is_missing(browser: Any, store: Working) -> None:
    def without(found: Any) -> Any:
        silent = {"kind": "unavailable", "detail": "no answer"}
        pool = {"node_id": "engine-pool", "kind": "unsupported", "detail": "none"}
        return {**found, "unreached": [{"node_id": "host-2", **silent}, {"node_id": "host-3", **silent}, pool]}

    with opened(browser, store.http.address, script={"/v1/history": without}) as page:
        said(page, "#latency .note", "without host-2, host-3")
        assert page.locator("#latency .note").inner_text() == "without host-2, host-3"
        said(page, "#evictions .note", "without host-2, host-3")
        assert page.locator("#ratio .note").count() == 0, "the metadata server counts lookups"


def test_page_names_nodes_that_it_cannot_query(browser: Any, store: Working) -> None:
    def silent(found: Any) -> Any:
        return {**found, "unreached": [{"node_id": "host-2", "kind": "unavailable", "detail": "connection refused"}]}

    with opened(browser, store.http.address, script={"/v1/overview": silent}) as page:
        said(page, "#nodes .note", "No figures of host-2 (connection refused): no answer to the admin server.")


def test_page_shows_cause_and_action_of_slow_loads(browser: Any, store: Working) -> None:
    def slow(found: Any) -> Any:
        cause = {"reason": "90 % of the time reading from node host-2", "action": "Check node host-2."}
        loads = [
            {"node_id": "host-1", "request_id": "", "seconds": 1.5, "ago_s": 3.0, "blocks": 4, "hit_blocks": 4, "figures": {}}
        ]
        return {**found, "slow_loads": [{**loads[0], **cause}]}

    with opened(browser, store.http.address, script={"/v1/overview": slow}) as page:
        said(page, "#slow tbody tr", "90 % of the time reading from node host-2")
        said(page, "#slow tbody .second", "Check node host-2.")


def test_page_finding_links_to_its_documentation(browser: Any, store: Working) -> None:
    def hung(found: Any) -> Any:
        finding = HealthFinding(codes.VOLUME_HUNG, "host-1/nvme0", "Volume host-1/nvme0 has not answered for 9 s.")
        found["findings"] = [serializers.finding(finding).model_dump()]
        return found

    with opened(browser, store.http.address, script={"/v1/cluster": hung}) as page:
        said(page, "#problems", "VOLUME_HUNG Volume host-1/nvme0 has not answered for 9 s.")
        with page.expect_popup() as opening:
            page.get_by_role("link", name="VOLUME_HUNG").click()
        opening.value.wait_for_load_state()
        assert opening.value.url == f"http://{store.http.address}/docs/reference/health/volume-hung.md"
        said(opening.value, "body", "# VOLUME_HUNG")
        said(opening.value, "body", codes.VOLUME_HUNG.meaning)


def test_node_view_of_unknown_node_says_so(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address) as page:
        page.goto(f"http://{store.http.address}/#node/%3Cb%3Enobody")
        said(page, "#node", "No node with this name is registered")
        assert page.locator("#node-title").inner_text() == "Node <b>nobody"
        show_all_nodes(page)


def test_node_view_of_silent_node_claims_no_figures(browser: Any, store: Working) -> None:
    def silent(found: Any) -> Any:
        unreached = [{"node_id": "host-2", "kind": "unavailable", "detail": "the node does not report to the metadata server"}]
        return {**found, "points": [], "faults": [], "unreached": unreached}

    with opened(browser, store.http.address, script={"/v1/history": silent}) as page:
        show_node(page, "host-2")
        said(page, "#latency", "Not known: the node does not answer.")
        said(page, "#evictions", "Not known: the node does not answer.")


def test_explorer_accepts_text_if_tokenizer_is_configured(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address) as page:
        said(page, "#explore-hint", "set admin.tokenizer")
        assert not page.locator("#explore-kind").is_visible()
    with opened(browser, store.http.address, script={"/v1/tokenizer": lambda _: {"configured": True}}) as page:
        said(page, "#explore-label", "Text of the prompt")
        page.select_option("#explore-namespace", SPEC.namespace.hex())
        page.fill("#explore-chain", "one two")
        found = {"blocks": 0, "hit_blocks": 0, "first_miss": None, "runs": [], "tokens": 2}
        page.route("**/v1/blocks/lookup", lambda route: route.fulfill(json=found))
        with page.expect_request("**/v1/blocks/lookup") as asked:
            page.get_by_role("button", name="Look up").click()
        assert asked.value.post_data_json == {"namespace_id": SPEC.namespace.hex(), "text": "one two"}
        said(page, "#explored", "and the input has 2")
        page.get_by_label("token ids or keys").check()
        said(page, "#explore-label", "Token ids")

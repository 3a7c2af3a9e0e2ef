"""The web page of the admin server, in a real browser, over a real store under load."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import focused, opened, said, show_all_nodes, show_node
from page_store import BLOCKS, HOSTILE, OTHER, SPEC, TOKENS, Working, browsing, working

from kvstore.embedded.cluster import LocalCluster

IMAGE_AFTER_MS = 60_000
OPERATOR = "operators-token-1-x"
READER = "readers-token-2-xyz"

CONTRAST = """
() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = color.map((one) => one / 255).map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const found = parse(getComputedStyle(one).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.closest("script, style, noscript") || !element.checkVisibility()) continue;
    const pair = [light(parse(getComputedStyle(element).color)), light(ground(element))].sort((one, other) => other - one);
    found.push({ text: walk.currentNode.data.trim().slice(0, 40), ratio: (pair[0] + 0.05) / (pair[1] + 0.05) });
  }
  return found;
}
"""

TROUBLE = """
() => {
  const away = document.querySelector("#away");
  away.hidden = false;
  away.textContent = "away";
  const problem = document.createElement("li");
  problem.textContent = "a problem";
  const problems = document.createElement("ul");
  problems.className = "problems";
  problems.append(problem);
  document.querySelector("#problems").replaceChildren(problems);
  const told = document.querySelector("#told");
  told.textContent = "told";
  document.querySelectorAll(".badge").forEach((badge, at) => { badge.className = `badge ${["bad", "warn", "quiet"][at]}`; });
}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    with working(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as made:
        yield made


@pytest.fixture
def page(browser: Any, store: Working) -> Iterator[Any]:
    with opened(browser, store.http.address) as made:
        made.locator("#nodes tbody tr").first.wait_for()
        yield made


def test_page_is_one_document_without_other_origins(store: Working) -> None:
    answer = store.http.ask("GET", "/")
    document = answer.raw.decode()
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    for name in ("script", "style"):
        (inside,) = re.findall(f"<{name}>(.*?)</{name}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert set(re.findall(r"https?://[^'\"\s]+", document)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b| style=| on[a-z]+=", document)


def test_page_shows_values_of_rest_api(page: Any, store: Working) -> None:
    said(page, "#problems", "No problems: 3 nodes answer")
    assert page.title() == "kvstore"
    nodes = store.http.get("/v1/nodes")["items"]
    assert page.locator("#nodes tbody a").all_text_contents() == [one["node_id"] for one in nodes]
    assert page.locator("#nodes .badge").all_text_contents() == ["active"] * 3
    full = store.http.get("/v1/volumes/host-1/nvme0")
    percent = f"{full['used_bytes'] / full['capacity_bytes'] * 100:.1f} %"
    said(page, "#nodes tbody tr", f"{percent} of {full['capacity_bytes'] >> 20} MiB")
    said(page, "#decisions tbody tr", "host-1 → host-2")
    said(page, "#namespaces tbody tr", SPEC.model)
    page.locator("#slow tbody tr").first.wait_for()
    said(page, "#latency .legend", "p99")
    page.locator("#ratio path[d*='L']").wait_for(state="attached")
    said(page, "#summary", "last 10 s")
    show_node(page, "host-2")
    page.locator("#node .row svg[aria-label*='link of node host-2']:not([aria-label*='in —'])").wait_for()
    show_node(page, "host-1")
    label = page.locator("#node svg[aria-label^='host-1/nvme0']").get_attribute("aria-label")
    assert f"is {percent} full" in label
    local = page.locator("#node svg[aria-label^='loads at node host-1 from local DRAM']")
    page.wait_for_function("label => / [1-9][^ ]* [kMG]?B.s$/.test(label.ariaLabel)", arg=local.element_handle())


def test_page_shows_hints_by_node_and_tenant(page: Any, store: Working) -> None:
    found = {one["node_id"]: one["hints"] for one in store.http.get("/v1/activity")["items"]}
    (mine,) = found["host-1"]
    assert (mine["tenant"], mine["sessions"], mine["keeps"], mine["ends"]) == (SPEC.tenant, 1, 1, 1)
    assert mine["protected_bytes"] >= BLOCKS * SPEC.block_bytes
    assert [one["tenant"] for one in found["host-2"]] == [OTHER.tenant]
    assert found["host-3"] == []
    said(page, "#tenants tbody tr", "1 session, 0 blocks dropped")
    show_node(page, "host-1")
    row = page.locator("#node table[aria-label='hints at node host-1'] tbody tr")
    said(page, "#node table[aria-label='hints at node host-1']", "1 / 1")
    assert row.count() == 1
    show_node(page, "host-3")
    assert page.locator("#node table").count() == 0


def test_page_shows_what_was_read_ahead(page: Any, store: Working) -> None:
    found = {one["node_id"]: one["read_ahead"] for one in store.http.get("/v1/activity")["items"]}
    size = BLOCKS * SPEC.block_bytes
    assert found["host-2"] == {"read_bytes": size, "unused_bytes": size, "refused": 0}
    text = "7.5 MiB were read ahead of loads, 7.5 MiB of them not used."
    said(page, "#decisions", text)
    said(page, "#decisions", "vllm:kvstore_verdict")
    show_node(page, "host-2")
    said(page, "#node", text)
    show_node(page, "host-3")
    assert "read ahead" not in page.locator("#node").text_content()


def test_page_of_large_cluster_counts_nodes_not_shown(page: Any) -> None:
    """The response that the page receives is changed to report a large cluster."""

    def larger(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "known_nodes": 1_103})

    assert "not shown" not in page.locator("#nodes").inner_text()
    page.route("**/v1/overview*", larger)
    said(page, "#nodes", "1,100 nodes are not shown")


def test_page_shows_hostile_names_as_text(page: Any) -> None:
    said(page, "#namespaces tbody tr", HOSTILE)
    assert page.locator("#namespaces img, #namespaces td b b, #explorer img").count() == 0
    row = page.locator("#namespaces tbody tr").filter(has_text=HOSTILE)
    assert OTHER.tenant in row.inner_text()
    row.get_by_role("button", name="Evict").click()
    assert HOSTILE in page.locator("#dialog-title").inner_text()
    said(page, "#dialog-body", "host-2/nvme0")
    assert page.locator("dialog img, dialog b").count() == 0
    assert page.title() == "kvstore"


def test_explorer_shows_hits_and_reasons_of_misses(page: Any, store: Working) -> None:
    page.select_option("#explore-namespace", SPEC.namespace.hex())
    page.fill("#explore-chain", str([*TOKENS.tolist(), *range(100)]))
    page.get_by_role("button", name="Look up").click()
    said(page, "#explored", f"{BLOCKS} of {BLOCKS + 3} blocks hit.")
    hit, *_, missed = page.locator("#explored tbody tr").all_inner_texts()
    assert "host-1/nvme0 (nvme)" in hit
    assert "never stored, or evicted everywhere" in missed
    found = store.http.post("/v1/blocks/lookup", {"namespace_id": SPEC.namespace.hex(), "tokens": TOKENS.tolist()})
    page.fill("#explore-chain", "f" * 32)
    page.get_by_role("button", name="Look up").click()
    said(page, "#explored", "0 of 1 block hits.")
    assert found["hit_blocks"] == BLOCKS
    page.fill("#explore-chain", "1 2 <b>three</b>")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    said(page, "#explore-error", "“<b>three</b>” is neither")
    assert focused(page) == "explore-chain"
    assert page.locator("#explored").inner_text() == ""


def test_drain_is_confirmed_and_cancelled_by_keyboard(page: Any, store: Working) -> None:
    def state() -> str:
        return str(store.http.get("/v1/nodes/host-3")["state"])

    show_node(page, "host-3")
    opener = page.get_by_role("button", name="Drain node host-3 …", exact=True)
    opener.focus()
    page.keyboard.press("Enter")
    said(page, "#dialog-body", "accepts no new blocks")
    stops = []
    for _ in range(4):
        stops.append(focused(page))
        page.keyboard.press("Tab")
    assert stops == ["dialog-move", "dialog-no", "dialog-yes", "dialog-move"], "the focus stays in the dialog"
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="hidden")
    assert focused(page) == "Drain node host-3 …", "and goes back to where it came from"
    assert state() == "active"
    page.keyboard.press("Enter")
    page.locator("#dialog-move:focus").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.locator("#dialog-yes:focus").wait_for()
    assert page.locator("#dialog-yes").inner_text() == "Drain"
    page.keyboard.press("Enter")
    said(page, "#told", "Node host-3 is draining")
    assert state() in ("draining", "drained")
    said(page, "#node article", "drained: may be stopped")
    said(page, "#timeline tbody tr", "host-3")
    assert "node host-3" in focused(page), "the button that stands there now"
    page.get_by_role("button", name="Undrain node host-3 …").click()
    page.locator("#dialog-yes").click()
    said(page, "#told", "accepts new blocks again")
    assert state() == "active"


def test_dialog_opened_right_after_another_stays_open(page: Any) -> None:
    """The browser reports the closing of a dialog one frame later, when the next dialog may be open."""
    show_node(page, "host-3")
    opener = page.get_by_role("button", name="Drain node host-3 …", exact=True)
    opener.click()
    said(page, "#dialog-body", "accepts no new blocks")
    opener.evaluate("""opener => {
      document.querySelector("#dialog").close();
      opener.click();
      return new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)));
    }""")
    assert "accepts no new blocks" in page.locator("#dialog-body").inner_text()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="hidden")


def test_quota_is_set_changed_and_removed(page: Any, store: Working) -> None:
    def quota() -> Any:
        return store.http.get("/v1/tenants/quota?tenant=team-a")["dram_bytes"]

    row = page.locator("#tenants tbody tr").filter(has_text="team-a")
    said(page, "#tenants tbody tr", OTHER.tenant)
    said(page, "#tenants tbody tr", "(default)")
    assert page.locator("#tenants td b").count() == 0, "names stay text"
    page.get_by_role("button", name="Quota for another …").click()
    page.fill("#dialog-tenant", "team-a")
    page.fill("#dialog-dram", "1.5 bananas")
    page.keyboard.press("Enter")
    said(page, "#dialog-error", "“1.5 bananas” is not a size")
    page.fill("#dialog-dram", "1.5 GiB")
    page.keyboard.press("Enter")
    said(page, "#told", "The quota of team-a is set")
    assert quota() == 3 << 29
    said(page, "#tenants tbody tr", "0 B of 1.5 GiB")
    page.get_by_role("button", name="Quota for another …").click()
    page.fill("#dialog-tenant", "team-a")
    page.fill("#dialog-dram", "7 GiB")
    page.locator("#dialog-yes").click()
    said(page, "#dialog-error", "it has a quota already")
    said(page, "#dialog-body", "Now: in DRAM 1.5 GiB at most, on volumes no limit.")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Quota of team-a …", exact=True).click()
    said(page, "#dialog-body", "Now: in DRAM 1.5 GiB at most, on volumes no limit.")
    assert page.input_value("#dialog-dram") == "1536 MiB"
    page.fill("#dialog-dram", "1 GiB")
    page.locator("#dialog-yes").click()
    said(page, "#tenants tbody tr", "0 B of 1.0 GiB")  # the message "is set" is still there from before
    assert quota() == 1 << 30
    page.get_by_role("button", name="Remove the quota of team-a …").click()
    said(page, "#dialog-body", "Now: in DRAM 1.0 GiB at most")
    page.locator("#dialog-yes").click()
    said(page, "#told", "team-a has no quota now")
    assert quota() is None
    row.wait_for(state="hidden")


def test_evictions_show_their_effect(page: Any, store: Working) -> None:
    show_node(page, "host-2")
    page.get_by_role("button", name="Evict from host-2/nvme0 …").click()
    assert "engines compute them again" in page.locator("#dialog-body").inner_text()
    page.fill("#dialog-percent", "101")
    page.locator("#dialog-yes").click()
    assert page.locator("dialog").is_visible(), "no such fill"
    page.fill("#dialog-percent", "100")
    page.locator("#dialog-yes").click()
    said(page, "#told", "0 blocks evicted from host-2/nvme0")
    show_all_nodes(page)
    page.locator("#namespaces tr").filter(has_text=HOSTILE).get_by_role("button", name="Evict").click()
    page.get_by_label("from DRAM of all nodes").uncheck()
    page.get_by_label("from volumes of all nodes").uncheck()
    page.locator("#dialog-yes").click()
    said(page, "#dialog-error", "choose DRAM, volumes or both")
    page.get_by_label("from volumes of all nodes").check()
    page.locator("#dialog-yes").click()
    said(page, "#told", "4 blocks evicted")
    assert "nvme" not in {one["tier"] for one in store.http.get(f"/v1/namespaces/{OTHER.namespace.hex()}/usage")["tiers"]}


def test_namespace_rule_is_shown_and_set(page: Any, store: Working) -> None:
    path = f"/v1/namespaces/{OTHER.namespace.hex()}"
    row = page.locator("#namespaces tbody tr").filter(has_text=HOSTILE)
    row.get_by_role("button", name="time to live").click()
    said(page, "#dialog-body", "Now: its blocks are evicted when space is needed.")
    page.fill("#dialog-ttl", "soon")
    page.check("#dialog-keep")
    page.check("#dialog-twice")
    page.locator("#dialog-yes").click()
    said(page, "#dialog-error", "“soon” is not a duration")
    page.fill("#dialog-ttl", "36 h")
    page.locator("#dialog-yes").click()
    said(page, "#told", "Retention of")
    rule = store.http.get(path)
    assert (rule["ttl_s"], rule["kept"], rule["copies"]) == (36 * 3600, True, 2)
    row.get_by_text("36 h after its last use").wait_for()
    row.get_by_text("kept", exact=True).wait_for()
    row.get_by_text("2 copies", exact=True).wait_for()
    row.get_by_role("button", name="Evict").click()
    said(page, "#dialog-body", "A kept namespace is not evicted")
    assert not page.locator("#dialog-yes").is_visible()
    page.keyboard.press("Escape")
    row.get_by_role("button", name="time to live").click()
    said(page, "#dialog-body", "Now: kept; two copies")
    assert page.input_value("#dialog-ttl") == "36 h"
    page.fill("#dialog-ttl", "")
    page.uncheck("#dialog-keep")
    page.locator("#dialog-yes").click()
    row.get_by_text("kept").wait_for(state="hidden")
    assert store.http.get(path)["ttl_s"] is None


def test_invalidate_requires_typed_namespace_id(page: Any, store: Working) -> None:
    namespace = OTHER.namespace.hex()
    page.locator("#namespaces tbody tr").filter(has_text=HOSTILE).get_by_role("button", name="Invalidate").click()
    assert page.locator("#dialog-yes").is_disabled()
    page.fill("#dialog-typed", namespace[:7])
    page.keyboard.press("Enter")
    assert page.locator("#dialog-yes").is_disabled()
    page.fill("#dialog-typed", namespace[:8])
    partly = {"complete": False, "evicted_blocks": 2, "kept_blocks": 0, "unreached": [{"node_id": "host-3", "detail": "silent"}]}
    page.route("**/invalidate", lambda route: route.fulfill(json=partly))
    page.locator("#dialog-yes").click()
    said(page, "#dialog-error", "Partly done: 2 blocks were dropped; not reached: host-3 (silent). Repeat it")
    page.unroute("**/invalidate")
    page.locator("#dialog-yes").click()
    said(page, "#told", "has no blocks now")
    assert store.http.get(f"/v1/namespaces/{namespace}/usage")["tiers"] == []


def test_volume_check_progress_is_shown_and_cancelled(browser: Any, page: Any, store: Working) -> None:
    check = "/v1/volumes/host-1/nvme0/check"
    show_node(page, "host-1")
    page.get_by_role("button", name="Check host-1/nvme0 …").click()
    said(page, "#dialog-body", "No check was started since its node started.")
    page.fill("#dialog-speed", "1")
    page.locator("#dialog-yes").click()
    said(page, "#told", "The check of host-1/nvme0 has started")
    said(page, "#node .check", "of 240 blocks, none bad so far")
    with opened(browser, store.http.address) as other:
        show_node(other, "host-1")
        said(other, "#node .check", "check running")  # a page that is opened later shows it too
    page.get_by_role("button", name="Check host-1/nvme0 …").click()
    said(page, "#dialog-body", "Check running")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Cancel the check of host-1/nvme0 …").click()
    page.locator("#dialog-yes").click()
    said(page, "#node .check", "check cancelled at")
    assert store.http.get(check)["state"] == "cancelled"
    page.get_by_role("button", name="Check host-1/nvme0 …").click()
    said(page, "#dialog-body", "Check cancelled at")
    page.locator("#dialog-yes").click()
    said(page, "#node .check", "240 blocks, none bad.")
    assert store.http.get(check)["good_blocks"] == 240


def test_path_policy_traffic_cap_and_index_are_changed(page: Any, store: Working) -> None:
    page.get_by_role("button", name="Path policy …").click()
    said(page, "#dialog-body", "Now: split.")
    page.select_option("#dialog-policy", "prefill_only")
    page.locator("#dialog-yes").click()
    said(page, "#told", "Path policy: prefill only.")
    said(page, "#summary", "prefill only")
    assert store.http.get("/v1/path-policy")["policy"] == "prefill_only"
    store.http.put("/v1/path-policy", {"policy": "split"}, if_match="*")
    show_node(page, "host-3")
    page.get_by_role("button", name="Traffic cap of node host-3 …").click()
    said(page, "#dialog-body", "Now: at most 9.0 GB/s.")
    assert page.input_value("#dialog-cap") == "9000 MB"
    page.fill("#dialog-cap", "2.5GB")
    page.locator("#dialog-yes").click()
    said(page, "#told", "KV traffic of node host-3: at most 2.5 GB/s.")
    assert store.http.get("/v1/nodes/host-3/traffic-cap")["bytes_per_s"] == 2_500_000_000
    page.get_by_role("button", name="Check the index of node host-3 …").click()
    page.locator("#dialog-yes").click()
    said(page, "#told", "The index ")
    with page.expect_request("**/v1/index/rebuild") as asked:
        page.route("**/v1/index/rebuild", lambda route: route.fulfill(json={"dropped_epoch": "0" * 32}))
        show_all_nodes(page)
        page.get_by_role("button", name="Rebuild the index …").click()
        said(page, "#dialog-body", "Now: ")
        assert page.locator("#dialog-yes").is_disabled()
        page.fill("#dialog-typed", "rebuild")
        page.locator("#dialog-yes").click()
        said(page, "#told", "The index is being rebuilt")
    assert asked.value.headers["if-match"] == f'"{store.http.get("/v1/index")["epoch"]}"'


def test_dialog_shows_rejected_and_conflicting_changes(browser: Any, store: Working) -> None:
    quota = "/v1/tenants/quota?tenant=team-b"
    store.http.put(quota, {"dram_bytes": 3 << 30}, if_match="*")
    with opened(browser, store.http.address, quietly=False) as page:  # browsers log an error for every 409 and 412
        show_node(page, "host-1")
        page.get_by_role("button", name="Traffic cap of node host-1 …").click()
        said(page, "#dialog-error", "this node was started without a cap")
        assert page.locator("#dialog-yes").is_disabled()
        page.keyboard.press("Escape")
        show_all_nodes(page)
        page.get_by_role("button", name="Remove the quota of team-b …").click()
        said(page, "#dialog-body", "Now: in DRAM 3.0 GiB at most")
        store.http.put(quota, {"dram_bytes": 2 << 30}, if_match="*")  # another operator
        page.locator("#dialog-yes").click()
        said(page, "#dialog-error", "another operator changed it")
        said(page, "#dialog-body", "Now: in DRAM 2.0 GiB at most")
        assert store.http.get(quota)["dram_bytes"] == 2 << 30
        page.locator("#dialog-yes").click()
        said(page, "#told", "team-b has no quota now")


def test_page_keyboard_reaches_every_control(page: Any) -> None:
    """The page refreshes every two seconds during the test."""
    walked = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        ring = "(e => [e.matches(':focus-visible'), getComputedStyle(e).outlineStyle, e.getBoundingClientRect().width > 0])"
        assert page.evaluate(f"{ring}(document.activeElement)") == [True, "solid", True], focused(page)
        walked.append(focused(page))
    reachable = page.locator("a[href]:visible, .skip, button:visible, main input:visible, main select, main textarea").count()
    assert len(walked) == len(set(walked)) == reachable
    assert walked[0] == "Skip to content"
    unnamed = "e => [...document.querySelectorAll('button, svg[role=img], section')].filter(one => !one.closest('dialog') &&"
    unnamed += " !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.textContent.trim())).length"
    assert page.evaluate(unnamed) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_contrast_is_sufficient(browser: Any, store: Working, scheme: str) -> None:
    with opened(browser, store.http.address, color_scheme=scheme) as page:
        page.locator("#slow tbody tr").first.wait_for()
        texts = page.evaluate(CONTRAST)
        show_node(page, "host-1")
        texts += page.evaluate(CONTRAST)
        page.get_by_role("button", name="Drain node host-1 …").click()
        texts += page.evaluate(CONTRAST)
        # also the elements that are shown only if something is wrong
        page.evaluate(TROUBLE)
        texts += page.evaluate(CONTRAST)
        grounds = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert len(texts) > 200
    assert [one for one in texts if one["ratio"] < 4.5] == []
    assert grounds == {"light": "rgb(245, 246, 248)", "dark": "rgb(14, 17, 22)"}[scheme]


def test_page_on_phone_does_not_overflow(browser: Any, store: Working) -> None:
    with opened(browser, store.http.address, viewport={"width": 360, "height": 740}) as page:
        page.locator("#slow tbody tr").first.wait_for()
        page.select_option("#explore-namespace", SPEC.namespace.hex())
        page.fill("#explore-chain", " ".join(map(str, TOKENS.tolist())))
        page.get_by_role("button", name="Look up").click()
        said(page, "#explored", "blocks hit.")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.locator("[data-do=evict-namespace]").first.click()
        said(page, "#dialog-body", "host-")
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert page.locator("dialog").evaluate("e => e.scrollWidth <= e.clientWidth")
        for opener in ("quota", "rule", "invalidate", "path-policy", "check"):
            page.keyboard.press("Escape")
            if opener == "check":
                show_node(page, "host-1")
                assert page.evaluate("document.documentElement.scrollWidth") == 360
            page.locator(f"[data-do={opener}]").first.click()
            assert page.locator("dialog").evaluate("e => e.scrollWidth <= e.clientWidth"), opener


def test_page_asks_for_token_and_uses_it(browser: Any, store: Working, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"operator alice {OPERATOR}\nread bob {READER}\n")
    file.chmod(0o600)
    beside = LocalCluster([], tmp_path / "admin")  # only a second admin server is started
    try:
        settings = {"metadata": store.cluster.metadata_address, "tokens_file": str(file)}
        address = beside.start_admin(*settings.items()).address
        with opened(browser, address, quietly=False) as page:  # browsers log an error for every 401
            said(page, "#dialog-title", "A token is required")
            assert "Authorization" not in page.locator("body").inner_text()
            page.fill("#dialog-token", "nobodys-token-3-xyz")
            page.keyboard.press("Enter")
            said(page, "#dialog-error", "the token is not known to this server")
            page.fill("#dialog-token", READER)
            page.keyboard.press("Enter")
            said(page, "#problems", "3 nodes answer")
            assert page.evaluate("localStorage.length") == 0
            assert READER not in page.content()
            page.reload()
            said(page, "#fresh", "role read: changes require operator")
            cluster = ["Quota of (default) …", "Quota for another …", "Rebuild the index …", "Path policy …"]
            for view, names in {"": cluster, "host-1": ["Drain node host-1 …", "Evict from host-1/nvme0 …"]}.items():
                if view:
                    show_node(page, view)
                for name in names:
                    button = page.get_by_role("button", name=name, exact=True)
                    assert button.is_disabled(), name
                    assert button.get_attribute("title") == "requires the role operator; this token has the role read"
            changing = page.locator(
                "[data-do]:not([data-do=usage], [data-do=token], [data-do=again], [data-do=sort], [data-do=page])"
            )
            assert changing.count() > 15
            assert all(one.is_disabled() for one in changing.all()), "whatever changes something"
            assert page.locator("[data-do=usage]").first.is_enabled()
            page.get_by_role("button", name="Token …").click()
            page.fill("#dialog-token", OPERATOR)
            page.locator("#dialog-yes").click()
            page.locator("dialog").wait_for(state="hidden")
            page.get_by_role("button", name="Evict from host-1/nvme0 …").click()
            page.fill("#dialog-percent", "100")
            page.locator("#dialog-yes").click()
            said(page, "#told", "0 blocks evicted from host-1/nvme0")
    finally:
        beside.close()


def test_images_for_the_readme(browser: Any, store: Working, pytestconfig: pytest.Config) -> None:
    folder: Path | None = pytestconfig.getoption("--page-images")
    if folder is None:
        pytest.skip("images are made where --page-images says a folder")
    wide = {"width": 1280, "height": 1150}
    views: dict[str, tuple[str, dict[str, Any]]] = {
        "page-light": ("", {"color_scheme": "light", "viewport": wide}),
        "page-dark": ("", {"color_scheme": "dark", "viewport": wide}),
        "page-node": ("host-1", {"color_scheme": "light", "viewport": wide}),
    }
    for position, (name, (node, how)) in enumerate(views.items()):
        with opened(browser, store.http.address, **how) as page:
            page.locator("#slow tbody tr").first.wait_for()
            if node:
                show_node(page, node)
            page.wait_for_timeout(IMAGE_AFTER_MS if position == 0 else 8_000)
            page.screenshot(path=folder / f"{name}.png")
            assert (folder / f"{name}.png").stat().st_size < 200_000


def test_page_admin_server_down_is_shown_and_retried(browser: Any, store: Working) -> None:
    """Must run after the other tests, because it stops the admin server."""
    with opened(browser, store.http.address, quietly=False) as page:
        said(page, "#problems", "No problems")
        store.rest()
        store.cluster.stop("admin")
        said(page, "#away", "The admin server does not answer since")
        said(page, "#away", "The next attempt is in 8 s")
        assert "Figures below are of" in page.locator("#away").inner_text()
        assert page.locator("#nodes tbody tr").count() == 3, "the last state is still shown"
        store.cluster.start_admin(("listen", store.http.address))
        page.get_by_role("button", name="Try now").click()
        page.locator("#away").wait_for(state="hidden")
        said(page, "#problems", "No problems: 3 nodes answer")


def test_page_metadata_server_down_shows_consequences(browser: Any, store: Working) -> None:
    """Must run after all others, when the loads have ended."""
    with opened(browser, store.http.address, quietly=False) as page:
        said(page, "#nodes .badge", "active")
        address = store.cluster.metadata_address
        store.cluster.kill("metadata")
        said(page, "#away", f"The metadata server ({address}) does not answer since")
        said(
            page,
            "#away",
            "connection refused. Lookups find nothing until it answers: engines compute their prompts. Stores continue,"
            " and no stored block is lost.",
        )
        said(page, "#away", "Restart it: its index survives. Figures below are of")
        assert "UNKNOWN" not in page.locator("body").inner_text(), "nothing of gRPC's own words"
        assert page.locator(".badge.ok").count() == 0, "nobody knows who is alive"
        assert page.locator("#nodes .badge").all_inner_texts() == ["state not known"] * 3
        said(page, "#nodes .note", "Figures of")
        store.cluster.start_metadata()
        page.get_by_role("button", name="Try now").click()
        page.locator("#away").wait_for(state="hidden")
        said(page, "#nodes .badge", "active")

"""The dashboard in a headless Chromium: what it shows under load, a request's waterfall, a tree, a chat.

It runs in an environment of its own, with playwright.
"""

from __future__ import annotations

import argparse

from playwright.sync_api import Page, expect, sync_playwright

_WAIT_MS = 30_000


def main() -> None:
    """Fails with an AssertionError."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--admin", required=True, help="URL of the admin listener")
    parser.add_argument("--api", required=True, help="URL of the API")
    parser.add_argument("--chromium", required=True)
    parser.add_argument("--picture", help="PNG to write")
    options = parser.parse_args()
    expect.set_options(timeout=_WAIT_MS)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=options.chromium, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 1600})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(options.admin)
        check_fleet(page)
        check_request(page)
        check_tree(page)
        check_chat(page, options.api)
        if options.picture:
            page.screenshot(path=options.picture, full_page=True)
        browser.close()
    assert not faults, faults


def check_fleet(page: Page) -> None:
    """Figures of the load, workers of both roles with their pages, and KV that moves."""
    tiles = page.locator(".tile")
    rate = tiles.filter(has_text="output tokens/s").locator("b")
    expect(rate).not_to_have_text("–")
    assert float(rate.inner_text().replace(",", "")) > 0
    for name in ("TTFT p50", "ITL p95"):
        expect(tiles.filter(has_text=name).locator("b")).to_contain_text("s")
    for role in ("prefill", "decode"):
        row = page.locator("#workers tr", has=page.locator(f".role.{role}")).first
        expect(row.locator("svg.kv").first).to_be_visible()
    expect(page.locator("#flows path.flow").first).to_be_attached()  # a level line is not "visible"
    expect(page.locator("#chart-tokens path")).to_have_count(1)


def check_request(page: Page) -> None:
    """A click on a request shows its stages on router, prefill and decode."""
    page.locator("#requests tr[data-id]").last.click()
    for stage in ("tokenize", "prefill_forward", "decode_loop"):
        expect(page.locator("#waterfall text", has_text=stage).first).to_be_visible()


def check_tree(page: Page) -> None:
    """The nodes of a worker's tree."""
    page.click("#tree-load")
    expect(page.locator("#tree rect").first).to_be_visible()
    expect(page.locator("#tree-summary")).to_contain_text("nodes")


def check_chat(page: Page, api: str) -> None:
    """An answer of the API at another port, with the workers that gave it."""
    page.fill("#api", api)
    page.click("#chat-send")
    expect(page.locator("#chat-facts")).to_contain_text("prefill on")
    assert page.inner_text("#chat-answer").strip()


main()

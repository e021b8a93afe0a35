"""The documentation site, as `make docs` builds it, opened from the disk in a real browser."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_every_page_is_in_the_navigation_once(repository: Path) -> None:
    named = re.findall(r"^ +- docs/(\S+)\.md$", (repository / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = repository / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs).with_suffix("")) for page in (*docs.glob("*.md"), *docs.glob("decisions/*.md")))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed")
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="zensical is not installed: make install")
def test_the_site_builds_without_a_warning_and_every_link_in_it_leads_somewhere(repository: Path, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    shutil.copy(repository / "mkdocs.yml", tmp_path)
    (tmp_path / ".package").symlink_to(repository / ".package")
    for command in ([repository / "docs" / "reference.py", "build/pages"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "build" / "site" / "index.html").as_uri()
    anchors, links, failed = dict[str, set[str]](), set[tuple[str, str]](), list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page()
        # A page that is left before its icon has been read aborts that request
        page.on("requestfailed", lambda request: failed.append(request.url) if request.failure != "net::ERR_ABORTED" else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.on("request", lambda request: failed.append(request.url) if request.url.startswith("http") else None)
        left = [first]
        while left:
            here = left.pop()
            page.goto(here)
            anchors[here] = set(page.locator("[id]").evaluate_all("all => all.map(one => one.id)"))
            for href in page.locator("a[href]").evaluate_all("all => all.map(one => one.href)"):
                target = urldefrag(href)[0]
                if target.startswith("file:"):
                    links.add((here, href))
                    if target.endswith(".html") and target not in {*anchors, *left} and Path(unquote(target.removeprefix("file://"))).exists():
                        left.append(target)
        page.goto(first)
        page.locator(".md-search__button").click()
        page.get_by_role("combobox", name="Search").fill("topk_candidates")
        page.get_by_role("listbox").locator("a[href*='groups/model.html']").first.wait_for()
        browser.close()
    lost = {
        (here.rpartition("/")[2], href)
        for here, href in links
        for target, anchor in [urldefrag(href)]
        if not Path(unquote(target.removeprefix("file://"))).exists() or (anchor and target in anchors and unquote(anchor) not in anchors[target])
    }
    assert lost == set()
    assert failed == []
    assert {page.with_suffix(".html").name for page in (repository / "docs").glob("*.md")} <= {here.rpartition("/")[2] for here in anchors}
    assert len(links) > 1000

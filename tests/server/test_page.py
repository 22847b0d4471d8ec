"""The page at /, in a real browser without a window, used by keyboard alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import httpx
import pytest

import sglite as sgl
from sglite.lang.waiting import background
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import EOS, scripted_engine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium with its driver here: install the packages chromium, chromium-driver"
)


ANSWER = b'{"name": "Ada"}'


def ada(history: list[int]) -> int:
    """The same answer after every line's end, then the end."""
    start = max((i for i, token in enumerate(history) if token == ord("\n")), default=-1)
    at = len(history) - 1 - start
    return ANSWER[at] if at < len(ANSWER) else EOS


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_engine(ada, context_length=2048) as engine, running(engine, ServerConfig(port=0)) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install 'sglite[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1200,1600",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, url: str):
    browser.get(url)
    wait(browser, lambda: text(browser, "state") == "ready")
    yield browser
    wrong = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not wrong


def wait(browser, condition) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30, poll_frequency=0.05).until(lambda _: condition())


def text(browser, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def press(browser, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def tab_to(browser, name: str) -> None:
    """Press Tab until the element has the focus."""
    from selenium.webdriver.common.keys import Keys

    for _ in range(60):
        if browser.execute_script("return document.activeElement.id || document.activeElement.textContent") == name:
            return
        press(browser, Keys.TAB)
    raise AssertionError(f"{name} cannot be reached by keyboard")


def ask(browser, prompt: str, schema: str = "") -> None:
    from selenium.webdriver.common.keys import Keys

    tab_to(browser, "prompt")
    press(browser, prompt)
    tab_to(browser, "schema")
    press(browser, schema)
    tab_to(browser, "run")
    press(browser, Keys.ENTER)


@needs_browser
@pytest.mark.timeout(180)
class TestPage:
    def test_it_shows_the_model_and_live_metrics(self, page) -> None:
        assert text(page, "model") == "scripted"
        wait(page, lambda: "KV pool used" in text(page, "metrics"))

    def test_everything_that_takes_input_has_a_label(self, page) -> None:
        unlabelled = """return [...document.querySelectorAll('input, textarea, select')]
            .filter(e => !e.labels.length).map(e => e.id)"""
        assert page.execute_script(unlabelled) == []
        assert page.execute_script("return document.documentElement.lang") == "en"

    def test_a_streamed_answer_and_its_trace_by_keyboard(self, page) -> None:
        from selenium.webdriver.common.keys import Keys

        ask(page, "who?")
        wait(page, lambda: text(page, "answer") == '{"name": "Ada"}')
        wait(page, lambda: "new" in text(page, "usage"))
        wait(page, lambda: "chatcmpl" in text(page, "programs"))
        name = page.execute_script("return document.querySelector('#programs button').textContent")
        tab_to(page, name)
        press(page, Keys.ENTER)
        wait(page, lambda: "gen:" in text(page, "tree"))
        assert "sampled" in text(page, "tree")

    def test_an_answer_under_a_schema(self, page) -> None:
        ask(page, "who?", SCHEMA)
        wait(page, lambda: text(page, "answer").replace(" ", "") == '{"name":"Ada"}')

    def test_a_schema_that_is_no_json_is_told(self, page) -> None:
        ask(page, "who?", "{nope")
        wait(page, lambda: "not JSON" in text(page, "problem"))

    def test_a_schema_that_cannot_be_served_is_told(self, page) -> None:
        ask(page, "who?", '{"type": "banana"}')
        wait(page, lambda: "banana" in text(page, "problem"))
        assert [entry["message"] for entry in page.get_log("browser") if "400" not in entry["message"]] == []

    def test_a_program_as_tree_and_timeline(self, page, url: str) -> None:
        from selenium.webdriver.common.keys import Keys

        @sgl.function
        def program(s):
            s += "a long beginning that is shared by all:\n" + sgl.gen("x", max_tokens=8)
            branches = s.fork(2)
            for branch in branches:
                branch += "more:" + sgl.gen("y", regex="[a-c]{2}forced", max_tokens=20)
            branches.join()
            s += sgl.gen("z", max_tokens=4)

        endpoint = sgl.RuntimeEndpoint(url)
        program.run(backend=endpoint).text()
        asyncio.run_coroutine_threadsafe(endpoint.aclose(), background().loop).result()
        tab_to(page, "refresh")
        press(page, Keys.ENTER)
        wait(page, lambda: "4 calls, 3 branches" in text(page, "programs"))
        page.execute_script("""[...document.querySelectorAll('#programs li')]
            .find(e => e.textContent.includes('4 calls')).querySelector('button').focus()""")
        press(page, Keys.ENTER)
        wait(page, lambda: "branch 1" in text(page, "tree"))
        drawn = "return document.querySelectorAll(`#timeline rect.${arguments[0]}`).length"
        for kind in ("cached", "computed", "forced", "sampled"):
            assert page.execute_script(drawn, kind) > 0, kind
        assert page.execute_script("return document.activeElement.id") == "trace-title"


def test_the_page_runs_nothing_but_its_own_files(url: str) -> None:
    response = httpx.get(url)
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert "<script>" not in response.text
    assert "style=" not in response.text


def test_programs_of_one_key_are_not_anothers() -> None:
    with scripted_engine() as engine, running(engine, ServerConfig(port=0, api_keys=("k1", "k2"))) as url:
        keys = [{"authorization": f"Bearer {key}"} for key in ("k1", "k2")]
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=keys[0]).status_code == 200
        own, others = (httpx.get(f"{url}/v1/sglite/programs", headers=h).json()["data"] for h in keys)
        assert (len(own), others) == (1, [])
        path = f"{url}/v1/sglite/programs/{own[0]['program']}"
        assert [httpx.get(path, headers=h).status_code for h in keys] == [200, 404]


def test_with_keys_a_browser_is_asked_for_one() -> None:
    with scripted_engine() as engine, running(engine, ServerConfig(port=0, api_keys=("k1",))) as url:
        refused = httpx.get(url)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert httpx.get(url, auth=("any", "k1")).status_code == 200
        assert httpx.get(url, auth=("any", "wrong")).status_code == 401
        assert httpx.get(f"{url}/v1/models", auth=("any", "k1")).status_code == 401  # only the page's own files

//! The report in a real browser: headless Chromium, driven over WebDriver.
//!
//! Needs `chromedriver` and `chromium` on the path. Without them the tests here say so and pass, unless `RIGHT_RESET_BROWSER` is set, as it is in CI.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::tool::{Place, json_lines, prose};

struct Browser {
    driver: Child,
    session: String,
}

impl Browser {
    #[allow(clippy::print_stdout)]
    fn start() -> Option<Self> {
        let driver = Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let Ok(mut driver) = driver else {
            assert!(std::env::var_os("RIGHT_RESET_BROWSER").is_none(), "RIGHT_RESET_BROWSER is set, but there is no chromedriver");
            println!("skipped: there is no chromedriver on the path (Debian: chromium-driver)");
            return None;
        };
        let lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines
            .map_while(Result::ok)
            .find_map(|line| line.split_once("started successfully on port ").map(|(_, rest)| rest.trim_end_matches('.').to_owned()))
            .expect("a port");
        let mut browser = Self { driver, session: format!("http://127.0.0.1:{port}/session") };
        let options =
            json!({ "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=800,900"] });
        let asked = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let made = browser.post("", &asked);
        browser.session = format!("{}/{}", browser.session, made["sessionId"].as_str().unwrap());
        Some(browser)
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut answer = agent.post(format!("{}{path}", self.session)).content_type("application/json").send(body.to_string()).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!(value["value"]["error"].is_null(), "{path}: {text}");
        value["value"].clone()
    }

    fn open(&self, place: &Place, file: &str) {
        self.post("/url", &json!({ "url": format!("file://{}", place.path(file).display()) }));
    }

    /// What a script gives, once the page has drawn what it does.
    fn run(&self, script: &str) -> Value {
        let drawn =
            format!("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done((() => {{ {script} }})())));");
        self.post("/execute/async", &json!({ "script": drawn, "args": [] }))
    }

    /// Presses a key on an element.
    fn press(&self, selector: &str, key: &str) {
        let found = self.post("/element", &json!({ "using": "css selector", "value": selector }));
        let id = found.as_object().unwrap().values().next().unwrap().as_str().unwrap().to_owned();
        self.post(&format!("/element/{id}/value"), &json!({ "text": key }));
    }

    /// Moves the slider, and gives the tokens at which the page then cuts.
    fn cuts_at(&self, penalty: f64) -> String {
        self.run(&format!("slider.value = {penalty}; slider.dispatchEvent(new Event('input')); return null;"));
        self.run("return document.getElementById('facts').dataset.cuts;").as_str().unwrap().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        // The driver ends its browser with the session; both end with the test.
        let _ = agent.delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// The tokens at which the library cuts each document.
fn library(place: &Place, settings: &[&str], penalty: f64) -> Vec<String> {
    let penalty = format!("segment.penalty={penalty:?}");
    let run = place.tool(&[&["run", "p.toml", "--output", "-", "--set", &penalty], settings].concat()).ok();
    let mut found: Vec<Vec<String>> = Vec::new();
    for row in json_lines(&run.stdout) {
        match row["chunk_index"].as_i64() {
            Some(0) => found.push(Vec::new()),
            _ => found.last_mut().unwrap().push(row["token_start"].to_string()),
        }
    }
    found.into_iter().map(|cuts| cuts.join(",")).collect()
}

#[test]
fn the_slider_cuts_as_the_library_does() {
    let Some(browser) = Browser::start() else { return };
    let place = Place::new();
    let mut texts: Vec<String> = prose(40, 40).into_iter().filter(|t| t.len() > 700).take(5).collect();
    // Nothing that the program could cut within its limits, and scripts without spaces.
    texts.push("x".repeat(3000));
    texts.push("川は流れる。橋の下で魚が待つ。".repeat(40));
    place.documents("in/a.jsonl", &texts);
    let damage = [
        "--set",
        "score.readouts=[\"lr\"]",
        "--set",
        "score.stages=[[8, 0.6], [16, 0.4], [32]]",
        "--set",
        "segment.objective=\"chunk_damage\"",
    ];
    for (settings, penalties) in [(&[][..], [0.5, 0.735, 0.9, 1.1]), (&damage[..], [2.0, 10.5, 22.0, 60.0])] {
        let own = format!("segment.penalty={:?}", penalties[1] + 0.001);
        let view = [&["view", "p.toml", "--output", "report.html", "--set", &own], settings].concat();
        place.tool(&view).ok();
        browser.open(&place, "report.html");
        // The report's own penalty lies between the slider's steps.
        let expected = library(&place, settings, penalties[1] + 0.001);
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(
                &browser.run(&format!("go({i}); return document.getElementById('facts').dataset.cuts;")),
                expected,
                "{settings:?}, document {i}"
            );
        }
        for penalty in penalties {
            let expected = library(&place, settings, penalty);
            assert!(expected.iter().any(|cuts| cuts.contains(',')), "some document has several cuts");
            let mut chunks = 0;
            for (i, expected) in expected.iter().enumerate() {
                browser.run(&format!("go({i});"));
                assert_eq!(&browser.cuts_at(penalty), expected, "{settings:?}, document {i} at {penalty}");
                chunks += expected.split(',').filter(|c| !c.is_empty()).count() + 1;
            }
            let all = browser.run("go(-1); return document.getElementById('facts').dataset.chunks;");
            assert_eq!(all, chunks.to_string(), "of all documents at {penalty}");
        }
    }
}

#[test]
fn any_text_is_text_and_keys_lead_from_document_to_document() {
    let Some(browser) = Browser::start() else { return };
    let place = Place::new();
    let hostile = "</script><img src=x onerror=\"window.hurt=1\"><!-- \u{202e}abc\u{2028} &amp; <b>bold</b> 👩‍👩‍👧 \u{0} {{data}} ";
    let texts = [hostile.repeat(30), prose(9, 40).into_iter().max_by_key(String::len).unwrap()];
    place.documents("in/a.jsonl", &texts);
    place.tool(&["view", "p.toml", "--output", "report.html"]).ok();
    browser.open(&place, "report.html");
    assert_eq!(browser.run("return document.querySelectorAll('table tbody tr').length;"), 2);
    browser.press("body", "\u{e014}"); // right arrow
    let text = "[...document.querySelectorAll('.chunk')].map((c) => c.lastChild.data).join('')";
    assert_eq!(browser.run(&format!("return {text};")), texts[0]);
    assert_eq!(browser.run("return [window.hurt, document.querySelectorAll('img, b, main script').length];"), json!([null, 0]));
    browser.press("body", "j");
    assert_eq!(browser.run(&format!("return {text};")), texts[1]);
    assert_eq!(browser.run("return [document.getElementById('next').disabled, location.hash];"), json!([true, "#1"]));
    // A real key on the slider is a step.
    let before = browser.run("return slider.value;");
    browser.press("#penalty", "\u{e014}");
    assert_ne!(browser.run("return slider.value;"), before);
    browser.press("body", "k");
    browser.press("body", "\u{e011}"); // home
    assert_eq!(browser.run("return document.querySelectorAll('canvas').length;"), 3);
    let wide = browser.run("return document.documentElement.scrollWidth <= window.innerWidth;");
    assert_eq!(wide, true, "nothing sticks out");
    // Chunks that a run has written, without a pipeline.
    place.run(&[]).ok();
    place.tool(&["view", "out", "--output", "chunks.html"]).ok();
    browser.open(&place, "chunks.html");
    assert_eq!(browser.run(&format!("go(0); return {text};")), texts[0]);
    let count = place.chunks("out").iter().filter(|c| c["doc_id"] == "a.jsonl#0").count();
    assert_eq!(browser.run("return document.getElementById('facts').dataset.chunks;"), count.to_string());
}

#[test]
fn a_document_of_100_000_tokens_is_cut_anew() {
    let Some(browser) = Browser::start() else { return };
    let place = Place::new();
    let text = prose(4000, 9).join(" ");
    place.documents("in/a.jsonl", &[text]);
    let settings = ["--set", "score.context=128"];
    place.tool(&[&["view", "p.toml", "--output", "report.html"], &settings[..]].concat()).ok();
    browser.open(&place, "report.html");
    assert!(browser.run("return documents[0].tokens;").as_u64().unwrap() >= 100_000);
    browser.run("go(0);");
    // Its curve is shown in parts that can be told apart, and stays where it was when the document is cut anew.
    let parts = browser.run("return [document.querySelectorAll('.strips canvas').length, Math.ceil(documents[0].tokens / 4000)];");
    assert_eq!(parts[0], parts[1]);
    browser.run("document.querySelector('.strips').scrollLeft = 2000;");
    assert_eq!(browser.cuts_at(0.9), library(&place, &settings, 0.9)[0]);
    assert_eq!(browser.run("return document.querySelector('.strips').scrollLeft;"), 2000);
}

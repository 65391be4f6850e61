//! Fetching from a hub: a server on loopback with the hub's layout, and what can go wrong on the way.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::json;

use crate::tool::{Place, prose, root};

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server misbehaves.
#[derive(Default, Clone)]
struct Faults {
    /// Connections to the weights that break halfway.
    breaks: usize,
    /// Wants this token.
    token: Option<&'static str>,
    /// Lists another size of the weights than it gives.
    wrong_size: bool,
    /// Lists another SHA-256.
    wrong_hash: bool,
}

struct Hub {
    endpoint: String,
    faults: Arc<Mutex<Faults>>,
    seen: Arc<Log>,
}

impl Hub {
    fn start(faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let mut files: BTreeMap<String, Vec<u8>> = ["config.json", "tokenizer.json", "model.safetensors"]
            .map(|name| (name.to_owned(), std::fs::read(root().join("tests/tiny").join(name)).unwrap()))
            .into();
        files.insert("1_Pooling/config.json".into(), b"{\"pooling_mode\": \"cls\"}".to_vec());
        let (faults, seen) = (Arc::new(Mutex::new(faults)), Arc::new(Mutex::new(Vec::new())));
        let (shared, log, own) = (Arc::clone(&faults), Arc::clone(&seen), endpoint.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // A client that went away is what these tests are about.
                let _ = serve(stream, &own, &files, &shared, &log);
            }
        });
        Self { endpoint, faults, seen }
    }

    fn fetch(&self, place: &Place, name: &str, token: Option<&str>) -> crate::tool::Done {
        let mut command = place.command(&["--models-dir", "models", "models", "fetch", name]);
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", place.path("hf")).env_remove("HF_TOKEN");
        if let Some(token) = token {
            command.env("HF_TOKEN", token);
        }
        crate::tool::done(command.output().unwrap())
    }
}

/// Requests: path, the range asked for, the token given.
type Log = Mutex<Vec<(String, Option<String>, Option<String>)>>;

fn serve(stream: TcpStream, own: &str, files: &BTreeMap<String, Vec<u8>>, faults: &Mutex<Faults>, log: &Log) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let path = lines.next().unwrap_or(Ok(String::new()))?.split(' ').nth(1).unwrap_or("").to_owned();
    let headers: BTreeMap<String, String> = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_once(": ").map(|(k, v)| (k.to_ascii_lowercase(), v.to_owned())))
        .collect();
    let (range, token) = (headers.get("range").cloned(), headers.get("authorization").cloned());
    log.lock().unwrap().push((path.clone(), range.clone(), token.clone()));
    let mut out = stream;
    let mut answer = |status: &str, more: &str, length: usize, body: &[u8]| {
        write!(out, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n")?;
        out.write_all(body)
    };
    let f = faults.lock().unwrap().clone();
    // Where files really lie, as the hub redirects large ones: no token is asked for, none should come.
    if let Some(name) = path.strip_prefix("/cdn/") {
        let bytes = &files[name];
        let from: usize = range.as_deref().and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()).unwrap_or(0);
        if from > bytes.len() {
            return answer("416 Range Not Satisfiable", "", 0, &[]);
        }
        let rest = &bytes[from..];
        let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
        if f.breaks > 0 {
            faults.lock().unwrap().breaks -= 1;
            return answer(status, "", rest.len(), &rest[..rest.len() / 2]);
        }
        return answer(status, "", rest.len(), rest);
    }
    if f.token.is_some_and(|wanted| token != Some(format!("Bearer {wanted}"))) {
        return answer("401 Unauthorized", "", 0, &[]);
    }
    if path.starts_with("/api/models/org/tiny/revision/main") || path.starts_with("/api/models/org/tiny/revision/v1") {
        let size = |name: &str| files[name].len() as u64;
        let weights = &files["model.safetensors"];
        let hash = if f.wrong_hash { "0".repeat(64) } else { sha256(weights) };
        let listed = size("model.safetensors") - u64::from(f.wrong_size);
        let body = json!({ "sha": SHA, "siblings": [
            { "rfilename": "README.md", "size": 3 },
            { "rfilename": "1_Pooling/config.json" },
            { "rfilename": "config.json", "size": size("config.json") },
            { "rfilename": "tokenizer.json", "size": size("tokenizer.json") },
            { "rfilename": "model.safetensors", "size": listed, "lfs": { "sha256": hash, "size": listed } },
        ] });
        let body = body.to_string();
        return answer("200 OK", "", body.len(), body.as_bytes());
    }
    match path.strip_prefix(&format!("/org/tiny/resolve/{SHA}/")) {
        Some("model.safetensors") => answer("302 Found", &format!("Location: {own}/cdn/model.safetensors\r\n"), 0, &[]),
        Some(name) if files.contains_key(name) => answer("200 OK", "", files[name].len(), &files[name]),
        _ => answer("404 Not Found", "", 0, &[]),
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_model_is_fetched_once_recorded_and_used_by_its_name() {
    let hub = Hub::start(Faults::default());
    let place = Place::with_documents(&prose(3, 30));
    hub.fetch(&place, "org/tiny", None).ok();
    let asked = hub.seen.lock().unwrap().len();
    // Revision and commit are recorded: neither is asked for again.
    hub.fetch(&place, "org/tiny", None).ok();
    hub.fetch(&place, &format!("org/tiny@{SHA}"), None).ok();
    assert_eq!(hub.seen.lock().unwrap().len(), asked);
    hub.fetch(&place, "org/tiny@v1", None).ok();
    assert_eq!(hub.seen.lock().unwrap().len(), asked + 1, "another revision is resolved; its files are there");
    let folder = place.path("models/hub/org--tiny").join(SHA);
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        assert!(std::fs::read(folder.join(name)).unwrap() == std::fs::read(root().join("tests/tiny").join(name)).unwrap());
    }
    assert!(folder.join("1_Pooling/config.json").is_file(), "what an encoder has besides");
    place.run(&["--models-dir", "models", "--set", "model.name=org/tiny"]).ok();
    place.run(&["--models-dir", "models", "--set", "model.name=org/other"]).fails(1, "models fetch org/other");
    // Without it, nothing listens where the model would come from, and nothing is asked.
    assert_eq!(hub.seen.lock().unwrap().len(), asked + 1);
}

#[test]
fn a_broken_connection_is_taken_up_where_it_broke() {
    let hub = Hub::start(Faults { breaks: 2, ..Faults::default() });
    let place = Place::new();
    hub.fetch(&place, "org/tiny", None).ok();
    let ranges: Vec<Option<String>> =
        hub.seen.lock().unwrap().iter().filter(|(path, ..)| path.starts_with("/cdn/")).map(|(_, range, _)| range.clone()).collect();
    assert!(ranges.len() == 3 && ranges[0].is_none() && ranges[1].is_some() && ranges[2].is_some() && ranges[1] != ranges[2], "{ranges:?}");
}

#[test]
fn an_interrupted_fetch_goes_on_next_time() {
    let hub = Hub::start(Faults::default());
    let place = Place::new();
    let folder = place.path("models/hub/org--tiny").join(SHA);
    std::fs::create_dir_all(&folder).unwrap();
    let weights = std::fs::read(root().join("tests/tiny/model.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors.part"), &weights[..10_000]).unwrap();
    hub.fetch(&place, "org/tiny", None).ok();
    assert!(hub.seen.lock().unwrap().iter().any(|(path, range, _)| path.starts_with("/cdn/") && range.as_deref() == Some("bytes=10000-")));
    assert!(std::fs::read(folder.join("model.safetensors")).unwrap() == weights);
}

#[test]
fn wrong_sizes_and_hashes_are_refused_and_nothing_is_left_to_go_on_with() {
    let hub = Hub::start(Faults { wrong_size: true, ..Faults::default() });
    let place = Place::with_documents(&prose(2, 30));
    hub.fetch(&place, "org/tiny", None).fails(1, "the hub lists");
    *hub.faults.lock().unwrap() = Faults { wrong_hash: true, ..Faults::default() };
    hub.fetch(&place, "org/tiny", None).fails(1, "SHA-256");
    place.run(&["--models-dir", "models", "--set", "model.name=org/tiny"]).fails(1, "has not been fetched yet");
    *hub.faults.lock().unwrap() = Faults::default();
    hub.fetch(&place, "org/tiny", None).ok();
}

#[test]
fn private_models_need_a_token_that_goes_to_the_hub_alone() {
    let hub = Hub::start(Faults { token: Some("secret"), ..Faults::default() });
    let place = Place::new();
    hub.fetch(&place, "org/tiny", None).fails(1, "401").fails(1, "HF_TOKEN");
    hub.fetch(&place, "org/none", Some("secret")).fails(1, "there is no model org/none");
    hub.fetch(&place, "org/tiny", Some("secret")).ok();
    let seen = hub.seen.lock().unwrap();
    assert!(seen.iter().filter(|(path, ..)| path.starts_with("/cdn/")).all(|(_, _, token)| token.is_none()));
    drop(seen);
    // The token of the hub's own tools does too.
    let other = Place::new();
    std::fs::create_dir_all(other.path("hf")).unwrap();
    std::fs::write(other.path("hf/token"), "secret\n").unwrap();
    hub.fetch(&other, "org/tiny", None).ok();
}

#[test]
fn a_hub_that_is_not_there_is_named() {
    let place = Place::new();
    let hub = Hub { endpoint: "http://127.0.0.1:9".into(), faults: Arc::default(), seen: Arc::default() };
    hub.fetch(&place, "org/tiny", None).fails(1, "tried http://127.0.0.1:9/api/models/org/tiny").fails(1, "by hand");
    hub.fetch(&place, "nonsense", None).fails(1, "models that can be fetched");
}

//! Fetching models from the Hugging Face hub: the only code here that opens a network connection, and only for `models fetch`.
//!
//! A revision is resolved to a commit once, when it is fetched, and recorded. Files come in parts that a later attempt goes on with, are
//! checked by size and, where the hub knows it, by SHA-256, and become visible only when all of them are there.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest, Sha256};

/// How often a broken connection is taken up again although nothing more came.
const ATTEMPTS: u32 = 4;

/// A model on the hub: `org/name`, at a branch, tag or commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubName {
    id: String,
    revision: String,
}

/// Bytes of a file that are there, of all, and the file's name.
pub type FetchProgress<'a> = &'a mut dyn FnMut(&str, u64, u64);

#[derive(Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl HubName {
    /// Reads `org/name[@revision]`; none for anything that is not of that form.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
        let (org, model) = id.split_once('/')?;
        let word = |s: &str| {
            !s.is_empty() && !s.starts_with(['.', '-']) && s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        };
        let sound = word(org) && word(model) && !revision.is_empty() && revision.split('/').all(word);
        sound.then(|| Self { id: id.to_owned(), revision: revision.to_owned() })
    }

    fn folder(&self, models: &Path) -> PathBuf {
        models.join("hub").join(self.id.replace('/', "--"))
    }

    fn note(&self, models: &Path) -> PathBuf {
        self.folder(models).join("refs").join(self.revision.replace('/', "--"))
    }

    /// The folder of a model that was fetched, or that other tools have in the hub's own cache.
    pub(crate) fn fetched(&self, models: &Path) -> Option<PathBuf> {
        let ours = fs::read_to_string(self.note(models)).ok().map(|sha| self.folder(models).join(sha.trim()));
        let theirs = || {
            let cache = hub_home()?.join("hub").join(format!("models--{}", self.id.replace('/', "--")));
            let noted = fs::read_to_string(cache.join("refs").join(&self.revision)).ok();
            Some(cache.join("snapshots").join(noted.as_deref().unwrap_or(&self.revision).trim()))
        };
        ours.or_else(theirs).filter(|folder| folder.join("config.json").is_file())
    }

    /// Fetches the model's configuration, tokenizer and weights unless they are there. Returns the folder, and whether anything came.
    pub(super) fn fetch(&self, models: &Path, progress: FetchProgress<'_>) -> Result<(PathBuf, bool), String> {
        if let Some(folder) = self.fetched(models) {
            return Ok((folder, false));
        }
        let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty()).unwrap_or_else(|| "https://huggingface.co".into());
        let client = Client::new(endpoint.trim_end_matches('/'));
        let url = format!("{}/api/models/{}/revision/{}?blobs=true", client.endpoint, self.id, self.revision.replace('/', "%2F"));
        let mut text = String::new();
        let response = client.get(&url, 0)?;
        if response.status().as_u16() != 200 {
            return Err(self.refused(&url, response.status().as_u16()));
        }
        response.into_body().into_reader().read_to_string(&mut text).map_err(|e| format!("{url}: {e}"))?;
        let listing: Listing = serde_json::from_str(&text).map_err(|e| format!("{url}: not the answer of a hub: {e}"))?;
        if listing.sha.is_empty() || !listing.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(format!("{url}: {:?} is no commit", listing.sha));
        }
        let folder = self.folder(models).join(&listing.sha);
        fs::create_dir_all(&folder).map_err(|e| format!("cannot create {}: {e}", folder.display()))?;
        for file in wanted(&listing, &self.id)? {
            let url = format!("{}/{}/resolve/{}/{}", client.endpoint, self.id, listing.sha, file.rfilename);
            self.file(&client, &url, file, &folder, progress)?;
        }
        for revision in [&self.revision, &listing.sha] {
            let note = Self { revision: revision.clone(), ..self.clone() }.note(models);
            let write = || {
                fs::create_dir_all(note.parent().unwrap_or(models))?;
                let mut file = tempfile::NamedTempFile::new_in(note.parent().unwrap_or(models))?;
                file.write_all(listing.sha.as_bytes())?;
                file.persist(&note)?;
                Ok::<_, std::io::Error>(())
            };
            write().map_err(|e| format!("cannot write {}: {e}", note.display()))?;
        }
        Ok((folder, true))
    }

    fn refused(&self, url: &str, status: u16) -> String {
        match status {
            401 | 403 => format!(
                "{url} answered {status}: {} is private or gated, or does not exist; accept its terms on its page and set HF_TOKEN",
                self.id
            ),
            404 => format!("{url} answered 404: there is no model {} with revision {}", self.id, self.revision),
            _ => format!("{url} answered {status}"),
        }
    }

    /// Fetches one file, going on where an earlier attempt stopped.
    fn file(&self, client: &Client, url: &str, file: &Sibling, folder: &Path, progress: FetchProgress<'_>) -> Result<(), String> {
        let path = folder.join(&file.rfilename);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(|e| format!("cannot create {}: {e}", parent.display()))?;
        let part = folder.join(format!("{}.part", file.rfilename));
        let size = file.lfs.as_ref().map(|l| l.size).or(file.size);
        if path.is_file() {
            return Ok(());
        }
        let failed = |e: std::io::Error| format!("cannot write {}: {e}", part.display());
        let mut idle = 0;
        loop {
            let have = fs::metadata(&part).map_or(0, |m| m.len());
            if have > 0 && size == Some(have) {
                break;
            }
            let response = client.get(url, have)?;
            let status = response.status().as_u16();
            let more = match status {
                206 => true,
                200 => false,
                // What is there is longer than the file: from the start.
                416 => {
                    fs::remove_file(&part).map_err(failed)?;
                    idle += 1;
                    if idle > ATTEMPTS {
                        return Err(self.refused(url, status));
                    }
                    continue;
                }
                _ => return Err(self.refused(url, status)),
            };
            let mut out = File::options().create(true).write(true).append(more).truncate(!more).open(&part).map_err(failed)?;
            let mut done = if more { have } else { 0 };
            let mut reader = response.into_body().into_reader();
            let mut buffer = vec![0; 1 << 16];
            let broken = loop {
                match reader.read(&mut buffer) {
                    Ok(0) => break None,
                    Ok(n) => {
                        out.write_all(&buffer[..n]).map_err(failed)?;
                        done += n as u64;
                        progress(&file.rfilename, done, size.unwrap_or(done));
                    }
                    Err(e) => break Some(e),
                }
            };
            out.sync_all().map_err(failed)?;
            match (broken, size) {
                (None, None) => break,
                (None, Some(size)) if done == size => break,
                (None, Some(size)) if done > size => {
                    // The part goes: it can become no file of this size.
                    let _ = fs::remove_file(&part);
                    return Err(format!("{url} gave {done} bytes, the hub lists {size}; try again later"));
                }
                (broken, _) => {
                    idle = if done > have { 0 } else { idle + 1 };
                    if idle >= ATTEMPTS {
                        let why = broken.map_or_else(|| "the connection ended".to_owned(), |e| e.to_string());
                        let of = size.map_or_else(String::new, |s| format!(" of {s}"));
                        return Err(format!("{url}: {why} after {done}{of} bytes; run it again to go on from there"));
                    }
                    std::thread::sleep(Duration::from_millis(100) * (1 << idle));
                }
            }
        }
        if let Some(lfs) = &file.lfs {
            let found = sha256(&part).map_err(|e| format!("cannot read {}: {e}", part.display()))?;
            if found != lfs.sha256 {
                // A wrong file must not be gone on with.
                let _ = fs::remove_file(&part);
                return Err(format!("{url} has SHA-256 {found}, the hub lists {}; it was thrown away, try again", lfs.sha256));
            }
        }
        fs::rename(&part, &path).map_err(|e| format!("cannot move {} into place: {e}", part.display()))
    }
}

/// The files of a listing that a model is loaded from, the small ones first.
fn wanted<'a>(listing: &'a Listing, id: &str) -> Result<Vec<&'a Sibling>, String> {
    let find = |name: &str| listing.siblings.iter().find(|s| s.rfilename == name);
    let needed = |name: &str| find(name).ok_or_else(|| format!("{id} has no {name}"));
    let mut files = vec![needed("config.json")?, needed("tokenizer.json")?];
    files.extend(find("model.safetensors.index.json"));
    let shard = |s: &&Sibling| s.rfilename.starts_with("model-") && s.rfilename.ends_with(".safetensors") && !s.rfilename.contains('/');
    let weights: Vec<&Sibling> =
        if files.len() == 3 { listing.siblings.iter().filter(shard).collect() } else { find("model.safetensors").into_iter().collect() };
    if weights.is_empty() {
        return Err(format!("{id} has no weights in safetensors; download a GGUF file and give its path"));
    }
    // What an encoder has besides.
    files.extend(["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"].into_iter().filter_map(find));
    files.extend(weights);
    Ok(files)
}

fn sha256(path: &Path) -> std::io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Where the hub's own tools keep their things: `HF_HOME`, else the user's cache folder.
fn hub_home() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| !p.as_os_str().is_empty());
    set("HF_HOME").or_else(|| {
        let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
        Some(cache.join("huggingface"))
    })
}

struct Client {
    agent: ureq::Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    fn new(endpoint: &str) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .user_agent(concat!("right-reset/", env!("CARGO_PKG_VERSION")))
            .build();
        let from_file = || fs::read_to_string(hub_home()?.join("token")).ok();
        let token = std::env::var("HF_TOKEN").ok().or_else(from_file).map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        Self { agent: config.into(), endpoint: endpoint.to_owned(), token }
    }

    /// Asks for a file from byte `from` on. The token goes to the hub alone, not to where it redirects.
    fn get(&self, url: &str, from: u64) -> Result<ureq::http::Response<ureq::Body>, String> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call().map_err(|e| format!("tried {url}: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_an_organisation_a_model_and_maybe_a_revision() {
        let name = |id: &str, revision: &str| Some(HubName { id: id.into(), revision: revision.into() });
        assert_eq!(HubName::parse("Qwen/Qwen3-4B-Base"), name("Qwen/Qwen3-4B-Base", "main"));
        assert_eq!(HubName::parse("a/b.c@v1.0"), name("a/b.c", "v1.0"));
        assert_eq!(HubName::parse("a/b@refs/pr/3"), name("a/b", "refs/pr/3"));
        for other in ["gpt2", "/a/b", "a/b/c", "./a", "../b", "a/../b", "a/b@", "a/b@../x", "a b/c", "a/.b"] {
            assert_eq!(HubName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn shards_or_one_file_are_wanted_never_both() {
        let listing = |names: &[&str]| Listing {
            sha: "0".into(),
            siblings: names.iter().map(|n| Sibling { rfilename: (*n).into(), size: None, lfs: None }).collect(),
        };
        let names = |list: &Listing| wanted(list, "a/b").map(|files| files.iter().map(|f| f.rfilename.clone()).collect::<Vec<_>>());
        let one = listing(&["README.md", "config.json", "tokenizer.json", "model.safetensors", "onnx/model.safetensors"]);
        assert_eq!(names(&one).unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let encoder = listing(&["1_Pooling/config.json", "model.safetensors", "tokenizer.json", "modules.json", "config.json"]);
        assert_eq!(names(&encoder).unwrap()[2..], ["modules.json", "1_Pooling/config.json", "model.safetensors"]);
        let index = "model.safetensors.index.json";
        let two =
            listing(&["config.json", "tokenizer.json", index, "model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors"]);
        assert_eq!(names(&two).unwrap()[2..], [index, "model-1-of-2.safetensors", "model-2-of-2.safetensors"]);
        assert!(names(&listing(&["config.json"])).unwrap_err().contains("tokenizer.json"));
        assert!(names(&listing(&["config.json", "tokenizer.json", "m.gguf"])).unwrap_err().contains("GGUF"));
    }
}

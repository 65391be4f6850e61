//! A workplace of its own for each test: folders, pipelines, runs of the binary, and readers of what it leaves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

pub struct Place {
    dir: tempfile::TempDir,
}

pub struct Done {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Done {
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    pub fn fails(self, code: i32, sentence: &str) -> Self {
        assert_eq!(self.code, code, "{}", self.stderr);
        assert!(self.stderr.contains(sentence), "expected {sentence:?} in:\n{}", self.stderr);
        self
    }
}

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Place {
    pub fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        let text = format!(
            "preset = \"paper\"\n[input]\npaths = [\"in\"]\n[model]\nname = {:?}\n[cache]\npath = \"cache\"\n[output]\npath = \"out\"\nformat = \"jsonl\"\n\
             [segment]\ntarget = 40\nmin = 12\nmax = 90\npenalty = 0.8\n",
            root().join("tests/tiny")
        );
        place.write("p.toml", text.as_bytes());
        std::fs::create_dir(place.path("in")).unwrap();
        place
    }

    /// A place whose input folder holds documents, one JSONL file.
    pub fn with_documents(texts: &[String]) -> Self {
        let place = Self::new();
        place.documents("in/a.jsonl", texts);
        place
    }

    pub fn documents(&self, name: &str, texts: &[String]) {
        let lines: Vec<String> = texts.iter().enumerate().map(|(i, t)| json!({ "id": format!("d{i}"), "text": t }).to_string()).collect();
        self.write(name, (lines.join("\n") + "\n").as_bytes());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_right-reset"));
        command.args(arguments).current_dir(self.dir.path()).env_remove("RUST_LOG").env_remove("FAILPOINTS");
        command.env("XDG_CACHE_HOME", self.dir.path().join("user-cache")).stdin(Stdio::null());
        command
    }

    pub fn tool(&self, arguments: &[&str]) -> Done {
        done(self.command(arguments).output().unwrap())
    }

    pub fn tool_with_input(&self, arguments: &[&str], input: &[u8]) -> Done {
        let file = self.path("stdin.bytes");
        std::fs::write(&file, input).unwrap();
        done(self.command(arguments).stdin(std::fs::File::open(file).unwrap()).output().unwrap())
    }

    pub fn run(&self, arguments: &[&str]) -> Done {
        self.tool(&[&["run", "p.toml"], arguments].concat())
    }

    pub fn summary(&self, output: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(output).join("_right-reset/summary.json")).unwrap()).unwrap()
    }

    /// Data files of an output folder by name.
    pub fn data(&self, output: &str) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.path(output)];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if name.starts_with('_') {
                    continue;
                }
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let below = path.strip_prefix(self.path(output)).unwrap().to_string_lossy().into_owned();
                    files.insert(below, std::fs::read(path).unwrap());
                }
            }
        }
        files
    }

    /// Chunk rows of a JSONL output folder.
    pub fn chunks(&self, output: &str) -> Vec<Value> {
        self.data(output).values().flat_map(|bytes| json_lines(bytes)).collect()
    }
}

pub fn json_lines(bytes: &[u8]) -> Vec<Value> {
    String::from_utf8(bytes.to_vec()).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

pub fn done(output: Output) -> Done {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!stderr.contains("panicked"), "{stderr}");
    Done { code: output.status.code().unwrap_or(-1), stdout: output.stdout, stderr }
}

/// Documents of many sentences, none like another.
pub fn prose(count: usize, sentences: usize) -> Vec<String> {
    const WORDS: [&str; 24] = [
        "river", "bread", "map", "slow", "gives", "old", "water", "the", "a", "under", "grows", "stone", "light", "of", "keeps", "seven",
        "north", "tea", "turns", "wheel", "and", "field", "early", "sound",
    ];
    let mut state = 12_345_u64;
    let mut next = move |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % n
    };
    (0..count)
        .map(|_| {
            let sentence = |next: &mut dyn FnMut(usize) -> usize| {
                let words: Vec<&str> = (0..4 + next(9)).map(|_| WORDS[next(WORDS.len())]).collect();
                words.join(" ") + "."
            };
            (0..1 + next(sentences)).map(|_| sentence(&mut next)).collect::<Vec<_>>().join(" ")
        })
        .collect()
}

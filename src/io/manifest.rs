//! The commit protocol: what an output folder holds is what its manifest says (design section 7).
//!
//! A part file is written under a temporary name, synced, renamed, its folder synced, and only then a line is appended to the manifest
//! and synced. On restart only the manifest is believed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::{FlockOperation, flock};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{IoError, at};

/// Folder of everything that is not data.
pub const SERVICE_DIR: &str = "_right-reset";
const MANIFEST: &str = "manifest.jsonl";
/// Suffix of files that are not committed.
pub(super) const TEMPORARY: &str = ".rr-tmp";
const SUCCESS: &str = "_SUCCESS";

/// An input file as it was when a part was made of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InputState {
    /// Bytes.
    pub size: u64,
    /// Modification time in nanoseconds since 1970.
    pub modified_ns: u64,
    /// blake3 of its bytes, in hex; empty for standard input.
    pub blake3: String,
}

/// A committed part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartLine {
    /// Input file, relative to its root.
    pub input: String,
    /// The input as it was.
    pub state: InputState,
    /// Number of the part within its input, from 0.
    pub part: u32,
    /// First physical row.
    pub first_row: u64,
    /// Physical row after the last.
    pub end_row: u64,
    /// Whether the input ends here.
    pub last: bool,
    /// The data file, relative to the output folder.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// Rows by what became of them.
    pub rows: RowCounts,
    /// Chunks in the data file.
    pub chunks: u64,
    /// Hash of everything that changes output bytes, in hex.
    pub spec: String,
}

/// Rows of a part by what became of them: `read` is the sum of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct RowCounts {
    /// Rows read.
    pub read: u64,
    /// Documents chunked.
    pub chunked: u64,
    /// Rows with empty text.
    pub empty: u64,
    /// Rows with null text.
    pub null: u64,
    /// Bad rows.
    pub bad: u64,
    /// Documents left out because they are not in the cache (`cache.on_miss = "skip"`).
    pub not_cached: u64,
}

impl RowCounts {
    /// Adds another count.
    pub fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.chunked += other.chunked;
        self.empty += other.empty;
        self.null += other.null;
        self.bad += other.bad;
        self.not_cached += other.not_cached;
    }
}

/// A penalty that was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CalibrationLine {
    /// Mean chunk length asked for, in tokens.
    pub target_mean_tokens: f64,
    /// The penalty.
    pub penalty: f64,
    /// Mean chunk length of the sample at that penalty.
    pub mean_tokens: f64,
    /// Documents of the sample.
    pub documents: u64,
    /// Hash of the settings it was found for, in hex.
    pub spec: String,
}

/// One line of `_right-reset/manifest.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Line {
    Part(PartLine),
    Calibration(CalibrationLine),
    /// The parts of an input are no longer part of the output.
    Removed {
        file: String,
    },
}

/// The open manifest of an output folder, locked against a second process.
pub struct Manifest {
    root: PathBuf,
    file: File,
    /// Live lines by data file.
    parts: BTreeMap<String, PartLine>,
    calibrations: Vec<CalibrationLine>,
}

impl Manifest {
    /// Opens the output folder `root`, made if absent: drops a torn last line, removes temporary files and `_SUCCESS`.
    ///
    /// # Errors
    /// [`IoError`] if the folder cannot be used, holds something else, or another process writes there.
    pub fn open(root: &Path) -> Result<Self, IoError> {
        let service = root.join(SERVICE_DIR);
        if root.exists() && !service.exists() {
            let mut entries = fs::read_dir(root).map_err(at(root))?;
            if entries.any(|e| e.is_ok_and(|e| !e.file_name().to_string_lossy().starts_with('.'))) {
                return Err(IoError::Input(format!(
                    "the output folder {} holds files that are not of right-reset; choose an empty or new folder",
                    root.display()
                )));
            }
        }
        fs::create_dir_all(&service).map_err(at(&service))?;
        let path = service.join(MANIFEST);
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(at(&path))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(IoError::File {
                path: root.to_owned(),
                source: std::io::Error::new(
                    std::io::ErrorKind::WouldBlock,
                    "another run writes to this output folder; wait for it to end, or choose another with --output",
                ),
            });
        }
        let success = root.join(SUCCESS);
        if success.exists() {
            fs::remove_file(&success).map_err(at(&success))?;
            sync_dir(root)?;
        }
        let bytes = fs::read(&path).map_err(at(&path))?;
        let (mut parts, mut calibrations) = (BTreeMap::new(), Vec::new());
        let mut sound = 0;
        for line in bytes.split_inclusive(|&b| b == b'\n') {
            let Some(text) = line.strip_suffix(b"\n") else {
                tracing::warn!(path = %path.display(), "dropped a torn last line of the manifest");
                break;
            };
            match serde_json::from_slice(text) {
                Ok(Line::Part(part)) => drop(parts.insert(part.file.clone(), part)),
                Ok(Line::Calibration(line)) => calibrations.push(line),
                Ok(Line::Removed { file }) => drop(parts.remove(&file)),
                Err(e) if sound + line.len() < bytes.len() => {
                    return Err(IoError::Format { path, format: "a manifest", reason: format!("at byte {sound}: {e}") });
                }
                Err(_) => break,
            }
            sound += line.len();
        }
        file.set_len(sound as u64).and_then(|()| file.seek(std::io::SeekFrom::End(0))).map_err(at(&path))?;
        let manifest = Self { root: root.to_owned(), file, parts, calibrations };
        manifest.remove_temporary(root)?;
        Ok(manifest)
    }

    fn remove_temporary(&self, folder: &Path) -> Result<(), IoError> {
        for entry in fs::read_dir(folder).map_err(at(folder))? {
            let path = entry.map_err(at(folder))?.path();
            if path.is_dir() {
                self.remove_temporary(&path)?;
            } else if path.to_string_lossy().ends_with(TEMPORARY) {
                fs::remove_file(&path).map_err(at(&path))?;
            }
        }
        Ok(())
    }

    fn append(&mut self, line: &Line) -> Result<(), IoError> {
        let path = self.root.join(SERVICE_DIR).join(MANIFEST);
        let mut text = serde_json::to_vec(line).map_err(|e| at(&path)(e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).and_then(|()| self.file.sync_data()).map_err(at(&path))
    }

    /// The committed parts of one input that were made with `spec` and whose files are there, in order and without gaps.
    #[must_use]
    pub fn parts_of(&self, input: &str, spec: &str) -> Vec<PartLine> {
        let there = |p: &PartLine| fs::metadata(self.root.join(&p.file)).is_ok_and(|m| m.len() == p.bytes);
        let mut parts: Vec<PartLine> = self.parts.values().filter(|p| p.input == input && p.spec == spec && there(p)).cloned().collect();
        parts.sort_by_key(|p| p.part);
        let first = parts.first().map(|p| p.state.blake3.clone());
        let whole = parts.iter().enumerate().take_while(|(i, p)| p.part as usize == *i && Some(&p.state.blake3) == first.as_ref()).count();
        parts.truncate(whole);
        parts
    }

    /// Commits a finished temporary file as a part.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses; the part then does not exist.
    pub fn commit(&mut self, temporary: &Path, line: PartLine) -> Result<(), IoError> {
        let target = self.root.join(&line.file);
        if self.parts.remove(&line.file).is_some() {
            // The old line must not vouch for the new file if the process dies between the two steps below.
            self.append(&Line::Removed { file: line.file.clone() })?;
        }
        kill_point!("before-rename");
        fs::rename(temporary, &target).map_err(at(&target))?;
        kill_point!("before-folder-sync");
        sync_dir(target.parent().unwrap_or(&self.root))?;
        kill_point!("before-manifest-line");
        self.append(&Line::Part(line.clone()))?;
        self.parts.insert(line.file.clone(), line);
        kill_point!("after-manifest-line");
        Ok(())
    }

    /// Writes the line of an unchanged input whose time stamp changed again.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn refresh(&mut self, line: PartLine) -> Result<(), IoError> {
        self.append(&Line::Part(line.clone()))?;
        self.parts.insert(line.file.clone(), line);
        Ok(())
    }

    /// The last calibration found for `spec`.
    #[must_use]
    pub fn calibration(&self, spec: &str) -> Option<&CalibrationLine> {
        self.calibrations.iter().rev().find(|c| c.spec == spec)
    }

    /// Stores a calibration.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn store_calibration(&mut self, line: CalibrationLine) -> Result<(), IoError> {
        self.append(&Line::Calibration(line.clone()))?;
        self.calibrations.push(line);
        Ok(())
    }

    /// Ends a complete run: removes the parts of `inputs` that are not in `kept`, with `prune` also those of other inputs; then removes
    /// data files that no line names, and writes `_SUCCESS`. Returns the removed files.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn finish(&mut self, inputs: &[&str], kept: &[String], prune: bool) -> Result<Vec<String>, IoError> {
        let stale: Vec<String> = self
            .parts
            .values()
            .filter(|p| !kept.contains(&p.file) && (prune || inputs.contains(&p.input.as_str())))
            .map(|p| p.file.clone())
            .collect();
        for file in &stale {
            self.append(&Line::Removed { file: file.clone() })?;
            self.parts.remove(file);
            kill_point!("before-remove-old-part");
            let path = self.root.join(file);
            if path.exists() {
                fs::remove_file(&path).map_err(at(&path))?;
            }
        }
        kill_point!("before-success");
        let success = self.root.join(SUCCESS);
        File::create(&success).and_then(|f| f.sync_all()).map_err(at(&success))?;
        sync_dir(&self.root)?;
        Ok(stale)
    }

    /// The output folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

fn sync_dir(path: &Path) -> Result<(), IoError> {
    File::open(path).and_then(|f| f.sync_all()).map_err(at(path))
}

/// Size and time of a file; the hash is left empty.
///
/// # Errors
/// [`IoError`] if it cannot be read.
pub fn file_state(path: &Path) -> Result<InputState, IoError> {
    let meta = fs::metadata(path).map_err(at(path))?;
    let modified = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    Ok(InputState { size: meta.len(), modified_ns: modified.map_or(0, |d| d.as_nanos() as u64), blake3: String::new() })
}

/// blake3 of a file, in hex.
///
/// # Errors
/// [`IoError`] if it cannot be read.
pub fn hash_file(path: &Path) -> Result<String, IoError> {
    Ok(crate::hash::file(path).map_err(at(path))?.to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(number: u32, spec: &str) -> PartLine {
        PartLine {
            input: "a.jsonl".into(),
            state: InputState { size: 1, modified_ns: 2, blake3: "h".into() },
            part: number,
            first_row: u64::from(number),
            end_row: u64::from(number) + 1,
            last: false,
            file: format!("a-{number}.jsonl"),
            bytes: 1,
            rows: RowCounts::default(),
            chunks: 1,
            spec: spec.into(),
        }
    }

    fn commit(manifest: &mut Manifest, number: u32, spec: &str) {
        let temporary = manifest.root().join(format!("x{TEMPORARY}"));
        fs::write(&temporary, "x").unwrap();
        manifest.commit(&temporary, part(number, spec)).unwrap();
    }

    #[test]
    fn a_torn_line_and_uncommitted_files_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::open(dir.path()).unwrap();
        commit(&mut manifest, 0, "s");
        commit(&mut manifest, 1, "s");
        drop(manifest);
        let path = dir.path().join(SERVICE_DIR).join(MANIFEST);
        let text = fs::read_to_string(&path).unwrap();
        for cut in [text.len() - 1, text.len() - 30] {
            fs::write(&path, &text[..cut]).unwrap();
            fs::write(dir.path().join("left.rr-tmp"), "x").unwrap();
            let manifest = Manifest::open(dir.path()).unwrap();
            assert_eq!(manifest.parts_of("a.jsonl", "s"), [part(0, "s")]);
            assert!(!dir.path().join("left.rr-tmp").exists());
        }
        fs::write(&path, format!("nonsense\n{text}")).unwrap();
        assert!(Manifest::open(dir.path()).is_err_and(|e| e.to_string().contains("at byte 0")));
    }

    #[test]
    fn only_whole_runs_of_present_parts_count() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::open(dir.path()).unwrap();
        for number in 0..3 {
            commit(&mut manifest, number, "s");
        }
        fs::remove_file(dir.path().join("a-1.jsonl")).unwrap();
        assert_eq!(manifest.parts_of("a.jsonl", "s").len(), 1);
        assert!(manifest.parts_of("a.jsonl", "other").is_empty());
        commit(&mut manifest, 1, "s");
        assert_eq!(manifest.finish(&["a.jsonl"], &["a-0.jsonl".into(), "a-1.jsonl".into()], false).unwrap(), ["a-2.jsonl"]);
        assert!(dir.path().join(SUCCESS).exists() && !dir.path().join("a-2.jsonl").exists());
    }

    #[test]
    fn a_second_writer_and_a_foreign_folder_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _open = Manifest::open(dir.path()).unwrap();
        assert!(Manifest::open(dir.path()).is_err_and(|e| e.to_string().contains("another run")));
        let foreign = tempfile::tempdir().unwrap();
        fs::write(foreign.path().join("data.csv"), "x").unwrap();
        assert!(Manifest::open(foreign.path()).is_err_and(|e| e.to_string().contains("not of right-reset")));
    }
}

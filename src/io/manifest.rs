//! The commit protocol: what an output folder holds is what its manifest says (design section 7).
//!
//! A part file is written under a temporary name, synced, renamed, its folder synced, and only then a line is appended to the manifest
//! and synced. On restart only the manifest is believed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
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
/// What a complete run leaves; for one of several ranks in its own folder, and in the output once all are complete.
const SUCCESS: &str = "_SUCCESS";
const LOCK: &str = "lock";
/// Lines of a manifest that may be out of date before it is written anew.
const SPARE_LINES: usize = 1000;

/// One of several workers that share an output folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Its number, from 0.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
}

impl Rank {
    /// Whether a unit (a row group of a Parquet file; of another file, all of it) is this rank's to work on. Decided by the hash of path and number, so that
    /// a new file moves nobody else's work.
    #[must_use]
    pub fn owns(&self, input: &str, unit: u32) -> bool {
        let hash = crate::hash::words(["unit", input, &unit.to_string()]);
        let mut number = [0; 8];
        number.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(number) % u64::from(self.world) == u64::from(self.rank)
    }

    /// The name of its folder.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("rank-{:05}-of-{:05}", self.rank, self.world)
    }

    /// The rank whose folder has this name.
    fn of_folder(name: &str) -> Option<Self> {
        let (rank, world) = name.strip_prefix("rank-")?.split_once("-of-")?;
        Some(Self { rank: rank.parse().ok()?, world: world.parse().ok()? })
    }
}

/// Why a part was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// There was none.
    #[default]
    New,
    /// The input has other bytes.
    InputChanged,
    /// Something that changes output bytes is set otherwise.
    SettingsChanged,
    /// The data file is gone, or has another size.
    FileMissing,
    /// Documents were missing from the cache.
    DocumentsMissing,
    /// An earlier part of the same input had to be made.
    EarlierPartMade,
    /// `--force`.
    Forced,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::New => "new",
            Self::InputChanged => "input changed",
            Self::SettingsChanged => "settings changed",
            Self::FileMissing => "data file missing",
            Self::DocumentsMissing => "documents were missing from the cache",
            Self::EarlierPartMade => "earlier part made",
            Self::Forced => "forced",
        })
    }
}

/// Why a part was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WhyKept {
    /// The input has the same size and time of change.
    SameTime,
    /// The input has the same bytes.
    SameBytes,
}

/// Why a part went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WhyRemoved {
    /// The last complete run did not make it.
    #[default]
    OutOfDate,
    /// The run that made it ended before it was committed.
    Uncommitted,
    /// Its input is no longer listed (`--prune`).
    InputGone,
}

/// The parts of an input that a run kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeptParts {
    /// Input file, relative to its root.
    pub input: String,
    /// Number of its row group, if ranks share the work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// Parts.
    pub parts: u64,
    /// Why.
    pub why: WhyKept,
}

/// What a complete run did. Only the last one is kept for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RunLine {
    /// Version of the program.
    pub version: String,
    /// Parts made by why; each part's line says it too.
    pub made: BTreeMap<Why, u64>,
    /// Parts kept.
    pub kept: Vec<KeptParts>,
    /// Parts removed.
    pub removed: u64,
}

/// How fast scoring was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SpeedLine {
    /// Hash of the score settings, in hex.
    pub scores: String,
    /// Document tokens per second.
    pub tokens_per_second: f64,
}

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
    /// Number of the row group, if ranks share the work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// Number of the part within its input or row group, from 0.
    pub part: u32,
    /// First physical row.
    pub first_row: u64,
    /// Physical row after the last.
    pub end_row: u64,
    /// Whether the input or row group ends here.
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
    /// Why it was made.
    #[serde(default)]
    pub why: Why,
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
    /// A data file is about to be put in place; without a line of its part behind this one, it must not be there.
    Making {
        file: String,
    },
    /// A data file is no longer part of the output.
    Removed {
        file: String,
        #[serde(default)]
        why: WhyRemoved,
    },
    Run(RunLine),
    Speed(SpeedLine),
}

/// What the lines of a manifest say.
#[derive(Debug, Clone, Default)]
pub struct Lines {
    /// Live parts by data file.
    pub parts: BTreeMap<String, PartLine>,
    calibrations: Vec<CalibrationLine>,
    /// The last complete run.
    pub last_run: Option<RunLine>,
    speeds: BTreeMap<String, f64>,
    /// Data files that may be in place without a line of their part.
    making: BTreeSet<String>,
    /// Lines, live or not.
    count: usize,
    /// Bytes up to the end of the last sound line.
    sound: usize,
}

/// An input, and the number of a row group if ranks share the work.
pub type Unit = (String, Option<u32>);

impl Lines {
    /// Reads a manifest; a torn last line is left out.
    ///
    /// # Errors
    /// [`IoError`] if it cannot be read, or if a line before the last is none.
    pub fn read(path: &Path) -> Result<Self, IoError> {
        let bytes = fs::read(path).map_err(at(path))?;
        Self::parse(&bytes).map_err(|(byte, e)| IoError::Format {
            path: path.to_owned(),
            format: "a manifest",
            reason: format!("at byte {byte}: {e}; put the file back from a backup, or choose another output folder (the score cache is untouched by this)"),
        })
    }

    /// Reads the bytes of a manifest; the error is that of a line before the last, and where it begins.
    ///
    /// # Errors
    /// What is wrong with a line before the last.
    pub fn parse(bytes: &[u8]) -> Result<Self, (usize, String)> {
        let mut lines = Self::default();
        for line in bytes.split_inclusive(|&b| b == b'\n') {
            let Some(text) = line.strip_suffix(b"\n") else {
                break;
            };
            match serde_json::from_slice(text) {
                Ok(line) => lines.take(line),
                Err(e) if lines.sound + line.len() < bytes.len() => return Err((lines.sound, e.to_string())),
                Err(_) => break,
            }
            lines.sound += line.len();
        }
        Ok(lines)
    }

    fn take(&mut self, line: Line) {
        self.count += 1;
        match line {
            Line::Part(part) => {
                self.making.remove(&part.file);
                self.parts.insert(part.file.clone(), part);
            }
            Line::Making { file } => {
                self.parts.remove(&file);
                self.making.insert(file);
            }
            Line::Calibration(line) => {
                self.calibrations.retain(|c| c.spec != line.spec);
                self.calibrations.push(line);
            }
            Line::Removed { file, .. } => {
                self.making.remove(&file);
                self.parts.remove(&file);
            }
            Line::Run(run) => self.last_run = Some(run),
            Line::Speed(speed) => drop(self.speeds.insert(speed.scores, speed.tokens_per_second)),
        }
    }

    /// The lines that say the same.
    fn live(&self) -> impl Iterator<Item = Line> + '_ {
        let speeds = self.speeds.iter().map(|(scores, &tokens_per_second)| SpeedLine { scores: scores.clone(), tokens_per_second });
        let parts = self.parts.values().cloned().map(Line::Part);
        parts
            .chain(self.calibrations.iter().cloned().map(Line::Calibration))
            .chain(self.last_run.iter().cloned().map(Line::Run))
            .chain(speeds.map(Line::Speed))
    }

    /// The committed parts of each input that were made with `spec` and whose files are below `root`, in order and without gaps. A part
    /// that lacks documents, since they were not in the cache, ends the row: they may be there now.
    #[must_use]
    pub fn complete(&self, root: &Path, spec: &str) -> HashMap<Unit, Vec<PartLine>> {
        let mut by_unit: HashMap<Unit, Vec<&PartLine>> = HashMap::new();
        for part in self.parts.values().filter(|p| p.spec == spec) {
            by_unit.entry((part.input.clone(), part.unit)).or_default().push(part);
        }
        let whole = |mut parts: Vec<&PartLine>| -> Vec<PartLine> {
            parts.sort_by_key(|p| p.part);
            let first = parts.first().map(|p| p.state.blake3.clone());
            let sound = |(i, p): &(usize, &PartLine)| {
                p.part as usize == *i && Some(&p.state.blake3) == first.as_ref() && p.rows.not_cached == 0 && p.is_there(root)
            };
            parts.into_iter().enumerate().take_while(sound).map(|(_, p)| p.clone()).collect()
        };
        by_unit.into_iter().map(|(unit, parts)| (unit, whole(parts))).filter(|(_, parts)| !parts.is_empty()).collect()
    }

    /// Why a part has to be made whose data file is `file` but for its extension.
    #[must_use]
    pub fn why(&self, root: &Path, file: &str, state: &InputState, spec: &str) -> Why {
        let stem = file.rsplit_once('.').map_or(file, |f| f.0);
        let Some(old) = ["parquet", "arrow", "jsonl"].iter().find_map(|e| self.parts.get(&format!("{stem}.{e}"))) else {
            return Why::New;
        };
        match () {
            () if old.state.blake3 != state.blake3 => Why::InputChanged,
            () if old.spec != spec => Why::SettingsChanged,
            () if !old.is_there(root) => Why::FileMissing,
            () if old.rows.not_cached > 0 => Why::DocumentsMissing,
            () => Why::EarlierPartMade,
        }
    }

    /// Data files that a complete run with the parts `kept` of `inputs` removes, and why; with `prune` also those of other inputs.
    #[must_use]
    pub fn stale(&self, inputs: &HashSet<&str>, kept: &HashSet<&str>, prune: bool) -> Vec<(String, WhyRemoved)> {
        let why = |p: &PartLine| match inputs.contains(p.input.as_str()) {
            true => Some(WhyRemoved::OutOfDate),
            false => prune.then_some(WhyRemoved::InputGone),
        };
        self.parts.values().filter(|p| !kept.contains(p.file.as_str())).filter_map(|p| Some((p.file.clone(), why(p)?))).collect()
    }

    /// The last calibration found for `spec`.
    #[must_use]
    pub fn calibration(&self, spec: &str) -> Option<&CalibrationLine> {
        self.calibrations.iter().rev().find(|c| c.spec == spec)
    }

    /// Document tokens per second when these scores were last computed.
    #[must_use]
    pub fn speed(&self, scores: &str) -> Option<f64> {
        self.speeds.get(scores).copied()
    }
}

impl PartLine {
    /// Whether its data file is below `root`, as long as it was.
    #[must_use]
    pub fn is_there(&self, root: &Path) -> bool {
        fs::metadata(root.join(&self.file)).is_ok_and(|m| m.len() == self.bytes)
    }
}

/// Folder of everything that is not data, of one rank if ranks share the work.
#[must_use]
pub fn service_dir(root: &Path, rank: Option<Rank>) -> PathBuf {
    let service = root.join(SERVICE_DIR);
    rank.map_or(service.clone(), |rank| service.join(rank.folder()))
}

/// Path of the manifest.
#[must_use]
pub fn manifest_path(root: &Path, rank: Option<Rank>) -> PathBuf {
    service_dir(root, rank).join(MANIFEST)
}

/// The ranks that have worked in an output folder.
///
/// # Errors
/// [`IoError`] if the folder cannot be read.
pub fn ranks(root: &Path) -> Result<Vec<Rank>, IoError> {
    let service = root.join(SERVICE_DIR);
    let mut found = Vec::new();
    for entry in fs::read_dir(&service).map_err(at(&service))? {
        found.extend(Rank::of_folder(&entry.map_err(at(&service))?.file_name().to_string_lossy()));
    }
    found.sort_by_key(|r| (r.world, r.rank));
    Ok(found)
}

/// How far a rank, or the one process, is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It has not begun.
    Missing,
    /// It is at work now.
    Running,
    /// It ended before it was done.
    Unfinished,
    /// It is done.
    Done,
}

/// How far a rank, or the one process, is.
///
/// # Errors
/// [`IoError`] if its lock cannot be looked at.
pub fn standing(root: &Path, rank: Option<Rank>) -> Result<Standing, IoError> {
    let service = service_dir(root, rank);
    let path = service.join(LOCK);
    let Ok(lock) = File::open(&path) else { return Ok(Standing::Missing) };
    if flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
        return Ok(Standing::Running);
    }
    let success = rank.map_or(root.join(SUCCESS), |_| service.join(SUCCESS));
    Ok(if success.exists() { Standing::Done } else { Standing::Unfinished })
}

/// The open manifest of an output folder, locked against a second process.
pub struct Manifest {
    root: PathBuf,
    service: PathBuf,
    rank: Option<Rank>,
    file: File,
    lines: Lines,
    _lock: File,
}

impl Manifest {
    /// Opens the output folder `root`, made if absent, for the one process or one of several ranks: drops a torn last line, removes temporary files
    /// and `_SUCCESS`.
    ///
    /// # Errors
    /// [`IoError`] if the folder cannot be used, holds something else, was made by another number of ranks, or another process writes there.
    pub fn open(root: &Path, rank: Option<Rank>) -> Result<Self, IoError> {
        let all = root.join(SERVICE_DIR);
        if root.exists() && !all.exists() {
            let mut entries = fs::read_dir(root).map_err(at(root))?;
            if entries.any(|e| e.is_ok_and(|e| !e.file_name().to_string_lossy().starts_with('.'))) {
                return Err(IoError::Input(format!(
                    "the output folder {} holds files that are not of right-reset; choose an empty or new folder",
                    root.display()
                )));
            }
        }
        fs::create_dir_all(&all).map_err(at(&all))?;
        let other = match (rank, ranks(root)?.into_iter().find(|r| rank.is_none_or(|own| own.world != r.world))) {
            (_, Some(other)) => Some(format!("{} ranks; go on with --world-size {}", other.world, other.world)),
            (Some(_), None) if all.join(MANIFEST).exists() => Some("one process; go on without --rank".to_owned()),
            _ => None,
        };
        if let Some(other) = other {
            return Err(IoError::Input(format!("the output folder {} was made by {other}, or choose another folder", root.display())));
        }
        let service = service_dir(root, rank);
        fs::create_dir_all(&service).map_err(at(&service))?;
        let lock = service.join(LOCK);
        let lock = File::options().write(true).create(true).truncate(false).open(&lock).map_err(at(&lock))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(IoError::File {
                path: root.to_owned(),
                source: std::io::Error::new(
                    std::io::ErrorKind::WouldBlock,
                    "another run writes to this output folder; wait for it to end, or choose another with --output",
                ),
            });
        }
        {
            let _turn = rank.map(|_| take_turn(&all)).transpose()?;
            for success in [service.join(SUCCESS), root.join(SUCCESS)] {
                if success.exists() {
                    fs::remove_file(&success).map_err(at(&success))?;
                    sync_dir(success.parent().unwrap_or(root))?;
                }
            }
        }
        for entry in fs::read_dir(&service).map_err(at(&service))? {
            let path = entry.map_err(at(&service))?.path();
            if path.to_string_lossy().ends_with(TEMPORARY) {
                fs::remove_file(&path).map_err(at(&path))?;
            }
        }
        let path = service.join(MANIFEST);
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(at(&path))?;
        let lines = Lines::read(&path)?;
        if file.metadata().map_err(at(&path))?.len() > lines.sound as u64 {
            tracing::warn!(event = "manifest_torn", path = %path.display(), "dropped a torn last line of the manifest");
        }
        file.set_len(lines.sound as u64).and_then(|()| file.seek(std::io::SeekFrom::End(0))).map_err(at(&path))?;
        let making = lines.making.clone();
        let mut manifest = Self { root: root.to_owned(), service, rank, file, lines, _lock: lock };
        manifest.remove(making.into_iter().map(|file| (file, WhyRemoved::Uncommitted)).collect())?;
        Ok(manifest)
    }

    /// Removes data files, then says so: a line that names a missing file does no harm, a file without a line would.
    fn remove(&mut self, files: Vec<(String, WhyRemoved)>) -> Result<(), IoError> {
        let mut folders = BTreeSet::new();
        for (file, _) in &files {
            kill_point!("before-remove-old-part");
            let path = self.root.join(file);
            if path.exists() {
                fs::remove_file(&path).map_err(at(&path))?;
                folders.insert(path.parent().unwrap_or(&self.root).to_owned());
            }
        }
        for folder in folders {
            sync_dir(&folder)?;
        }
        files.into_iter().try_for_each(|(file, why)| self.append(Line::Removed { file, why }))
    }

    /// What its lines say.
    #[must_use]
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Folder of everything that is not data, this rank's own.
    #[must_use]
    pub fn service(&self) -> &Path {
        &self.service
    }

    fn append(&mut self, line: Line) -> Result<(), IoError> {
        let path = self.service.join(MANIFEST);
        let mut text = serde_json::to_vec(&line).map_err(|e| at(&path)(e.into()))?;
        text.push(b'\n');
        let length = self.lines.sound as u64;
        if let Err(e) = self.file.write_all(&text).and_then(|()| self.file.sync_data()) {
            // Half a line on a full disk must not stand before the next one.
            let _ = self.file.set_len(length).and_then(|()| self.file.seek(std::io::SeekFrom::End(0)).map(drop));
            return Err(at(&path)(e));
        }
        self.lines.sound += text.len();
        self.lines.take(line);
        Ok(())
    }

    /// Commits a finished temporary file as a part.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses; the part then does not exist.
    pub fn commit(&mut self, temporary: &Path, line: PartLine) -> Result<(), IoError> {
        let target = self.root.join(&line.file);
        // An old line must not vouch for the new file, nor the new file stay without a line, if the process dies between the two steps below.
        self.append(Line::Making { file: line.file.clone() })?;
        kill_point!("before-rename");
        fs::rename(temporary, &target).map_err(at(&target))?;
        kill_point!("before-folder-sync");
        sync_dir(target.parent().unwrap_or(&self.root))?;
        kill_point!("before-manifest-line");
        self.append(Line::Part(line))?;
        kill_point!("after-manifest-line");
        Ok(())
    }

    /// Writes the line of an unchanged input whose time stamp changed again.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn refresh(&mut self, line: PartLine) -> Result<(), IoError> {
        self.append(Line::Part(line))
    }

    /// Stores a calibration.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn store_calibration(&mut self, line: CalibrationLine) -> Result<(), IoError> {
        self.append(Line::Calibration(line))
    }

    /// Stores how fast scoring was.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn store_speed(&mut self, line: SpeedLine) -> Result<(), IoError> {
        self.append(Line::Speed(line))
    }

    /// Ends a complete run: removes the parts that are [stale](Lines::stale), says in the manifest what was done, and writes `_SUCCESS`. Returns how many parts
    /// were removed.
    ///
    /// # Errors
    /// [`IoError`] if the disk refuses.
    pub fn finish(&mut self, inputs: &HashSet<&str>, kept: &HashSet<&str>, prune: bool, mut run: RunLine) -> Result<u64, IoError> {
        let stale = self.lines.stale(inputs, kept, prune);
        run.removed = stale.len() as u64;
        let removed = run.removed;
        self.remove(stale)?;
        self.append(Line::Run(run))?;
        self.compact()?;
        kill_point!("before-success");
        let write = |success: &Path| {
            File::create(success).and_then(|f| f.sync_all()).map_err(at(success))?;
            sync_dir(success.parent().unwrap_or(&self.root))
        };
        let Some(rank) = self.rank else {
            write(&self.root.join(SUCCESS))?;
            return Ok(removed);
        };
        let _turn = take_turn(&self.root.join(SERVICE_DIR))?;
        write(&self.service.join(SUCCESS))?;
        let done = |r: u32| service_dir(&self.root, Some(Rank { rank: r, world: rank.world })).join(SUCCESS).exists();
        if (0..rank.world).all(done) {
            write(&self.root.join(SUCCESS))?;
        }
        Ok(removed)
    }

    /// Writes the manifest anew if many of its lines say nothing any more.
    fn compact(&mut self) -> Result<(), IoError> {
        let live: Vec<Line> = self.lines.live().collect();
        if self.lines.count < 2 * live.len() + SPARE_LINES {
            return Ok(());
        }
        let path = self.service.join(MANIFEST);
        let mut bytes = Vec::new();
        for line in &live {
            serde_json::to_writer(&mut bytes, line).map_err(|e| at(&path)(e.into()))?;
            bytes.push(b'\n');
        }
        write_whole(&path, &bytes)?;
        self.file = File::options().append(true).open(&path).map_err(at(&path))?;
        (self.lines.count, self.lines.sound) = (live.len(), bytes.len());
        Ok(())
    }

    /// The output folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// Waits for a turn at what ranks share; it ends when the file is dropped.
fn take_turn(service: &Path) -> Result<File, IoError> {
    let path = service.join("turn");
    let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(at(&path))?;
    flock(&file, FlockOperation::LockExclusive).map_err(|e| at(&path)(e.into()))?;
    Ok(file)
}

/// Writes a file whole or not at all: under a temporary name beside it, synced, renamed, the folder synced.
///
/// # Errors
/// [`IoError`] if the disk refuses; a file that was there before is as it was.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), IoError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!("{name}.{}{TEMPORARY}", std::process::id()));
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    if let Err(e) = write() {
        // The failure is what counts, not what it left behind.
        let _ = fs::remove_file(&temporary);
        return Err(at(path)(e));
    }
    sync_dir(folder)
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
            unit: None,
            part: number,
            first_row: u64::from(number),
            end_row: u64::from(number) + 1,
            last: false,
            file: format!("a-{number}.jsonl"),
            bytes: 1,
            rows: RowCounts::default(),
            chunks: 1,
            spec: spec.into(),
            why: Why::New,
        }
    }

    fn commit(manifest: &mut Manifest, number: u32, spec: &str) {
        let temporary = manifest.root().join(format!("x{TEMPORARY}"));
        fs::write(&temporary, "x").unwrap();
        manifest.commit(&temporary, part(number, spec)).unwrap();
    }

    fn parts(manifest: &Manifest, spec: &str) -> Vec<PartLine> {
        manifest.lines().complete(manifest.root(), spec).remove(&("a.jsonl".to_owned(), None)).unwrap_or_default()
    }

    fn finish(manifest: &mut Manifest, kept: &[&str]) -> u64 {
        let run = RunLine { version: "0".into(), made: BTreeMap::new(), kept: Vec::new(), removed: 0 };
        manifest.finish(&HashSet::from(["a.jsonl"]), &kept.iter().copied().collect(), false, run).unwrap()
    }

    #[test]
    fn a_torn_line_and_uncommitted_files_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::open(dir.path(), None).unwrap();
        commit(&mut manifest, 0, "s");
        commit(&mut manifest, 1, "s");
        drop(manifest);
        let path = dir.path().join(SERVICE_DIR).join(MANIFEST);
        let text = fs::read_to_string(&path).unwrap();
        for cut in [text.len() - 1, text.len() - 30] {
            fs::write(&path, &text[..cut]).unwrap();
            fs::write(dir.path().join(SERVICE_DIR).join("left.rr-tmp"), "x").unwrap();
            let manifest = Manifest::open(dir.path(), None).unwrap();
            assert_eq!(parts(&manifest, "s"), [part(0, "s")]);
            assert!(dir.path().join("a-0.jsonl").exists() && !dir.path().join("a-1.jsonl").exists(), "an uncommitted file is removed");
            drop(manifest);
            // As the run that died left it.
            fs::write(dir.path().join("a-1.jsonl"), "x").unwrap();
            assert!(!dir.path().join(SERVICE_DIR).join("left.rr-tmp").exists());
        }
        fs::write(&path, format!("nonsense\n{text}")).unwrap();
        assert!(Manifest::open(dir.path(), None).is_err_and(|e| e.to_string().contains("at byte 0")));
    }

    #[test]
    fn only_whole_runs_of_present_parts_count() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::open(dir.path(), None).unwrap();
        for number in 0..3 {
            commit(&mut manifest, number, "s");
        }
        fs::remove_file(dir.path().join("a-1.jsonl")).unwrap();
        assert_eq!(parts(&manifest, "s").len(), 1);
        assert!(parts(&manifest, "other").is_empty());
        commit(&mut manifest, 1, "s");
        assert_eq!(finish(&mut manifest, &["a-0.jsonl", "a-1.jsonl"]), 1);
        assert!(dir.path().join(SUCCESS).exists() && !dir.path().join("a-2.jsonl").exists());
    }

    #[test]
    fn a_second_writer_and_a_foreign_folder_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _open = Manifest::open(dir.path(), None).unwrap();
        assert!(Manifest::open(dir.path(), None).is_err_and(|e| e.to_string().contains("another run")));
        let foreign = tempfile::tempdir().unwrap();
        fs::write(foreign.path().join("data.csv"), "x").unwrap();
        assert!(Manifest::open(foreign.path(), None).is_err_and(|e| e.to_string().contains("not of right-reset")));
    }

    #[test]
    fn many_dead_lines_are_left_out_in_time_and_the_lock_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::open(dir.path(), None).unwrap();
        commit(&mut manifest, 0, "s");
        for _ in 0..1500 {
            manifest.refresh(part(0, "s")).unwrap();
        }
        let path = manifest_path(dir.path(), None);
        let long = fs::metadata(&path).unwrap().len();
        finish(&mut manifest, &["a-0.jsonl"]);
        assert!(fs::metadata(&path).unwrap().len() < long / 100);
        assert!(Manifest::open(dir.path(), None).is_err_and(|e| e.to_string().contains("another run")));
        commit(&mut manifest, 1, "s");
        let lines = manifest.lines().parts.clone();
        drop(manifest);
        assert_eq!(Manifest::open(dir.path(), None).unwrap().lines().parts, lines);
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn ranks_share_a_folder_and_the_last_one_done_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let of = |rank, world| Some(Rank { rank, world });
        let mut two = [0, 1].map(|r| Manifest::open(dir.path(), of(r, 2)).unwrap());
        assert!(Manifest::open(dir.path(), of(1, 2)).is_err_and(|e| e.to_string().contains("another run")));
        assert!(Manifest::open(dir.path(), of(1, 3)).is_err_and(|e| e.to_string().contains("made by 2 ranks")));
        assert!(Manifest::open(dir.path(), None).is_err_and(|e| e.to_string().contains("made by 2 ranks")));
        assert_eq!(standing(dir.path(), of(1, 2)).unwrap(), Standing::Running);
        finish(&mut two[0], &[]);
        assert!(!dir.path().join(SUCCESS).exists());
        finish(&mut two[1], &[]);
        assert!(dir.path().join(SUCCESS).exists());
        drop(two);
        assert_eq!(standing(dir.path(), of(1, 2)).unwrap(), Standing::Done);
        let _again = Manifest::open(dir.path(), of(0, 2)).unwrap();
        assert!(!dir.path().join(SUCCESS).exists());
        assert_eq!(ranks(dir.path()).unwrap().len(), 2);
        let one = tempfile::tempdir().unwrap();
        drop(Manifest::open(one.path(), None).unwrap());
        assert!(Manifest::open(one.path(), of(0, 2)).is_err_and(|e| e.to_string().contains("made by one process")));
        // Every unit is somebody's, and nobody's share is empty.
        let owners: Vec<Vec<u32>> =
            (0..200).map(|unit| (0..4).filter(|&r| Rank { rank: r, world: 4 }.owns("a/b.parquet", unit)).collect()).collect();
        assert!(owners.iter().all(|o| o.len() == 1));
        assert!((0..4).all(|r| owners.iter().filter(|o| o[0] == r).count() > 25));
    }
}

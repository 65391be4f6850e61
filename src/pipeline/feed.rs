//! The reader thread: files, parts and batches, in order.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::mpsc;

use super::RunError;
use super::spec::{InputFormat, PassThrough, PassThroughWord, Pipeline};
use crate::io::{
    ColumnPlan, ColumnSettings, FileFormat, InputFile, InputState, PartLine, Rank, ReadLimits, SourceBatch, SourceReader, Unit, WhyKept,
    file_state, hash_file, units,
};

/// A part ends after this many rows, or this many bytes of text.
const PART_ROWS: u64 = 65_536;
const PART_BYTES: u64 = 256 << 20;

/// What the reader thread says.
pub(super) enum Event {
    /// Rows of the file with this index.
    Rows(usize, SourceBatch),
    /// The part that the rows since the last end belong to is complete.
    PartEnd(PartEnd),
    /// Committed parts of one input or row group that need not be made again, why, and whether their lines must be written anew.
    Kept(Vec<PartLine>, WhyKept, bool),
    /// A file is done.
    FileEnd,
    /// All files are done. Without it, something is missing.
    End,
    /// Reading failed.
    Failed(RunError),
}

/// A complete part.
pub(super) struct PartEnd {
    pub(super) file: usize,
    pub(super) unit: Option<u32>,
    pub(super) part: u32,
    pub(super) first_row: u64,
    pub(super) end_row: u64,
    pub(super) last: bool,
    pub(super) state: InputState,
}

/// What the reader thread needs to know.
pub(super) struct FeedOptions {
    pub(super) files: Vec<InputFile>,
    pub(super) plan: Arc<ColumnPlan>,
    /// Committed parts.
    pub(super) kept: HashMap<Unit, Vec<PartLine>>,
    /// Whose share of the input is read, if not all.
    pub(super) rank: Option<Rank>,
    /// Rows to read at most.
    pub(super) limit: Option<u64>,
    /// Hash files whose size and time are unchanged.
    pub(super) checksum: bool,
    /// Whether inputs are hashed at all.
    pub(super) hash: bool,
}

/// Column settings of a pipeline, owned.
pub(super) struct Columns {
    text: String,
    id: Option<String>,
    count: Option<String>,
    pass_through: Option<Vec<String>>,
    columns: std::collections::BTreeMap<String, String>,
}

impl Columns {
    pub(super) fn new(pipeline: &Pipeline) -> Self {
        let input = &pipeline.input;
        let pass_through = match &input.pass_through {
            PassThrough::Word(PassThroughWord::All) => None,
            PassThrough::Word(PassThroughWord::None) => Some(Vec::new()),
            PassThrough::Columns(names) => Some(names.clone()),
        };
        Self {
            text: input.text_column.clone(),
            id: input.id_column.clone(),
            count: pipeline.segment.count_column.clone(),
            pass_through,
            columns: input.columns.clone(),
        }
    }

    pub(super) fn settings(&self) -> ColumnSettings<'_> {
        ColumnSettings {
            text: &self.text,
            id: self.id.as_deref(),
            count: self.count.as_deref(),
            pass_through: self.pass_through.as_deref(),
            columns: &self.columns,
        }
    }
}

/// The format that a pipeline forces.
pub(super) fn forced_format(pipeline: &Pipeline) -> Option<FileFormat> {
    match pipeline.input.format {
        InputFormat::Auto => None,
        InputFormat::Parquet => Some(FileFormat::Parquet),
        InputFormat::Jsonl => Some(FileFormat::Jsonl),
        InputFormat::Arrow => Some(FileFormat::Arrow),
    }
}

pub(super) fn read_limits(pipeline: &Pipeline) -> ReadLimits {
    ReadLimits { document: pipeline.input.max_document_bytes, line: pipeline.input.max_line_bytes }
}

/// Opens the first file, which fixes the columns of the whole run.
pub(super) fn open_first(pipeline: &Pipeline, files: &[InputFile]) -> Result<SourceReader, RunError> {
    let columns = Columns::new(pipeline);
    Ok(SourceReader::open(&files[0], None, &columns.settings(), read_limits(pipeline), 0..u64::MAX)?)
}

/// Reads all files and sends events until done or until nobody listens. `first` is the already open first file.
pub(super) fn feed(pipeline: &Pipeline, options: FeedOptions, first: Option<SourceReader>, busy_ns: &AtomicU64, out: &mpsc::Sender<Event>) {
    let mut feeder = Feeder { pipeline, columns: Columns::new(pipeline), options, first, busy_ns, out, read: 0, current: None };
    // The decoders of the formats are not ours: what they do not expect in a damaged file must not look like its end.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| feeder.all()));
    let last = match ended {
        Ok(Ok(())) => Event::End,
        Ok(Err(None)) => return,
        Ok(Err(Some(error))) => Event::Failed(error),
        Err(_) => {
            let path = feeder.current.clone().unwrap_or_default();
            let reason = "its decoder gave up on it; the file is damaged".to_owned();
            Event::Failed(crate::io::IoError::Format { path, format: "what it should be", reason }.into())
        }
    };
    // Nobody listens any more: the run has ended another way.
    let _ = out.blocking_send(last);
}

struct Feeder<'a> {
    pipeline: &'a Pipeline,
    columns: Columns,
    options: FeedOptions,
    first: Option<SourceReader>,
    busy_ns: &'a AtomicU64,
    out: &'a mpsc::Sender<Event>,
    /// Rows read or kept.
    read: u64,
    /// The file at hand.
    current: Option<std::path::PathBuf>,
}

/// An error to report, or `None`: nobody listens.
type Ended = Option<RunError>;

impl Feeder<'_> {
    fn all(&mut self) -> Result<(), Ended> {
        for index in 0..self.options.files.len() {
            if self.left() == Some(0) {
                break;
            }
            self.file(index)?;
        }
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        self.options.limit.map(|limit| limit.saturating_sub(self.read))
    }

    fn send(&self, event: Event) -> Result<(), Ended> {
        self.out.blocking_send(event).map_err(|_| None)
    }

    fn file(&mut self, index: usize) -> Result<(), Ended> {
        let file = self.options.files[index].clone();
        self.current = Some(file.path.clone());
        let units: Vec<(Option<u32>, Range<u64>)> = match self.options.rank {
            None => vec![(None, 0..u64::MAX)],
            Some(rank) => {
                let units = units(&file).map_err(|e| Some(e.into()))?;
                let numbered = units.into_iter().enumerate().map(|(unit, rows)| (Some(unit as u32), rows));
                numbered.filter(|(unit, _)| unit.is_some_and(|u| rank.owns(&file.relative, u))).collect()
            }
        };
        let mut state: Option<InputState> = None;
        for (unit, rows) in units {
            if self.left() == Some(0) {
                return Ok(());
            }
            self.unit(index, &file, unit, rows, &mut state)?;
        }
        self.first = None;
        self.send(Event::FileEnd)
    }

    /// The file as it is now, hashed unless it can be trusted to be what it was.
    fn state(&self, file: &InputFile, old: Option<&InputState>) -> Result<InputState, Ended> {
        let mut state = file_state(&file.path).map_err(|e| Some(e.into()))?;
        match old.filter(|o| o.size == state.size && o.modified_ns == state.modified_ns && !self.options.checksum) {
            Some(old) => state = old.clone(),
            None => state.blake3 = hash_file(&file.path).map_err(|e| Some(e.into()))?,
        }
        Ok(state)
    }

    fn unit(
        &mut self,
        index: usize,
        file: &InputFile,
        unit: Option<u32>,
        rows: Range<u64>,
        known: &mut Option<InputState>,
    ) -> Result<(), Ended> {
        let mut kept = self.options.kept.remove(&(file.relative.clone(), unit)).unwrap_or_default();
        let hashed = self.options.hash && !file.is_stdin();
        if !hashed {
            kept.clear();
        }
        let state = match known {
            Some(state) => state.clone(),
            None if hashed => known.insert(self.state(file, kept.first().map(|p| &p.state))?).clone(),
            None => InputState { size: 0, modified_ns: 0, blake3: String::new() },
        };
        if kept.first().is_some_and(|p| p.state.blake3 != state.blake3) {
            kept.clear();
        }
        if !kept.is_empty() {
            let refresh = kept.iter().any(|p| p.state != state);
            let why = if refresh || self.options.checksum { WhyKept::SameBytes } else { WhyKept::SameTime };
            kept.iter_mut().for_each(|p| p.state = state.clone());
            self.send(Event::Kept(kept.clone(), why, refresh))?;
        }
        self.read += kept.iter().map(|p| p.rows.read).sum::<u64>();
        let (mut part, mut row, done) = kept.last().map_or((0, rows.start, false), |p| (p.part + 1, p.end_row, p.last));
        if done || self.left() == Some(0) {
            return Ok(());
        }
        let mut reader = match self.first.take().filter(|_| row == 0 && unit.is_none()) {
            Some(reader) => reader,
            None => SourceReader::open(file, Some(&self.options.plan), &self.columns.settings(), read_limits(self.pipeline), row..rows.end)
                .map_err(|e| Some(e.into()))?,
        };
        let mut waiting = self.next(&mut reader)?;
        loop {
            let first_row = row;
            let (mut rows, mut bytes) = (0, 0);
            while let Some(mut batch) = waiting.take() {
                let mut take = batch.rows.len();
                let mut size = 0;
                for (i, text) in batch.texts().enumerate() {
                    size += match text {
                        crate::io::TextCell::Text(text) => text.len() as u64,
                        _ => 0,
                    };
                    if rows + i as u64 + 1 == PART_ROWS || bytes + size >= PART_BYTES {
                        take = i + 1;
                        break;
                    }
                }
                let whole = take == batch.rows.len();
                let front = batch.split_front(take);
                rows += take as u64;
                bytes += size;
                row = front.rows.last().map_or(row, |r| r + 1);
                self.send(Event::Rows(index, front))?;
                waiting = if whole { self.next(&mut reader)? } else { Some(batch) };
                if rows >= PART_ROWS || bytes >= PART_BYTES {
                    break;
                }
            }
            let last = waiting.is_none();
            if hashed {
                let now = file_state(&file.path).map_err(|e| Some(e.into()))?;
                if (now.size, now.modified_ns) != (state.size, state.modified_ns) {
                    let text = format!("{} changed while it was read; run again when it is complete", file.path.display());
                    return Err(Some(crate::io::IoError::Input(text).into()));
                }
            }
            self.send(Event::PartEnd(PartEnd { file: index, unit, part, first_row, end_row: row, last, state: state.clone() }))?;
            part += 1;
            if last {
                return Ok(());
            }
        }
    }

    /// The next batch, cut to the rows that may still be read.
    fn next(&mut self, reader: &mut SourceReader) -> Result<Option<SourceBatch>, Ended> {
        if self.left() == Some(0) {
            return Ok(None);
        }
        let began = Instant::now();
        let batch = reader.next_batch().map_err(|e| Some(e.into()));
        self.busy_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let Some(mut batch) = batch? else {
            return Ok(None);
        };
        let rows = batch.rows.len() as u64;
        let take = self.left().map_or(rows, |left| left.min(rows));
        self.read += take;
        Ok(Some(batch.split_front(take as usize)))
    }
}

//! A run: input files to an output folder or to standard output.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arrow::array::Array;
use arrow::util::display::array_value_to_string;
use futures::stream::{self, StreamExt};
use tokio::sync::{mpsc, watch};

use super::RunError;
use super::chunks::{Judge, Prepared};
use super::documents::{DocState, Need, Scorer, cache_path};
use super::feed::{Event, FeedOptions, PartEnd, feed, forced_format, open_first};
use super::operator::{CutBatch, Operator, limits};
use super::spec::{CacheMode, OnBadRow, OnMiss, Pipeline};
use super::summary::{Lengths, Summary, peak_memory};
use crate::io::{
    CalibrationLine, ChunkWriter, ColumnPlan, InputFile, IoError, KeptParts, Manifest, PartLine, Rank, RowCounts, RunLine, SinkTarget,
    SourceBatch, SpeedLine, TextCell, Why, at, discover, write_whole,
};
use crate::segment::calibrate;

/// Time after which scores are made durable although no part is complete.
const FLUSH_EVERY: Duration = Duration::from_secs(2);

/// Batches that may wait to be written beside those at work: writing goes in bursts.
const AHEAD: usize = 6;

/// Documents that a penalty is calibrated on at most.
const SAMPLE: usize = 10_000;

/// Why a run was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// `--stop-after` has passed.
    Deadline,
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "interrupted",
            Self::Terminate => "terminated",
            Self::Deadline => "the time of --stop-after is up",
        })
    }
}

/// How far a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Progress {
    /// Input files.
    pub files: usize,
    /// Input files done.
    pub files_done: usize,
    /// Rows read.
    pub rows: u64,
    /// Documents whose scores came from the cache, or were not needed.
    pub from_cache: u64,
    /// Documents scored.
    pub scored: u64,
    /// Chunks.
    pub chunks: u64,
    /// Document tokens per second of scoring.
    pub tokens_per_second: f64,
}

/// What a run does beside what its pipeline says.
pub struct RunOptions {
    /// Folder of fetched models.
    pub models: PathBuf,
    /// Rows to read at most.
    pub limit: Option<u64>,
    /// Hash inputs whose size and time are unchanged.
    pub checksum: bool,
    /// Remove the parts of inputs that are no longer listed.
    pub prune: bool,
    /// Make every part again; scores still come from the cache.
    pub force: bool,
    /// Whose share of the work this is, if several processes share it. Each has a cache and a manifest of its own.
    pub rank: Option<Rank>,
    /// Find the penalty of `target_mean_tokens` anew.
    pub recalibrate: bool,
    /// Changes to `Some` when the run shall stop.
    pub stop: watch::Receiver<Option<Stop>>,
    /// Called about once a second.
    pub progress: Box<dyn Fn(Progress) + Send + Sync>,
}

/// Runs a pipeline to its end.
///
/// Everything committed before an error stays, and the same call goes on from there.
///
/// # Errors
/// [`RunError`].
pub async fn run(pipeline: &Pipeline, options: RunOptions) -> Result<Summary, RunError> {
    let began = Instant::now();
    let target =
        pipeline.output.path.clone().ok_or_else(|| IoError::Input("no output: set output.path in the pipeline or give --output".into()))?;
    let folder = (target != "-").then(|| PathBuf::from(&target));
    let files = discover(&pipeline.input.paths, forced_format(pipeline), folder.as_deref())?;
    let pipeline = &of_rank(pipeline, options.rank, &files)?;
    let scorer = Arc::new(Scorer::new(pipeline, &options.models)?);
    let mut manifest = folder.as_deref().map(|f| Manifest::open(f, options.rank)).transpose()?;
    tracing::info!(event = "run_started", files = files.len(), output = target, rank = options.rank.map(|r| r.rank));
    let first = open_first(pipeline, &files)?;
    let plan = Arc::clone(first.plan());

    let mut scored_before = 0;
    let penalty = match pipeline.segment.target_mean_tokens {
        Some(mean) => calibrated(pipeline, &options, &scorer, &files, &plan, manifest.as_mut(), mean)
            .await
            .inspect(|_| scored_before = scorer.counters.forget())?,
        None => pipeline.segment.penalty(),
    };
    let operator = Arc::new(Operator::with_plan(pipeline, Arc::clone(&scorer), Arc::clone(&plan), penalty)?);
    let spec = spec_hash(pipeline, &scorer, &operator, options.limit);

    let kept = match &manifest {
        Some(manifest) if !options.force => manifest.lines().complete(manifest.root(), &spec),
        _ => HashMap::new(),
    };
    let stdout = match &manifest {
        None => {
            let out = &pipeline.output;
            Some(ChunkWriter::create(SinkTarget::Stdout, operator.schema(), out.format, out.compression)?)
        }
        Some(_) => None,
    };
    let read_ns = Arc::new(AtomicU64::new(0));
    let feed_options = FeedOptions {
        files: files.clone(),
        plan,
        kept,
        rank: options.rank,
        limit: options.limit,
        checksum: options.checksum,
        hash: manifest.is_some(),
    };
    let events = spawn_feed(pipeline, feed_options, Some(first), &read_ns);
    let mut consumer = Consumer {
        pipeline,
        files: &files,
        spec,
        operator: Arc::clone(&operator),
        manifest,
        writer: stdout,
        temporary: None,
        closing: None,
        part_rows: RowCounts::default(),
        part_chunks: 0,
        part_bad: Vec::new(),
        live: Vec::new(),
        made: BTreeMap::new(),
        kept: Vec::new(),
        flushed: (Instant::now(), 0),
        summary: Summary::default(),
        lengths: Lengths::default(),
        files_done: 0,
        ended: false,
        write_ns: 0,
    };
    let result = consumer.consume(events, &options).await;
    // A part that is complete is committed, whatever happened behind it.
    let closed = consumer.close().await;
    let result = result.and(closed);
    if result.is_err() {
        consumer.give_up();
    }
    // What was scored is kept whatever happened since.
    let flushed = scorer.store().flush();
    result?;
    flushed?;
    consumer.finish(&options)?;

    let mut summary = consumer.summary;
    summary.chunks = consumer.lengths.counts();
    let counters = &scorer.counters;
    let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
    let relaxed = summary.documents.relaxed;
    summary.documents = super::summary::DocumentCounts {
        // What the calibration scored comes from the cache the second time.
        from_cache: get(&counters.from_cache).saturating_sub(scored_before),
        scored: get(&counters.scored),
        not_needed: get(&counters.not_needed),
        tokens: get(&counters.tokens),
        candidates: get(&counters.candidates),
        relaxed,
    };
    let engine = scorer.engine_stats().unwrap_or_default();
    summary.scoring = super::summary::ScoringCounts {
        model_loaded: counters.model_loaded.load(Ordering::Relaxed),
        tokenizer_loaded: counters.tokenizer_loaded.load(Ordering::Relaxed),
        encoder_loaded: scorer.encoder_loaded(),
        source_tokens: engine.source_tokens,
        forward_tokens: engine.forward_tokens,
        tokens_per_second: if engine.busy_seconds > 0.0 { engine.source_tokens as f64 / engine.busy_seconds } else { 0.0 },
    };
    let fixed = pipeline.segment.count.is_some() || pipeline.segment.count_column.is_some();
    summary.penalty = (!fixed).then_some(penalty);
    (summary.cache_unsound, summary.cache_unwritten) = scorer.store().trouble();
    let seconds = |ns: u64| ns as f64 / 1e9;
    summary.seconds = BTreeMap::from([
        ("total".to_owned(), began.elapsed().as_secs_f64()),
        ("read".to_owned(), seconds(get(&read_ns))),
        ("look_up".to_owned(), seconds(get(&counters.lookup_ns))),
        ("tokenize".to_owned(), seconds(get(&counters.tokenize_ns))),
        ("score".to_owned(), engine.busy_seconds),
        ("segment".to_owned(), seconds(get(&operator.segment_ns))),
        ("write".to_owned(), seconds(consumer.write_ns)),
    ]);
    summary.peak_memory_bytes = peak_memory();
    if let Some(manifest) = &mut consumer.manifest {
        if summary.scoring.tokens_per_second > 0.0 {
            let line = SpeedLine { scores: scores_hash(&scorer), tokens_per_second: summary.scoring.tokens_per_second };
            manifest.store_speed(line)?;
        }
        let text = serde_json::to_string_pretty(&summary).map_err(|e| RunError::Bug(e.to_string()))?;
        write_whole(&manifest.service().join("summary.json"), (text + "\n").as_bytes())?;
    }
    tracing::info!(
        event = "run_finished",
        rows = summary.rows.read,
        parts_made = summary.parts_made,
        seconds = began.elapsed().as_secs_f64()
    );
    Ok(summary)
}

/// A pipeline as one of several ranks runs it: with a cache of its own.
pub(super) fn of_rank(pipeline: &Pipeline, rank: Option<Rank>, files: &[InputFile]) -> Result<Pipeline, RunError> {
    let mut pipeline = pipeline.clone();
    let Some(rank) = rank else { return Ok(pipeline) };
    let refuse = |text: &str| Err(IoError::Input(text.into()).into());
    if pipeline.segment.target_mean_tokens.is_some() {
        return refuse(
            "segment.target_mean_tokens looks at a sample of all documents, which ranks that see only their own share cannot do; find the penalty by a \
             run over some of the files without --rank, and give it as segment.penalty",
        );
    }
    if files.iter().any(InputFile::is_stdin) {
        return refuse("standard input cannot be shared by ranks; give files");
    }
    pipeline.cache.path = Some(rank_cache(&cache_path(&pipeline), rank));
    Ok(pipeline)
}

/// The cache of one rank: a folder below the pipeline's.
fn rank_cache(cache: &Path, rank: Rank) -> PathBuf {
    cache.join(format!("rank-{:05}", rank.rank))
}

/// Hash of everything that can change a score.
pub(super) fn scores_hash(scorer: &Scorer) -> String {
    let keys: Vec<String> = scorer.keys().iter().map(|k| k.to_hex().to_string()).collect();
    hash_words(&keys)
}

/// Starts the reader thread.
pub(super) fn spawn_feed(
    pipeline: &Pipeline,
    options: FeedOptions,
    first: Option<crate::io::SourceReader>,
    busy_ns: &Arc<AtomicU64>,
) -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(2);
    let (pipeline, busy_ns) = (pipeline.clone(), Arc::clone(busy_ns));
    // Detached on purpose: it ends when the receiver is gone.
    drop(tokio::task::spawn_blocking(move || feed(&pipeline, options, first, &busy_ns, &sender)));
    receiver
}

/// The events of a receiver as a stream.
pub(super) fn event_stream(receiver: mpsc::Receiver<Event>) -> impl stream::Stream<Item = Event> + Unpin {
    Box::pin(stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|event| (event, receiver)) }))
}

/// The rows of a pipeline's input, for commands that look at a sample.
pub(super) struct Rows {
    /// The columns beside the text.
    pub(super) plan: Arc<ColumnPlan>,
    /// Names of the files, by number.
    pub(super) names: Vec<String>,
    events: mpsc::Receiver<Event>,
}

impl Rows {
    /// Reads at most `limit` rows.
    pub(super) fn open(pipeline: &Pipeline, limit: Option<u64>) -> Result<Self, RunError> {
        let files = discover(&pipeline.input.paths, forced_format(pipeline), None)?;
        let names = files.iter().map(|f| f.relative.clone()).collect();
        let first = open_first(pipeline, &files)?;
        let plan = Arc::clone(first.plan());
        let feed =
            FeedOptions { files, plan: Arc::clone(&plan), kept: Default::default(), rank: None, limit, checksum: false, hash: false };
        Ok(Self { plan, names, events: spawn_feed(pipeline, feed, Some(first), &Arc::default()) })
    }

    /// The id of a row: its id column's value, else `<path>#<row>`.
    pub(super) fn id(&self, file: usize, batch: &SourceBatch, place: usize) -> Result<String, RunError> {
        match self.plan.id {
            Some(_) => Ok(array_value_to_string(batch.columns.column(0), place)?),
            None => Ok(format!("{}#{}", self.names[file], batch.rows[place])),
        }
    }

    /// The next rows, with the number of their file; none at the end.
    pub(super) async fn next(&mut self) -> Result<Option<(usize, SourceBatch)>, RunError> {
        loop {
            match self.events.recv().await {
                Some(Event::Rows(file, batch)) => return Ok(Some((file, batch))),
                Some(Event::Failed(error)) => return Err(error),
                Some(Event::End) => return Ok(None),
                Some(_) => {}
                None => return Err(RunError::Bug("the reader ended without saying so".into())),
            }
        }
    }
}

/// A name in a column. JSONL columns without a type hold JSON.
pub(super) fn name(column: &dyn Array, place: usize) -> Result<String, RunError> {
    let value = array_value_to_string(column, place)?;
    Ok(serde_json::from_str(&value).unwrap_or(value))
}

/// Waits until the run shall stop.
pub(super) async fn stopped(mut stop: watch::Receiver<Option<Stop>>) -> Stop {
    loop {
        if let Some(reason) = *stop.borrow_and_update() {
            return reason;
        }
        if stop.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Hash of everything that changes output bytes; the program's version is not part of it.
pub(super) fn spec_hash(pipeline: &Pipeline, scorer: &Scorer, operator: &Operator, limit: Option<u64>) -> String {
    let mut words: Vec<String> = vec!["parts 1".into()];
    words.extend(scorer.keys().iter().map(|k| k.to_hex().to_string()));
    words.push(format!("{:?} {:?}", operator.cutting, operator.limits));
    words.push(format!("{:?}", operator.schema.fields()));
    let mut metadata: Vec<_> = operator.schema.metadata().iter().collect();
    metadata.sort();
    words.push(format!("{metadata:?}"));
    words.push(format!("{:?} {:?} {:?}", pipeline.output.format, pipeline.output.compression, pipeline.output.provenance));
    let input = &pipeline.input;
    words.push(format!("{:?} {:?} {:?} {:?}", input.text_column, input.id_column, input.max_document_bytes, input.max_line_bytes));
    words.push(format!("{:?} {:?} {limit:?}", pipeline.segment.count_column, pipeline.cache.on_miss == OnMiss::Skip));
    hash_words(&words)
}

fn hash_words(words: &[String]) -> String {
    crate::hash::words(words.iter().map(String::as_str)).to_hex()[..32].to_owned()
}

/// The one consumer: writes and commits, in order.
struct Consumer<'a> {
    pipeline: &'a Pipeline,
    files: &'a [InputFile],
    spec: String,
    operator: Arc<Operator>,
    manifest: Option<Manifest>,
    writer: Option<ChunkWriter>,
    temporary: Option<PathBuf>,
    /// A part whose file is being closed and synced while the next one is made.
    closing: Option<Closing>,
    part_rows: RowCounts,
    part_chunks: u64,
    part_bad: Vec<(u64, String)>,
    /// Data files of this run.
    live: Vec<String>,
    /// Parts made, by why.
    made: BTreeMap<Why, u64>,
    /// Parts kept.
    kept: Vec<KeptParts>,
    /// When scores were last made durable, and how many documents had been scored then.
    flushed: (Instant, u64),
    summary: Summary,
    lengths: Lengths,
    files_done: usize,
    /// Whether all input has been read.
    ended: bool,
    write_ns: u64,
}

/// A part whose file is being closed: the task, the file, and the line that will commit it.
type Closing = (tokio::task::JoinHandle<Result<(), IoError>>, PathBuf, PartLine);

enum Cut {
    Batch(usize, Result<CutBatch, RunError>),
    Other(Event),
}

impl Consumer<'_> {
    async fn consume(&mut self, events: mpsc::Receiver<Event>, options: &RunOptions) -> Result<(), RunError> {
        let operator = Arc::clone(&self.operator);
        let names: Arc<Vec<String>> = Arc::new(self.files.iter().map(|f| f.relative.clone()).collect());
        let sides = operator.scorer.threads() + AHEAD;
        let cut = event_stream(events).map(move |event| {
            let (operator, names) = (Arc::clone(&operator), Arc::clone(&names));
            async move {
                match event {
                    Event::Rows(file, batch) => {
                        let task = tokio::spawn(async move { operator.cut(&names[file], Arc::new(batch)).await });
                        Cut::Batch(file, task.await.unwrap_or_else(|e| Err(RunError::Bug(e.to_string()))))
                    }
                    other => Cut::Other(other),
                }
            }
        });
        let mut cut = Box::pin(cut.buffered(sides));
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        let stop = stopped(options.stop.clone());
        tokio::pin!(stop);
        loop {
            tokio::select! {
                biased;
                reason = &mut stop => return Err(RunError::Stopped(reason)),
                _ = tick.tick() => {
                    (options.progress)(self.progress());
                    tokio::task::block_in_place(|| self.flush_scores())?;
                },
                item = cut.next() => match item {
                    None => break,
                    Some(item) => {
                        if matches!(item, Cut::Other(Event::PartEnd(_))) {
                            self.close().await?;
                        }
                        tokio::task::block_in_place(|| self.take(item, options.force))?;
                    }
                },
            }
        }
        (options.progress)(self.progress());
        if self.ended { Ok(()) } else { Err(RunError::Bug("the reader ended before the input did".into())) }
    }

    fn progress(&self) -> Progress {
        let counters = &self.operator.scorer.counters;
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let engine = self.operator.scorer.engine_stats().unwrap_or_default();
        Progress {
            files: self.files.len(),
            files_done: self.files_done,
            rows: self.summary.rows.read + self.part_rows.read,
            from_cache: get(&counters.from_cache) + get(&counters.not_needed),
            scored: get(&counters.scored),
            chunks: self.lengths.counts().count,
            tokens_per_second: if engine.busy_seconds > 0.0 { engine.source_tokens as f64 / engine.busy_seconds } else { 0.0 },
        }
    }

    /// Makes scores durable from time to time, so that a part of many documents need not be scored again from its start.
    fn flush_scores(&mut self) -> Result<(), RunError> {
        let scorer = &self.operator.scorer;
        let scored = scorer.counters.scored.load(Ordering::Relaxed);
        if scored > self.flushed.1 && self.flushed.0.elapsed() >= FLUSH_EVERY {
            scorer.store().flush()?;
            self.flushed = (Instant::now(), scored);
            kill_point!("after-timed-flush");
        }
        Ok(())
    }

    fn take(&mut self, item: Cut, force: bool) -> Result<(), RunError> {
        match item {
            Cut::Batch(file, batch) => {
                let began = Instant::now();
                let result = batch.and_then(|b| self.write(file, b));
                self.write_ns += began.elapsed().as_nanos() as u64;
                result
            }
            Cut::Other(Event::PartEnd(end)) => {
                let began = Instant::now();
                let result = self.end_part(end, force);
                self.write_ns += began.elapsed().as_nanos() as u64;
                result
            }
            Cut::Other(Event::Kept(parts, why, refresh)) => {
                if let Some(first) = parts.first() {
                    self.kept.push(KeptParts { input: first.input.clone(), unit: first.unit, parts: parts.len() as u64, why });
                }
                for part in parts {
                    self.summary.rows.add(&part.rows);
                    self.summary.parts_kept += 1;
                    self.live.push(part.file.clone());
                    if let (true, Some(manifest)) = (refresh, &mut self.manifest) {
                        manifest.refresh(part)?;
                    }
                }
                Ok(())
            }
            Cut::Other(Event::FileEnd) => {
                self.files_done += 1;
                Ok(())
            }
            Cut::Other(Event::Failed(error)) => Err(error),
            Cut::Other(Event::End) => {
                self.ended = true;
                Ok(())
            }
            Cut::Other(Event::Rows(..)) => Ok(()),
        }
    }

    /// Opens the writer of the current part, if it is not open.
    fn writer(&mut self) -> Result<&mut ChunkWriter, RunError> {
        if self.writer.is_none() {
            let service = self.manifest.as_ref().map_or(Path::new("."), Manifest::service);
            // The one before may still be closed.
            let path = service.join(format!("part-{}.rr-tmp", self.summary.parts_made % 2));
            let out = &self.pipeline.output;
            self.temporary = Some(path.clone());
            self.writer = Some(ChunkWriter::create(SinkTarget::File(path), self.operator.schema(), out.format, out.compression)?);
        }
        self.writer.as_mut().ok_or_else(|| RunError::Bug("no writer".into()))
    }

    fn write(&mut self, file: usize, batch: CutBatch) -> Result<(), RunError> {
        self.part_rows.add(&batch.rows);
        self.lengths.merge(&batch.lengths);
        self.summary.documents.relaxed += batch.relaxed;
        let name = &self.files[file].relative;
        if let (Some((row, reason)), Some(max)) = (batch.bad.last(), self.pipeline.input.max_bad_rows) {
            let count = self.summary.rows.bad + self.part_rows.bad;
            if count > max {
                return Err(RunError::TooManyBadRows { count, max, file: name.clone(), row: *row, reason: reason.clone() });
            }
        }
        for (row, reason) in &batch.bad {
            tracing::warn!(event = "bad_row", file = name, row, reason, "bad row left out");
        }
        self.part_bad.extend(batch.bad);
        for (chunks, bytes) in batch.chunks {
            self.part_chunks += chunks.num_rows() as u64;
            self.writer()?.write(chunks, bytes)?;
        }
        kill_point!("after-write");
        Ok(())
    }

    fn end_part(&mut self, end: PartEnd, force: bool) -> Result<(), RunError> {
        let rows = std::mem::take(&mut self.part_rows);
        let chunks = std::mem::take(&mut self.part_chunks);
        let bad = std::mem::take(&mut self.part_bad);
        self.summary.rows.add(&rows);
        if self.manifest.is_none() {
            return Ok(());
        }
        // Scores are durable before the part that needed them is.
        self.operator.scorer.store().flush()?;
        kill_point!("after-cache-flush");
        self.writer()?;
        let file = &self.files[end.file];
        let data = data_file(file, end.unit, end.part, self.pipeline.output.format.extension());
        let (Some(writer), Some(temporary), Some(manifest)) = (self.writer.take(), self.temporary.take(), self.manifest.as_ref()) else {
            return Ok(());
        };
        let target = manifest.root().join(&data);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).map_err(at(parent))?;
        }
        if self.pipeline.input.on_bad_row == OnBadRow::Quarantine {
            quarantine(manifest.service(), &file.relative, end.first_row, end.end_row, &bad)?;
        }
        let why = if force { Why::Forced } else { manifest.lines().why(manifest.root(), &data, &end.state, &self.spec) };
        let line = PartLine {
            input: file.relative.clone(),
            state: end.state,
            unit: end.unit,
            part: end.part,
            first_row: end.first_row,
            end_row: end.end_row,
            last: end.last,
            file: data.clone(),
            bytes: 0,
            rows,
            chunks,
            spec: self.spec.clone(),
            why,
        };
        *self.made.entry(why).or_default() += 1;
        self.live.push(data);
        self.summary.parts_made += 1;
        self.closing = Some((tokio::task::spawn_blocking(move || writer.finish()), temporary, line));
        Ok(())
    }

    /// Waits until the file of the part before is durable, and commits the part.
    async fn close(&mut self) -> Result<(), RunError> {
        let Some((task, temporary, mut line)) = self.closing.take() else { return Ok(()) };
        let closed = task.await.map_err(|e| RunError::Bug(e.to_string())).and_then(|r| Ok(r?));
        let began = Instant::now();
        let committed = closed.and_then(|()| {
            let Some(manifest) = self.manifest.as_mut() else { return Ok(()) };
            tokio::task::block_in_place(|| {
                line.bytes = std::fs::metadata(&temporary).map_err(at(&temporary))?.len();
                tracing::info!(event = "part_committed", file = line.file, why = %line.why, rows = line.rows.read, chunks = line.chunks, bytes = line.bytes);
                manifest.commit(&temporary, line)
            })
            .map_err(RunError::from)
        });
        self.write_ns += began.elapsed().as_nanos() as u64;
        committed.inspect_err(|_| {
            // The failure is what counts; a full disk has room again at once.
            let _ = std::fs::remove_file(&temporary);
        })
    }

    /// Removes what an unfinished part has on disk. The next run would do it at the latest; a full disk has room again at once.
    fn give_up(&mut self) {
        self.writer = None;
        if let Some(temporary) = self.temporary.take() {
            let _ = std::fs::remove_file(temporary);
        }
    }

    fn finish(&mut self, options: &RunOptions) -> Result<(), RunError> {
        match &mut self.manifest {
            None => {
                if let Some(writer) = self.writer.take() {
                    writer.finish()?;
                }
            }
            Some(manifest) => {
                let inputs: HashSet<&str> = self.files.iter().map(|f| f.relative.as_str()).collect();
                let live: HashSet<&str> = self.live.iter().map(String::as_str).collect();
                let (made, kept) = (std::mem::take(&mut self.made), std::mem::take(&mut self.kept));
                let run = RunLine { version: env!("CARGO_PKG_VERSION").to_owned(), made, kept, removed: 0 };
                self.summary.parts_removed = manifest.finish(&inputs, &live, options.prune, run)?;
            }
        }
        Ok(())
    }
}

/// Path of a data file below the output folder: partition folders of the input are mirrored.
pub(super) fn data_file(file: &InputFile, unit: Option<u32>, part: u32, extension: &str) -> String {
    let (folders, name) = file.relative.rsplit_once('/').unwrap_or(("", &file.relative));
    let partitions: Vec<&str> = folders.split('/').filter(|f| f.contains('=')).collect();
    let stem = name.split('.').next().filter(|s| !s.is_empty()).unwrap_or("input");
    let hash = blake3::hash(file.relative.as_bytes()).to_hex();
    let unit = unit.map_or(String::new(), |unit| format!("g{unit:05}-"));
    let own = format!("{stem}-{}-{unit}{part:05}.{extension}", &hash[..8]);
    partitions.into_iter().chain([own.as_str()]).collect::<Vec<_>>().join("/")
}

/// Puts the bad rows of a part into `quarantine.jsonl`, in place of what an earlier attempt at these rows left there.
fn quarantine(service: &Path, input: &str, first: u64, end: u64, bad: &[(u64, String)]) -> Result<(), IoError> {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct BadLine {
        source_file: String,
        source_row: u64,
        reason: String,
    }
    let path = service.join("quarantine.jsonl");
    let old = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(at(&path)(e)),
    };
    let mut lines: Vec<BadLine> = old
        .lines()
        .filter_map(|l| serde_json::from_str::<BadLine>(l).ok())
        .filter(|l| l.source_file != input || !(first..end).contains(&l.source_row))
        .collect();
    if bad.is_empty() && lines.len() == old.lines().count() {
        return Ok(());
    }
    lines.extend(bad.iter().map(|(row, reason)| BadLine { source_file: input.to_owned(), source_row: *row, reason: reason.clone() }));
    lines.sort_by(|a, b| (&a.source_file, a.source_row).cmp(&(&b.source_file, b.source_row)));
    let mut bytes = Vec::new();
    for line in &lines {
        serde_json::to_writer(&mut bytes, line).map_err(|e| at(&path)(e.into()))?;
        bytes.push(b'\n');
    }
    write_whole(&path, &bytes)
}

/// Hash of the settings that a penalty is found for.
pub(super) fn calibration_spec(pipeline: &Pipeline, scorer: &Scorer, mean: f64) -> String {
    let mut words = vec![
        "calibration 2".to_owned(),
        format!("{mean} {:?} {:?} {:?}", limits(pipeline), pipeline.segment.objective, pipeline.segment.utility),
    ];
    words.extend(scorer.keys().iter().map(|k| k.to_hex().to_string()));
    hash_words(&words)
}

/// The penalty for a mean chunk length: the one in the manifest, else found on a sample of the documents.
async fn calibrated(
    pipeline: &Pipeline,
    options: &RunOptions,
    scorer: &Arc<Scorer>,
    files: &[InputFile],
    plan: &Arc<ColumnPlan>,
    manifest: Option<&mut Manifest>,
    mean: f64,
) -> Result<f64, RunError> {
    let (limits, judge) = (limits(pipeline), Judge::new(pipeline));
    let spec = calibration_spec(pipeline, scorer, mean);
    if let Some(found) = manifest.as_ref().and_then(|m| m.lines().calibration(&spec)).filter(|_| !options.recalibrate) {
        return Ok(found.penalty);
    }
    if files.iter().any(InputFile::is_stdin) {
        return Err(IoError::Input(
            "segment.target_mean_tokens reads the input twice, which standard input does not allow; give a penalty".into(),
        )
        .into());
    }
    if pipeline.cache.mode == CacheMode::Off {
        return Err(IoError::Input(
            "segment.target_mean_tokens would score its sample twice without the cache; set cache.mode to \"on\"".into(),
        )
        .into());
    }
    tracing::info!(event = "penalty_sought", mean, "finding the penalty for the mean chunk length");
    let all = || FeedOptions {
        files: files.to_vec(),
        plan: Arc::clone(plan),
        kept: HashMap::new(),
        rank: None,
        limit: options.limit,
        checksum: false,
        hash: false,
    };
    let stop = stopped(options.stop.clone());
    tokio::pin!(stop);
    let unused = Arc::new(AtomicU64::new(0));
    let hash_of = |cell: TextCell<'_>| match cell {
        TextCell::Text(text) if !text.is_empty() => Some(*blake3::hash(text.as_bytes()).as_bytes()),
        _ => None,
    };

    let mut smallest: std::collections::BTreeSet<[u8; 32]> = std::collections::BTreeSet::new();
    let mut events = spawn_feed(pipeline, all(), None, &unused);
    loop {
        let event = tokio::select! { biased; reason = &mut stop => return Err(RunError::Stopped(reason)), event = events.recv() => event };
        match event {
            None => break,
            Some(Event::Failed(error)) => return Err(error),
            Some(Event::Rows(_, batch)) => {
                for hash in batch.texts().filter_map(hash_of) {
                    smallest.insert(hash);
                    if smallest.len() > SAMPLE {
                        smallest.pop_last();
                    }
                }
            }
            Some(_) => {}
        }
    }

    let mut sample = Vec::new();
    let mut tokens = 0;
    let mut events = spawn_feed(pipeline, all(), None, &unused);
    loop {
        let event = tokio::select! { biased; reason = &mut stop => return Err(RunError::Stopped(reason)), event = events.recv() => event };
        let mut batch = match event {
            None => break,
            Some(Event::Failed(error)) => return Err(error),
            Some(Event::Rows(_, batch)) => batch,
            Some(_) => continue,
        };
        // Of several copies the first is kept.
        batch.keep_texts(|text| hash_of(text).is_some_and(|hash| smallest.remove(&hash)));
        let batch = Arc::new(batch);
        let states = tokio::select! { biased; reason = &mut stop => return Err(RunError::Stopped(reason)), states = scorer.resolve(&batch, Need::Cuttable(limits)) => states? };
        for state in states {
            if let DocState::Ready(document) = state {
                tokens += u64::from(document.tokens);
                sample.push(document);
            }
        }
    }
    scorer.store().flush()?;
    let prepared: Vec<Prepared<'_>> = sample.iter().map(|document| Prepared::new(document, &judge)).collect();
    let count = |penalty: f64| {
        let chunks = prepared.iter().map(|document| document.open(&limits, penalty).cuts.len() as u64 + 1);
        Ok::<_, RunError>(chunks.sum())
    };
    let found = tokio::task::block_in_place(|| calibrate(pipeline.segment.scale(), tokens, mean, count))?;
    tracing::info!(
        event = "penalty_found",
        penalty = found.penalty,
        mean_tokens = found.mean_tokens,
        documents = sample.len(),
        "penalty found"
    );
    if let Some(manifest) = manifest {
        manifest.store_calibration(CalibrationLine {
            target_mean_tokens: mean,
            penalty: found.penalty,
            mean_tokens: found.mean_tokens,
            documents: sample.len() as u64,
            spec,
        })?;
    }
    Ok(found.penalty)
}

//! The `plan` command: what a run would do, without doing it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::stream::StreamExt;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::documents::{DocState, Need, Scorer};
use super::feed::{Event, FeedOptions, forced_format, open_first};
use super::operator::{Operator, limits};
use super::run::{calibration_spec, data_file, event_stream, of_rank, scores_hash, spawn_feed, spec_hash, stopped};
use super::spec::{OnMiss, Pipeline};
use super::{RunError, Stop};
use crate::io::{IoError, Lines, PartLine, Rank, TextCell, Why, discover, manifest_path};

/// Bytes of a token, where no document of the input is known yet: about that of English.
const TOKEN_BYTES: f64 = 4.5;

/// What a run would do.
#[derive(Debug, Clone, PartialEq, Default, Serialize, JsonSchema)]
pub struct Plan {
    /// Input files.
    pub files: u64,
    /// Parts that would be kept.
    pub parts_kept: u64,
    /// Parts that would be made, by why.
    pub parts_made: BTreeMap<Why, u64>,
    /// Data files that would be removed.
    pub parts_removed: Vec<String>,
    /// Rows of the parts to make.
    pub rows: u64,
    /// Documents among them whose scores are in the cache.
    pub in_cache: u64,
    /// Documents that are known to need no scores.
    pub not_needed: u64,
    /// Different texts that would be scored, or tokenized and found to need no scores.
    pub missing: u64,
    /// Rows with the same text as another missing one.
    pub copies: u64,
    /// Null, empty and bad rows.
    pub other_rows: u64,
    /// Bytes of the missing texts.
    pub missing_bytes: u64,
    /// About how many tokens they have.
    pub missing_tokens: u64,
    /// Document tokens per second when these scores were last computed for this output; none if they never were.
    pub tokens_per_second: Option<f64>,
    /// About how long scoring would take, at that speed.
    pub seconds: Option<f64>,
    /// Whether the penalty of `target_mean_tokens` is still to be found, which scores a sample first.
    pub penalty_unknown: bool,
}

/// What to plan beside what the pipeline says; as for a run.
pub struct PlanOptions {
    /// Folder of fetched models.
    pub models: PathBuf,
    /// Rows to read at most.
    pub limit: Option<u64>,
    /// Hash inputs whose size and time are unchanged.
    pub checksum: bool,
    /// Remove the parts of inputs that are no longer listed.
    pub prune: bool,
    /// Make every part again.
    pub force: bool,
    /// Whose share of the work this is.
    pub rank: Option<Rank>,
    /// Changes to `Some` when planning shall stop.
    pub stop: watch::Receiver<Option<Stop>>,
}

#[derive(Default)]
struct Tally {
    plan: Plan,
    missing: HashSet<blake3::Hash>,
    known_bytes: u64,
}

/// Plans a run: reads input, manifest and cache, and writes nothing to output or cache.
///
/// # Errors
/// [`RunError`].
pub async fn plan(pipeline: &Pipeline, options: PlanOptions) -> Result<Plan, RunError> {
    let folder = pipeline.output.path.as_deref().filter(|p| *p != "-").map(Path::new);
    let files = discover(&pipeline.input.paths, forced_format(pipeline), folder)?;
    let pipeline = &of_rank(pipeline, options.rank, &files)?;
    let asked = pipeline.cache.on_miss;
    let looking = Pipeline { cache: super::spec::Cache { on_miss: OnMiss::Skip, ..pipeline.cache.clone() }, ..pipeline.clone() };
    let scorer = Arc::new(Scorer::to_look(&looking, &options.models)?);
    let first = open_first(pipeline, &files)?;
    let columns = Arc::clone(first.plan());
    let manifest = folder.map(|f| manifest_path(f, options.rank)).filter(|m| m.exists());
    let lines = manifest.as_deref().map(Lines::read).transpose()?.unwrap_or_default();
    let root = folder.unwrap_or(Path::new("-"));

    let penalty = match pipeline.segment.target_mean_tokens {
        Some(mean) => lines.calibration(&calibration_spec(pipeline, &scorer, mean)).map(|c| c.penalty),
        None => Some(pipeline.segment.penalty()),
    };
    let spec = match penalty {
        Some(penalty) => {
            let operator = Operator::with_plan(pipeline, Arc::clone(&scorer), Arc::clone(&columns), penalty)?;
            spec_hash(pipeline, &scorer, &operator, options.limit)
        }
        // No part was made with a penalty that is still to be found.
        None => String::new(),
    };
    let kept = if options.force { HashMap::new() } else { lines.complete(root, &spec) };
    let feed = FeedOptions {
        files: files.clone(),
        plan: columns,
        kept,
        rank: options.rank,
        limit: options.limit,
        checksum: options.checksum,
        hash: folder.is_some(),
    };
    let events = spawn_feed(pipeline, feed, Some(first), &Arc::new(AtomicU64::new(0)));
    let (limits, worker) = (limits(pipeline), Arc::clone(&scorer));
    let found = event_stream(events).map(move |event| {
        let scorer = Arc::clone(&worker);
        async move {
            let Event::Rows(_, batch) = event else { return Ok((Some(event), Vec::new())) };
            let batch = Arc::new(batch);
            let states = scorer.resolve(&batch, Need::Cuttable(limits)).await?;
            let text = |cell: TextCell<'_>| match cell {
                TextCell::Text(text) if !text.is_empty() => Some((blake3::hash(text.as_bytes()), text.len() as u64)),
                _ => None,
            };
            Ok::<_, RunError>((None, batch.texts().map(text).zip(states).collect()))
        }
    });
    let mut found = Box::pin(found.buffered(scorer.threads() + 1));
    let mut tally = Tally::default();
    let mut live: HashSet<String> = HashSet::new();
    let stop = stopped(options.stop.clone());
    tokio::pin!(stop);
    loop {
        let item = tokio::select! { biased; reason = &mut stop => return Err(RunError::Stopped(reason)), item = found.next() => item };
        let Some(item) = item else { break };
        match item? {
            (Some(Event::Failed(error)), _) => return Err(error),
            (Some(Event::Kept(parts, ..)), _) => {
                tally.plan.parts_kept += parts.len() as u64;
                live.extend(parts.into_iter().map(|p: PartLine| p.file));
            }
            (Some(Event::PartEnd(end)), _) => {
                let data = data_file(&files[end.file], end.unit, end.part, pipeline.output.format.extension());
                let why = if options.force { Why::Forced } else { lines.why(root, &data, &end.state, &spec) };
                *tally.plan.parts_made.entry(why).or_default() += 1;
                live.insert(data);
            }
            (_, rows) => rows.into_iter().for_each(|(text, state)| tally.add(text, &state)),
        }
    }
    let inputs: HashSet<&str> = files.iter().map(|f| f.relative.as_str()).collect();
    let mut plan = tally.plan;
    plan.files = files.len() as u64;
    plan.parts_removed =
        lines.stale(&inputs, &live.iter().map(String::as_str).collect(), options.prune).into_iter().map(|(f, _)| f).collect();
    plan.missing = tally.missing.len() as u64;
    let tokens = scorer.counters.tokens.load(Ordering::Relaxed);
    let per_token = if tokens > 0 { tally.known_bytes as f64 / tokens as f64 } else { TOKEN_BYTES };
    plan.missing_tokens = (plan.missing_bytes as f64 / per_token).round() as u64;
    plan.tokens_per_second = lines.speed(&scores_hash(&scorer));
    plan.seconds = plan.tokens_per_second.map(|speed| plan.missing_tokens as f64 / speed);
    plan.penalty_unknown = penalty.is_none();
    if plan.missing > 0 && asked == OnMiss::Error {
        return Err(IoError::Input(format!(
            "{} documents are not in the score cache, and cache.on_miss = \"error\" forbids inference; run once with --set cache.on_miss=score",
            plan.missing
        ))
        .into());
    }
    Ok(plan)
}

impl Tally {
    fn add(&mut self, text: Option<(blake3::Hash, u64)>, state: &DocState) {
        self.plan.rows += 1;
        match (state, text) {
            (DocState::Ready(document), Some((_, bytes))) => {
                self.known_bytes += bytes;
                *if document.scores.is_some() { &mut self.plan.in_cache } else { &mut self.plan.not_needed } += 1;
            }
            (DocState::NotCached, Some((hash, bytes))) => {
                if self.missing.insert(hash) {
                    self.plan.missing_bytes += bytes;
                } else {
                    self.plan.copies += 1;
                }
            }
            _ => self.plan.other_rows += 1,
        }
    }
}

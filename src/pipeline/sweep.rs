//! The `sweep` command: what each penalty would give, from the cache alone, all penalties in one pass over the data.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures::stream::StreamExt;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::watch;

use super::chunks::{Judge, Prepared};
use super::documents::{DocState, Need, Scorer};
use super::feed::{Event, FeedOptions, forced_format, open_first};
use super::operator::limits;
use super::run::{event_stream, spawn_feed, stopped};
use super::spec::Pipeline;
use super::summary::Lengths;
use super::{RunError, Stop};
use crate::io::discover;
use crate::segment::Limits;

/// What one penalty gives.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PenaltyRow {
    /// The penalty.
    pub penalty: f64,
    /// Chunks.
    pub chunks: u64,
    /// Mean tokens of a chunk.
    pub mean: f64,
    /// 5th percentile of chunk tokens.
    pub p5: u32,
    /// Median of chunk tokens.
    pub p50: u32,
    /// 95th percentile of chunk tokens.
    pub p95: u32,
    /// Share of chunks at the hard minimum or below.
    pub at_min: f64,
    /// Share of chunks at the hard maximum or above.
    pub at_max: f64,
    /// Documents for which a limit gave way.
    pub relaxed: u64,
}

/// The outcome of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Sweep {
    /// One row per penalty, as given.
    pub penalties: Vec<PenaltyRow>,
    /// Documents cut.
    pub documents: u64,
    /// Documents left out because they are not in the cache.
    pub not_cached: u64,
    /// Rows left out: null, empty or bad.
    pub other_rows: u64,
}

#[derive(Clone)]
struct Tally {
    lengths: Vec<Lengths>,
    relaxed: Vec<u64>,
    documents: u64,
    not_cached: u64,
    other: u64,
}

/// Cuts every document of the pipeline's input at every penalty. What `cache.on_miss` says about documents without scores holds.
///
/// # Errors
/// [`RunError`].
pub async fn sweep(
    pipeline: &Pipeline,
    models: &Path,
    penalties: &[f64],
    limit: Option<u64>,
    stop: watch::Receiver<Option<Stop>>,
) -> Result<Sweep, RunError> {
    let files = discover(&pipeline.input.paths, forced_format(pipeline), None)?;
    let scorer = Arc::new(Scorer::new(pipeline, models)?);
    let first = open_first(pipeline, &files)?;
    let plan = Arc::clone(first.plan());
    let (limits, judge) = (limits(pipeline), Judge::new(pipeline));
    let options = FeedOptions { files, plan, kept: Default::default(), rank: None, limit, checksum: false, hash: false };
    let events = spawn_feed(pipeline, options, Some(first), &Arc::new(AtomicU64::new(0)));
    let penalties: Arc<[f64]> = penalties.into();
    let empty = Tally {
        lengths: vec![Lengths::default(); penalties.len()],
        relaxed: vec![0; penalties.len()],
        documents: 0,
        not_cached: 0,
        other: 0,
    };
    let (worker, values, blank) = (Arc::clone(&scorer), Arc::clone(&penalties), empty.clone());
    let tallies = event_stream(events).map(move |event| {
        let (scorer, penalties, mut tally, judge) = (Arc::clone(&worker), Arc::clone(&values), blank.clone(), judge.clone());
        async move {
            match event {
                Event::Rows(_, batch) => {
                    let solve = move |_, state: DocState| Outcome::of(&state, &limits, &judge, &penalties);
                    let tally = move |outcomes: Vec<Outcome>| {
                        outcomes.into_iter().for_each(|outcome| tally.add(outcome));
                        tally
                    };
                    scorer.resolve_each(&Arc::new(batch), Need::Cuttable(limits), solve, tally).await
                }
                Event::Failed(error) => Err(error),
                _ => Ok(tally),
            }
        }
    });
    let mut tallies = Box::pin(tallies.buffered(scorer.threads() + 1));
    let mut total = empty;
    let stop = stopped(stop);
    tokio::pin!(stop);
    loop {
        let item = tokio::select! { biased; reason = &mut stop => return Err(RunError::Stopped(reason)), item = tallies.next() => item };
        match item {
            None => break,
            Some(tally) => total.merge(&tally?),
        }
    }
    scorer.store().flush()?;
    let rows = penalties.iter().zip(&total.lengths).zip(&total.relaxed).map(|((&penalty, lengths), &relaxed)| {
        let counts = lengths.counts();
        let share = |n: u64| {
            if counts.count == 0 { 0.0 } else { n as f64 / counts.count as f64 }
        };
        PenaltyRow {
            penalty,
            chunks: counts.count,
            mean: counts.mean,
            p5: counts.p5,
            p50: counts.p50,
            p95: counts.p95,
            at_min: share(lengths.within(..=limits.min)),
            at_max: share(lengths.within(limits.max..)),
            relaxed,
        }
    });
    Ok(Sweep { penalties: rows.collect(), documents: total.documents, not_cached: total.not_cached, other_rows: total.other })
}

/// What became of a row.
enum Outcome {
    /// At each penalty the lengths of the chunks in tokens, and whether a limit gave way.
    Cut(Vec<(Vec<u32>, bool)>),
    NotCached,
    Other,
}

impl Outcome {
    fn of(state: &DocState, limits: &Limits, judge: &Judge, penalties: &[f64]) -> Self {
        match state {
            DocState::Ready(document) => Self::Cut(Prepared::new(document, judge).sweep(limits, penalties)),
            DocState::NotCached => Self::NotCached,
            DocState::Null | DocState::Empty | DocState::Bad(_) => Self::Other,
        }
    }
}

impl Tally {
    fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Cut(penalties) => {
                self.documents += 1;
                for (i, (lengths, relaxed)) in penalties.into_iter().enumerate() {
                    lengths.into_iter().for_each(|tokens| self.lengths[i].add(tokens));
                    self.relaxed[i] += u64::from(relaxed);
                }
            }
            Outcome::NotCached => self.not_cached += 1,
            Outcome::Other => self.other += 1,
        }
    }

    fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.lengths.iter_mut().zip(&other.lengths) {
            mine.merge(theirs);
        }
        for (mine, theirs) in self.relaxed.iter_mut().zip(&other.relaxed) {
            *mine += theirs;
        }
        self.documents += other.documents;
        self.not_cached += other.not_cached;
        self.other += other.other;
    }
}

//! The pipeline: its specification, the stages from input to output, and their statistics.
//!
//! A reader thread gives batches of bounded size through a bounded channel; batches are resolved (looked up, scored, cut) side by side
//! and put back in order; one consumer writes and commits. The writer asks for the next batch, so a slow disk slows the reader down.
//! Knows nothing of file formats' insides or of how a model works.

mod chunks;
mod documents;
mod evaluate;
mod export;
mod feed;
mod mechanism;
mod methods;
mod operator;
mod plan;
mod run;
mod sections;
pub mod spec;
mod status;
mod streams;
mod summary;
mod sweep;
mod utility;
mod view;

pub use chunks::{Chunks, Cutting};
pub use documents::{DocState, Need, Scored, Scorer, cache_path};
pub use evaluate::{Calibrated, EvalOptions, Evaluated, Evaluation, evaluate, find_penalties, overlay};
pub use export::{edges_schema, export_edges};
pub use mechanism::{Margin, Mechanism, MechanismOptions, PrefixRow, WindowCell, mechanism};
pub use methods::Method;
pub use operator::Operator;
pub use plan::{Plan, PlanOptions, plan};
pub use run::{Progress, RunOptions, Stop, run};
pub use sections::{SectionOptions, SectionRow, Sections, sections};
pub use status::{Joined, Status, Worker, status};
pub use streams::{Built, StreamOptions, build_streams};
pub use summary::{Summary, chunks_schema, manifest_schema, summary_schema};
pub use sweep::{PenaltyRow, Sweep, sweep};
pub use view::{ViewOptions, view, view_chunks};

use crate::cache::CacheError;
use crate::io::IoError;
use crate::model::ModelError;
use crate::score::ScoreError;
use spec::SpecError;

/// What stops a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The pipeline is at fault.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Files.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Scoring.
    #[error(transparent)]
    Score(#[from] ScoreError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Documents are not in the cache, under `cache.on_miss = "error"`.
    #[error(
        "row {row} is not in the score cache ({documents} such documents in its batch), and cache.on_miss = \"error\" forbids inference; \
         run once with --set cache.on_miss=score"
    )]
    NotCached {
        /// The first such row.
        row: u64,
        /// Such documents in its batch.
        documents: usize,
    },
    /// More bad rows than `input.max_bad_rows`.
    #[error("{count} bad rows, more than input.max_bad_rows = {max}; the last: {file}, row {row}: {reason}")]
    TooManyBadRows {
        /// Bad rows so far.
        count: u64,
        /// The limit.
        max: u64,
        /// File of the last.
        file: String,
        /// Row of the last.
        row: u64,
        /// What was wrong with it.
        reason: String,
    },
    /// The run was stopped from outside.
    #[error("stopped: {0}; what is done is kept, run the same command again to go on")]
    Stopped(Stop),
    /// Something that cannot happen did.
    #[error("a bug: {0}; please report it")]
    Bug(String),
}

impl From<arrow::error::ArrowError> for RunError {
    fn from(error: arrow::error::ArrowError) -> Self {
        Self::Bug(error.to_string())
    }
}

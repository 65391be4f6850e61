//! Scoring: the reset pass, its comparison with the full pass, and the engine that packs windows of many documents into batches.
//!
//! Owns the Right Reset readout and its curves. Promises: the curve of an edge has the same bits whatever batch, thread or neighbour
//! it was computed with. Knows nothing of files or the cache.

mod curve;
mod engine;

pub use curve::{Curve, kept_positions, score_at};
pub use engine::{Document, Engine, EngineStats};

use crate::model::{ModelError, Tap};

/// Revision of the kernels and of the order of their operations: part of the score key, raised when a change of code changes bits.
pub const KERNEL_REVISION: u32 = 2;

/// What can go wrong while scoring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScoreError {
    /// The model refused the input.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A score came out infinite or NaN.
    #[error("the score of edge {edge} is not a finite number: the model's states overflow on this document")]
    NotFinite {
        /// Tokens on the left of the edge.
        edge: u32,
    },
    /// The settings do not fit each other or the model.
    #[error("{0}")]
    Settings(String),
    /// A worker thread died: a bug.
    #[error("a scoring thread failed: {0}")]
    Worker(String),
}

/// How positions of a reset pass are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Positions {
    /// As in the document.
    Original,
    /// From 0, prefix included.
    Reindexed,
}

/// What stands before the window of a reset pass.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// Fixed tokens; none is the paper's default.
    Tokens(Vec<u32>),
    /// The `p` tokens before the edge are kept.
    Local(u32),
}

impl Prefix {
    fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Local(p) => *p as usize,
        }
    }
}

/// Everything that decides a score, besides the model and the document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreSpec {
    /// Tokens of the reset window, W.
    pub window: u32,
    /// Positions skipped at the start of the window, s.
    pub skip: u32,
    /// Where states are read.
    pub tap: Tap,
    /// How the reset pass is numbered.
    pub positions: Positions,
    /// What stands before the window.
    pub prefix: Prefix,
    /// A token put before the full pass, for models that need it.
    pub bos: Option<u32>,
    /// Tokens of one full pass, C.
    pub context: u32,
}

impl ScoreSpec {
    /// Checks that the settings fit each other.
    ///
    /// # Errors
    /// [`ScoreError::Settings`] that names the settings.
    pub fn validate(&self) -> Result<(), ScoreError> {
        let fail = |text: String| Err(ScoreError::Settings(text));
        if self.window <= self.skip {
            return fail(format!("score.window = {} leaves nothing after score.skip = {}", self.window, self.skip));
        }
        let needed = self.window as usize + self.prefix.len();
        if needed > (self.room() - self.stride()) as usize {
            return fail(format!(
                "score.window and the reset prefix take {needed} tokens, more than the {} that a context of {} leaves; \
                 lower score.window or raise score.context",
                self.room() - self.stride(),
                self.context
            ));
        }
        if self.prefix == Prefix::Local(0) {
            return fail("score.reset_prefix = \"local:0\" keeps nothing; use \"none\"".into());
        }
        Ok(())
    }

    /// Document tokens of one segment.
    fn room(&self) -> u32 {
        self.context - u32::from(self.bos.is_some())
    }

    /// Distance between segments, S.
    fn stride(&self) -> u32 {
        self.context / 2
    }

    /// Tokens of the window of edge `b` in a document of `n` tokens: m = min(W, n - b).
    #[must_use]
    pub fn window_at(&self, b: u32, n: u32) -> u32 {
        self.window.min(n - b)
    }

    /// Whether edge `b` gets a score: its window is longer than what is skipped, and the prefix is really removed.
    #[must_use]
    pub fn scores(&self, b: u32, n: u32) -> bool {
        let removes = if let Prefix::Local(p) = self.prefix { b > p } else { true };
        b < n && self.window_at(b, n) > self.skip && removes
    }

    /// The segment that edge `b` is read from: i = max(0, ceil((b + m - C) / S)).
    fn segment(&self, b: u32, n: u32) -> u32 {
        (b + self.window_at(b, n)).saturating_sub(self.room()).div_ceil(self.stride())
    }

    /// Tokens and positions of segment `i`.
    fn full_pass<'a>(&self, ids: &'a [u32], segment: u32) -> impl Iterator<Item = (u32, u32)> + use<'a> {
        let start = (segment * self.stride()) as usize;
        let end = ids.len().min(start + self.room() as usize);
        self.bos.into_iter().chain(ids[start..end].iter().copied()).zip(0..)
    }

    /// Tokens and positions of the reset pass at `b`, and how many of them stand before the window.
    fn reset_pass<'a>(&'a self, ids: &'a [u32], b: u32) -> (impl Iterator<Item = (u32, u32)> + use<'a>, usize) {
        let n = ids.len() as u32;
        let m = self.window_at(b, n);
        let prefix: &[u32] = match &self.prefix {
            Prefix::Tokens(tokens) => tokens,
            Prefix::Local(p) => &ids[(b - p) as usize..b as usize],
        };
        let p = prefix.len() as u32;
        let first = match self.positions {
            Positions::Reindexed => 0,
            Positions::Original => (b - self.segment(b, n) * self.stride() + u32::from(self.bos.is_some())).saturating_sub(p),
        };
        let window = &ids[b as usize..(b + m) as usize];
        (prefix.iter().chain(window).copied().zip(first..), prefix.len())
    }

    /// Row of token `b` among the states of its segment.
    fn full_row(&self, b: u32, n: u32) -> usize {
        (b - self.segment(b, n) * self.stride() + u32::from(self.bos.is_some())) as usize
    }
}
